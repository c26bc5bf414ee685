"""dp-accounting's accountants, which read events of this library too."""

import abc

import dp_accounting
import numpy as np
from dp_accounting import pld, rdp

from dpadambc.core import accounting


class ReadableDpEvent(dp_accounting.DpEvent, abc.ABC):
    """An event that dp-accounting does not know, with what its accountants need.

    A Gaussian step with a public noise multiplier, which affects a neighbor at a rate.

    Attributes:
      noise_multiplier: the noise over the sensitivity.
      neighboring_relation: what the event is stated for. Accountants of another
        relation refuse it. None is for all relations.

    Example:
      >>> import dpadambc
      >>> from dpadambc import accounting
      >>> mechanism = dpadambc.graphs.NodePoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=2.0, max_terms=8, sampling_prob=0.1,
      ...     iterations=100, normalize_by=1_000)
      >>> step = mechanism.dp_event().event
      >>> isinstance(step, accounting.ReadableDpEvent), round(step.rate, 2)
      (True, 0.57)
    """

    noise_multiplier: float
    neighboring_relation: dp_accounting.NeighboringRelation | None = None

    @property
    @abc.abstractmethod
    def rate(self) -> float:
        """The probability that a step affects what two neighbors differ in."""

    @abc.abstractmethod
    def privacy_losses(
        self, interval: float
    ) -> pld.privacy_loss_distribution.PrivacyLossDistribution:
        """The distribution of the privacy loss of one step, from above, on a grid."""

    @abc.abstractmethod
    def renyi_divergences(self, orders: np.ndarray) -> np.ndarray:
        """An upper bound on the Rényi divergence of one step at each order."""


def _refusal(
    event: dp_accounting.DpEvent,
    accountant: accounting.Accountant,
    relation: dp_accounting.NeighboringRelation,
) -> dp_accounting.PrivacyAccountant.CompositionErrorDetails | None:
    own = getattr(event, "neighboring_relation", None)
    message = accounting.refusal(event, accountant, relation)
    if isinstance(event, ReadableDpEvent) and own not in (None, relation):
        message = (
            f"Expected neighboring_relation {own.name}, which this event is stated for,"
            f" got {relation.name}. Make the event of a mechanism with that relation."
        )
    if message is None:
        return None
    return dp_accounting.PrivacyAccountant.CompositionErrorDetails(event, message)


class PLDAccountant(pld.PLDAccountant):
    """dp-accounting's accountant, which reads a `ReadableDpEvent` too.

    Example:
      >>> import dp_accounting
      >>> import dpadambc
      >>> from dpadambc import accounting
      >>> mechanism = dpadambc.graphs.NodePoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=2.0, max_terms=8, sampling_prob=0.1,
      ...     iterations=100, normalize_by=1_000)
      >>> accountant = accounting.PLDAccountant()
      >>> _ = accountant.compose(mechanism.dp_event(accountant="pld"))
      >>> _ = accountant.compose(dp_accounting.GaussianDpEvent(10.0))
      >>> print(f"{accountant.get_epsilon(1e-6):.2f}")
      2.30
    """

    @property
    def losses(self) -> pld.privacy_loss_distribution.PrivacyLossDistribution:
        """The distribution of the privacy loss of all that was composed."""
        if self._contains_non_dp_event:
            return pld.privacy_loss_distribution.from_privacy_parameters(
                pld.common.DifferentialPrivacyParameters(0.0, 1.0)
            )
        return self._pld

    def _maybe_compose(
        self, event: dp_accounting.DpEvent, count: int, do_compose: bool
    ) -> dp_accounting.PrivacyAccountant.CompositionErrorDetails | None:
        if refusal := _refusal(event, "pld", self.neighboring_relation):
            return refusal
        if not isinstance(event, ReadableDpEvent):
            return super()._maybe_compose(event, count, do_compose)
        if not do_compose or event.rate == 0:
            return None
        if event.noise_multiplier == 0:
            self._contains_non_dp_event = True
            return None
        step = event.privacy_losses(self._value_discretization_interval)
        # Where the grid holds hardly any mass, bounds on its tails overflow.
        with np.errstate(over="ignore", divide="ignore"):
            self._pld = self._pld.compose(step.self_compose(count))
        return None


class RdpAccountant(rdp.RdpAccountant):
    """dp-accounting's accountant, which reads a `ReadableDpEvent` too.

    Example:
      >>> import dp_accounting
      >>> import dpadambc
      >>> from dpadambc import accounting
      >>> mechanism = dpadambc.graphs.NodePoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=2.0, max_terms=8, sampling_prob=0.1,
      ...     iterations=100, normalize_by=1_000)
      >>> accountant = accounting.RdpAccountant()
      >>> _ = accountant.compose(mechanism.dp_event(accountant="rdp"))
      >>> _ = accountant.compose(dp_accounting.GaussianDpEvent(10.0))
      >>> print(f"{accountant.get_epsilon(1e-6):.2f}")
      4.08
    """

    def _maybe_compose(
        self, event: dp_accounting.DpEvent, count: int, do_compose: bool
    ) -> dp_accounting.PrivacyAccountant.CompositionErrorDetails | None:
        if refusal := _refusal(event, "rdp", self.neighboring_relation):
            return refusal
        if not isinstance(event, ReadableDpEvent):
            return super()._maybe_compose(event, count, do_compose)
        if do_compose and event.rate > 0:
            without_noise = event.noise_multiplier == 0
            step = np.inf if without_noise else event.renyi_divergences(self._orders)
            self._rdp += count * step
        return None

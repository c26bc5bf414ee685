"""Poisson sampling: each example takes part with the same probability, alone."""

import dataclasses

import dp_accounting
import optax

from dpadambc.core import accounting
from dpadambc.core.clip import FLAT, ClipRule, NeighboringRelation
from dpadambc.core.sampled import PoissonSampled

_ADD_OR_REMOVE_ONE = NeighboringRelation.ADD_OR_REMOVE_ONE
_REPLACE_ONE = NeighboringRelation.REPLACE_ONE
_REPLACE_SPECIAL = NeighboringRelation.REPLACE_SPECIAL


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoissonGaussian(PoissonSampled):
    r"""The Poisson-subsampled Gaussian mechanism, `iterations` times: DP-SGD.

    At every step each example takes part independently with probability
    `sampling_prob`; gradients are clipped to `l2_clip_norm`, summed, divided by
    `normalize_by`; Gaussian noise of standard deviation

    .. math:: \sigma = z \Delta, \quad \Delta = C / B \text{ or } 2 C / B

    is added, with the noise multiplier z and the sensitivity Δ. Under
    ADD_OR_REMOVE_ONE the variance is the papers' Φ = (z C / B)².

    Args:
      l2_clip_norm: C, positive.
      noise_multiplier: z, non-negative, the noise in units of the sensitivity; or a
        schedule of the step, which makes `noise_stddev` a schedule.
      sampling_prob: q, in [0, 1].
      iterations: the number of steps.
      normalize_by: B, positive; usually `sampling_prob * num_examples`, rounded. It
        does not change epsilon.
      neighboring_relation: what two neighboring datasets differ in.
      clip_rule: which share of each gradient is taken; see `clip_per_example`. No
        rule changes epsilon.

    Raises:
      TypeError: if a number is not a number, or `iterations` not an int.
      ValueError: if a number is out of its range.

    Example:
      >>> import dpadambc
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.85, sampling_prob=1024 / 50_000,
      ...     iterations=3_360, normalize_by=1024)
      >>> round(mechanism.epsilon(target_delta=1e-5), 3)
      2.925
      >>> round(mechanism.noise_stddev, 7)
      0.0018066
      >>> mechanism = dpadambc.PoissonGaussian.calibrate(
      ...     target_epsilon=1.0, target_delta=1e-5, l2_clip_norm=1.0,
      ...     noise_multiplier=4.0, sampling_prob=0.02, normalize_by=1000)
      >>> mechanism.iterations
      2739

    References:
      Abadi et al., `Deep Learning with Differential Privacy
      <https://arxiv.org/abs/1607.00133>`_, 2016
    """

    l2_clip_norm: float
    noise_multiplier: float | optax.Schedule
    sampling_prob: float
    iterations: int
    normalize_by: float
    neighboring_relation: NeighboringRelation = _ADD_OR_REMOVE_ONE
    clip_rule: ClipRule = FLAT

    _solvable = ("noise_multiplier", "iterations", "sampling_prob")
    _relations = {
        _ADD_OR_REMOVE_ONE: ("pld", "rdp"),
        _REPLACE_ONE: ("pld",),
        _REPLACE_SPECIAL: ("pld", "rdp"),
    }
    _refusal = "dp-accounting has no RDP bound for Poisson sampling under REPLACE_ONE."

    def _check_relation(self, accountant: str | None = None) -> None:
        # Without sampling there is nothing to refuse.
        super()._check_relation(None if self.sampling_prob == 1 else accountant)

    def _step_event(
        self, noise_multiplier: float, accountant: accounting.Accountant
    ) -> dp_accounting.DpEvent:
        gaussian = self._gaussian(noise_multiplier, accountant)
        if self.sampling_prob == 1:
            return gaussian
        return dp_accounting.PoissonSampledDpEvent(self.sampling_prob, gaussian)

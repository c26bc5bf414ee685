"""A base for events that dp-accounting does not know."""

import abc
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation, pld, rdp
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from dpadambc.core.accounting import OwnDpEvent


class ReadableDpEvent(OwnDpEvent):
    """An event that dp-accounting does not know, with the numbers to account for it.

    It is a Gaussian step with a public noise multiplier, which affects a neighbor at a
    rate.

    Attributes:
      noise_multiplier: the noise over the sensitivity.
      neighboring_relation: the relation that the event is stated for. Accountants of
        another relation refuse it. None stands for all relations.
    """

    neighboring_relation: NeighboringRelation | None = None

    @abc.abstractmethod
    def privacy_losses(self, interval: float) -> PrivacyLossDistribution:
        """Returns the privacy losses of one step on a grid, from above."""

    def renyi_divergences(self, orders: np.ndarray) -> np.ndarray:
        """Bounds the Rényi divergence of one step at each order, if the class can."""
        del orders
        raise dp_accounting.UnsupportedEventError(
            f"{type(self).__name__} has no Rényi bound; use accounting.PLD."
        )

    def compose_into(self, accountant: Any, count: int) -> None:
        """Composes as `OwnDpEvent.compose_into` says, by the accountant's method."""
        relation = accountant.neighboring_relation
        if self.neighboring_relation not in (None, relation):
            raise dp_accounting.UnsupportedEventError(
                f"Expected neighboring_relation {self.neighboring_relation.name}, which"
                f" this event is stated for, got {relation.name}."
            )
        if self.rate == 0:
            return
        if isinstance(accountant, pld.PLDAccountant):
            losses = self.privacy_losses(accountant._value_discretization_interval)
            # Where the grid holds hardly any mass, bounds on its tails overflow.
            with np.errstate(over="ignore", divide="ignore"):
                accountant._pld = accountant._pld.compose(losses.self_compose(count))
        elif isinstance(accountant, rdp.RdpAccountant):
            accountant._rdp += count * self.renyi_divergences(accountant._orders)
        else:
            raise dp_accounting.UnsupportedEventError(f"Unknown: {accountant!r}.")

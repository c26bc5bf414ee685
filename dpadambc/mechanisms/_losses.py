"""The distribution of the privacy loss of an event, on a grid that is fine enough."""

import math

import dp_accounting
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from dpadambc.mechanisms._accountants import PLDAccountant

# The largest grid of privacy losses: some seconds, and less than a gigabyte.
_MOST_LOSSES = 10**6


def _on_grid(
    event: dp_accounting.DpEvent,
    neighboring_relation: dp_accounting.NeighboringRelation,
    interval: float,
) -> PrivacyLossDistribution:
    accountant = PLDAccountant(neighboring_relation, interval)
    accountant.compose(event)
    return accountant.losses


def privacy_losses(
    event: dp_accounting.DpEvent,
    *,
    target_delta: float,
    neighboring_relation: dp_accounting.NeighboringRelation,
) -> PrivacyLossDistribution:
    """The distribution of the privacy loss of an event, from above.

    Every grid gives an upper bound, and a finer one a tighter bound at ten times the
    cost. So the grid is refined until that changes epsilon at the target delta by less
    than 0.5 %, or 1e-4.

    Args:
      event: what was run, in the unit that the "pld" accountant reads.
      target_delta: for which the grid is made, in (0, 1).
      neighboring_relation: what two neighboring datasets differ in.

    Returns:
      dp-accounting's `PrivacyLossDistribution`, which has a delta for every epsilon and
      an epsilon for every delta.

    Raises:
      dp_accounting.UnsupportedEventError: if the event has no distribution that is
        known under this relation.

    Example:
      >>> import dp_accounting
      >>> from dpadambc.mechanisms import accounting
      >>> losses = accounting.privacy_losses(
      ...     dp_accounting.GaussianDpEvent(2.0), target_delta=1e-5,
      ...     neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
      >>> round(losses.get_epsilon_for_delta(1e-5), 3)
      1.993
      >>> print(f"{losses.get_delta_for_epsilon(1.0):.4f}")
      0.0068
    """
    interval, bound, losses = 1e-2, math.inf, None
    while True:
        last, last_losses = bound, losses
        try:
            losses = _on_grid(event, neighboring_relation, interval)
        except MemoryError:
            if last_losses is None:
                raise
            return last_losses
        bound = float(losses.get_epsilon_for_delta(target_delta))
        if last_losses is not None and bound > last:
            return last_losses
        if bound in (0, math.inf) or last - bound < 5e-3 * bound + 1e-4:
            return losses
        interval /= 10
        if bound > _MOST_LOSSES * interval:
            return losses

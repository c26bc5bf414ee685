"""The distribution of the privacy loss of an event, on a grid that is fine enough."""

import math
from typing import NamedTuple

import dp_accounting
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from dpadambc.accounting.accountants import PLDAccountant
from dpadambc.core import astronomical

_COARSEST = 1e-2
# Of epsilon; the noise for a target is within as much of the least.
_TOLERANCE = 3e-4
# A grid of one step, or of all, has no more losses than this: some 100 MB in all.
_MOST_LOSSES = 3e5
# Each composition by FFT takes less than this off delta by rounding: six times the most
# that `benchmarks.accounting.rounding` finds, in random runs of up to a million steps.
_ROUNDING = 4e-16


class Bound(NamedTuple):
    """A distribution on a grid, and what it says."""

    losses: PrivacyLossDistribution
    epsilon: float  # at the target delta
    interval: float  # of the grid


def on_grid(
    event: dp_accounting.DpEvent,
    neighboring_relation: dp_accounting.NeighboringRelation,
    interval: float,
) -> PrivacyLossDistribution:
    """The distribution on a grid of this interval."""
    accountant = PLDAccountant(neighboring_relation, interval)
    accountant.compose(event)
    return accountant.losses


def num_compositions(event: dp_accounting.DpEvent) -> int:
    """How many steps there are in an event."""
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return event.count * num_compositions(event.event)
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return sum(map(num_compositions, event.events))
    return 0 if isinstance(event, dp_accounting.NoOpDpEvent) else 1


def _num_losses(losses: PrivacyLossDistribution) -> int:
    return max(losses._pmf_remove.size, losses._pmf_add.size)


def rounding_of(event: dp_accounting.DpEvent) -> float:
    """What the rounding of the composition may have taken off any delta, at most."""
    return _ROUNDING * num_compositions(event)


def epsilon_of(
    losses: PrivacyLossDistribution, event: dp_accounting.DpEvent, target_delta: float
) -> float:
    """Epsilon, with a part of delta spent on the rounding of the composition."""
    left = float(target_delta) - rounding_of(event)
    return float(losses.get_epsilon_for_delta(left)) if left > 0 else math.inf


def bounded(
    event: dp_accounting.DpEvent,
    neighboring_relation: dp_accounting.NeighboringRelation,
    target_delta: float,
    *,
    tolerance: float = _TOLERANCE,
    enough: float = 0.0,
) -> Bound:
    """The distribution on a grid with which epsilon is known to a relative tolerance.

    Every grid gives an upper bound, whose error falls with the square of the interval.
    Two grids tell the error, and so the interval that is fine enough.

    Args:
      event: what was run.
      neighboring_relation: what two neighboring datasets differ in.
      target_delta: at which epsilon counts.
      tolerance: of epsilon.
      enough: an epsilon that need not be known better once it is not exceeded.

    Returns:
      The bound on the last grid.
    """
    finest = astronomical.range_of_losses(event) / _MOST_LOSSES
    interval = max(_COARSEST, finest)

    def on(interval):
        losses = on_grid(event, neighboring_relation, interval)
        return Bound(losses, epsilon_of(losses, event, target_delta), interval)

    bound, shrink = on(interval), 0.25
    while bound.epsilon > enough and bound.epsilon < math.inf:
        composed = _num_losses(bound.losses) * bound.interval / _MOST_LOSSES
        interval = max(bound.interval * shrink, finest, composed)
        if interval >= 0.9 * bound.interval:
            break
        last, bound = bound, on(interval)
        ratio = (last.interval / bound.interval) ** 2
        error = (last.epsilon - bound.epsilon) / (ratio - 1)
        allowed = tolerance * bound.epsilon + 1e-6
        if error <= allowed:
            break
        # Somewhat finer than what the error says, for one that falls more slowly.
        shrink = max(0.7 * math.sqrt(allowed / error), 1 / 8)
    return bound


def privacy_losses(
    event: dp_accounting.DpEvent,
    *,
    target_delta: float,
    neighboring_relation: dp_accounting.NeighboringRelation,
) -> PrivacyLossDistribution:
    """The distribution of the privacy loss of an event, from above.

    It is on a grid, which gives an upper bound but for the rounding of the composition,
    less than 4e-16 of delta for each step. The grid is so fine that epsilon at the
    target delta is within 0.03 % or so of what it would be without.

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
      >>> from dpadambc import accounting
      >>> losses = accounting.privacy_losses(
      ...     dp_accounting.GaussianDpEvent(2.0), target_delta=1e-5,
      ...     neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
      >>> round(losses.get_epsilon_for_delta(1e-5), 3)
      1.993
      >>> print(f"{losses.get_delta_for_epsilon(1.0):.4f}")
      0.0068
    """
    return bounded(event, neighboring_relation, target_delta).losses

"""Epsilon of an event, and the parameter that meets a target, by dp-accounting."""

import functools
import logging
import math
from collections.abc import Callable

import dp_accounting

from dpadambc._core import validate
from dpadambc.mechanisms import _astronomical, _events, _search
from dpadambc.mechanisms._accountants import (
    PLDAccountant,
    RdpAccountant,
    ReadableDpEvent,
)
from dpadambc.mechanisms._events import Accountant, level_counts
from dpadambc.mechanisms._losses import privacy_losses

__all__ = [
    "Accountant",
    "PLDAccountant",
    "RdpAccountant",
    "ReadableDpEvent",
    "calibrate",
    "epsilon",
    "level_counts",
    "privacy_losses",
]


class _QuietOrders(logging.Filter):
    """Drops dp-accounting's notes that a Rényi order did not converge.

    It leaves that order out of a minimum over many, so the bound stands.
    """

    def filter(self, record):
        return "failed to converge" not in record.getMessage()


def _epsilon_by(
    accountant: dp_accounting.PrivacyAccountant,
    event: dp_accounting.DpEvent,
    target_delta: float,
) -> float:
    logger, quiet = logging.getLogger("absl"), _QuietOrders()
    logger.addFilter(quiet)
    try:
        return float(accountant.compose(event).get_epsilon(target_delta))
    finally:
        logger.removeFilter(quiet)


def epsilon(
    event: dp_accounting.DpEvent,
    *,
    target_delta: float,
    neighboring_relation: dp_accounting.NeighboringRelation,
    accountant: Accountant = "pld",
) -> float:
    """The epsilon that an event spends.

    Args:
      event: what was run, in the unit that the accountant reads (see
        `PoissonGaussian.dp_event`).
      target_delta: the delta that goes with it, in (0, 1).
      neighboring_relation: what two neighboring datasets differ in.
      accountant: "pld" (privacy loss distributions, tight) or "rdp" (Rényi, an upper
        bound, faster).

    Returns:
      Epsilon; infinity without noise, or where it is too large to compute: beyond some
      700, and in any case where the noise is below 0.005 of what it has to hide.

    Raises:
      ValueError: for an unknown accountant, a delta outside (0, 1), or an event that
        the accountant cannot account for under this relation.

    Example:
      >>> import dp_accounting
      >>> from dpadambc.mechanisms import accounting
      >>> relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
      >>> event = dp_accounting.GaussianDpEvent(2.0)
      >>> round(accounting.epsilon(
      ...     event, target_delta=1e-5, neighboring_relation=relation), 3)
      1.993
    """
    _events.check_accountant(accountant)
    _events.check_delta(target_delta)
    if _astronomical.is_astronomical(event, accountant):
        return math.inf
    try:
        if accountant == "pld":
            losses = privacy_losses(
                event,
                target_delta=target_delta,
                neighboring_relation=neighboring_relation,
            )
            return float(losses.get_epsilon_for_delta(target_delta))
        by_orders = RdpAccountant(neighboring_relation=neighboring_relation)
        return _epsilon_by(by_orders, event, target_delta)
    except dp_accounting.UnsupportedEventError as error:
        raise ValueError(
            f"The {accountant!r} accountant cannot account for this sampling under"
            f" {neighboring_relation.name}: {error}"
        ) from error


# The parameter's grid of trial values, from the side of little epsilon.
_GRIDS = {
    "noise_multiplier": (2.0**14, 0.5, 2.0**-10),
    "sampling_prob": (2.0**-24, 2.0, 1.0),
    "iterations": (1, 2, 2**30),
}


def calibrate(
    event_of: Callable[..., dp_accounting.DpEvent],
    unknown: str,
    *,
    target_epsilon: float,
    target_delta: float,
    neighboring_relation: dp_accounting.NeighboringRelation,
    accountant: Accountant = "pld",
) -> float | int:
    """Solves for one parameter of an event.

    Args:
      event_of: the event as a function of the unknown.
      unknown: "noise_multiplier", "sampling_prob" or "iterations".
      target_epsilon: the epsilon to reach and not to exceed; positive.
      target_delta: in (0, 1).
      neighboring_relation: what two neighboring datasets differ in.
      accountant: "pld" or "rdp".

    Returns:
      The least noise multiplier, the largest sampling probability or the largest
      number of iterations, to four digits. Its epsilon never exceeds the target.

    Raises:
      ValueError: if the target cannot be reached.

    Example:
      >>> import dp_accounting
      >>> from dpadambc.mechanisms import accounting
      >>> z = accounting.calibrate(
      ...     dp_accounting.GaussianDpEvent, "noise_multiplier",
      ...     target_epsilon=1.0, target_delta=1e-5,
      ...     neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
      >>> round(z, 2)
      3.73
    """
    validate.positive(target_epsilon=target_epsilon)

    @functools.cache
    def gap(x):
        spent = epsilon(
            event_of(x),
            target_delta=target_delta,
            neighboring_relation=neighboring_relation,
            accountant=accountant,
        )
        # Bounded, since the search cannot use infinity.
        return min(spent, 2 * target_epsilon + 1) - target_epsilon

    start, factor, end = _GRIDS[unknown]
    if gap(start) > 0:
        raise ValueError(
            f"target_epsilon={target_epsilon:g} at target_delta={target_delta:g}"
            f" cannot be reached by choosing {unknown}: it is exceeded even at"
            f" {start:g}."
        )
    good, bad = _search.bracket(gap, start, factor, end)
    if good == bad:
        return good
    if unknown == "iterations":
        return _search.last_affordable(lambda n: gap(n) <= 0, round(good), round(bad))
    return _search.solve(gap, good, bad)

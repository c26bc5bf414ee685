"""Epsilon of an event, and the parameter that meets a target, by dp-accounting."""

import contextlib
import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation

from dpadambc.accounting import losses
from dpadambc.accounting.accountants import RdpAccountant, ReadableDpEvent
from dpadambc.core import accounting as _events
from dpadambc.core import astronomical, validate
from dpadambc.core import calibrate as search
from dpadambc.core.accounting import Accountant

# A delta below this for each step is of the size of what rounding leaves.
_RARE_DELTA = 1e-14
# How close a calibrated epsilon comes to its target, and where the search begins.
_ACCURACY = 1e-4
_ROUGHLY = 2e-2
# How many epsilons are kept.
_MOST_KNOWN = 4096


def _hashable(event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
    """The event with a tuple for a list; raises if it may be equal to others than it.

    A class that does not say when its events are equal may compare no fields at all.
    """
    if "__eq__" not in vars(type(event)):
        raise TypeError(f"{type(event).__name__} has no equality of its own.")
    if isinstance(event, dp_accounting.ComposedDpEvent):
        events: Any = tuple(map(_hashable, event.events))
        return dp_accounting.ComposedDpEvent(events)
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return dp_accounting.SelfComposedDpEvent(_hashable(event.event), event.count)
    if inner := getattr(event, "event", None):  # sampled
        _hashable(inner)
    hash(event)
    return event


def _cached(of_event: Callable[..., float]) -> Callable[..., float]:
    """Computes a number of an event once, or each time where that has no hash."""
    known = functools.lru_cache(_MOST_KNOWN)(of_event)

    @functools.wraps(of_event)
    def found(event: dp_accounting.DpEvent, *args, **kwargs) -> float:
        try:
            event = _hashable(event)
        except TypeError:
            return of_event(event, *args, **kwargs)
        return known(event, *args, **kwargs)

    return found


class _QuietOrders(logging.Filter):
    """Drops dp-accounting's notes that a Rényi order did not converge.

    It leaves that order out of a minimum over many, so the bound stands.
    """

    def filter(self, record):
        return "failed to converge" not in record.getMessage()


@_cached
def _by_rdp(
    event: dp_accounting.DpEvent,
    neighboring_relation: NeighboringRelation,
    target_delta: float,
) -> float:
    logger, quiet = logging.getLogger("absl"), _QuietOrders()
    logger.addFilter(quiet)
    try:
        accountant = RdpAccountant(neighboring_relation=neighboring_relation)
        return float(accountant.compose(event).get_epsilon(target_delta))
    finally:
        logger.removeFilter(quiet)


def _in_unit_of_rdp(
    event: dp_accounting.DpEvent, neighboring_relation: NeighboringRelation
) -> dp_accounting.DpEvent:
    """The same steps, in the unit of "rdp" in place of that of "pld".

    Under REPLACE_ONE a multiplier is halved: see `_events.gaussian`.
    """
    same_unit = neighboring_relation != NeighboringRelation.REPLACE_ONE
    if same_unit or isinstance(event, ReadableDpEvent):
        return event
    convert = lambda part: _in_unit_of_rdp(part, neighboring_relation)
    if isinstance(event, dp_accounting.GaussianDpEvent):
        return dp_accounting.GaussianDpEvent(event.noise_multiplier / 2)
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return dp_accounting.SelfComposedDpEvent(convert(event.event), event.count)
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return dp_accounting.ComposedDpEvent([*map(convert, event.events)])
    raise dp_accounting.UnsupportedEventError(
        f"Expected Gaussian steps under REPLACE_ONE, got {event!r}."
    )


@_cached
def _by_pld(
    event: dp_accounting.DpEvent,
    neighboring_relation: NeighboringRelation,
    target_delta: float,
    **how: float,
) -> float:
    bound = losses.bounded(event, neighboring_relation, target_delta, **how).epsilon
    if target_delta > _RARE_DELTA * losses.num_compositions(event):
        return bound
    # What is spent on rounding counts, and Rényi divergences have no such.
    with contextlib.suppress(dp_accounting.UnsupportedEventError):
        event = _in_unit_of_rdp(event, neighboring_relation)
        bound = min(bound, _by_rdp(event, neighboring_relation, target_delta))
    return bound


def epsilon(
    event: dp_accounting.DpEvent,
    *,
    target_delta: float,
    neighboring_relation: NeighboringRelation,
    accountant: Accountant = "pld",
) -> float:
    """The epsilon that an event spends.

    Those of events that are frozen and have a hash, as all of this library and most of
    dp-accounting are, are computed once for the same relation and delta.

    Args:
      event: what was run, in the unit that the accountant reads (see
        `PoissonGaussian.dp_event`).
      target_delta: the delta that goes with it, in (0, 1).
      neighboring_relation: what two neighboring datasets differ in.
      accountant: "pld" (privacy loss distributions, tight) or "rdp" (Rényi, an upper
        bound, faster).

    Returns:
      Epsilon; infinity without noise, or where it is too large to compute: beyond some
      700, and in any case where the noise is below 0.005 of what it has to hide. By
      "pld" it is infinite too where delta is below 4e-16 for each step, which is spent
      on rounding, unless "rdp" can account for the event: then it is that bound.

    Raises:
      ValueError: for an unknown accountant, a delta outside (0, 1), or an event that
        the accountant cannot account for under this relation.

    Example:
      >>> import dp_accounting
      >>> from dpadambc import accounting
      >>> relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
      >>> event = dp_accounting.GaussianDpEvent(2.0)
      >>> round(accounting.epsilon(
      ...     event, target_delta=1e-5, neighboring_relation=relation), 3)
      1.993
    """
    _events.check_accountant(accountant)
    _events.check_delta(target_delta)
    if message := _events.refusal(event, accountant, neighboring_relation):
        raise ValueError(message)
    if astronomical.is_astronomical(event, accountant):
        return math.inf
    target_delta = float(target_delta)  # in whatever precision it was given
    spent = _by_pld if accountant == "pld" else _by_rdp
    try:
        return spent(event, neighboring_relation, target_delta)
    except dp_accounting.UnsupportedEventError as error:
        raise ValueError(
            f"The {accountant!r} accountant cannot account for this sampling under"
            f" {neighboring_relation.name}: {error}"
        ) from error


# The parameter's grid of trial values, from the side of little epsilon.
_GRIDS = {
    "noise_multiplier": (2.0**14, 0.25, 2.0**-10),
    "sampling_prob": (2.0**-24, 4.0, 1.0),
    "iterations": (1, 4, 2**30),
}


def calibrate(
    event_of: Callable[..., dp_accounting.DpEvent],
    unknown: str,
    *,
    target_epsilon: float,
    target_delta: float,
    neighboring_relation: NeighboringRelation,
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
      >>> from dpadambc import accounting
      >>> z = accounting.calibrate(
      ...     dp_accounting.GaussianDpEvent, "noise_multiplier",
      ...     target_epsilon=1.0, target_delta=1e-5,
      ...     neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
      >>> round(z, 2)
      3.73
    """
    validate.positive(target_epsilon=target_epsilon)
    _events.check_delta(target_delta)
    _events.check_accountant(accountant)
    # In double precision, whatever they are in.
    target_epsilon, target_delta = float(target_epsilon), float(target_delta)

    def gap_of(spent: float) -> float:
        # Bounded, since the search cannot use infinity.
        return math.log(np.clip(spent / target_epsilon, 1e-3, 1e3))

    @functools.cache
    def gap(x: float) -> float:
        return gap_of(
            epsilon(
                event_of(x),
                target_delta=target_delta,
                neighboring_relation=neighboring_relation,
                accountant=accountant,
            )
        )

    @functools.cache
    def rough_gap_at(x: float) -> float:
        """To a few percent, and from above: what is affordable here is."""
        event = event_of(x)
        if accountant == "rdp" or astronomical.is_astronomical(event, accountant):
            return gap(x)
        spent = _by_pld(
            event,
            neighboring_relation,
            target_delta,
            tolerance=_ROUGHLY,
            enough=(1 - _ROUGHLY) * target_epsilon,
        )
        return gap_of(spent)

    allowed = round if unknown == "iterations" else float
    rough_gap = lambda x: rough_gap_at(allowed(x))

    start, factor, end = _GRIDS[unknown]
    if gap(start) > 0:
        raise ValueError(
            f"target_epsilon={target_epsilon:g} at target_delta={target_delta:g}"
            f" cannot be reached by choosing {unknown}: it is exceeded even at"
            f" {start:g}."
        )
    good, bad = search.bracket(rough_gap, start, factor, end)
    if good == bad:
        return good
    near = search.root(rough_gap, good, bad, tolerance=_ROUGHLY / 2)
    if unknown == "iterations":
        good, bad = search.whole_numbers_around(gap, near, round(good), round(bad))
        return search.last_affordable(gap, good, bad)
    return search.polished(gap, near, good, bad, accuracy=_ACCURACY)

"""Where epsilon meets a target, and epochs as the fields of a mechanism.

The search differs from dp-accounting's `calibrate_dp_mechanism` in its cost: it comes
from the side where accounting is cheap, on coarse grids first, and takes a few fine
ones at the end. No answer exceeds its target.
"""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from fractions import Fraction
from typing import Any

import dp_accounting
import numpy as np
import scipy.optimize
from dp_accounting import NeighboringRelation

from dpadambc.core import validate
from dpadambc.core.accounting import Accountant, check_delta, least_epsilon

# How close a calibrated epsilon comes to its target, and where the search begins.
_ACCURACY, _ROUGHLY = 1e-4, 2e-2
# The parameter's grid of trial values, from the side of little epsilon.
_GRIDS = {
    "noise_multiplier": (2.0**14, 0.25, 2.0**-10),
    "sampling_prob": (2.0**-24, 4.0, 1.0),
    "iterations": (1, 4, 2**30),
}


_ASKED = ("epochs", "batch_size", "num_examples")  # of as_fields


def _exactly(number: float) -> Fraction:
    """As it is written: 0.1 is a tenth."""
    return Fraction(repr(float(number)))


def _bracket(
    gap: Callable[[float], float], start: float, factor: float, end: float
) -> tuple[float, float]:
    """The last of start, start * factor, ... before a positive gap, and the next.

    The search comes from the side of little epsilon, where accounting is cheap; at
    the other end it can take more memory than there is.
    """
    while start != end and gap(start * factor) <= 0:
        start *= factor
    return start, start * factor if start != end else end


def _root(
    gap: Callable[[float], float], good: float, bad: float, *, tolerance: float
) -> float:
    """A number near the sign change of the gap, to a relative tolerance."""
    solution = scipy.optimize.root_scalar(
        lambda x: gap(math.exp(x)),
        bracket=(math.log(good), math.log(bad)),
        xtol=tolerance,
    )
    return math.exp(solution.root)


def _polished(
    gap: Callable[[float], float], near: float, good: float, bad: float, accuracy: float
) -> float:
    """A number where a gap is at most zero, and hardly less, by the secant method.

    Args:
      gap: the logarithm of epsilon over its target, smooth but for rounding.
      near: a number near its change of sign.
      good: where it is at most zero.
      bad: where it is positive, or hardly less.
      accuracy: how far below zero it may be.

    Returns:
      A number between the good and the bad one.
    """
    to_good = math.copysign(1, good - bad)
    ends = sorted((math.log(good), math.log(bad)))
    clipped = lambda x: min(max(x, ends[0]), ends[1])
    x, slope = math.log(near), -to_good
    at_x = gap(math.exp(x))
    for _ in range(10):
        if -accuracy <= at_x <= 0:
            break
        before, at_before = x, at_x
        x = clipped(x - (at_x + accuracy / 2) / slope)
        if x == before:
            break
        at_x = gap(math.exp(x))
        if (at_x - at_before) * (x - before) * to_good < 0:
            slope = (at_x - at_before) / (x - before)
    while at_x > 0:  # whatever its shape is
        x += to_good * 2 * max(accuracy, at_x)
        at_x = gap(math.exp(x))
    return math.exp(x)


def _whole_numbers_around(
    gap: Callable[[int], float], near: float, good: int, bad: int
) -> tuple[int, int]:
    """Close to a number, one whose gap is not positive and one whose gap is."""
    low, high = math.floor(0.95 * near), math.ceil(1.05 * near)
    if low <= good or gap(low) > 0:
        return good, min(high, bad) if gap(min(high, bad)) > 0 else bad
    while high < bad and gap(high) <= 0:
        low, high = high, math.ceil(1.2 * high)
    return low, min(high, bad)


def last_affordable(gap: Callable[[int], float], affordable: int, too_many: int) -> int:
    """The last number of steps whose gap is not positive, exact below 10,000.

    By interpolation, or by bisection where that did not halve what is left.
    """
    low, high = gap(affordable), gap(too_many)
    interpolates = True
    while too_many - affordable > max(1, 1e-4 * affordable):
        width = too_many - affordable
        share = low / (low - high) if interpolates else 0.5
        # No nearer to an end than need be: then the other end comes as near at once.
        least = int(max(1, 1e-4 * affordable))
        middle = affordable + min(max(round(share * width), least), width - least)
        at_middle = gap(middle)
        if at_middle <= 0:
            affordable, low = middle, at_middle
        else:
            too_many, high = middle, at_middle
        interpolates = 2 * (too_many - affordable) <= width or not interpolates
    return affordable


def solved(
    event_of: Callable[[Any], dp_accounting.DpEvent],
    unknown: str,
    accountants: Sequence[Accountant],
    *,
    target_epsilon: float,
    target_delta: float,
    neighboring_relation: NeighboringRelation,
) -> float | int:
    """The value of the unknown with which an event meets a target.

    Args:
      event_of: the event as a function of the unknown.
      unknown: "noise_multiplier", "sampling_prob" or "iterations".
      accountants: that can account for the event, the tightest first.
      target_epsilon: to reach and not to exceed.
      target_delta: that goes with it.
      neighboring_relation: what two neighboring data sets differ in.
    """
    validate.positive(target_epsilon=target_epsilon)
    check_delta(target_delta)
    target_epsilon = float(target_epsilon)  # in double precision, whatever it is in

    @functools.cache
    def gap(x: float, **how: float) -> float:
        spent = least_epsilon(
            event_of(x),
            accountants,
            target_delta=float(target_delta),
            neighboring_relation=neighboring_relation,
            **how,
        )
        # Bounded, since the search cannot use infinity.
        return math.log(np.clip(spent / target_epsilon, 1e-3, 1e3))

    allowed = round if unknown == "iterations" else float
    enough = (1 - _ROUGHLY) * target_epsilon
    # To a few percent, and from above: where this is affordable, it is.
    rough_gap = lambda x: gap(allowed(x), tolerance=_ROUGHLY, enough=enough)
    start, factor, end = _GRIDS[unknown]
    if gap(start) > 0:
        raise ValueError(
            f"Expected a target_epsilon that some {unknown} can reach at"
            f" target_delta={target_delta:g}, got {target_epsilon:g}, which is exceeded"
            f" even at {start:g}."
        )
    good, bad = _bracket(rough_gap, start, factor, end)
    if good == bad:
        return good
    near = _root(rough_gap, good, bad, tolerance=_ROUGHLY / 2)
    if unknown == "iterations":
        good, bad = _whole_numbers_around(gap, near, round(good), round(bad))
        return last_affordable(gap, good, bad)
    return _polished(gap, near, good, bad, accuracy=_ACCURACY)


def as_fields(
    names: Collection[str], numbers: dict[str, Any], *, deals_epochs: bool
) -> dict[str, Any]:
    """The numbers that users think of, as the fields of a mechanism.

    Args:
      names: the fields of the mechanism.
      numbers: some fields, and `epochs`, `batch_size` and `num_examples`; None is as
        good as left out.
      deals_epochs: whether an epoch deals all examples into batches, and so is a whole
        number of steps.
    """
    given = {name: value for name, value in numbers.items() if value is not None}
    found = {k: v for k, v in given.items() if k in names or k not in _ASKED}
    batch_size, num_examples = given.get("batch_size"), given.get("num_examples")
    per_epoch = Fraction(int(given.get("batches_per_epoch", 0)))
    follows: dict[str, Any] = {}
    if num_examples is not None:
        validate.count(num_examples=num_examples, least=1)
    if batch_size is not None:
        validate.positive(batch_size=batch_size)
        if num_examples is None or not 1 <= batch_size <= num_examples:
            kind = TypeError if num_examples is None else ValueError
            raise kind(
                "Expected batch_size with num_examples, and from 1 to it, got"
                f" {batch_size=} and {num_examples=}. A probability is sampling_prob."
            )
        found.setdefault("normalize_by", batch_size)
        # Of Python, whose integers do not overflow.
        rows = int(num_examples) * int(given.get("participations", 1))
        per_epoch = per_epoch or rows / _exactly(batch_size)
        if deals_epochs or "batches_per_epoch" in names:
            per_epoch = Fraction(math.ceil(per_epoch))
        if "batches_per_epoch" in names:
            follows["batches_per_epoch"] = int(per_epoch)
        elif "sampling_prob" in names:
            follows["sampling_prob"] = batch_size / num_examples
    if "epochs" in given:
        validate.positive(epochs=given["epochs"])
        if not per_epoch:
            raise TypeError(
                "Expected batch_size and num_examples with epochs, which say how many"
                " steps an epoch has, got neither. Or give iterations."
            )
        follows["iterations"] = math.ceil(_exactly(given["epochs"]) * per_epoch)
    if twice := follows.keys() & found.keys():
        raise TypeError(
            f"Expected {' and '.join(sorted(twice))} to be left out, which follows from"
            " epochs or batch_size, got both."
        )
    return found | follows

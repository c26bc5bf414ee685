"""Where a function of a number changes its sign, from the side where it is negative.

The function is the gap between epsilon and its target, which costs seconds. It falls or
grows with the number, and is positive on the side of a large epsilon.
"""

import math
from collections.abc import Callable
from typing import Any

import scipy.optimize


def bracket(
    gap: Callable[[float], float], start: float, factor: float, end: float
) -> tuple[float, float]:
    """The last of start, start * factor, ... before a positive gap, and the next."""
    good = start
    while good != end and gap(good * factor) <= 0:
        good *= factor
    return good, good * factor


def root(
    gap: Callable[[float], float], good: float, bad: float, *, tolerance: float
) -> float:
    """A number near the sign change of the gap, to a relative tolerance."""
    found: Any = scipy.optimize.root_scalar(
        lambda x: gap(math.exp(x)),
        bracket=(math.log(good), math.log(bad)),
        xtol=tolerance,
    )
    return math.exp(found.root)


def polished(
    gap: Callable[[float], float],
    near: float,
    good: float,
    bad: float,
    accuracy: float,
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
    x, slope, at_x = math.log(near), -to_good, gap(near)
    for _ in range(10):
        if -accuracy <= at_x <= 0:
            break
        before, at_before = x, at_x
        x = min(max(x - (at_x + accuracy / 2) / slope, ends[0]), ends[1])
        if x == before:
            break
        at_x = gap(math.exp(x))
        if (at_x - at_before) * (x - before) * to_good < 0:
            slope = (at_x - at_before) / (x - before)
    while at_x > 0:  # whatever its shape is
        x += to_good * 2 * max(accuracy, at_x)
        at_x = gap(math.exp(x))
    return math.exp(x)


def last_near(gap: Callable[[int], float], near: float, good: int, bad: int) -> int:
    """The last number of steps whose gap is not positive, near one that is known."""
    low, high = math.floor(0.95 * near), math.ceil(1.05 * near)
    if low > good and gap(low) <= 0:
        good = low
        while high < bad and gap(high) <= 0:
            good, high = high, math.ceil(1.2 * high)
    if high < bad and gap(high) > 0:
        bad = high
    return last_affordable(gap, good, bad)


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

"""Finds the sign change of a function, from the side where it is negative.

The function is the gap between epsilon and its target, which takes seconds. It falls or
grows with the number, and is positive on the side of a large epsilon.
"""

import math
from collections.abc import Callable
from typing import Any

# The distance of a gap from zero: roughly, where that is cheaper, and in the end.
ROUGHLY, ACCURACY = 2e-2, 1e-4
# The limit on trials of a search, and the steepest slope that it follows.
_MOST_TRIALS, _STEEPEST = 100, 1e3


def solution(
    ratio: Callable[..., float], grid: tuple[float, float, float], is_whole: bool
) -> Any:
    """Returns the last number at which epsilon does not exceed its target.

    Args:
      ratio: epsilon over the target, to a `tolerance` that it takes. It may jump.
      grid: the start, the factor and the end of the numbers tried first.
      is_whole: whether the numbers are whole.
    """

    def gap(x: float, **how: float) -> float:
        # Bounded, since no step can be computed from infinity.
        return math.log(min(max(ratio(x, **how), 1e-3), 1e3))

    allowed = round if is_whole else float
    # Find it to a few percent, from above: if that is affordable, the exact one is.
    rough_gap = lambda x: gap(allowed(x), tolerance=ROUGHLY)
    good, factor, end = grid
    bad = good * factor
    while bad != end and rough_gap(bad) <= 0:
        bad *= factor
    good = bad / factor
    if bad == end and gap(end) <= 0:
        return end
    near = last_number(rough_gap, math.sqrt(good * bad), good, bad, ROUGHLY / 2)
    if is_whole:
        return last_near(gap, near, round(good), round(bad))
    step = factor**0.1  # more than the error of the rough search
    good, bad = near / step, bad if bad == end else near * step
    return last_number(gap, near, good, bad, ACCURACY)


def last_number(
    gap: Callable[[float], float], near: float, good: float, bad: float, accuracy: float
) -> float:
    """Finds a number where a gap is at most zero, and hardly less, by secants.

    Args:
      gap: the logarithm of epsilon over its target, which may jump.
      near: a number near its change of sign.
      good: a number where it is at most zero.
      bad: a number on the other side of the change.
      accuracy: the distance below zero that is accepted.

    Returns:
      A number between the two; where the gap jumps, the last number before the jump.
    """
    good, bad, x = math.log(good), math.log(bad), math.log(near)
    slope, before, at_good = math.copysign(1, bad - good), None, 0.0
    for _ in range(_MOST_TRIALS):
        at_x = gap(math.exp(x))
        good, bad, at_good = (x, bad, at_x) if at_x <= 0 else (good, x, at_good)
        width = abs(bad - good)
        if -accuracy <= at_x <= 0 or width < max(accuracy / 10, -at_good / _STEEPEST):
            break
        if before and (at_x - before[1]) * (x - before[0]) * slope > 0:
            slope = (at_x - before[1]) / (x - before[0])
        before = x, at_x
        x -= (at_x + accuracy / 2) / slope
        if not min(good, bad) < x < max(good, bad):
            x = (good + bad) / 2
    return math.exp(good)


def last_near(gap: Callable[[int], float], near: float, good: int, bad: int) -> int:
    """Finds the last number of steps with a gap of at most zero, near a known one."""
    low, high = math.floor(0.95 * near), math.ceil(1.05 * near)
    if low > good and gap(low) <= 0:
        good = low
        while high < bad and gap(high) <= 0:
            good, high = high, math.ceil(1.2 * high)
    if high < bad and gap(high) > 0:
        bad = high
    return last_affordable(gap, good, bad)


def last_affordable(gap: Callable[[int], float], affordable: int, too_many: int) -> int:
    """Finds the last number of steps with a gap of at most zero, exact below 10,000.

    It interpolates, or bisects where interpolation did not halve the interval.
    """
    low, high = gap(affordable), gap(too_many)
    interpolates = True
    while too_many - affordable > max(1, 1e-4 * affordable):
        width = too_many - affordable
        share = low / (low - high) if interpolates else 0.5
        # Keep a distance from both ends, so that the other end comes near at once.
        least = int(max(1, 1e-4 * affordable))
        middle = affordable + min(max(round(share * width), least), width - least)
        at_middle = gap(middle)
        if at_middle <= 0:
            affordable, low = middle, at_middle
        else:
            too_many, high = middle, at_middle
        interpolates = 2 * (too_many - affordable) <= width or not interpolates
    return affordable

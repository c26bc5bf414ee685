"""Where a number that epsilon grows or falls with meets a target."""

import math
from collections.abc import Callable

import scipy.optimize


def bracket(
    gap: Callable[[float], float], start: float, factor: float, end: float
) -> tuple[float, float]:
    """The last of start, start * factor, ... before a positive gap, and the next.

    The search comes from the side of little epsilon, where accounting is cheap; at
    the other end it can take more memory than there is.
    """
    while start != end and gap(start * factor) <= 0:
        start *= factor
    return start, start * factor if start != end else end


def solve(gap: Callable[[float], float], good: float, bad: float) -> float:
    """A number near the sign change of the gap, to four digits, on the good side."""
    solution = scipy.optimize.root_scalar(
        lambda x: gap(math.exp(x)), bracket=(math.log(good), math.log(bad)), xtol=5e-5
    )
    x = solution.root
    while gap(math.exp(x)) > 0:
        x += 1e-4 * math.copysign(1, good - bad)
    return math.exp(x)


def last_affordable(
    is_affordable: Callable[[int], bool], affordable: int, too_many: int
) -> int:
    """The last affordable number of steps, exact below 10,000 and never too many."""
    while too_many - affordable > max(1, 1e-4 * affordable):
        middle = (affordable + too_many) // 2
        if is_affordable(middle):
            affordable = middle
        else:
            too_many = middle
    return affordable

"""The mechanism of one trial with which a whole search meets a target."""

import functools
import math
from collections.abc import Callable
from typing import TypeVar

import scipy.optimize

from dpadambc.core import validate

MechanismT = TypeVar("MechanismT")

# Epsilon of one trial is solved for to about this, relative.
_TOLERANCE = 5e-4


def calibrated(
    of_one_trial: Callable[[float], MechanismT],
    search_epsilon: Callable[[MechanismT], float],
    target_epsilon: float,
) -> MechanismT:
    """Solves for the epsilon of one trial, with which that of the search grows.

    Args:
      of_one_trial: calibrates to an epsilon of one trial.
      search_epsilon: of a search whose trials have this mechanism.
      target_epsilon: of the search; to reach and not to exceed.

    Returns:
      A mechanism whose search costs the target, to three digits, and never more.
    """
    validate.positive(target_epsilon=target_epsilon)
    mechanism = functools.cache(lambda x: of_one_trial(math.exp(x)))

    @functools.cache
    def gap(x):
        # Bounded, since the search cannot use infinity.
        spent = min(search_epsilon(mechanism(x)), 10 * target_epsilon)
        return math.log(max(spent, 1e-3 * target_epsilon) / target_epsilon)

    most = math.log(target_epsilon)  # no search costs less than one trial
    if gap(most) <= 0:
        return mechanism(most)
    least = most - math.log(2)
    while gap(least) > 0:
        least -= math.log(2)
    x = scipy.optimize.root_scalar(gap, bracket=(least, most), xtol=_TOLERANCE).root
    while gap(x) > 0:
        x -= _TOLERANCE
    return mechanism(x)

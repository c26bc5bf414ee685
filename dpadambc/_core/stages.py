"""Which stages of a private step this process has traced, to warn of one that lacks.

A stage sees an array, and not where it comes from. But where no gradient has been
clipped for each example, noise hides none; and where no noise has been added, there is
none to take out. This is asked of the levels that mechanisms state: who has a level
from elsewhere may have a gradient from there too.
"""

import collections
import warnings
from typing import Any

_MOST_STATED = 2**12  # the latest

_STATED: collections.OrderedDict[float, None] = collections.OrderedDict()
_TRACED: set[str] = set()
_WARNED: set[str] = set()

_MISSING = {
    "clip": (
        "Expected gradients clipped for each example before noise of a mechanism's"
        " level, got a process in which dpadambc has clipped none. In a mean of"
        " gradients, also one that is clipped as a whole, as by"
        " optax.clip_by_global_norm, one example moves far more than the sensitivity of"
        " the mechanism, and its epsilon does not hold. Take dpadambc.clipped_grad, or"
        " dpadambc.per_example_grad with dpadambc.privatize. If other code clips each"
        " example, it has to keep that sensitivity."
    ),
    "noise": (
        "Expected a gradient with noise of the level that is taken out of its second"
        " moment, got a process in which dpadambc has added none. A correction adds no"
        " noise, and without it no epsilon holds. Put dpadambc.privatize before it, or"
        " dpadambc.add_dp_noise behind dpadambc.clipped_grad. If other code adds the"
        " noise, its level has to be this one."
    ),
}


def stated(level: Any) -> Any:
    """The level of noise; if it is a number, known from now on as a mechanism's."""
    if isinstance(level, float):
        _STATED[level] = None
        _STATED.move_to_end(level)
    while len(_STATED) > _MOST_STATED:
        _STATED.popitem(last=False)
    return level


def traced(stage: str) -> None:
    """Tells that there is such a stage in this process."""
    _TRACED.add(stage)


def expect(stage: str, level: Any, *, stacklevel: int) -> None:
    """Warns, once, where a stage was to come before and this process has none.

    Args:
      stage: "clip" or "noise".
      level: of the noise; one that no mechanism states is not looked at.
      stacklevel: of the line to name, from here.
    """
    if stage in _TRACED | _WARNED or not isinstance(level, float) or not level:
        return
    if level in _STATED:
        _WARNED.add(stage)
        warnings.warn(_MISSING[stage], stacklevel=stacklevel + 1)

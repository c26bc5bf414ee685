"""Which states of noise have taken a step, to warn of one that serves two.

Both steps add the same noise, and their difference has none. A program that has been
compiled runs without this file: of a state that it takes and does not return, nothing
is seen but that its count stays where it was.
"""

import collections
import warnings
import weakref
from typing import Any

import jax
import jax.numpy as jnp
from jax import core

# By the identity of a state's counter, which every step makes anew: to read it is to
# wait for the device.
_MADE: dict[int, int] = {}  # by `init`: how many steps had been traced before
_TAKEN: set[int] = set()

_TRACED: collections.Counter[str] = collections.Counter()

_CARRY_ON = (
    "The state has the key of the noise, also where the optimizer itself has none:"
    " carry it on, as in updates, state = optimizer.update(grads, state, params), and"
    " make it an argument and a result of what is compiled."
)


def begins(counter: jax.Array, key: jax.Array) -> None:
    """Tells of the first state of a run.

    Args:
      counter: of its steps.
      key: that it is made of; one that is an argument of what is compiled is another in
        each call.
    """
    if isinstance(key, core.Tracer):
        return
    _MADE[id(counter)] = _TRACED["steps"]
    weakref.finalize(counter, _MADE.pop, id(counter), None)


def check_step(counter: jax.Array, updates: Any, *, stacklevel: int) -> None:
    """Warns where a state is not the one that the step before has returned.

    Args:
      counter: of its steps.
      updates: what noise is added to.
      stacklevel: of the line to name, from here.
    """
    _TRACED["steps"] += 1
    found = None
    if isinstance(counter, core.Tracer):
        if id(counter) in _MADE:
            found = "one that init makes in what is compiled, anew in every call of it"
    elif _is_compiled(updates):
        found = "one that is a constant of what is compiled, the same in every call"
    elif id(counter) in _TAKEN:
        found = "one that has taken a step before"
    elif isinstance(counter, jax.Array):  # not a number that was read from a file
        _TAKEN.add(id(counter))
        weakref.finalize(counter, _TAKEN.discard, id(counter))
    if found:
        warnings.warn(
            f"Expected the state that the step before has returned, got {found}. If"
            " that is in several steps, all add the same noise. It cancels in the"
            f" difference of two, so that epsilon does not hold. {_CARRY_ON}",
            stacklevel=stacklevel + 1,
        )


def _is_compiled(updates: Any) -> bool:
    """Whether they are arguments of what is compiled, not of an eager map alone."""
    are_traced = any(isinstance(x, core.Tracer) for x in jax.tree.leaves(updates))
    return are_traced and isinstance(jnp.zeros([]), core.Tracer)


def warn_of_first(counter: Any, *, stacklevel: int) -> None:
    """Warns of a state without a step, where steps were traced since it was made."""
    before = _MADE.get(id(counter))
    if before is not None and before < _TRACED["steps"]:
        warnings.warn(
            "Expected the state after the last step, got that of init, which counts no"
            " step, while steps have been traced since. If they were taken from this"
            " state, all had the noise of the first, and epsilon does not hold."
            f" {_CARRY_ON}",
            stacklevel=stacklevel + 1,
        )

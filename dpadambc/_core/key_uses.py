"""With which keys the runs of this process began, to warn of one that serves two."""

import collections
import contextlib
import contextvars
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from dpadambc._core import differences, keys, marks, origins

_MOST_KNOWN = 2**14  # keys, the latest

_BEGAN: collections.OrderedDict[str, dict[str, Any]] = collections.OrderedDict()

_IS_TOLD = contextvars.ContextVar("is_told", default=False)


@contextlib.contextmanager
def told_by_caller() -> Iterator[None]:
    """Where the caller, who knows more of the run, does `check`."""
    token = _IS_TOLD.set(True)
    try:
        yield
    finally:
        _IS_TOLD.reset(token)


def name_of(state: Any) -> str:
    """Of the first key in a state, that of its noise."""
    return keys.name_of(next(filter(_is_key, jax.tree.leaves(state))))


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def check_start(
    state: Any, params: Any, outline: Callable[[], dict[str, Any]], *, stacklevel: int
) -> None:
    """`check`, where noise begins for parameters, if all that matters are numbers.

    Warns too of parameters that an earlier run has trained.

    Args:
      state: the first of a run.
      params: the parameters.
      outline: what else tells the run from others.
      stacklevel: of the line to name, from here.
    """
    leaves = jax.tree.leaves(params)  # none where `optax.tree.map_params` asks
    if _IS_TOLD.get() or not leaves or not all(map(_is_known, (state, *leaves))):
        return
    arrays = jax.tree.map(lambda x: x if _has_dtype(x) else np.asarray(x), params)
    origins.warn_of_start(arrays, stacklevel=stacklevel)
    try:
        known = outline()
    except jax.errors.JAXTypeError:  # a hyperparameter is traced: no such run is known
        return
    known["params"] = marks.of(arrays)
    check(name_of(state), known, stacklevel=stacklevel + 1)


def _is_known(tree: Any) -> bool:
    """Whether all numbers in it can be read."""
    return not any(
        isinstance(x, core.Tracer | jax.ShapeDtypeStruct)
        or (isinstance(x, jax.Array) and x.is_deleted())
        for x in jax.tree.leaves(tree)
    )


def _has_dtype(x: Any) -> bool:
    return hasattr(x, "dtype")


def check(key: str, outline: dict[str, Any], *, stacklevel: int) -> None:
    """Warns if a run of this process began with the key that was another run.

    The same run once more, be it for more iterations, adds the same noise to the same
    gradients, which tells nothing new.

    Args:
      key: the name of it.
      outline: what the run is, as far as that is known before its first step. Of two
        runs what both tell is compared: a loop by hand does not show its data.
      stacklevel: of the line to name, from here.
    """
    known = _BEGAN.pop(key, outline)
    _BEGAN[key] = outline | known
    while len(_BEGAN) > _MOST_KNOWN:
        _BEGAN.popitem(last=False)
    both = known.keys() & outline.keys()
    there, here = ({name: run[name] for name in both} for run in (known, outline))
    apart = differences.of_identities(there, here) + differences.of_numbers(there, here)
    if apart:
        warnings.warn(
            "Expected a key of its own for each run, got the key of an earlier,"
            " different run of this process. Both runs add the same noise, and it"
            " cancels in the difference of what they return. So epsilon does not hold"
            " if both are released, or one of them is chosen. Draw a new key, such as"
            " training.secret_key() or jax.random.fold_in(key, run). What differs:\n  "
            + "\n  ".join(dict.fromkeys(apart)),
            stacklevel=stacklevel,
        )

"""With which keys the runs of this process began, to warn of one that serves two."""

import collections
import contextlib
import contextvars
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import core

from dpadambc._core import closures, differences, keys, marks

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


def check_noise(
    key: jax.Array, params: Any, made_of: dict[str, Any], *, stacklevel: int
) -> None:
    """`check`, of noise that begins for these parameters, if they are numbers.

    Args:
      key: of the noise, as its state has it first.
      params: the parameters.
      made_of: what else tells the run from others, such as its learning rate.
      stacklevel: of the line to name, from here.
    """
    leaves = jax.tree.leaves(params)  # none where `optax.tree.map_params` asks
    # Inside `jax.jit` a key is a number until something is done with it.
    parts = jax.random.key_data(key), *leaves
    is_abstract = any(isinstance(x, core.Tracer | jax.ShapeDtypeStruct) for x in parts)
    if _IS_TOLD.get() or is_abstract or not leaves:
        return
    outline = {
        "start": marks.of([jnp.asarray(x) for x in leaves]),
        "functions": closures.functions(**made_of),
        "numbers": closures.of(**made_of),
    }
    check(f"noise {keys.name_of(key)}", outline, stacklevel=stacklevel + 1)


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
            "Expected a key of its own for each run, got that of an earlier run of this"
            " process that was another. Both add the same noise, which is gone from the"
            " difference of what they return, so epsilon does not hold where both are"
            " released, or one is chosen. Draw a new key, such as"
            " training.secret_key() or jax.random.fold_in(key, run). What differs:\n  "
            + "\n  ".join(dict.fromkeys(apart)),
            stacklevel=stacklevel,
        )

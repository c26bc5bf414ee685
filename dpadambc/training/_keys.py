"""Where the key of a run comes from."""

import secrets
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.experimental import multihost_utils

from dpadambc.training import _processes

# Of the keys that this process has drawn from entropy: nobody means one of them.
_DRAWN: set[bytes] = set()


def secret_key() -> jax.Array:
    """A key from the operating system's entropy, for a run that nobody can repeat.

    JAX's default generator takes 64 bits. Anyone who knows or guesses the number behind
    a key, such as a seed in a script, can compute the noise.

    In a program of several processes (`jax.distributed.initialize`), the first one
    draws the key and all get it. So all of them must call this. One that trains a model
    of its own folds in its number: `jax.random.fold_in(key, jax.process_index())`.

    Returns:
      A typed key.

    Example:
      >>> from dpadambc import training
      >>> bool((training.secret_key() != training.secret_key()).all())
      True
    """
    if isinstance(jnp.zeros(()), core.Tracer):
        raise TypeError(
            "Expected secret_key outside jax.jit and other transformations, got a call"
            " inside, where it is one constant for all calls of what is compiled. Draw"
            " the key before, and give it as an argument."
        )
    words = [secrets.randbits(32) for _ in range(2)]
    key = jax.random.wrap_key_data(jnp.array(words, jnp.uint32), impl="threefry2x32")
    key = the_same_everywhere(key)
    _DRAWN.add(np.asarray(jax.random.key_data(key)).tobytes())
    return key


def is_from_entropy(key: jax.Array) -> bool:
    """Whether `secret_key` has drawn it in this process."""
    return np.asarray(jax.random.key_data(key)).tobytes() in _DRAWN


def the_same_everywhere(key: jax.Array) -> jax.Array:
    """The key of the first process, on no device in particular.

    Processes of one run with keys of their own would each draw other batches and other
    noise, and an example be in the sum of several.
    """
    words = np.asarray(jax.random.key_data(key))
    if jax.process_count() > 1:
        words = np.asarray(multihost_utils.broadcast_one_to_all(words))
    return jax.random.wrap_key_data(jnp.asarray(words), impl=jax.random.key_impl(key))


def of_this_process(key: jax.Array) -> jax.Array:
    """The same key, on no device in particular."""
    words = jnp.asarray(np.asarray(jax.random.key_data(key)))
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(key))


def compared_with_other_processes(
    key: jax.Array, outline: Callable[[], Mapping[str, Any]]
) -> set[str]:
    """Raises where another process has another run with the key of this one.

    Args:
      key: of a run of this process alone, for which another trains something else.
      outline: what the run is, with its "data"; all processes tell theirs.

    Returns:
      Names of the runs of others that have the same data.
    """
    if jax.process_count() == 1:
        return set()
    words, told = np.asarray(jax.random.key_data(key)).tobytes(), outline()
    parts = words, _processes.common(told), told["data"]
    own, everyone = _processes.gathered("alone", *parts)
    same_key, same_run, same_data, *_ = (everyone == own).all(-1).T
    if (same_key & ~same_run).any():
        raise ValueError(
            "Expected a key of its own for the run of each process, got one key for"
            " runs that differ, in the data or in what is trained: both add the same"
            " noise, which is gone from the difference of what they return."
            " training.secret_key() is the same in all processes. Give"
            " jax.random.fold_in(key, jax.process_index()); or, where all processes are"
            " to train one model, batch_sharding over the devices of all."
        )
    others = everyone[same_data & ~same_key, 0]
    return {f"of another process: {key.tobytes().hex()}" for key in others}

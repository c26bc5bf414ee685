"""Where the key of a run comes from."""

import secrets

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.experimental import multihost_utils

from dpadambc.core import checksums


def secret_key() -> jax.Array:
    """A key from the operating system's entropy, for a run that nobody can repeat.

    JAX's default generator takes 64 bits. Anyone who knows or guesses the number behind
    a key, such as a seed in a script, can compute the noise.

    Each process of a program of several (`jax.distributed.initialize`) draws a key of
    its own. A `fit` whose arrays span them takes the key of the first process.

    Returns:
      A typed key.

    Raises:
      TypeError: if it is called inside a transformation of JAX.

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
    return jax.random.wrap_key_data(jnp.array(words, jnp.uint32), impl="threefry2x32")


def of_batches(key: jax.Array, checksum: jax.typing.ArrayLike) -> jax.Array:
    """The key of batches, of what tells them from those of other runs."""
    return checksums.folded_in(key, checksum)


def the_same_everywhere(key: jax.Array) -> jax.Array:
    """The key of the first process, on no device in particular.

    Processes of one run with keys of their own would each draw other batches and other
    noise, and an example be in the sum of several.
    """
    words = multihost_utils.broadcast_one_to_all(np.asarray(jax.random.key_data(key)))
    impl = jax.random.key_impl(key)
    return jax.random.wrap_key_data(jnp.asarray(np.asarray(words)), impl=impl)


def of_this_process(key: jax.Array) -> jax.Array:
    """The same key, on no device in particular."""
    words = jnp.asarray(np.asarray(jax.random.key_data(key)))
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(key))

"""A key that nobody knows: the noise is as secret as its key."""

import secrets

import jax
import jax.numpy as jnp
from jax import core


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
            "Expected secret_key outside jax.jit, got a call inside, where it is a"
            " constant. Draw the key before, and pass it in."
        )
    words = [secrets.randbits(32) for _ in range(2)]
    return jax.random.wrap_key_data(jnp.array(words, jnp.uint32), impl="threefry2x32")

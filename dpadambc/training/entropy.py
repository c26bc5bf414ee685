"""A secret key: the noise is as secret as its key."""

import secrets

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from dpadambc.core import chacha


def secret_key() -> jax.Array:
    """Makes a key from the operating system's entropy, for a run nobody can repeat.

    Anyone who knows or guesses the number behind a key, such as a seed in a script, can
    compute the noise. This key has 256 bits, and its generator is a cipher, ChaCha20. A
    key of JAX's default kind has 64 bits, and its generator is not a cipher.
    `jax.random` takes
    both. Words that were saved become such a key again by
    `jax.random.wrap_key_data(words, impl=jax.random.key_impl(training.secret_key()))`.

    Each process of a program of several (`jax.distributed.initialize`) draws its own
    key. A `fit` whose arrays span them takes the key of the first process.

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
    words = np.frombuffer(secrets.token_bytes(32), np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words), impl=chacha.KIND)

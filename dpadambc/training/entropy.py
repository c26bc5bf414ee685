"""A secret key: the noise is as secret as its key."""

import secrets
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from dpadambc.core import chacha

_KINDS = {64: "threefry2x32", 256: chacha.KIND}


def secret_key(*, bits: Literal[64, 256] = 64) -> jax.Array:
    """Makes a key from the operating system's entropy, for a run nobody can repeat.

    Anyone who knows or guesses the number behind a key, such as a seed in a script, can
    compute the noise. A key of 64 bits is of JAX's default kind, whose generator is not
    a cipher: whoever sees noised gradients and has a large cluster can try all keys. A
    key of 256 bits is of ChaCha20, a cipher. Its noise takes four to six times as long
    on a processor: from 1.06 times the step of a CNN to twice that of an encoder.

    `jax.random` takes both. Saved words become a key again by
    `jax.random.wrap_key_data(words, impl=jax.random.key_impl(key))`, of a key like it.

    Each process of a program of several (`jax.distributed.initialize`) draws its own
    key. A `fit` whose arrays span them takes the key of the first process.

    Args:
      bits: 64 or 256.

    Returns:
      A typed key.

    Raises:
      TypeError: if it is called inside a transformation of JAX.
      ValueError: if `bits` is neither 64 nor 256.

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
    if bits not in _KINDS:
        raise ValueError(f"Expected bits=64 or bits=256, got {bits!r}.")
    words = np.frombuffer(secrets.token_bytes(bits // 8), np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words), impl=_KINDS[bits])

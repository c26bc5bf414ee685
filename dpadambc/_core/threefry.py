"""The default generator of JAX, written out: its words, and normal numbers of them."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Threefry-2x32, 20 rounds: how far each of eight turns, and a word of the key schedule.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)

Key = jax.Array | tuple[jax.Array, jax.Array]  # two words


def words(key: Key, high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two random words for each counter (high, low), under a key of two words.

    `Salmon et al. 2011 <https://doi.org/10.1145/2063384.2063405>`_
    """
    schedule = key[0], key[1], key[0] ^ key[1] ^ _PARITY
    x0, x1 = high + key[0], low + key[1]
    for group in range(5):
        for bits in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = x0 ^ (x1 << bits | x1 >> 32 - bits)
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + (group + 1)
    return x0, x1


def positions(shape: tuple[int, ...]) -> jax.Array:
    """The number of each coordinate, as a sum of iotas: any sharding can split it."""
    number = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        along = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        number += along * np.uint32(math.prod(shape[axis + 1 :]))
    return number


def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`jax.random.normal` in float32, number for number, as one pass over memory.

    JAX compiles the rounds of its generator to a loop on a CPU, where each step of
    each round takes its words from memory and puts them back. Written out, they and
    what is made of them stay in registers. (The order is that of the default,
    `jax_threefry_partitionable`.)
    """
    x0, x1 = words(jax.random.key_data(key), jnp.uint32(0), positions(shape))
    # 23 random bits behind the point of a number in [1, 2), then moved to (-1, 1).
    bits = (x0 ^ x1) >> 9 | np.float32(1).view(np.uint32)
    uniform = 2 * (jax.lax.bitcast_convert_type(bits, jnp.float32) - 1)
    least = np.nextafter(np.float32(-1), np.float32(0))
    return np.float32(math.sqrt(2)) * jax.lax.erf_inv(uniform + least)


def _normal_once(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`_normal`, which XLA would merge into each use, and repeat there.

    It does not merge a branch. The condition always holds, which XLA cannot tell.
    (`jax.lax.optimization_barrier` is for this, but does not last in JAX 0.10.)
    """
    word = jax.random.key_data(key)[0]
    return jax.lax.cond(
        word | 1 != 0,
        lambda: _normal(key, shape),
        # Of the key, so that it varies over devices as the other branch does.
        lambda: jnp.broadcast_to(word.astype(jnp.float32) * jnp.nan, shape),
    )


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """`jax.random.normal`, faster on a CPU in float32 with keys of the default kind."""
    of_jax = lambda key: jax.random.normal(key, shape, dtype)
    is_default = dtype == jnp.float32 and jax.random.key_impl(key) == "threefry2x32"
    if not is_default or math.prod(shape) >= 2**32:  # counted in one word
        return of_jax(key)
    written_out = lambda key: _normal_once(key, shape)
    return jax.lax.platform_dependent(key, cpu=written_out, default=of_jax)

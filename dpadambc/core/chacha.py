"""A kind of key of 256 bits, whose generator is a cipher: ChaCha20.

`Bernstein 2008 <https://cr.yp.to/chacha.html>`_, as `RFC 8439
<https://www.rfc-editor.org/rfc/rfc8439>`_ has it: a block of 16 words is a function of
a key of eight, a counter, and a nonce of three. No way is known to tell the blocks of a
secret key from random words that is faster than to try all keys. The nonce separates
the three uses of a key: draws, new keys, and keys with numbers folded in.

JAX's default kind has keys of 64 bits, and was not designed as a cipher.
"""

import math
from typing import Any

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np

from dpadambc.core import arrays

_CONSTANT = np.frombuffer(b"expand 32-byte k", np.uint32)
_DRAW, _SPLIT = (np.array([use, 0, 0], np.uint32) for use in range(2))
_FOLD = 2
_DOUBLE_ROUNDS = 10


def _quarter_rounds(a, b, c, d):
    """Mixes four rows, in each column by itself."""
    turn = lambda x, bits: x << bits | x >> 32 - bits
    a = a + b
    d = turn(d ^ a, 16)
    c = c + d
    b = turn(b ^ c, 12)
    a = a + b
    d = turn(d ^ a, 8)
    c = c + d
    b = turn(b ^ c, 7)
    return a, b, c, d


def blocks(
    key: jax.Array, counter: jax.Array, nonce: jax.typing.ArrayLike
) -> jax.Array:
    """Computes a block for each counter.

    The state is four rows of four words. Even rounds mix its columns, and odd ones its
    diagonals, which are columns once the rows are turned. XLA takes minutes to compile
    all rounds written out.

    Args:
      key: shape (8,), uint32.
      counter: any shape, uint32.
      nonce: shape (3,), uint32.

    Returns:
      shape (16, *counter.shape), uint32.
    """
    wide = lambda words: jnp.broadcast_to(
        jnp.expand_dims(words + (key[0] & 0), range(1, counter.ndim + 1)),
        (len(words), *counter.shape),
    )
    last = jnp.concatenate([counter[None] + (key[0] & 0), wide(nonce)])
    start = wide(_CONSTANT), wide(key[:4]), wide(key[4:]), last

    def double_round(_, rows):
        for turns in ((1, 2, 3), (3, 2, 1)):
            first, *others = _quarter_rounds(*rows)
            turned = (jnp.roll(x, -k, 0) for x, k in zip(others, turns, strict=True))
            rows = first, *turned
        return rows

    rows = jax.lax.fori_loop(0, _DOUBLE_ROUNDS, double_round, start)
    return jnp.concatenate([x + y for x, y in zip(rows, start, strict=True)])


def draw(
    key: jax.Array, shape: tuple[int, ...], nonce: np.ndarray = _DRAW
) -> jax.Array:
    """Draws words; along the last axis of the shape if whole blocks fill it."""
    size = math.prod(shape)
    if is_split := bool(shape) and shape[-1] % 16 == 0:
        of_blocks = (*shape[:-1], shape[-1] // 16)
    else:
        of_blocks = (-(-size // 16),)
    if math.prod(of_blocks) >= 2**32:
        raise ValueError(f"Expected at most 2**36 words of one key, got {size}.")
    found = blocks(key, arrays.positions(of_blocks), nonce)
    if is_split:
        return jnp.moveaxis(found, 0, -1).reshape(shape)
    return found.reshape(-1)[:size].reshape(shape)


def _seed(seed: jax.Array) -> jax.Array:
    """Makes a key of all bits of an integer, padded with zeros, as JAX does."""
    high = jax.lax.shift_right_logical(seed, jnp.asarray(32, seed.dtype))
    words = [x.astype(jnp.uint32) for x in (seed, high)]
    return jnp.stack([*words, *[jnp.uint32(0)] * 6])


def _split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return draw(key, (*shape, 8), _SPLIT)


def folded_in(key: jax.Array, words: jax.Array) -> jax.Array:
    """Makes a key of a key and two words, in one block."""
    nonce = jnp.stack([jnp.uint32(_FOLD), words[1], jnp.uint32(0)])
    return blocks(key, words[0], nonce)[:8]


def _fold_in(key: jax.Array, number: Any) -> jax.Array:
    return folded_in(key, jnp.stack([number.astype(jnp.uint32), jnp.uint32(0)]))


def _random_bits(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    if bit_width == 64:
        words = draw(key, (2, *shape)).astype(jnp.uint64)
        return words[0] << 32 | words[1]
    return draw(key, shape).astype(f"uint{bit_width}")


KIND = jax.extend.random.define_prng_impl(
    key_shape=(8,),
    seed=_seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="chacha20",
    tag="chacha",
)

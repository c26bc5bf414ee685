"""The default generator of JAX, written out: its words, and normal numbers of them."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Threefry-2x32, 20 rounds: how far each of eight turns, and a word of the key schedule.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)

# Arrays of one draw are rows of this length, each with its key.
_ROW = 256
# One draw has as many numbers as this, or as the largest array, or an eighth of all.
_TOGETHER = 2**22
# Where an array starts in a draw is counted in 32 bits.
_COUNTED = 2**30

Key = jax.Array | tuple[jax.Array, jax.Array]  # two words
Shape = tuple[int, ...]
Like = jax.ShapeDtypeStruct


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


def positions(shape: Shape) -> jax.Array:
    """The number of each coordinate, as a sum of iotas: any sharding can split it."""
    number = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        along = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        number += along * np.uint32(math.prod(shape[axis + 1 :]))
    return number


def _gaussian(x0: jax.Array, x1: jax.Array) -> jax.Array:
    """Standard normal numbers in float32, of random words as JAX makes them."""
    # 23 random bits behind the point of a number in [1, 2), then moved to (-1, 1).
    bits = (x0 ^ x1) >> 9 | np.float32(1).view(np.uint32)
    uniform = 2 * (jax.lax.bitcast_convert_type(bits, jnp.float32) - 1)
    least = np.nextafter(np.float32(-1), np.float32(0))
    return np.float32(math.sqrt(2)) * jax.lax.erf_inv(uniform + least)


def _alone(key: jax.Array, shape: Shape) -> jax.Array:
    """Standard normal numbers of one key, in one pass over memory.

    JAX compiles the rounds of its generator to a loop on a CPU, where each step of
    each round takes its words from memory and puts them back. Written out, they and
    what is made of them stay in registers.
    """
    return _gaussian(*words((key[0], key[1]), jnp.uint32(0), positions(shape)))


def _together(keys: jax.Array, sizes: Sequence[int]) -> jax.Array:
    """The same of several keys, in rows that know their key and where they start.

    Written out, it takes long to compile: here once for all of them. The numbers
    that fill the last row of each key are for nobody.
    """
    ends = np.cumsum([_num_rows(size) for size in sizes], dtype=np.int32)
    row = jnp.arange(ends[-1])
    number = jnp.searchsorted(ends, row, side="right", method="compare_all")
    of_key = row - jnp.asarray([0, *ends[:-1]])[number]
    within = jnp.arange(_ROW, dtype=jnp.uint32)
    low = _ROW * of_key.astype(jnp.uint32)[:, None] + within[None]
    of_row = keys[number]
    key = of_row[:, 0, None], of_row[:, 1, None]
    return _gaussian(*words(key, jnp.uint32(0), low)).reshape(-1)


def _num_rows(size: int) -> int:
    return -(-size // _ROW)


def _once(draw: Callable[[], jax.Array], key: jax.Array) -> jax.Array:
    """The draw, which XLA would merge into each use, and repeat there.

    It does not merge a branch. The condition always holds, which XLA cannot tell.
    (`jax.lax.optimization_barrier` is for this, but does not last in JAX 0.10.)
    """
    word, shape = key[0], jax.eval_shape(draw).shape
    # Of the key, so that it varies over devices as the other branch does.
    nan = word.astype(jnp.float32) * jnp.nan
    return jax.lax.cond(word | 1 != 0, draw, lambda: jnp.broadcast_to(nan, shape))


def _not_folded(number: int, key: jax.Array) -> jax.Array:
    """A number that XLA does not know when it compiles.

    Equal kernels are compiled once, such as those of an optimizer for parameters of
    one shape. With a number in them they would not be equal.
    """
    zero = jnp.minimum(key[0], 0).astype(jnp.int32)
    pair = jnp.asarray(np.array([number, -1], np.int32))
    return jax.lax.dynamic_index_in_dim(pair, zero, keepdims=False)


def _groups(sizes: Sequence[int]) -> list[list[int]]:
    """The positions of arrays that are drawn together; all of a draw is in memory."""
    most = min(max(_TOGETHER, sum(sizes) // 8, *sizes), _COUNTED)
    groups: list[list[int]] = [[]]
    total = 0
    for i, size in enumerate(sizes):
        if total + size > most:
            groups.append([])
            total = 0
        groups[-1].append(i)
        total += size
    return groups


def _written_out(
    keys: jax.Array, shapes: Sequence[Shape], is_split: bool
) -> list[jax.Array]:
    """Standard normal numbers of each key, in as few draws as memory allows."""
    sizes = [math.prod(shape) for shape in shapes]
    found = []
    # On a mesh each is split along its own axes, which only a draw of its own can be.
    groups = [[i] for i in range(len(sizes))] if is_split else _groups(sizes)
    for group in filter(None, groups):
        first = keys[group[0]]
        if len(group) == 1:
            draw = functools.partial(_alone, first, shapes[group[0]])
            found.append(_once(draw, first))
            continue
        of_group = [sizes[i] for i in group]
        draw = functools.partial(_together, keys[np.array(group)], of_group)
        drawn, start = _once(draw, first), 0
        for i in group:
            at = _not_folded(start, first)
            part = jax.lax.dynamic_slice(drawn, (at,), (sizes[i],))
            found.append(part.reshape(shapes[i]))
            start += _ROW * _num_rows(sizes[i])
    return found


def normals(keys: jax.Array, likes: Sequence[Like]) -> list[jax.Array]:
    """`jax.random.normal` of each key: on a CPU faster, and compiled faster.

    There the generator of the default kind of keys is written out, for float32. The
    bits are JAX's with `jax_threefry_partitionable`, its default, and the numbers are
    so within a unit in the last place; without, JAX counts in another order.

    Args:
      keys: shape (n,).
      likes: the shapes and dtypes of n arrays.
    """
    is_split = not jax.sharding.get_abstract_mesh().empty
    kind, of_keys = jax.random.key_impl(keys), jax.random.key_data(keys)
    likes = tuple(Like(x.shape, x.dtype) for x in likes)
    return _normals(of_keys, likes, kind, is_split)


# Jitted for those who draw in a step that is not, where JAX would compile it each time.
@functools.partial(jax.jit, static_argnames=("likes", "kind", "is_split"), inline=True)
def _normals(
    keys: jax.Array, likes: tuple[Like, ...], kind: Any, is_split: bool
) -> list[jax.Array]:
    def of_jax(key, like):
        typed = jax.random.wrap_key_data(key, impl=kind)
        return jax.random.normal(typed, like.shape, like.dtype)

    def all_of_jax(keys):
        return list(map(of_jax, keys, likes))

    def on_cpu(keys):
        # One word counts the numbers of a key.
        known = [x.dtype == jnp.float32 and x.size < 2**32 for x in likes]
        shapes = [x.shape for x, is_known in zip(likes, known, strict=True) if is_known]
        ours = _written_out(keys[np.flatnonzero(known)], shapes, is_split)
        return [
            ours.pop(0) if is_known else of_jax(keys[i], likes[i])
            for i, is_known in enumerate(known)
        ]

    if kind != "threefry2x32":
        return all_of_jax(keys)
    return jax.lax.platform_dependent(keys, cpu=on_cpu, default=all_of_jax)

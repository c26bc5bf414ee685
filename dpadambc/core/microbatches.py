"""A function of a batch, a few examples at a time, but for padding."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from optax.microbatching import AccumulationType, microbatch

# The rows beyond the expected size of a batch are cut into this many parts: for a
# binomial batch, a part is a standard deviation, and half of the batches need none. A
# few rows are not worth another program.
_PARTS = 8
_FEW = 16
# This many multiplications take less time than the compilation of another program: then
# the rows beyond the expected size are computed with the others.
_CHEAP = 2**22


def first_rows(batch_size: int, expected_size: float | None) -> int:
    """Returns how many rows of a padded batch are computed, whatever they hold.

    It is at least the size of one part, should `expected_size` be another number.
    """
    if expected_size is None or batch_size <= expected_size + _FEW:
        return batch_size
    return math.ceil(max(expected_size, batch_size / _PARTS))


def in_parts(
    fun: Callable[..., Any],
    batched: Sequence[int],
    microbatch_size: int | None,
    expected_size: float | None,
) -> Callable[..., Any]:
    """Returns a function of (padding, *args) that joins values and adds sums of parts.

    Args:
      fun: returns values of examples, and sums over them.
      batched: which of `args` are batches.
      microbatch_size: how many examples are in memory at once; all by default.
      expected_size: the size of a batch without its padding, which comes last. That
        many rows are computed whatever they hold, and the others if their part has an
        example. By default all are computed.
    """
    loop = functools.partial(_in_microbatches, fun, batched, expected_size is not None)

    def rows(where, args):
        some = lambda tree: jax.tree.map(lambda x: jnp.asarray(x)[where], tree)
        return [some(x) if i in batched else x for i, x in enumerate(args)]

    def all_parts(mask, *args):
        first = first_rows(len(mask), expected_size)
        if _work(batched, args, len(mask) - first) <= _CHEAP:
            first = len(mask)
        size, rest = min(first, microbatch_size or first), len(mask) - first
        if rest and _PARTS * size <= first:  # one loop is compiled once
            return loop(size)(mask, *args)
        head = fun if size == first else loop(size)
        if not rest:
            return head(mask, *args)
        tail = loop(min(size, -(-rest // _PARTS)))
        values, sums = head(mask[:first], *rows(slice(first), args))
        others, more = tail(mask[first:], *rows(slice(first, None), args))
        values = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), values, others)
        return values, jax.tree.map(jnp.add, sums, more)

    return all_parts


def _work(batched: Sequence[int], args: Sequence[Any], num_rows: int) -> float:
    """Estimates the multiplications of some rows: each number meets each parameter."""
    sizes = [sum(jnp.size(x) for x in jax.tree.leaves(arg)) for arg in args]
    of_batch = sum(sizes[i] for i in batched)
    shared = sum(sizes) - of_batch
    batch_size = max(jnp.shape(jax.tree.leaves(args[batched[0]])[0])[0], 1)
    return num_rows * of_batch / batch_size * shared


def _in_microbatches(
    fun: Callable[..., Any], batched: Sequence[int], skip_padding: bool, size: int
) -> Callable[..., Any]:
    """Returns the function with a loop over `size` examples at a time."""

    def in_microbatches(mask, *args):
        batch_size, num = len(mask), -(-len(mask) // size)
        mask = jnp.concatenate([mask, jnp.ones(num * size - batch_size, bool)])
        num_real = None
        if skip_padding:
            is_real = ~mask.reshape(num, size).all(1)
            num_real = jnp.max(jnp.where(is_real, jnp.arange(1, num + 1), 0))
        # Optax takes every n-th row into one of n microbatches, so that arrays stay
        # where they are on several devices. To skip padding, neighbors must stay
        # together.
        order = (lambda x: _interleaved(x, num)) if skip_padding else (lambda x: x)
        args = list(args)
        for i in batched:
            extended = lambda x: order(_extended(x, num * size))
            args[i] = jax.tree.map(extended, args[i])
        values, sums = microbatch(
            fun,
            argnums=(0, *(1 + i for i in batched)),
            microbatch_size=size,
            accumulator=(AccumulationType.CONCAT, AccumulationType.SUM),
            num_real_microbatches=num_real,
        )(order(mask), *args)
        if skip_padding:
            values = jax.tree.map(lambda x: _interleaved(x, size), values)
        return jax.tree.map(lambda x: x[:batch_size], values), sums

    return in_microbatches


def _extended(x: jax.Array, size: int) -> jax.Array:
    """Repeats the last row along axis 0, up to `size` rows."""
    if x.shape[0] == size:  # an index would gather an array on several devices
        return x
    return jnp.asarray(x)[jnp.minimum(jnp.arange(size), x.shape[0] - 1)]


def _interleaved(x: jax.Array, distance: int) -> jax.Array:
    """Moves neighbors along axis 0 to this distance."""
    groups = jnp.asarray(x).reshape(distance, -1, *x.shape[1:])
    return groups.swapaxes(0, 1).reshape(x.shape)

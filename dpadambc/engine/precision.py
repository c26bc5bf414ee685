"""Products at full precision, in at least float32, and what rounding hides of them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def at_least_float32(dtype: Any) -> jnp.dtype:
    """The dtype itself if it has 32 bits or more, else float32."""
    return jnp.promote_types(dtype, jnp.float32)


def einsum(
    a: jax.Array,
    a_axes: Sequence[int],
    b: jax.Array,
    b_axes: Sequence[int],
    out_axes: Sequence[int],
) -> jax.Array:
    """`jnp.einsum` of two arrays at full precision, accumulated in at least float32.

    Accelerators round the inputs of products by default, which would carry a clipped
    gradient past the clip norm.
    """
    common = jnp.promote_types(a.dtype, b.dtype)
    return jnp.einsum(
        a.astype(common),
        list(a_axes),
        b.astype(common),
        list(b_axes),
        list(out_axes),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=at_least_float32(common),
    )


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Axes (l, t, i) and (l, t, j) to (l, i, j), as `einsum`."""
    if a.shape[0] == 1:
        # Without the axis of size one, XLA multiplies in place, without transposing.
        return einsum(a[0], (0, 1), b[0], (0, 2), (1, 2))[None]
    return einsum(a, (0, 1, 2), b, (0, 1, 3), (0, 2, 3))


def gram(rows: jax.Array) -> jax.Array:
    """Inner products of rows: axes (l, t, i) to (l, t, t)."""
    if rows.shape[0] == 1:
        return einsum(rows[0], (0, 2), rows[0], (1, 2), (0, 1))[None]
    return einsum(rows, (0, 1, 3), rows, (0, 2, 3), (0, 1, 2))


def rounding_allowance(
    squares: Sequence[jax.Array], counts: Sequence[Any], can_cancel: bool = True
) -> jax.Array:
    r"""What rounding can hide of a squared norm computed from its factors.

    Rounding is relative to the terms of a sum, so where these cancel it can exceed the
    norm. By Cauchy and Schwarz the sum of the norms of all terms is at most the root
    of the product of `squares`. An allowance of eps times its square keeps the clipping
    weights so small that the *sum* of the clipped gradients, which is rounded as well,
    stays within about sqrt(eps) of the clip norm. And squares below the least normal
    number vanish: that much for each number squared.

    Args:
      squares: the squared Frobenius norms of the two factors.
      counts: how many numbers each factor holds, as numbers or arrays.
      can_cancel: whether more than one term is summed.
    """
    info = jnp.finfo(squares[0].dtype)
    vanished = counts[0] * squares[1] + counts[1] * squares[0]
    canceled = info.eps * squares[0] * squares[1] if can_cancel else 0
    return canceled + info.tiny * vanished

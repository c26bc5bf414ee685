"""At least float32 from the clip on, whatever the model computes in."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax


def at_least_float32(dtype: Any) -> jnp.dtype:
    """The dtype itself if it has 32 bits or more, else float32; keys stay keys."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return dtype
    return jnp.promote_types(dtype, jnp.float32)


def zeros_like(tree: Any) -> Any:
    """Zeros in at least float32, with the shapes of a tree, which lie as it does."""

    def zeros(x: Any) -> jax.Array:
        return jnp.zeros_like(x, dtype=at_least_float32(jnp.result_type(x)))

    return jax.tree.map(zeros, tree)


def with_wide_state(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """The same optimizer, with state as for parameters in at least float32.

    Gradients come in at least float32, and moments in less would not keep their dtype.
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def init_fn(params):
        return optimizer.init(jax.tree.map(wide, params))

    return optax.GradientTransformationExtraArgs(init_fn, optimizer.update)


def wide(x: Any) -> Any:
    """In at least float32; a shape stays a shape."""
    dtype = at_least_float32(jnp.result_type(x))
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
    return jnp.asarray(x, dtype)


def rounded(x: jax.Array) -> jax.Array:
    """The number that its dtype has, where XLA may be working with more digits.

    By a round trip to float32: rounding in the dtype itself XLA takes for nothing to
    do, and leaves out before it decides how many digits to keep.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating) or jnp.finfo(x.dtype).bits >= 32:
        return x
    info = jnp.finfo(x.dtype)
    wide = x.astype(jnp.float32)
    return jax.lax.reduce_precision(wide, info.nexp, info.nmant).astype(x.dtype)


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

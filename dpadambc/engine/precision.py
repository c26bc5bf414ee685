"""At least float32, and bounds on the rounding error of a norm there."""

from typing import Any

import jax
import jax.numpy as jnp


def at_least_float32(dtype: Any) -> jnp.dtype:
    """Returns the dtype if it has 32 bits or more, else float32."""
    return jnp.promote_types(dtype, jnp.float32)


def at_least_16_bits(x: jax.Array) -> jax.Array:
    """Widens float8 to bfloat16, which holds all its numbers and which JAX promotes."""
    is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 16
    return x.astype(jnp.bfloat16) if is_narrow else x


def rounded(x: jax.Array) -> jax.Array:
    """Rounds numbers to their dtype, where XLA may compute with more digits.

    The round trip goes through float32, since XLA removes a rounding in the dtype
    itself before it decides how many digits to keep.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating) or jnp.finfo(x.dtype).bits >= 32:
        return x
    info = jnp.finfo(x.dtype)
    wide = x.astype(jnp.float32)
    return jax.lax.reduce_precision(wide, info.nexp, info.nmant).astype(x.dtype)


def rounding_error(length: int, dtype: Any) -> float:
    r"""Bounds the error of an inner product, over the norms of its two vectors.

    A sum of n products, in any order and with or without fused operations, has an error
    of at most :math:`\gamma_n \sum_k |x_k y_k| \le \gamma_n \lVert x \rVert \lVert y
    \rVert` with :math:`\gamma_n = n u / (1 - n u)` and u half of eps (`Higham 2002
    <https://doi.org/10.1137/1.9780898718027>`_, 3.1). So n is the length of a dot
    product, which a device may add up in sequence, plus 32 for the reductions around
    it, which XLA adds up as trees. A tenth more covers terms of second order, which are
    :math:`T n u` of the first where the errors of two Gram matrices of T rows meet: for
    T n below a million.

    Where terms cancel, the error can exceed the result. So an allowance is added
    *after* the computed number is clamped: `max(computed, 0) + allowance`.

    Args:
      length: the length of the dot product.
      dtype: the dtype in which it is added up.
    """
    return 1.1 * (length + 32) * float(jnp.finfo(dtype).eps) / 2

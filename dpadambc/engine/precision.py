"""At least float32, and what rounding hides there of a norm."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def at_least_float32(dtype: Any) -> jnp.dtype:
    """The dtype itself if it has 32 bits or more, else float32."""
    return jnp.promote_types(dtype, jnp.float32)


def at_least_16_bits(x: jax.Array) -> jax.Array:
    """The same numbers in a dtype that JAX promotes: bfloat16 has all of float8."""
    is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 16
    return x.astype(jnp.bfloat16) if is_narrow else x


def rounded(x: jax.Array) -> jax.Array:
    """The numbers as their dtype has them, where XLA may compute with more digits.

    The round trip goes through float32, since XLA removes a rounding in the dtype
    itself before it decides how many digits to keep.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating) or jnp.finfo(x.dtype).bits >= 32:
        return x
    info = jnp.finfo(x.dtype)
    wide = x.astype(jnp.float32)
    return jax.lax.reduce_precision(wide, info.nexp, info.nmant).astype(x.dtype)


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

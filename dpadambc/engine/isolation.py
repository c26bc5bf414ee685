"""Isolates the examples of a batch where XLA mixes them, or JAX cannot map them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def isolated(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Maps a convolution over examples so that NaN stays in its row.

    Where both operands differ between examples, as for the gradient of a kernel, the
    batch becomes the groups of one convolution. On CPU, XLA computes it with zeros
    times the other groups, and zero times NaN or infinity is NaN: one example would
    turn all others into NaN. So examples that are not finite are replaced by zeros, and
    their output by NaN.

    Args:
      fun: a function of arrays that returns a list of one array.
    """
    separate = jax.custom_batching.custom_vmap(fun)

    @separate.def_vmap
    def _(axis_size, are_batched, *operands):
        del axis_size
        in_axes = [0 if batched else None for batched in are_batched]
        if not all(are_batched):
            return jax.vmap(fun, in_axes)(*operands), [True]
        rows = lambda x, ndim: x.reshape((-1,) + (1,) * (ndim - 1))
        finite = True
        for x in operands:
            finite &= jnp.isfinite(x).all(range(1, x.ndim))
        clean = [jnp.where(rows(finite, x.ndim), x, 0) for x in operands]
        (out,) = jax.vmap(fun)(*clean)
        return [jnp.where(rows(finite, out.ndim), out, jnp.nan)], [True]

    return separate


# By primitive. JAX cannot map a `ragged_dot` whose kernel the examples share.
BY_PRIMITIVE: dict[str, Callable[..., Any]] = {
    "conv_general_dilated": isolated,
    "ragged_dot_general": jax.custom_batching.sequential_vmap,
}

"""Sums over examples of weight times gradient, in which zero means exactly zero.

An example of weight zero is padding, or its norm is not finite, and must leave no trace
whatever it holds. Zero times NaN is NaN, so it is not enough to multiply:

* The array that is scaled by the weights is zero where they are.
* The arrays that it is multiplied by are finite where the norm is, since the norm is
  computed from them. So they are blanked only where some norm is not finite.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dpadambc.engine.forms import Dense
from dpadambc.engine.interface import Gradient


def sums(
    gradients: Sequence[Gradient], weights: jax.Array, are_finite: jax.Array
) -> list[jax.Array]:
    """For each parameter the weighted sum, in at least float32.

    Args:
      gradients: whose arrays have the examples along axis 0.
      weights: shape (batch,).
      are_finite: shape (), bool: whether the norms of all examples are finite.
    """
    keep = weights != 0
    scale = lambda x: jnp.where(_rows(keep, x), x * _rows(weights, x), 0)

    def weighted_sum(grad):
        if isinstance(grad, Dense):  # as one product, without a scaled copy
            value = grad.dense()
            return jnp.tensordot(weights, value, 1, precision=jax.lax.Precision.HIGHEST)
        # Fused with the transposition that a product wants, scaling is slow on CPU.
        weighted = jax.lax.optimization_barrier(grad.map_scale(scale))
        return weighted.summed().dense()

    return list(map(weighted_sum, _blanked_unless(are_finite, gradients, keep)))


def _rows(values: jax.Array, x: jax.Array) -> jax.Array:
    """A value for each row of an array."""
    return values.reshape((-1,) + (1,) * (x.ndim - 1))


# Functions of the module, so that JAX compiles the loop once where it is not jitted.
_Blanking = tuple[jax.Array, jax.Array, list[jax.Array]]  # skip, keep and the arrays


def _is_left(state: _Blanking) -> jax.Array:
    return ~state[0]


def _blanked(state: _Blanking) -> _Blanking:
    skip, keep, arrays = state
    return ~skip, keep, [jnp.where(_rows(keep, x), x, 0) for x in arrays]


def _blanked_unless(
    skip: jax.Array, gradients: Sequence[Gradient], keep: jax.Array
) -> list[Gradient]:
    """Zero in the arrays that are not scaled for all but the examples to keep.

    A loop of one step or none, since a loop works in place. `jax.lax.cond` would hold
    a second copy of all that the gradients hold, made or not.
    """
    distinct = {id(x): x for grad in gradients for x in grad.unscaled()}
    start = skip, keep, list(distinct.values())
    _, _, clean = jax.lax.while_loop(_is_left, _blanked, start)
    by_id = dict(zip(distinct, clean, strict=True))
    return jax.tree.map(lambda x: by_id.get(id(x), x), list(gradients))

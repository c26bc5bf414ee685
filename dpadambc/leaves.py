"""The operations that a per-example gradient answers, and nothing else.

Clipping needs two things of a per-example gradient: the squared norm of each example,
and the weighted sum over examples. Whatever form a leaf has, the rest of the library
reaches it through the functions of this file alone. Here a leaf is an array of shape
(batch, ...), one gradient per row.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax


def at_least_float32(dtype: Any) -> jnp.dtype:
    """The dtype itself if it has 32 bits or more, else float32."""
    return jnp.promote_types(dtype, jnp.float32)


def batch_size(leaf: jax.Array) -> int:
    """The number of examples."""
    return leaf.shape[0]


def parameter_shape(leaf: jax.Array) -> tuple[int, ...]:
    """The shape of the parameter, and of one example's gradient."""
    return leaf.shape[1:]


def squared_norms(leaf: jax.Array) -> jax.Array:
    """The squared L2 norm of each example, shape (batch,), at least float32."""
    rows = leaf.astype(at_least_float32(leaf.dtype))
    return jnp.sum(jnp.square(rows), axis=tuple(range(1, rows.ndim)))


def weighted_sum(leaf: jax.Array, weights: jax.Array) -> jax.Array:
    """The sum over examples of weight times gradient, in the dtype of the weights.

    An example of weight zero contributes exactly zero, whatever it holds: NaN too.
    """
    is_zero = (weights == 0).reshape((-1,) + (1,) * (leaf.ndim - 1))
    leaf = jnp.where(is_zero, 0, leaf.astype(weights.dtype))
    # At full precision: accelerators round the inputs of products by default, which
    # would carry a clipped gradient past the clip norm.
    return jnp.tensordot(weights, leaf, 1, precision=jax.lax.Precision.HIGHEST)


def per_example_squared_norms(gradients: optax.Updates) -> jax.Array:
    """The squared norm of each example over the whole tree, shape (batch,)."""
    return functools.reduce(
        jnp.add, [squared_norms(leaf) for leaf in jax.tree.leaves(gradients)]
    )


def weighted_sums(gradients: optax.Updates, weights: jax.Array) -> optax.Updates:
    """`weighted_sum` of every leaf."""
    return jax.tree.map(lambda leaf: weighted_sum(leaf, weights), gradients)

"""Multiplies per-example gradients by public factors, before the clip."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from dpadambc.contrib.moving_bound import MovingBoundState
from dpadambc.core.arrays import at_least_float32
from dpadambc.core.gradient import PerExampleGradient, close_array, is_per_example
from dpadambc.core.mesh import spec_of_examples, specs_of, with_automatic_axes
from dpadambc.core.noise import AddDPNoiseState
from dpadambc.engine import rounding
from dpadambc.engine.forms import Dense
from dpadambc.engine.interface import Gradient

SCALED = "materialized: scaled"


def check_noise(inner_state: Any) -> None:
    """Raises unless the state contains noise, on a sum clipped at a fixed bound.

    Divisors are made from private gradients. Without noise no epsilon would cover them,
    and with a moving bound they would be in another unit in each step.
    """
    is_noise = lambda node: isinstance(node, MovingBoundState | AddDPNoiseState)
    kinds = set(map(type, jax.tree.leaves(inner_state, is_leaf=is_noise)))
    if MovingBoundState in kinds:
        raise ValueError(
            "Expected private_gradient of a mechanism with a fixed bound, got one that"
            " moves. Give a mechanism without quantile or slack clipping."
        )
    if AddDPNoiseState not in kinds:
        raise ValueError(
            "Expected private_gradient with add_dp_noise in it, got one without noise."
            " Give dpadambc.privatize(mechanism, key=key)."
        )


class OuterProduct(NamedTuple):
    """A scale for each coordinate of a parameter, as a product over its axes."""

    vectors: tuple[jax.Array, ...]  # one for each axis

    def dense(self) -> jax.Array:
        """Materializes the product."""
        return functools.reduce(functools.partial(jnp.tensordot, axes=0), self.vectors)


def scale_examples(gradients: optax.Updates, factors: optax.Params) -> optax.Updates:
    """Multiplies each example's gradient by the same factors, coordinate by coordinate.

    It mixes no examples, so it may come before the clip. The result is sealed and
    masked like the gradients, in at least float32. A product of factors times an
    `OuterProduct` is a product again, and so are rows of a table. With any other array,
    and for convolutions with overlapping patches, the gradient is materialized.

    Args:
      gradients: a tree of per-example gradients.
      factors: an array for each parameter, of its shape, or an `OuterProduct`, of
        numbers that are public, such as a function of earlier private gradients.
    """

    def scale(leaf: PerExampleGradient, factor: Any) -> PerExampleGradient:
        if isinstance(factor, OuterProduct):
            factored = _scaled_along(leaf, factor.vectors)
            if factored is not None:
                return factored
            factor = factor.dense()
        return _materialized_and_scaled(leaf, factor)

    return jax.tree.map(scale, gradients, factors, is_leaf=is_per_example)


def _along_each_axis(grad: Gradient, vectors: tuple[jax.Array, ...]) -> Gradient | None:
    """Multiplies a gradient by an outer product of vectors, one for each axis."""
    times = lambda g, x: g.astype(at_least_float32(jnp.result_type(g, x))) * x
    for axis, vector in enumerate(vectors):
        ones = [-1 if i == axis else 1 for i in range(len(vectors))]
        scaled = grad.entrywise(times, vector.reshape(ones))
        if scaled is None:
            return None
        grad = scaled
    return grad


def _scaled_along(
    leaf: PerExampleGradient, vectors: tuple[jax.Array, ...]
) -> PerExampleGradient | None:
    """Scales in the same form, or returns None where the form does not allow it."""
    dtypes = []

    def product(leaf, vectors):
        opened = rounding.rounded_tree(leaf.open())
        grad = jax.vmap(_along_each_axis, (0, None))(opened, vectors)
        dtypes.extend(x.dtype for x in jax.tree.leaves(grad))
        return jax.tree.map(close_array, grad)

    if jax.eval_shape(product, leaf, vectors) is None:
        return None
    dtypes.clear()
    spec, dtype = spec_of_examples(leaf.seal), at_least_float32(leaf.dtype)
    sealed = with_automatic_axes(product, spec, leaf, vectors)
    return dataclasses.replace(leaf, sealed=sealed, dtype=dtype, dtypes=tuple(dtypes))


def _materialized_and_scaled(
    leaf: PerExampleGradient, factor: jax.Array
) -> PerExampleGradient:
    dtype = at_least_float32(leaf.dtype)

    def product(leaf, factor):
        gradient = dataclasses.replace(leaf, dtype=dtype).materialize()
        return close_array(gradient * factor[None].astype(dtype))

    spec = spec_of_examples(leaf.seal)
    if not len(spec):
        spec = PartitionSpec(None, *specs_of(factor))
    closed = with_automatic_axes(product, spec, leaf, factor)
    form: dict[str, Any] = dict(sealed=Dense(closed, leaf.shape, SCALED), rule=SCALED)
    return dataclasses.replace(leaf, **form, dtype=dtype, dtypes=(dtype,))

"""Per-example norms, and weighted sums in which weight zero adds exactly zero.

An example of weight zero is padding, or its norm is not finite, and must leave no trace
whatever it holds. Zero times NaN is NaN, so it is not enough to multiply:

* The array that is scaled by the weights is zero where they are.
* The arrays that it is multiplied by are finite where the norm is, since the norm is
  computed from them. So they are zeroed only where some norm is not finite.

On a CPU, the arrays are zeroed first, in a loop of one step or none, since a loop works
in place. On an accelerator, an operation between two products costs as much as the
products: the sums are computed at once, and again, one parameter after the other, where
some norm was not finite.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpadambc.engine import forms, rounding
from dpadambc.engine.forms import Dense
from dpadambc.engine.interface import Gradient, Norm


def squared_norms(units: rounding.Units, gradients: Sequence[Gradient]) -> jax.Array:
    """Computes each example's squared norm, with the bound on a term of `sums`.

    Args:
      units: the units of products, here and in the sums.
      gradients: gradients whose arrays have the examples along axis 0.
    """
    if units is rounding.FULL:
        found = _of_examples(units, rounding.rounded_tree(gradients))
    else:
        found = norm(units, gradients)
    return found.squared_bound


def norm(units: rounding.Units, gradients: Sequence[Gradient]) -> Norm:
    """Computes each example's norm over all parameters, by products that may round."""
    operands = [grad.operands(units) for grad in gradients]
    dense, factored = forms.split_dense(operands)
    joined, _ = forms.side_by_side(dense)
    return _of_examples(units, [*joined, *factored])


def _of_examples(units: rounding.Units, gradients: Sequence[Gradient]) -> Norm:
    of_all = lambda *of_one: Norm.of_all([grad.norm(units) for grad in of_one])
    return jax.vmap(of_all)(*gradients)


def sums(
    units: rounding.Units,
    gradients: Sequence[Gradient],
    weights: jax.Array,
    are_finite: jax.Array,
) -> list[jax.Array]:
    """Computes the weighted sum for each parameter, in at least float32.

    Args:
      units: the units of products.
      gradients: gradients whose arrays have the examples along axis 0.
      weights: shape (batch,).
      are_finite: shape (), bool: whether the norms of all examples are finite.
    """
    if units is not rounding.FULL:
        return _sums_again_unless(are_finite, units, gradients, weights)
    gradients = rounding.rounded_tree(gradients)
    gradients, weights = _blanked_unless(are_finite, gradients, weights)

    def scale(x):
        rows = _rows(weights, x)
        return jnp.where(rows != 0, x * rows, 0)

    def weighted_sum(grad):
        if isinstance(grad, Dense):  # one product, without a scaled copy
            return _weighted_rows(grad.dense(), weights)
        # Scaling is slow on CPU if XLA fuses it with the transposition for a product.
        weighted = jax.lax.optimization_barrier(grad.map_scale(scale))
        return weighted.summed().dense(units)

    return list(map(weighted_sum, gradients))


def _weighted_rows(value: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.tensordot(weights, value, 1, precision=jax.lax.Precision.HIGHEST)


def _rows(values: jax.Array, x: jax.Array) -> jax.Array:
    """Reshapes one value per row to broadcast against an array."""
    return values.reshape((-1,) + (1,) * (x.ndim - 1))


def _sums_again_unless(
    are_finite: jax.Array,
    units: rounding.Units,
    gradients: Sequence[Gradient],
    weights: jax.Array,
) -> list[jax.Array]:
    """Computes the sums by products that may round, in the dtype of each factor."""
    keep = weights != 0

    def scale(x):
        # Multiply in the wider dtype, so that c g is rounded once: k' of `rounding`, 3.
        wide = rounding.rounded_to(x, jnp.promote_types(x.dtype, weights.dtype))
        wide = jnp.where(_rows(keep, x), wide * _rows(weights, x), 0)
        return rounding.rounded_to(wide, x.dtype)

    def weighted_sum(grad):
        return grad.operands(units).map_scale(scale).summed().dense(units)

    def again(state):
        done, sums = state
        for i, grad in enumerate(factored):
            # Barriers order the loop body behind its state and the previous sum, so
            # that the copies of one parameter at a time are in memory, and only inside
            # the loop.
            grad, done = jax.lax.optimization_barrier((grad, done))
            clean = jax.lax.optimization_barrier(_blank(grad, keep))
            sums = [*sums[:i], weighted_sum(clean), *sums[i + 1 :]]
            done, sums[i] = jax.lax.optimization_barrier((done, sums[i]))
        return ~done, sums

    operands = [grad.operands(units) for grad in gradients]
    arrays, _ = forms.split_dense(operands)
    factored = [grad for grad in gradients if not isinstance(grad, Dense)]
    sums = [weighted_sum(grad) for grad in factored]
    _, sums = jax.lax.while_loop(_is_left, again, (are_finite, sums))
    joined, split = forms.side_by_side(arrays)
    # A select is free where each row is read once.
    of_arrays = [
        _weighted_rows(jnp.where(_rows(keep, x), x, 0), weights)
        for x in (grad.dense() for grad in joined)
    ]
    found = iter(split(of_arrays)), iter(sums)
    return [next(found[not isinstance(grad, Dense)]) for grad in gradients]


def _blank(grad: Gradient, keep: jax.Array) -> Gradient:
    """Zeroes the unscaled arrays for all but the examples to keep."""
    clean = {id(x): jnp.where(_rows(keep, x), x, 0) for x in grad.unscaled()}
    return jax.tree.map(lambda x: clean.get(id(x), x), grad)


# Functions of the module, so that JAX compiles the loop once where it is not jitted.
_Blanking = tuple[jax.Array, jax.Array, list[jax.Array]]  # skip, weights and arrays


def _is_left(state: tuple[Any, ...]) -> jax.Array:
    return ~state[0]


def _blanked(state: _Blanking) -> _Blanking:
    skip, weights, arrays = state
    keep = weights != 0
    return ~skip, weights, [jnp.where(_rows(keep, x), x, 0) for x in arrays]


def _blanked_unless(
    skip: jax.Array, gradients: Sequence[Gradient], weights: jax.Array
) -> tuple[list[Gradient], jax.Array]:
    """Zeroes the unscaled arrays for examples of weight zero.

    It runs a loop of one step or none, since a loop works in place. `jax.lax.cond`
    would hold a second copy of the gradients in either case. The weights go through the
    loop: XLA would recompute them in each product that takes them.
    """
    distinct = {id(x): x for grad in gradients for x in grad.unscaled()}
    start = skip, weights, list(distinct.values())
    _, weights, clean = jax.lax.while_loop(_is_left, _blanked, start)
    by_id = dict(zip(distinct, clean, strict=True))
    return jax.tree.map(lambda x: by_id.get(id(x), x), list(gradients)), weights

"""Arrays of other libraries, for whose sensitivity the caller vouches."""

import jax
import jax.numpy as jnp
import optax

from dpadambc.core import validate
from dpadambc.core.arrays import varying_axes
from dpadambc.core.clip import clip_numbers
from dpadambc.core.clipped_sum import close_sums
from dpadambc.core.gradient import mask_examples, seal_gradients
from dpadambc.engine.forms import Dense
from dpadambc.mechanisms import names


def as_per_example(
    gradients: optax.Updates, *, is_padding_example: jax.Array | None = None
) -> optax.Updates:
    r"""Declares that arrays are untouched gradients of single examples.

    Use it for gradients that do not come from `per_example_grad`, such as
    `jax.vmap(jax.grad(...))`. `clip_per_example` takes no bare arrays, since they may
    have been changed.

    Guarantees:
      * None of its own: by calling this you vouch that each row depends on one example
        alone. Scaling all rows by a norm over the batch, averages over steps, and
        statistics of the batch break this, and with it the sensitivity. So does
        `jax.vmap(jax.grad(...))` inside `jax.shard_map`, where JAX sums over devices.

    Args:
      gradients: a tree of floating-point arrays of shape (batch, \*parameter shape).
      is_padding_example: shape (batch,), bool, True where a row is padding. If given,
        those rows become zero, and the gradients count as masked.

    Returns:
      The same tree, with a `PerExampleGradient` for each array.

    Raises:
      TypeError: if a leaf is no array of real floating-point numbers, or is a
        `PerExampleGradient` already.
      ValueError: if an array has no batch axis.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> params = jnp.zeros(2)
      >>> loss_fn = lambda w, x: w @ x
      >>> x = jnp.array([[3.0, 4.0], [0.0, 0.5]])
      >>> grads = dpadambc.as_per_example(
      ...     jax.vmap(jax.grad(loss_fn), (None, 0))(params, x))
      >>> clip = dpadambc.clip_per_example(1.0, normalize_by=2)
      >>> clipped, _ = clip.update(grads, clip.init(params), params)
      >>> print([f"{g:.3f}" for g in clipped.value])
      ['0.300', '0.650']
    """
    validate.real_arrays(gradients=gradients)
    arrays, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, gradients))
    if not all(x.ndim for x in arrays):
        raise ValueError("Expected gradients to have the examples along axis 0.")
    shapes = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in arrays]
    dense = [Dense(x, x.shape[1:], "array") for x in arrays]
    rules = ["array"] * len(arrays)
    leaves = seal_gradients(dense, shapes, rules, varying_axes(arrays))
    return mask_examples(structure.unflatten(leaves), is_padding_example)


@names.explained
def as_clipped_sum(
    gradient: optax.Updates, *, l2_clip_norm: float, normalize_by: float
) -> optax.Updates:
    r"""Declares that arrays are a clipped sum, for `add_dp_noise`.

    Use it for a sum that does not come from `clipped_grad` or `clip_per_example`, such
    as one that another library has clipped.

    Guarantees:
      * None of its own: by calling this you vouch that the gradient is
        :math:`\frac{1}{B} \sum_i g_i`, where the gradient :math:`g_i` of one example,
        over all arrays together, has a norm of at most C and depends on that example
        alone, and no padding is among them. A mean that is clipped as a whole is no
        such sum.

    Args:
      gradient: a tree of arrays of real floating-point numbers.
      l2_clip_norm: C, positive.
      normalize_by: B, positive: a public number.

    Returns:
      The same tree, with a `ClippedSum` for each array, in at least float32.

    Raises:
      TypeError: if a leaf is no array of real floating-point numbers.
      ValueError: if a number is not positive.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> gradients = jnp.array([[3.0, 4.0], [0.0, 0.5]])
      >>> norms = jnp.linalg.norm(gradients, axis=1, keepdims=True)
      >>> clipped = gradients / jnp.maximum(norms, 1.0)
      >>> summed = dpadambc.as_clipped_sum(
      ...     clipped.sum(0) / 2, l2_clip_norm=1.0, normalize_by=2)
      >>> print([f"{x:.2f}" for x in summed.value])
      ['0.30', '0.65']
    """
    numbers = clip_numbers(l2_clip_norm, normalize_by)
    validate.real_arrays(gradient=gradient)
    return close_sums(gradient, *numbers, is_masked=True)

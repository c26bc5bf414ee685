"""Losses made from a loss, before it is trained privately."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpadambc.core import validate
from dpadambc.core.step import takes_key

Loss = Callable[..., jax.Array]


def with_augmentations(
    loss_fn: Loss,
    augment: Callable[..., Any],
    multiplicity: int,
    *,
    has_frozen: bool = False,
) -> Loss:
    """Returns the mean loss over several augmented views of one example.

    The gradient of the mean is the mean of the gradients, taken *before* clipping: an
    example counts once however many views it has, so epsilon does not change. (If each
    view were clipped separately, it would count as an example, and the noise would be
    too small by the multiplicity.)

    Args:
      loss_fn: a loss of `(params, *example)`, or of `(params, frozen, *example)`; with
        a keyword-only `key`, for dropout, say, each view has its own.
      augment: a function of `(key, *example)` that returns a view: a tuple of the
        arguments that the loss takes for an example.
      multiplicity: the number of views.
      has_frozen: whether the second argument is the `frozen` of `fit`.

    Returns:
      A loss of the same arguments, and a keyword-only `key`, which `fit` gives it.

    Raises:
      TypeError: from the loss, if `augment` returns no tuple.
      ValueError: if the multiplicity is less than one.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dpadambc import training
      >>> loss_fn = lambda w, x: w * x
      >>> shift = lambda key, x: (x + jax.random.normal(key),)
      >>> augmented = training.with_augmentations(loss_fn, shift, 10_000)
      >>> print(augmented(2.0, 1.0, key=jax.random.key(0)).round(1))
      2.0

    References:
      De et al., `Unlocking High-Accuracy Differentially Private Image Classification
      <https://arxiv.org/abs/2204.13650>`_, 2022
    """
    validate.count(least=1, multiplicity=multiplicity)

    num_shared, is_random = 2 if has_frozen else 1, takes_key(loss_fn)

    def augmented(*arguments, key):
        shared, example = arguments[:num_shared], arguments[num_shared:]

        def one_view(key):
            augment_key, loss_key = jax.random.split(key)
            view = augment(augment_key, *example)
            if not isinstance(view, tuple | list):
                raise TypeError(
                    "Expected augment to return a tuple of the arguments that an"
                    f" example has, such as (x, y), got a {type(view).__name__}."
                )
            own_key = {"key": loss_key} if is_random else {}
            return loss_fn(*shared, *view, **own_key)

        return jnp.mean(jax.vmap(one_view)(jax.random.split(key, multiplicity)))

    return augmented


def with_compute_dtype(loss_fn: Loss, dtype: Any) -> Loss:
    """Computes the loss in low precision, with parameters that stay in float32.

    All floating-point arguments are cast on the way in, `frozen` and the example too.
    The parameters that the optimizer updates stay in full precision. There, steps far
    below the resolution of bfloat16 add up. Added to bfloat16 parameters, most of them
    would be rounded away, noise included. Clipping, noise and moments are in float32 in
    any case.

    Args:
      loss_fn: a loss of `(params, *rest)`.
      dtype: the dtype, such as `jnp.bfloat16`.

    Returns:
      A loss of the same arguments, in at least float32.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dpadambc import training
      >>> loss_fn = training.with_compute_dtype(lambda w, x: w * x, jnp.bfloat16)
      >>> print(loss_fn(jnp.float32(1.001), jnp.bfloat16(3.0)))
      3.0
    """

    def cast(x):
        is_float = jnp.issubdtype(jnp.result_type(x), jnp.floating)
        return jnp.asarray(x, dtype) if is_float else x

    @functools.wraps(loss_fn)  # for its key
    def in_low_precision(*arguments, **key):
        return loss_fn(*jax.tree.map(cast, arguments), **key).astype(jnp.float32)

    return in_low_precision

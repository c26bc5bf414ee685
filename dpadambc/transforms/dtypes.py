"""Dtypes of gradients, states and updates: real, and wide until the last cast."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpadambc.core import validate
from dpadambc.core.arrays import at_least_float32, widen


def wide_zeros_like(tree: Any) -> Any:
    """Returns zeros like `tree`, in at least float32, with its shardings."""

    def zeros(x: Any) -> jax.Array:
        return jnp.zeros_like(x, dtype=at_least_float32(jnp.result_type(x)))

    return jax.tree.map(zeros, tree)


def with_wide_state(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Initializes the optimizer's state as for parameters in at least float32.

    Private gradients are in at least float32, and narrower moments would change dtype.
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def init_fn(params):
        return optimizer.init(jax.tree.map(widen, params))

    return optax.GradientTransformationExtraArgs(init_fn, optimizer.update)


def cast_to_params() -> optax.GradientTransformation:
    """Casts each update to the dtype of its parameter: the last stage of a chain."""

    def cast(updates, params):
        if params is None:
            return updates
        return jax.tree.map(lambda u, p: u.astype(jnp.result_type(p)), updates, params)

    return optax.stateless(cast)


def check_learning_rate(learning_rate: optax.ScalarOrSchedule) -> None:
    """Raises for a negative number, which would ascend."""
    if not callable(learning_rate):
        validate.non_negative(learning_rate=learning_rate)


def descent(
    learning_rate: optax.ScalarOrSchedule, *stages: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Chains stages, the learning rate, and the cast to the dtypes of parameters."""
    check_learning_rate(learning_rate)
    rate = optax.scale_by_learning_rate(learning_rate)
    return optax.chain(*stages, rate, cast_to_params())


def check_floating_dtype(**named: Any) -> None:
    """Raises unless the argument is a floating dtype or None."""
    ((name, value),) = named.items()
    if isinstance(value, jax.Array):
        raise TypeError(
            f"Expected {name} to be a floating dtype, got an array of {value.dtype}."
            f" With optax.inject_hyperparams, pass static_args={name!r}."
        )
    if value is not None and not jnp.issubdtype(jnp.dtype(value), jnp.floating):
        raise TypeError(
            f"Expected {name} to be a floating dtype, got {jnp.dtype(value)}."
        )


def check_decay(**named: Any) -> None:
    """Raises unless the decay rate of a moving average is in [0, 1)."""
    validate.require(named, lambda x: 0 <= x < 1, "in [0, 1)")


def check_real(tree: Any) -> None:
    """Raises if a leaf has complex numbers."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating):
            raise TypeError(
                f"Expected gradients of real numbers, got {jnp.result_type(leaf)} at"
                f" {jax.tree_util.keystr(path) or 'the gradient'}. Train the real and"
                " the imaginary part as two parameters."
            )

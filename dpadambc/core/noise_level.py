"""The noise level: one number, a schedule, or a tree prefix of either.

The noise and the second-moment correction read it through these functions, so that the
same value means the same thing to both.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpadambc.core import validate

# A number, an optax.Schedule, a tree prefix with such leaves, or a mechanism.
NoiseStddev = Any


def resolved(noise_stddev: NoiseStddev) -> Any:
    """The level itself, of a mechanism its own.

    Raises unless every number is non-negative, finite and of full precision.
    """
    noise_stddev = getattr(noise_stddev, "noise_stddev", noise_stddev)
    for level in jax.tree.leaves(noise_stddev, is_leaf=lambda x: x is None):
        if not callable(level):
            validate.non_negative(noise_stddev=level)
    return noise_stddev


def numbers_of_sum(noise_stddev: NoiseStddev) -> dict[str, float | None]:
    """What a mechanism says of the sum that its noise hides; nothing of a number.

    Raises for one whose epsilon is not of independent noise.
    """
    if not getattr(noise_stddev, "has_independent_noise", True):
        raise TypeError(
            "Expected a mechanism with independent noise in every step, got"
            f" {noise_stddev!r}. Its own is mechanism.add_noise(key=key)."
        )
    names = ("l2_clip_norm", "normalize_by")
    return {name: getattr(noise_stddev, name, None) for name in names}


def of_schedule(schedule: Callable[..., Any], step: Any) -> Any:
    """Its value at a step; an error says that the step may be traced."""
    try:
        return schedule(step)
    except jax.errors.JAXTypeError as error:
        error.add_note(
            "A schedule of the noise is called with a traced step. It cannot branch on"
            " it, nor leave JAX: write jnp.where(step < 100, 2.0, 1.0) in place of if,"
            " or take optax.piecewise_constant_schedule."
        )
        raise


def at_step(noise_stddev: NoiseStddev, count: jax.typing.ArrayLike) -> Any:
    """The numbers in force at step `count`, in the same tree prefix."""

    def number(level):
        if callable(level):
            level = of_schedule(level, count)
            validate.full_precision(noise_stddev=level)
        return jnp.asarray(level, float)

    return jax.tree.map(number, noise_stddev)


def per_leaf(prefix: Any, tree: optax.Params) -> Any:
    """The prefix broadcast to one value for each leaf of the tree."""
    if not jax.tree.leaves(tree):
        return tree
    try:
        return jax.tree.broadcast(prefix, tree)
    except ValueError as error:
        raise ValueError(
            "Expected noise_stddev to be a number, a schedule, or a tree prefix of the"
            f" parameters, got a tree of structure {jax.tree.structure(prefix)} for"
            f" parameters of structure {jax.tree.structure(tree)}."
        ) from error

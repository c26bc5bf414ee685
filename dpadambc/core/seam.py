"""Clip and noise of a mechanism, and what they keep from step to step.

A bound that moves is kept with the state of the noise: it is made of what the noise has
hidden. The sum that moves it is one more coordinate of the gradient, and is noised with
it, by the same key and at the same level.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpadambc.contrib.moving_bound import MovingBoundState
from dpadambc.core import clip as flat
from dpadambc.core import clipped_sum
from dpadambc.core.mechanism import Mechanism


def clip(mechanism: Mechanism) -> optax.GradientTransformationExtraArgs:
    """The clip of each step, at the `bound` that is its state."""
    return flat._observing(mechanism.clip_rule)


def bound(mechanism: Mechanism, state: Any) -> Any:
    """The state of `clip` in a step, from that of `add_noise` before it."""
    moves = mechanism.clip_rule._moves
    if isinstance(state, MovingBoundState) != moves:
        raise TypeError(
            f"Expected the state of a mechanism with {mechanism.clip_rule!r}, got"
            f" {type(state).__name__}, that of one whose bound"
            f" {'stays' if moves else 'moves'}. Call init again for another rule."
        )
    if not moves:
        return flat._Bound(mechanism.l2_clip_norm, mechanism.normalize_by)
    # In units of the bound: the sensitivity is that of the first step. Rounded up, for
    # the bound is in float32, and the sum may be in float64.
    rounding = 1 + 4 * jnp.finfo(jnp.float32).eps
    units = state.l2_clip_norm / mechanism.l2_clip_norm * rounding
    return flat._Bound(state.l2_clip_norm, mechanism.normalize_by * units)


def add_noise(mechanism: Mechanism, *, key: jax.Array) -> optax.GradientTransformation:
    """The noise of a mechanism on what its `clip` returns: the private gradient."""
    noise = optax.with_extra_args_support(mechanism.add_noise(key=key))
    if mechanism.clip_rule._moves:
        return _moving_noise(mechanism, noise)
    numbers = mechanism.l2_clip_norm, mechanism.normalize_by

    def update_fn(updates, state, params=None):
        summed: Any = updates
        return noise.update(
            clipped_sum.closed(summed.gradient, *numbers), state, params
        )

    return optax.GradientTransformation(noise.init, update_fn)


def _moving_noise(
    mechanism: Mechanism, noise: optax.GradientTransformation
) -> optax.GradientTransformation:
    """The same, with the sum that moves the bound beside the gradient."""
    rule: Any = mechanism.clip_rule
    mechanism._check_moving()
    start, divisor = mechanism.l2_clip_norm, mechanism.normalize_by
    unit = rule._unit(mechanism.noise_stddev, start / divisor, divisor)

    def init_fn(params):
        # In float32 whatever the parameters are in: a constant to what is clipped.
        first = jnp.asarray(start, jnp.float32)
        return MovingBoundState(first, noise.init(_with(params, 0.0)))

    def update_fn(updates, state, params=None):
        summed: Any = updates
        noised: Any
        both = _with(summed.gradient, unit * summed.indicator)
        noised, noise_state = noise.update(
            clipped_sum.closed(both, None, None),
            state.noise,
            None if params is None else _with(params, 0.0),
        )
        gradient, observed = noised
        mean = observed / (unit * divisor)
        moved = rule._moved(state.l2_clip_norm, mean, start)
        return gradient, MovingBoundState(moved, noise_state)

    return optax.GradientTransformation(init_fn, update_fn)


def _with(tree: Any, number: Any) -> Any:
    """A gradient with one more coordinate."""
    return tree, jnp.asarray(number)

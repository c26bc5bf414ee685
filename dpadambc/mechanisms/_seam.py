"""Clip and noise of a mechanism, and what they keep from step to step.

A bound that moves is kept with the state of the noise: it is made of what the noise has
hidden. The sum that moves it is one more coordinate of the gradient, and is noised with
it, by the same key and at the same level.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpadambc.clipping import flat
from dpadambc.mechanisms.base import Mechanism


class MovingBoundState(NamedTuple):
    """Of a mechanism whose bound moves: secret for the key in it."""

    l2_clip_norm: jax.Array  # of the next step, shape=(): as private as a gradient
    noise: Any

    @property
    def rng_key(self) -> jax.Array:
        """That of the noise."""
        return self.noise.rng_key


def clip(mechanism: Mechanism, state: Any) -> optax.GradientTransformationExtraArgs:
    """The clip of a step, whose sum goes to `add_noise`.

    Args:
      mechanism: the public numbers.
      state: that of `add_noise` before the step.
    """
    start, divisor = mechanism.l2_clip_norm, mechanism.normalize_by
    rule = mechanism.clip_rule
    if not rule._moves:
        return flat.clip_per_example(start, normalize_by=divisor, clip_rule=rule)
    # In units of the bound: the sensitivity is that of the first step.
    return flat._observing(
        state.l2_clip_norm,
        normalize_by=divisor * (state.l2_clip_norm / start),
        clip_rule=rule,
    )


def add_noise(mechanism: Mechanism, *, key: jax.Array) -> optax.GradientTransformation:
    """The noise of a mechanism on what its `clip` returns: the private gradient."""
    rule: Any = mechanism.clip_rule
    noise = mechanism.add_noise(key=key)
    if not rule._moves:
        return noise
    start, divisor = mechanism.l2_clip_norm, mechanism.normalize_by
    unit = rule._unit(mechanism.noise_stddev, start / divisor, divisor)

    def init_fn(params):
        # In float32 whatever the parameters are in: a constant to what is clipped.
        first = jnp.asarray(start, jnp.float32)
        return MovingBoundState(first, noise.init(_with(params, 0.0)))

    def update_fn(updates, state, params=None):
        summed: Any = updates
        noised: Any
        noised, noise_state = noise.update(
            _with(summed.gradient, unit * summed.indicator),
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

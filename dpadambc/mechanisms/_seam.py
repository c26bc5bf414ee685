"""Clip and noise of a mechanism, and what they keep from step to step.

A bound that moves is kept with the state of the noise: it is made of what the noise has
hidden. The count that moves it is one more coordinate of the sum, and is noised with
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
    return flat._counting(
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
    start, stddev = mechanism.l2_clip_norm, mechanism.noise_stddev
    # Of one vote in the last coordinate, whose noise is that of the others. Without
    # noise there is no privacy, and any number will do.
    unit = stddev / (rule.fraction_stddev * mechanism.normalize_by) or 1.0

    def init_fn(params):
        # In float32 whatever the parameters are in: a constant to what is clipped.
        first = jnp.asarray(start, jnp.float32)
        return MovingBoundState(first, noise.init(_with_votes(params, 0.0)))

    def update_fn(updates, state, params=None):
        summed: Any = updates
        noised: Any
        noised, noise_state = noise.update(
            _with_votes(summed.gradient, unit * summed.votes),
            state.noise,
            None if params is None else _with_votes(params, 0.0),
        )
        gradient, votes = noised
        fraction = 0.5 + votes / (unit * mechanism.normalize_by)
        moved = rule._moved(state.l2_clip_norm, fraction, start)
        return gradient, MovingBoundState(moved, noise_state)

    return optax.GradientTransformation(init_fn, update_fn)


def _with_votes(tree: Any, votes: Any) -> Any:
    """A sum with one more coordinate."""
    return tree, jnp.asarray(votes)

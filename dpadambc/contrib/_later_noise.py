"""The common half of two strategies whose later steps cancel part of earlier noise."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc.core import clipped_sum, grid, noise, validate
from dpadambc.core.clip import refuse_parts


def schedule(mechanism: Any, norms: Sequence[float] | np.ndarray) -> Any:
    """Makes the noise level of each step; the last norm is for all later steps.

    Args:
      mechanism: the mechanism of the noise.
      norms: the noise of the first steps, in units of one draw.
    """
    levels = mechanism.noise_multiplier * mechanism.sensitivity * np.asarray(norms)
    last = len(levels) - 1
    return lambda step: jnp.asarray(levels, float)[jnp.minimum(step, last)]


def adding(
    kind: Any,
    name: str,
    key: jax.Array,
    noise_stddev: float,
    start: Callable[[Any], Any],
    draw: Callable[..., tuple[Any, Any]],
) -> optax.GradientTransformation:
    """Adds noise on the grid of its draws, and keeps a part of it for later steps.

    Args:
      kind: the class of its state: the state of the draws, and the part kept.
      name: the name of the transformation.
      key: a typed JAX key, of this run alone.
      noise_stddev: the level of the draws.
      start: a function of the parameters: the part kept before the first step.
      draw: a function of a step's key, its level, sums and a state: the noise that is
        added to the sums, and the part kept of it.
    """
    validate.typed_key(key=key)
    validate.non_negative(noise_stddev=noise_stddev)

    def init_fn(params):
        refuse_parts(params)
        return kind(noise.first_state(key, name, params), start(params))

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        updates = clipped_sum.open_sums(updates, params)
        own_key = noise.key_of_state(state.draws, key, updates)
        next_key, step_key = jax.random.split(own_key)
        sigma = noise.stddev_of_step(noise_stddev, state.draws)
        added, kept = draw(step_key, sigma, updates, state)
        on_grid = lambda y, s: grid.add_on_grid(y, s, sigma)
        with jax.enable_x64(True):
            noised = jax.tree.map(on_grid, added, updates)
        kept = optax.tree.cast_like(kept, state[1])
        return noised, kind(noise.next_state(state.draws, next_key), kept)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)

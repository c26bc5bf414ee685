"""Noise of which later steps take a part back: the common half of two strategies."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.core import clipped_sum, grid, noise
from dpadambc.core.noise import AddDPNoiseState


def schedule(mechanism: Any, norms: Sequence[float] | np.ndarray) -> Any:
    """Makes the level of the noise in each step; the last norm is that of all later.

    Args:
      mechanism: that has the noise.
      norms: the noise of the first steps, in units of the draws'.
    """
    levels = mechanism.noise_multiplier * mechanism.sensitivity * np.asarray(norms)
    last = len(levels) - 1
    return lambda step: jnp.asarray(levels, float)[jnp.minimum(step, last)]


def open_step(
    key: jax.Array,
    updates: Any,
    params: Any,
    draws: AddDPNoiseState,
    noise_stddev: float,
) -> tuple[Any, jax.Array, jax.Array, jax.Array]:
    """Opens a clipped sum; returns it with the next key, the step's, and the level."""
    updates = clipped_sum.open_sums(updates, params)
    own_key = noise.key_of_state(draws, key, updates)
    next_key, step_key = jax.random.split(own_key)
    return updates, next_key, step_key, noise.stddev_of_step(noise_stddev, draws)


def released(added: Any, updates: Any, sigma: jax.Array) -> Any:
    """Adds noise in float64 to sums, on the grid of the draws' level."""
    with jax.enable_x64(True):
        return jax.tree.map(lambda y, s: grid.add_on_grid(y, s, sigma), added, updates)

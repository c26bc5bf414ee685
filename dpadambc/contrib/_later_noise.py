"""Noise of which later steps take a part back: the common half of two strategies."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc.core import clipped_sum, keys, noise
from dpadambc.core.noise import AddDPNoiseState
from dpadambc.core.privatize import Noise


@dataclasses.dataclass(frozen=True)
class LaterNoise(Noise):
    """Noise that a mechanism's coefficients correlate over its steps.

    Args:
      field: the name of the mechanism's coefficients.
      norms: of the coefficients, the noise of each step in units of the draws'.
      add: makes the transformation, of a level, the coefficients and a key.
    """

    field: str
    norms: Callable[[tuple[float, ...]], Sequence[float] | np.ndarray]
    add: Callable[..., optax.GradientTransformation]

    def stddev(self, mechanism: Any) -> Callable[..., jax.Array]:
        """Makes a schedule, which grows over the first steps and then is one number."""
        norms = np.asarray(self.norms(getattr(mechanism, self.field)))
        level = mechanism.noise_multiplier * mechanism.sensitivity
        last = len(norms) - 1
        return lambda step: jnp.asarray(level * norms, float)[jnp.minimum(step, last)]

    def transformation(
        self, mechanism: Any, key: jax.Array
    ) -> optax.GradientTransformation:
        """Makes the stage that adds the noise of the mechanism's coefficients."""
        level = mechanism.noise_multiplier * mechanism.sensitivity
        return self.add(level, getattr(mechanism, self.field), key=key)


def open_step(
    updates: Any, params: Any, draws: AddDPNoiseState, noise_stddev: float
) -> tuple[Any, jax.Array, jax.Array, jax.Array]:
    """Opens a clipped sum; returns it with the next key, the step's, and the level."""
    updates = clipped_sum.open_sums(updates, params)
    noise.check_devices(updates, draws.rng_key)
    own_key = keys.of_one_run(draws.rng_key, updates)
    rng_key, step_key = jax.random.split(own_key)
    return updates, rng_key, step_key, noise.stddev_of_step(noise_stddev, draws)

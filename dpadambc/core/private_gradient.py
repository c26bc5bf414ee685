"""How a mechanism makes a private gradient: the clip of each example, and the noise.

They are two halves of one transformation, so that microbatches and devices can add up
clipped sums between them. Both read one state. Independent noise on a flat clip is all
that the core has; `contrib` has other kinds, which vouch for the event of theirs.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpadambc.core import clip, clipped_sum
from dpadambc.core.noise import add_dp_noise


class PrivateGradient(NamedTuple):
    """The two halves, which share a state.

    Attributes:
      init: the state, of the parameters.
      clip: of per-example gradients, the state, the parameters and the padding mask,
        the `clip.Sums` over the examples. Those of microbatches add up.
      add_noise: of these sums, the state and the parameters, the private gradient and
        the next state.
    """

    init: Callable[[optax.Params], Any]
    clip: Callable[..., clip.Sums]
    add_noise: Callable[..., tuple[optax.Updates, Any]]


def scaled(
    noise_multiplier: float | optax.Schedule, sensitivity: float
) -> float | optax.Schedule:
    """A noise multiplier times the sensitivity, a schedule if it is one."""
    if callable(noise_multiplier):
        return lambda step: jnp.asarray(noise_multiplier(step), float) * sensitivity
    return noise_multiplier * sensitivity


class Noise(abc.ABC):
    """Which noise hides the clipped sums of a mechanism."""

    @abc.abstractmethod
    def stddev(self, mechanism: Any) -> float | optax.Schedule:
        """The standard deviation of the noise in each step's gradient."""

    @abc.abstractmethod
    def transformation(
        self, mechanism: Any, key: jax.Array
    ) -> optax.GradientTransformation:
        """The noise of a key on a tree of `ClippedSum`."""

    def private_gradient(self, mechanism: Any, key: jax.Array) -> PrivateGradient:
        """A flat clip at the bound of the mechanism, and the noise on its sum."""
        numbers = mechanism.l2_clip_norm, mechanism.normalize_by
        noise = self.transformation(mechanism, key)

        def init_fn(params):
            clip.check_parameters(params, mechanism.clip_rule)
            return noise.init(params)

        def clip_fn(gradients, state, params, **extra_args):
            del state
            return clip.clipped_sums(
                gradients, params, *numbers, mechanism.clip_rule, **extra_args
            )

        def noise_fn(sums, state, params=None):
            closed = clipped_sum.closed(sums.gradient, *numbers)
            return noise.update(closed, state, params)

        return PrivateGradient(init_fn, clip_fn, noise_fn)


@dataclasses.dataclass(frozen=True)
class Independent(Noise):
    """Independent Gaussian noise in every step, at the level of the mechanism."""

    def stddev(self, mechanism: Any) -> float | optax.Schedule:
        """The noise multiplier times the sensitivity."""
        return scaled(mechanism.noise_multiplier, mechanism.sensitivity)

    def transformation(
        self, mechanism: Any, key: jax.Array
    ) -> optax.GradientTransformation:
        """`add_dp_noise`."""
        return add_dp_noise(mechanism, key=key)


INDEPENDENT = Independent()

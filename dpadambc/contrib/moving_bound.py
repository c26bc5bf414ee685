"""Rules whose bound is another in each step, made of what earlier steps released."""

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpadambc.clipping import rules
from dpadambc.core import validate

# The bound stays within this factor of the one that it starts from, either way. For a
# start near one that is far from where squares of float32 numbers vanish or overflow.
_FARTHEST = 1e6


class MovingBoundState(NamedTuple):
    """Of a mechanism whose bound moves: secret for the key in it."""

    l2_clip_norm: jax.Array  # of the next step, shape=(): as private as a gradient
    noise: Any

    @property
    def rng_key(self) -> jax.Array:
        """That of the noise."""
        return self.noise.rng_key


class MovingRule(rules.ClipRule):
    """A rule at a bound that moves by a sum, one number of each example.

    The sum is one more coordinate of the clipped gradients, and is noised with them.
    """

    _moves = True
    learning_rate: float
    rule: rules.ClipRule

    def __post_init__(self):
        validate.positive(learning_rate=self.learning_rate)
        if not isinstance(self.rule, rules.ClipRule) or self.rule._moves:
            raise TypeError(
                "Expected rule to be a ClipRule with a fixed bound, such as"
                f" clipping.Flat(), got {self.rule!r}."
            )

    def weight(self, norm: jax.Array, l2_clip_norm: jax.Array) -> jax.Array:
        """See `ClipRule.weight`: at the bound of the step."""
        return self.rule.weight(norm, l2_clip_norm)

    def _groups(self, params: optax.Params) -> rules.Groups:
        return self.rule._groups(params)

    @abc.abstractmethod
    def _multiplier_left(self, noise_multiplier: Any, changed: float) -> Any:
        """That of the gradient, where it and the sum together have a noise multiplier.

        Args:
          noise_multiplier: of both.
          changed: how many examples neighbors differ in, over `normalize_by`.
        """

    @abc.abstractmethod
    def _unit(self, noise_stddev: Any, longest: Any, normalize_by: Any) -> Any:
        """What the sum is multiplied by, for the noise of the gradient to hide it.

        Args:
          noise_stddev: of the gradient.
          longest: of one example in it.
          normalize_by: B.
        """

    @abc.abstractmethod
    def _error(self, mean: jax.Array) -> jax.Array:
        """How far the noisy sum over B is above where it shall be."""

    def _moved(
        self, l2_clip_norm: jax.Array, mean: jax.Array, start: float
    ) -> jax.Array:
        """The bound of the next step.

        Args:
          l2_clip_norm: of this step.
          mean: the noisy sum, over B.
          start: the bound of the first step.
        """
        moved = l2_clip_norm * jnp.exp(-self.learning_rate * self._error(mean))
        low, high = start / _FARTHEST, start * _FARTHEST
        return jnp.clip(moved, low, high).astype(l2_clip_norm.dtype)

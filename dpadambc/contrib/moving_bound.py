"""Mechanisms whose clip norm moves, as a function of earlier noised sums.

The gradient is in units of the bound, so its sensitivity and its noise stay the same.
The sum that moves the bound is one more coordinate of the clipped gradients, and gets
noise with them, by the same key and at the same level.
"""

import abc
import math
from typing import Any, NamedTuple, cast

import dp_accounting
import jax
import jax.numpy as jnp
import optax

from dpadambc.core import clip, clipped_sum, validate
from dpadambc.core.gradient import seals_agree
from dpadambc.core.mechanism import PrivateGradient, scaled_multiplier
from dpadambc.core.mesh import with_automatic_axes
from dpadambc.core.noise import add_dp_noise
from dpadambc.core.sampling import Batch
from dpadambc.mechanisms.checks import check_independent_noise
from dpadambc.mechanisms.mechanism import Mechanism

# The bound stays within this factor of its start, either way. From a start near one,
# that is far from where squares of float32 numbers underflow or overflow.
_FARTHEST = 1e6


class MovingBoundState(NamedTuple):
    """The state of a mechanism whose bound moves: secret for the key in it."""

    l2_clip_norm: jax.Array  # for the next step, shape=(): as private as a gradient
    noise: Any

    @property
    def key_data(self) -> jax.Array:
        """The key data of the noise."""
        return self.noise.key_data


def _with(tree: Any, number: Any) -> Any:
    """Appends one more coordinate to a gradient."""
    return tree, jnp.asarray(number)


def _longest(squared_norms: jax.Array, weights: jax.Array, size: int) -> jax.Array:
    """Bounds the norms of clipped gradients, underflow included."""
    norms = jnp.sqrt(squared_norms)
    rounding = 16 * jnp.finfo(norms.dtype).eps
    longest = weights * (norms * (1 + rounding) + clip.unseen_norm(size, norms.dtype))
    return jnp.where(weights > 0, longest, 0)  # where it is not finite, too


def _sum_of_indicators(
    mechanism: "MovingBound",
    gradients: Any,
    params: Any,
    is_padding_example: jax.Array | None,
    found: clip.Factors,
    bound: jax.Array,
) -> jax.Array:
    """Sums the numbers that move the bound; not private."""
    sizes, longest = [math.prod(jnp.shape(x)) for x in jax.tree.leaves(params)], []
    for name, (_, places) in mechanism.clip_rule.groups(params).items():
        size = sum(sizes[i] for i in places)
        squared_norms, weights = found.squared_norms[name], found.weights[name]
        longest.append(_longest(squared_norms, weights, size))
    # In units of the bound, since squares of small numbers underflow.
    used = jnp.linalg.norm(jnp.stack(longest) / bound, axis=0)
    norm = jnp.sqrt(sum(found.squared_norms.values()))
    of_one = jax.vmap(mechanism.indicator, (0, 0, None))
    indicators = of_one(norm, used, jnp.asarray(bound, norm.dtype))
    # Padding may come as gradients of zero, without its mask. An example that replaces
    # it must not move the sum further than from nothing.
    tells = found.are_finite & (norm > 0)
    if is_padding_example is not None:
        tells &= ~is_padding_example
    indicators = jnp.where(tells, indicators, 0)
    return jnp.sum(jnp.where(seals_agree(gradients), indicators, jnp.nan))


def _of_mechanism(name: str) -> Any:
    """Makes a property that reads a number of the inner mechanism."""
    return property(lambda self: getattr(self.mechanism, name))


class MovingBound(Mechanism):
    """A mechanism with another one's batches and epsilon, at a bound that moves.

    Attributes:
      mechanism: the inner mechanism, whose `l2_clip_norm` is the bound of the first
        step.
      learning_rate: the learning rate of the bound.
    """

    mechanism: Mechanism
    learning_rate: float

    def __post_init__(self):
        check_independent_noise(self.mechanism)
        if isinstance(self.mechanism, MovingBound):
            raise ValueError(
                f"Expected mechanism to have a fixed bound, got {self.mechanism!r}."
            )
        validate.positive(learning_rate=self.learning_rate)
        super().__post_init__()
        self.gradient_multiplier  # noqa: B018

    l2_clip_norm = _of_mechanism("l2_clip_norm")
    noise_multiplier = _of_mechanism("noise_multiplier")
    iterations = _of_mechanism("iterations")
    normalize_by = _of_mechanism("normalize_by")
    neighboring_relation = _of_mechanism("neighboring_relation")
    clip_rule = _of_mechanism("clip_rule")
    num_examples = _of_mechanism("known_size")
    batch_size = _of_mechanism("known_batch_size")
    relations = _of_mechanism("relations")
    draws_steps_alone = _of_mechanism("draws_steps_alone")
    pads_batches = _of_mechanism("pads_batches")
    terms_per_unit = _of_mechanism("terms_per_unit")
    accounted_as = _of_mechanism("accounted_as")

    @property
    def noise_stddev(self) -> Any:
        """The noise multiplier that remains for the gradient, times Δ."""
        return scaled_multiplier(self.gradient_multiplier, self.sensitivity)

    def _noise(self, key: jax.Array) -> optax.GradientTransformation:
        """Raises, since the sum that moves the bound is missing."""
        raise TypeError(
            "Expected privatize, a chain such as dp_adam_bc, or training.fit for"
            f" {type(self).__name__}, whose bound follows from a sum of its own,"
            " got add_noise."
        )

    def private_gradient(self, key: jax.Array) -> PrivateGradient:
        """Clips at the bound in the state, which the noise then moves."""
        noise = add_dp_noise(self.noise_stddev, key=key)
        start, divisor = self.l2_clip_norm, self.normalize_by
        rule, unit = self.clip_rule, self.unit()

        def init_fn(params):
            clip.check_parameters(params, rule)
            # In float32 for any dtype of the parameters: the clip treats it as a
            # constant.
            first = jnp.asarray(start, jnp.float32)
            return MovingBoundState(first, noise.init(_with(params, 0.0)))

        def clip_fn(gradients, state, params, *, precision=None, **extra_args):
            mask = extra_args.get("is_padding_example")
            if not clip.check_gradients(gradients, params, **extra_args):
                return clip.Sums(gradients, jnp.zeros([]))
            # In units of the bound, the sensitivity is that of the first step. Round
            # up, since the bound is in float32, and the sum may be in float64.
            rounding = 1 + 4 * jnp.finfo(jnp.float32).eps
            units = state.l2_clip_norm / start * rounding
            chosen = rule, precision

            def clip_and_sum(bound, normalize_by, gradients, mask):
                found = clip.factors(gradients, params, bound, mask, *chosen)
                return clip.Sums(
                    clip.weighted_sum(gradients, params, found, normalize_by, *chosen),
                    _sum_of_indicators(self, gradients, params, mask, found, bound),
                )

            numbers = state.l2_clip_norm, divisor * units
            specs = clip.specs_of_sums(params)
            return with_automatic_axes(clip_and_sum, specs, *numbers, gradients, mask)

        def noise_fn(sums, state, params=None):
            both = _with(sums.gradient, unit * sums.aux)
            closed = clipped_sum.close_sums(both, None, None, is_masked=True)
            like = None if params is None else _with(params, 0.0)
            noised, noise_state = noise.update(closed, state.noise, like)
            gradient, observed = cast(Any, noised)
            mean = observed / (unit * divisor)
            moved = self.moved(state.l2_clip_norm, mean)
            return gradient, MovingBoundState(moved, noise_state)

        return PrivateGradient(init_fn, clip_fn, noise_fn)

    @property
    @abc.abstractmethod
    def gradient_multiplier(self) -> Any:
        """The noise in the gradient over its sensitivity."""

    @abc.abstractmethod
    def unit(self) -> Any:
        """Returns the factor at which the noise of the gradient hides the sum."""

    @abc.abstractmethod
    def indicator(
        self, norm: jax.Array, used: jax.Array, l2_clip_norm: jax.Array
    ) -> jax.Array:
        """Computes the number of one example in the sum, shape ().

        Args:
          norm: the norm of its gradient, shape ().
          used: a bound on the clipped norm over the bound of the step, shape ().
          l2_clip_norm: the bound of the step, shape ().
        """

    @abc.abstractmethod
    def error(self, mean: jax.Array) -> jax.Array:
        """Computes the difference of the noisy sum over B from its target."""

    def moved(self, l2_clip_norm: jax.Array, mean: jax.Array) -> jax.Array:
        """Computes the bound of the next step.

        Args:
          l2_clip_norm: the bound of this step.
          mean: the noisy sum over B.
        """
        moved = l2_clip_norm * jnp.exp(-self.learning_rate * self.error(mean))
        low, high = self.l2_clip_norm / _FARTHEST, self.l2_clip_norm * _FARTHEST
        return jnp.clip(moved, low, high).astype(l2_clip_norm.dtype)

    def _event(self, steps: int, noise_multiplier: float) -> dp_accounting.DpEvent:
        return self.mechanism._event(steps, noise_multiplier)

    def _draw(self, key: jax.Array, step: int | jax.Array, num_examples: int) -> Batch:
        return self.mechanism._draw(key, step, num_examples)

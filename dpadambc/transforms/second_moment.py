r"""A second moment without the variance of its noise, and the floor under it.

Every corrected optimizer divides by :math:`\sqrt{\max(\hat v - \hat \Phi, \gamma')}`:
the second moment of the noised gradient, less the same average of the variance of its
noise, and not below a floor.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpadambc.core import validate
from dpadambc.core.noise import NoiseStddev, stddev_at_step, stddev_per_leaf
from dpadambc.transforms.dtypes import check_real, wide_zeros_like

Number = jax.typing.ArrayLike


def moving_average_spread(decay: Number, count: Number = math.inf) -> jax.Array:
    r"""Computes the relative standard deviation of a moving average.

    .. math:: \sqrt{\frac{1 - b}{1 + b} \cdot \frac{1 + b^t}{1 - b^t}}

    It is for the bias-corrected average of independent numbers, over the standard
    deviation of one, and exact after every number of steps t.
    """
    faded = jnp.power(decay, count * 1.0)  # JAX compiles each power that is an integer
    bias_correction = -jnp.expm1(count * jnp.log1p(-(1 - decay)))  # 1 - decay ** count
    return jnp.sqrt((1 - decay) / (1 + decay) * (1 + faded) / bias_correction)


def second_moment_spread(
    noise_variance: Number, b2: Number = 0.999, count: Number = math.inf
) -> jax.Array:
    r"""Computes the standard deviation of :math:`\hat v` under noise alone.

    This is the resolution of :math:`\hat v`. It is :math:`\sqrt 2 \Phi` times
    `moving_average_spread`, exact for every number of steps and constant noise: 141 %
    of :math:`\Phi` at the first step, 8 % at step 300 and 3 % in the limit, for b2 =
    0.999. `benchmarks/theory` has the proof, and the spread in the presence of a
    gradient.

    Args:
      noise_variance: :math:`\Phi`.
      b2: the decay rate of the second moment.
      count: the number of steps t, the limit by default.

    Returns:
      The standard deviation, in the unit of the squared gradient.

    Example:
      >>> from dpadambc.transforms import second_moment
      >>> print(second_moment.second_moment_spread(1.0).round(4))
      0.0316
    """
    noise_variance = jnp.asarray(noise_variance)
    # The root of the square would underflow where the variance is tiny.
    of_one = jnp.sqrt(noise_variance) * jnp.sqrt(2 * noise_variance)
    return of_one * moving_average_spread(b2, count)


@dataclasses.dataclass(frozen=True)
class RelativeFloor:
    r"""A floor on the corrected second moment in units of its resolution.

    Under noise alone :math:`\hat v` spreads about :math:`\Phi`: by 141 % of it at the
    first step, 8 % at step 300 and 3 % in the limit, for b2 = 0.999. A corrected
    moment below that spread is no different from zero. The floor is `factor` times the
    spread, so that it keeps its meaning when the batch size, the clip norm or epsilon
    changes.

    Args:
      factor: a positive number.

    Raises:
      ValueError: if `factor` is not positive and finite.

    Example:
      >>> import jax.numpy as jnp
      >>> import dpadambc
      >>> gradient = jnp.array([0.5, 0.2])
      >>> for factor in (1.0, 0.25):
      ...     adam_bc = dpadambc.scale_by_adam_bc(
      ...         0.3, variance_floor=dpadambc.RelativeFloor(factor))
      ...     updates, _ = adam_bc.update(gradient, adam_bc.init(gradient))
      ...     print(updates.round(2))
      [1.25 0.56]
      [1.25 1.12]
    """

    factor: float = 1.0

    def __post_init__(self):
        validate.positive(factor=self.factor)

    def variance(self, noise_variance: Number, b2: Number, count: Number) -> jax.Array:
        """Returns the floor after `count` steps with this average noise variance."""
        return self.factor * second_moment_spread(noise_variance, b2, count)


def floor_at(
    floor: Number | RelativeFloor, noise_variance: Number, b2: Number, count: Number
) -> jax.Array:
    """The floor after `count` steps, in the unit of the squared gradient."""
    if isinstance(floor, RelativeFloor):
        return floor.variance(noise_variance, b2, count)
    return jnp.asarray(floor, float)


def corrected_second_moment(
    nu_hat: jax.Array, noise_variance: Number, floor: Number
) -> jax.Array:
    r"""Computes :math:`\max(\hat v - \hat \Phi, \gamma')`, in the dtype of `nu_hat`.

    Args:
      nu_hat: the bias-corrected second moment of the noised gradient, any shape.
      noise_variance: the bias-corrected average of the noise variance.
      floor: the least value returned.

    Example:
      >>> import jax.numpy as jnp
      >>> from dpadambc.transforms import second_moment
      >>> print(second_moment.corrected_second_moment(jnp.array([1.5, 0.9]), 1.0, 0.1))
      [0.5 0.1]
    """
    return jnp.maximum(nu_hat - noise_variance, floor).astype(nu_hat.dtype)


@dataclasses.dataclass(frozen=True)
class NoiseCorrection:
    r"""The correction of a second moment for the variance of its noise.

    It averages the variance as the second moment averages the squared gradients, and
    divides by :math:`\sqrt{\max(\hat v - \hat \Phi, \gamma')}`.

    Args:
      noise_stddev: the noise of the incoming gradient; see `stddev_of`.
      variance_floor: :math:`\gamma'`.
      correction: the share of the noise variance to subtract.
    """

    noise_stddev: NoiseStddev
    variance_floor: Number | RelativeFloor
    correction: Number

    def __post_init__(self):
        if not isinstance(self.variance_floor, RelativeFloor):
            validate.non_negative(variance_floor=self.variance_floor)
        validate.non_negative(correction=self.correction)

    def init(self, params: optax.Params) -> Any:
        """Makes a zero for each level of noise; raises unless they fit `params`."""
        stddev_per_leaf(self.noise_stddev, params)
        return jax.tree.map(lambda _: jnp.zeros([], float), self.noise_stddev)

    def transformation(
        self, kind: Any, b2: Number, start: Callable[..., Any], move: Callable[..., Any]
    ) -> optax.GradientTransformation:
        """Divides the first moment by the corrected root, or returns 0 for 0.

        Args:
          kind: the class of the state: count, first moments, nu, noise_variance.
          b2: the decay rate of the second moment.
          start: a function of zeros like the parameters that returns the first moments,
            a tuple.
          move: a function of the gradient, the state and the new count that returns the
            numerator, and the first moments after the step.
        """

        def init_fn(params):
            zeros = wide_zeros_like(params)
            nu, count = optax.tree.zeros_like(zeros), jnp.zeros([], jnp.int32)
            return kind(count, *start(zeros), nu, self.init(params))

        def update_fn(updates, state, params=None):
            del params
            check_real(updates)
            updates = optax.tree.cast_like(updates, state.nu)
            count = jnp.asarray(optax.safe_increment(state.count))
            moved, moments = move(updates, state, count)
            stddev = stddev_at_step(self.noise_stddev, state.count)
            nu = optax.tree.update_moment_per_elem_norm(updates, state.nu, b2, 2)
            noise = optax.tree.update_moment(stddev, state.noise_variance, b2, 2)
            nu_hat = optax.tree.bias_correction(nu, b2, count)
            noise_hat = optax.tree.bias_correction(noise, b2, count)

            def scale(u, v, phi):
                floor = floor_at(self.variance_floor, phi, b2, count)
                less = corrected_second_moment(v, self.correction * phi, floor)
                root = jnp.sqrt(less)
                return jnp.where(root > 0, u / root, 0)

            levels = stddev_per_leaf(noise_hat, nu_hat)
            updates = jax.tree.map(scale, moved, nu_hat, levels)
            kept = optax.tree.cast_like((*moments, nu, noise), tuple(state[1:]))
            return updates, kind(count, *kept)

        return optax.GradientTransformation(init_fn, update_fn)

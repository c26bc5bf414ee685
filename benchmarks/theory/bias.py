"""What noise adds to the second moment, and what that makes of Adam's step."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.theory._decay import Number, settled
from dpadambc.core import validate
from dpadambc.transforms.dtypes import check_decay


def noise_variance(
    noise_multiplier: Number, l2_sensitivity: Number, normalize_by: Number = 1.0
) -> Any:
    r"""The variance that the noise adds to every squared gradient, in expectation.

    .. math:: \Phi = (\sigma C / B)^2

    A mechanism gives its own, by `mechanism.noise_variance`, for its own sensitivity.

    Args:
      noise_multiplier: :math:`\sigma`, in units of the sensitivity.
      l2_sensitivity: :math:`C`, of the sum of clipped gradients.
      normalize_by: :math:`B`, what the sum is divided by.

    Returns:
      :math:`\Phi`, in the unit of the squared gradient.

    Example:
      >>> from benchmarks import theory
      >>> print(f"{theory.noise_variance(0.4, 0.1, 256):.6e}")
      2.441406e-08

    References:
      `DP-AdamBC <https://arxiv.org/abs/2312.14334>`_, section 2
    """
    return (noise_multiplier * l2_sensitivity / normalize_by) ** 2


def second_moment_bias(noise_variances: jax.Array, b2: float) -> jax.Array:
    r"""The expected bias of :math:`\hat v` after each step, for noise of any schedule.

    .. math:: \mathbb{E}[\hat v_t] - \hat v_t^{clean} =
        \frac{1 - b_2}{1 - b_2^t} \sum_{i \le t} b_2^{t-i} \Phi_i

    For constant noise it is :math:`\Phi` at every step. `scale_by_adam_bc` subtracts
    exactly this.

    Args:
      noise_variances: of the steps in turn, shape (steps,).
      b2: decay rate of the second moment.

    Returns:
      The bias after each step, shape (steps,), in the unit of the squared gradient.

    Example:
      >>> import jax.numpy as jnp
      >>> from benchmarks import theory
      >>> print(theory.second_moment_bias(jnp.array([1.0, 1.0, 4.0]), b2=0.5))
      [1.        1.        2.7142856]

    References:
      `DP-AdamBC <https://arxiv.org/abs/2312.14334>`_, section 3
    """

    def step(average, variance):
        average = b2 * average + (1 - b2) * variance
        return average, average

    noise_variances = jnp.asarray(noise_variances, float)
    _, averages = jax.lax.scan(step, jnp.zeros([]), noise_variances)
    return averages / settled(b2, jnp.arange(1, len(noise_variances) + 1))


def sign_descent_ratio(gradient: Number, noise_variance: Number) -> jax.Array:
    r"""Adam's step for a constant gradient, which without noise is its sign.

    .. math:: g / \sqrt{g^2 + \Phi}

    Noise makes it :math:`g / \sqrt\Phi` where :math:`|g| \ll \sqrt\Phi`: small
    gradients take small steps, as in SGD.

    Args:
      gradient: :math:`g`, any shape.
      noise_variance: :math:`\Phi`.

    Returns:
      The ratio of the expected step to the learning rate, in [-1, 1].

    Example:
      >>> from benchmarks import theory
      >>> print(theory.sign_descent_ratio(0.1**0.5, 1.0).round(4))
      0.3015

    References:
      `DP-AdamBC <https://arxiv.org/abs/2312.14334>`_, section 3
    """
    gradient = jnp.asarray(gradient)
    return gradient / jnp.sqrt(gradient**2 + noise_variance)


def corrected_sign_descent_ratio(gradient: Number, variance_floor: Number) -> jax.Array:
    r"""Adam's step for a constant gradient, once the noise is taken out.

    .. math:: g / \sqrt{\max(g^2, \gamma')}

    That is with :math:`\hat v - \Phi` at its expectation: the sign of the gradient
    again, down to gradients of :math:`\sqrt{\gamma'}`. How far :math:`\hat v` strays
    from it is `second_moment_spread`.

    Args:
      gradient: :math:`g`, any shape.
      variance_floor: :math:`\gamma'`, positive.

    Returns:
      The ratio of the step to the learning rate, in [-1, 1].

    Example:
      >>> from benchmarks import theory
      >>> print(theory.corrected_sign_descent_ratio(0.1**0.5, 0.03).round(4))
      1.0

    References:
      `DP-AdamBC <https://arxiv.org/abs/2312.14334>`_, section 3
    """
    gradient = jnp.asarray(gradient)
    return gradient / jnp.sqrt(jnp.maximum(gradient**2, variance_floor))


def equivalent_sgdm_schedule(
    learning_rate: optax.ScalarOrSchedule, noise_stddev: float, b1: float = 0.9
) -> optax.Schedule:
    r"""The learning rates with which DP-SGD with momentum takes DP-Adam's steps.

    .. math:: \eta_t \frac{1 - b_1}{(1 - b_1^t) \sqrt\Phi}

    Where noise dominates, :math:`\hat v \approx \Phi` in every coordinate, and DP-Adam
    with :math:`\eta_t` is `dp_sgd` with `momentum=b1`, without dampening, at this rate.
    The two differ by the spread of :math:`\hat v` (`second_moment_spread`, as a share
    of :math:`\Phi`, halved by the root) and by what signal it has.

    Args:
      learning_rate: :math:`\eta_t` of DP-Adam, a number or a schedule.
      noise_stddev: :math:`\sqrt\Phi`, such as `mechanism.noise_stddev`.
      b1: decay rate of DP-Adam's first moment.

    Returns:
      An Optax schedule, of the number of updates made before.

    Raises:
      ValueError: if the noise level is not positive, or b1 not in [0, 1).

    Example:
      >>> from benchmarks import theory
      >>> schedule = theory.equivalent_sgdm_schedule(1e-3, noise_stddev=1.5625e-4)
      >>> print(f"{schedule(0):.3f} {schedule(9):.5f} {schedule(10_000):.4f}")
      6.400 0.98262 0.6400

    References:
      `DP-AdamBC <https://arxiv.org/abs/2312.14334>`_, Eq. 3
    """
    validate.positive(noise_stddev=noise_stddev)
    check_decay(b1=b1)

    def schedule(count):
        rate = learning_rate(count) if callable(learning_rate) else learning_rate
        return rate * (1 - b1) / (settled(b1, count + 1) * noise_stddev)

    return schedule

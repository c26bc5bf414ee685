r"""What noise does to Adam's moments, in closed form.

A gradient g with Gaussian noise of variance :math:`\Phi` in every coordinate,
:math:`\tilde g = g + z`, gives the moments :math:`\hat m` and :math:`\hat v` after t
steps. The functions here say how far these lie from the moments of g, and what that
makes of Adam's step. They take and return numbers or arrays, one entry for each
coordinate or step, and work under `jax.jit`.

Errata. Where the papers and these functions differ, the papers are in error:

* arXiv 2312.14334, Propositions 3 and 4: printed :math:`\sqrt{\ln(1/\alpha)}\,2\nu^2`;
  two-sided and of the right unit it is :math:`\sqrt{2\nu^2 \ln(2/\alpha)}`. See
  `second_moment_deviation`, which also says for which gradients they hold.
* The same, section 3: momentum without dampening is :math:`(1 - b_1^t)/(1 - b_1)` times
  :math:`\hat m`, not its inverse; its Eq. 3 is right. Its 0.645 and 0.026 for that
  schedule come from :math:`\Phi` rounded to two digits; they are 0.640 and 0.0256. Its
  text on Figure 2 names a learning rate of 0.001 where 6.4 belongs to 0.01.
* The same, on sign descent: :math:`|\mathbb{E} g|` is to be compared with
  :math:`\sqrt\Phi`, not with :math:`\Phi`.
* The same, Table 2: its noise was added for a batch of 255 and :math:`\Phi` subtracted
  for 256, which leaves 0.8 % of :math:`\Phi`, two thirds of the floor.
* The same, DP-SGDM: the step is :math:`-\eta b`, not :math:`+\eta b`; and the decay
  rates called default, 0.9 and 0.99, are those of the graph experiment alone.
* arXiv 2304.11208, Eq. 2 and 3: :math:`\Phi` is defined with the factor
  :math:`1 - b_2^t` and subtracted without it from :math:`\hat v`.
* arXiv 2511.07843, Algorithm 1: eps is inside the root; in its code it is outside.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc import _validate

Number = jax.typing.ArrayLike


def _gone(decay: Number, count: Number) -> jax.Array:
    """1 - decay ** count, without the rounding of 1 - decay."""
    return -jnp.expm1(count * jnp.log1p(-(1 - decay)))


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
      >>> from dpadambc import theory
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
      >>> from dpadambc import theory
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
    return averages / _gone(b2, jnp.arange(1, len(noise_variances) + 1))


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
      >>> from dpadambc import theory
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
      >>> from dpadambc import theory
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
      >>> from dpadambc import theory
      >>> schedule = theory.equivalent_sgdm_schedule(1e-3, noise_stddev=1.5625e-4)
      >>> print(f"{schedule(0):.3f} {schedule(9):.5f} {schedule(10_000):.4f}")
      6.400 0.98262 0.6400

    References:
      `DP-AdamBC <https://arxiv.org/abs/2312.14334>`_, Eq. 3
    """
    _validate.positive(noise_stddev=noise_stddev)
    _validate.decay(b1=b1)

    def schedule(count):
        rate = learning_rate(count) if callable(learning_rate) else learning_rate
        return rate * (1 - b1) / (_gone(b1, count + 1) * noise_stddev)

    return schedule


def _relative_spread(decay: Number, count: Number) -> jax.Array:
    """Standard deviation of the average of `count` uncorrelated numbers over theirs."""
    faded = jnp.power(decay, count)
    return jnp.sqrt((1 - decay) / (1 + decay) * (1 + faded) / _gone(decay, count))


def first_moment_spread(
    noise_variance: Number, b1: Number = 0.9, count: Number = math.inf
) -> jax.Array:
    r"""The standard deviation of :math:`\hat m` under noise alone.

    .. math::
      \sqrt{\Phi \frac{1 - b_1}{1 + b_1} \cdot \frac{1 + b_1^t}{1 - b_1^t}}

    Exact for every t: all of :math:`\sqrt\Phi` at the first step, and 0.2294 of it in
    the limit, for b1 = 0.9.

    Args:
      noise_variance: :math:`\Phi`.
      b1: decay rate of the first moment.
      count: the number of steps t, the limit by default.

    Returns:
      The standard deviation, in the unit of the gradient.

    Example:
      >>> from dpadambc import theory
      >>> print(theory.first_moment_spread(1.0).round(4))
      0.2294
    """
    return jnp.sqrt(noise_variance) * _relative_spread(b1, count)


def second_moment_spread(
    noise_variance: Number, b2: Number = 0.999, count: Number = math.inf
) -> jax.Array:
    r"""The standard deviation of :math:`\hat v` under noise alone: what it can resolve.

    .. math::
      \Phi \sqrt{\frac{2(1 - b_2)}{1 + b_2} \cdot \frac{1 + b_2^t}{1 - b_2^t}}

    Exact for every t, for constant noise: 141 % of :math:`\Phi` at the first step, 8 %
    at step 300 and 3 % in the limit, for b2 = 0.999. `RelativeFloor` is in its units.

    Args:
      noise_variance: :math:`\Phi`.
      b2: decay rate of the second moment.
      count: the number of steps t, the limit by default.

    Returns:
      The standard deviation, in the unit of the squared gradient.

    Example:
      >>> from dpadambc import theory
      >>> print(theory.second_moment_spread(1.0).round(4))
      0.0316
    """
    return jnp.asarray(noise_variance) * math.sqrt(2) * _relative_spread(b2, count)


def second_moment_deviation(
    noise_variance: Number,
    count: Number,
    *,
    b2: float = 0.999,
    alpha: float = 0.05,
    gradient_bound: Number | None = None,
) -> jax.Array:
    r"""How far :math:`\hat v - \Phi` lies from the clean moment, with high probability.

    With probability :math:`1 - \alpha` at least, for one coordinate at one step,
    :math:`|\hat v - \Phi - \hat v^{clean}| \le \xi`,

    .. math::
      \xi = \frac{1 - b_2}{1 - b_2^t}
        \max\Big(\sqrt{2 \nu^2 \ln\tfrac{2}{\alpha}},\ 2 b \ln\tfrac{2}{\alpha}\Big),
      \quad \nu^2 = (4 \Phi^2 + 8 G^2 \Phi) \frac{1 - b_2^{2t}}{1 - b_2^2},
      \quad b = 4 \Phi

    Each step adds :math:`2 g z + z^2 - \Phi`. For
    :math:`|\lambda| \le 1 / (4 \Phi)` the logarithm of its moment generating function
    is at most :math:`\lambda^2 (2 \Phi^2 + 4 g^2 \Phi)`, whatever noise g depends on
    from before, so the weighted sum is sub-exponential with :math:`(\nu, b)` and
    Bernstein's inequality gives the two branches.

    The published :math:`\nu = 4 \Phi \sqrt{\cdot}` is this for
    :math:`G = \sqrt{1.5\,\Phi}`, so it is proved for gradients below 1.2 standard
    deviations of the noise, and false for much larger ones. With G the clip norm over B
    times the batch size nothing is assumed, and the bound is of little use: far above
    :math:`\Phi`. It is loose by a factor of two, and by four with the default G where
    gradients are small; the spread under noise alone is `second_moment_spread`.

    As a floor: a corrected moment above :math:`\xi` differs from zero at the level
    :math:`\alpha`.

    Args:
      noise_variance: :math:`\Phi`, positive.
      count: the number of steps t.
      b2: decay rate of the second moment.
      alpha: the probability of a larger deviation.
      gradient_bound: :math:`G`, a bound on the absolute clean gradient of the
        coordinate in all steps; :math:`\sqrt{1.5\,\Phi}`, as published, by default.

    Returns:
      :math:`\xi`, in the unit of the squared gradient.

    Raises:
      ValueError: if alpha is not in (0, 1), b2 not in [0, 1), or the noise variance not
        positive.

    Example:
      >>> from dpadambc import theory
      >>> print(f"{theory.second_moment_deviation(1.5625e-4**2, 10_000):.4e}")
      5.9330e-09

    References:
      `DP-AdamBC <https://arxiv.org/abs/2312.14334>`_, Proposition 3, corrected
    """
    _validate.open_unit_interval(alpha=alpha)
    _validate.decay(b2=b2)
    if jnp.ndim(noise_variance) == 0:
        _validate.positive(noise_variance=noise_variance)
    if gradient_bound is None:
        gradient_bound = jnp.sqrt(1.5 * noise_variance)
    # In units of the noise variance, whose square may be less than float32 can hold.
    bound = jnp.square(gradient_bound) / noise_variance
    nu = jnp.sqrt((4 + 8 * bound) * _gone(b2**2, count) / _gone(b2**2, 1))
    log = math.log(2 / alpha)
    deviation = jnp.maximum(math.sqrt(2 * log) * nu, 8 * log)
    return jnp.asarray(noise_variance) * deviation * _gone(b2, 1) / _gone(b2, count)


def noise_bound(
    noise_stddev: Number, num_coordinates: int, iterations: int, alpha: float = 0.05
) -> Any:
    r"""What no coordinate of the noise exceeds in a whole run, with high probability.

    .. math:: \sigma \sqrt{2 \ln(2 d T / \alpha)}

    by a union bound over :math:`d T` draws.

    Args:
      noise_stddev: :math:`\sigma`, the largest of the run.
      num_coordinates: :math:`d`.
      iterations: :math:`T`.
      alpha: the probability that any draw is larger.

    Returns:
      A number in the unit of the gradient.

    Example:
      >>> from dpadambc import theory
      >>> print(round(theory.noise_bound(1.0, 1_000_000, 1_000), 2))
      6.99
    """
    _validate.open_unit_interval(alpha=alpha)
    return noise_stddev * math.sqrt(
        2 * math.log(2 * num_coordinates * iterations / alpha)
    )


def adam_convergence_bound(
    *,
    initial_gap: float,
    smoothness: float,
    gradient_bound: float,
    noise_stddev: float,
    num_coordinates: int,
    iterations: int,
    learning_rate: float,
    b2: float = 0.999,
    eps_root: float = 1e-8,
    alpha: float = 0.05,
) -> float:
    r"""An upper bound on the squared gradient that DP-Adam without momentum reaches.

    For :math:`\theta_{t+1} = \theta_t - \eta_t \tilde g_t / \sqrt{v_t + \epsilon}` with
    :math:`v_t = \sum_i b_2^{t-i} \tilde g_i^2` and
    :math:`\eta_t = \eta \sqrt{(1 - b_2^t) / (1 - b_2)}`, that is Adam with b1 = 0, and
    a step drawn evenly from the T of the run,

    .. math::
      \mathbb{E} \|\nabla F\|^2 \le \frac{2 R}{\eta T} (F_0 - F_*)
        + E \Big(\frac{1}{T} \ln\big(1 + \frac{R^2}{(1 - b_2) \epsilon}\big)
        - \ln b_2\Big),
      \quad E = \frac{4 d R^2}{\sqrt{1 - b_2}} + \frac{\eta d R L}{1 - b_2}

    where :math:`R - \sqrt\epsilon` bounds the absolute noised gradient. Gaussian noise
    has no bound; but cut off at `noise_bound` it is still symmetric, and with
    probability :math:`1 - \alpha` the run with it *is* the run: the expectation is that
    of the cut off one. It assumes that F is L-smooth and bounded below, that batches
    are independent and their gradients unbiased for that of F, so that none is clipped.

    Args:
      initial_gap: :math:`F_0 - F_*`.
      smoothness: :math:`L`.
      gradient_bound: on the absolute clean gradient of any batch in any coordinate.
      noise_stddev: of the noise in the gradient.
      num_coordinates: :math:`d`.
      iterations: :math:`T`.
      learning_rate: :math:`\eta`, Adam's.
      b2: decay rate of the second moment.
      eps_root: :math:`\epsilon`; Adam's own, inside the root of :math:`\hat v`, is
        :math:`1 - b_2` times as large in the limit.
      alpha: the probability that the bound is not about this run.

    Returns:
      The bound, in the unit of the squared gradient.

    Raises:
      ValueError: for a number outside its range.

    Example:
      >>> from dpadambc import theory
      >>> problem = dict(initial_gap=1.0, smoothness=1.0, gradient_bound=1.0,
      ...                num_coordinates=10, eps_root=1e-4)
      >>> for T in (10_000, 1_000_000):
      ...     print(round(theory.adam_convergence_bound(
      ...         noise_stddev=0.1, iterations=T, learning_rate=T**-0.5, b2=1 - 1 / T,
      ...         **problem)))
      23
      3

    References:
      Défossez et al., `A Simple Convergence Proof of Adam and Adagrad
      <https://arxiv.org/abs/2003.02395>`_, 2022, Theorem 2
    """
    _validate.positive(smoothness=smoothness)
    _validate.positive(learning_rate=learning_rate)
    _validate.positive(eps_root=eps_root)
    _validate.open_unit_interval(b2=b2)
    noise = noise_bound(noise_stddev, num_coordinates, iterations, alpha)
    bound = gradient_bound + noise + math.sqrt(eps_root)
    variation = (
        num_coordinates
        * bound
        * (4 * bound / math.sqrt(1 - b2) + learning_rate * smoothness / (1 - b2))
    )
    settling = math.log1p(bound**2 / ((1 - b2) * eps_root)) / iterations
    return 2 * bound * initial_gap / (learning_rate * iterations) + variation * (
        settling - math.log(b2)
    )


def decay_shrinkage(
    learning_rates: optax.ScalarOrSchedule, weight_decay: float, iterations: int
) -> float:
    r"""The share of a parameter that decoupled weight decay takes in a whole run.

    .. math:: 1 - \prod_t (1 - \eta_t \lambda)

    One that takes 5e-5, as that of the DP-AdamW paper on CIFAR-10 does, has no effect.

    Args:
      learning_rates: :math:`\eta_t`, a number or a schedule.
      weight_decay: :math:`\lambda`.
      iterations: the number of steps.

    Returns:
      A number in [0, 1], for :math:`\eta_t \lambda \le 1`.

    Example:
      >>> from dpadambc import theory
      >>> print(f"{theory.decay_shrinkage(1.5e-3, 1e-5, 3360):.0e}")
      5e-05

    References:
      `DP-AdamW <https://arxiv.org/abs/2511.07843>`_, Tables 1 and 2
    """
    steps = np.arange(iterations)
    rates = learning_rates(steps) if callable(learning_rates) else learning_rates
    rates = np.broadcast_to(np.asarray(rates, float), steps.shape)
    return float(1 - np.prod(1 - rates * weight_decay))

r"""The effect of noise on Adam's moments, in closed form.

A gradient g with Gaussian noise of variance :math:`\Phi` in every coordinate gives the
moments :math:`\hat m` and :math:`\hat v` after t steps. The functions take and return
numbers or arrays, one entry for each coordinate or step, and work under `jax.jit`.
README.md has the proofs, the errata of the papers, and two published theorems that are
false.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc.core import validate
from dpadambc.transforms.dtypes import check_decay
from dpadambc.transforms.second_moment import moving_average_spread

Number = jax.typing.ArrayLike


def _settled(decay: Number, count: Number) -> jax.Array:
    """1 - decay ** count, without the rounding of 1 - decay."""
    return -jnp.expm1(count * jnp.log1p(-(1 - decay)))


def noise_variance(
    noise_multiplier: Number, l2_sensitivity: Number, normalize_by: Number = 1.0
) -> Any:
    r"""What the noise adds to every squared gradient, in expectation.

    .. math:: \Phi = (\sigma C / B)^2
    """
    return (noise_multiplier * l2_sensitivity / normalize_by) ** 2


def second_moment_bias(noise_variances: jax.Array, b2: float) -> jax.Array:
    r"""The expected bias of :math:`\hat v` after each step, for noise of any schedule.

    .. math:: \mathbb{E}[\hat v_t] - \hat v_t^{clean} =
        \frac{1 - b_2}{1 - b_2^t} \sum_{i \le t} b_2^{t-i} \Phi_i

    `scale_by_adam_bc` subtracts exactly this; for constant noise it is :math:`\Phi`.
    The variances of the steps, and their biases, have shape (steps,).
    """

    def step(average, variance):
        average = b2 * average + (1 - b2) * variance
        return average, average

    noise_variances = jnp.asarray(noise_variances, float)
    _, averages = jax.lax.scan(step, jnp.zeros([]), noise_variances)
    return averages / _settled(b2, jnp.arange(1, len(noise_variances) + 1))


def sign_descent_ratio(gradient: Number, noise_variance: Number) -> jax.Array:
    r"""Adam's step over its rate for a constant gradient; without noise its sign.

    .. math:: g / \sqrt{g^2 + \Phi}
    """
    gradient = jnp.asarray(gradient)
    return gradient / jnp.sqrt(gradient**2 + noise_variance)


def equivalent_sgdm_schedule(
    learning_rate: optax.ScalarOrSchedule, noise_stddev: float, b1: float = 0.9
) -> optax.Schedule:
    r"""The learning rates with which DP-SGD with momentum takes DP-Adam's steps.

    .. math:: \eta_t \frac{1 - b_1}{(1 - b_1^t) \sqrt\Phi}

    Where noise dominates, :math:`\hat v \approx \Phi` in every coordinate, and DP-Adam
    is `dp_sgd` with `momentum=b1`, without dampening, at this rate (DP-AdamBC, Eq. 3).
    """
    validate.positive(noise_stddev=noise_stddev)
    check_decay(b1=b1)

    def schedule(count):
        rate = learning_rate(count) if callable(learning_rate) else learning_rate
        return rate * (1 - b1) / (_settled(b1, count + 1) * noise_stddev)

    return schedule


def first_moment_spread(
    noise_variance: Number, b1: Number = 0.9, count: Number = math.inf
) -> jax.Array:
    r"""The standard deviation of :math:`\hat m` under noise alone, exact for every t.

    .. math::
      \sqrt{\Phi \frac{1 - b_1}{1 + b_1} \cdot \frac{1 + b_1^t}{1 - b_1^t}}
    """
    return jnp.sqrt(noise_variance) * moving_average_spread(b1, count)


def second_moment_spread(
    noise_variance: Number,
    b2: Number = 0.999,
    count: Number = math.inf,
    gradient: Number = 0.0,
) -> jax.Array:
    r"""The standard deviation of :math:`\hat v` due to noise: what it can resolve.

    .. math::
      \sqrt{(2 \Phi^2 + 4 \Phi g^2)
        \frac{1 - b_2}{1 + b_2} \cdot \frac{1 + b_2^t}{1 - b_2^t}}

    Exact for every t, for constant noise and gradients of constant size |g|; a bound on
    gradients gives a bound on the spread. `RelativeFloor` is in these units.
    """
    noise_variance = jnp.asarray(noise_variance)
    # Not the root of a product, which may be less than float32 can hold.
    of_one = jnp.sqrt(2 * noise_variance + 4 * jnp.square(gradient))
    return jnp.sqrt(noise_variance) * of_one * moving_average_spread(b2, count)


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

    (DP-AdamBC, Propositions 3 and 4, corrected.) G bounds the absolute clean gradient
    of the coordinate in all steps: :math:`\sqrt{1.5\,\Phi}`, as published, by default.
    As a floor: a corrected moment above :math:`\xi` differs from zero at the level
    :math:`\alpha`.
    """
    validate.open_unit_interval(alpha=alpha)
    check_decay(b2=b2)
    if jnp.ndim(noise_variance) == 0:
        validate.positive(noise_variance=noise_variance)
    if gradient_bound is None:
        gradient_bound = jnp.sqrt(1.5 * noise_variance)
    # In units of the noise variance, whose square may be less than float32 can hold.
    bound = jnp.square(gradient_bound) / noise_variance
    nu = jnp.sqrt((4 + 8 * bound) * _settled(b2**2, count) / _settled(b2**2, 1))
    log = math.log(2 / alpha)
    deviation = jnp.maximum(math.sqrt(2 * log) * nu, 8 * log)
    weight = _settled(b2, 1) / _settled(b2, count)
    return jnp.asarray(noise_variance) * deviation * weight


def noise_bound(
    noise_stddev: Number, num_coordinates: int, iterations: int, alpha: float = 0.05
) -> Any:
    r"""What no coordinate of the noise exceeds in a whole run, with high probability.

    .. math:: \sigma \sqrt{2 \ln(2 d T / \alpha)}

    by a union bound over :math:`d T` draws.
    """
    if jnp.ndim(noise_stddev) == 0:
        validate.non_negative(noise_stddev=noise_stddev)
    validate.count(num_coordinates=num_coordinates, least=1)
    validate.count(iterations=iterations, least=1)
    validate.open_unit_interval(alpha=alpha)
    log = math.log(2 * num_coordinates * iterations / alpha)
    return noise_stddev * math.sqrt(2 * log)


def _vector(x: Number, name: str) -> jax.Array:
    x = jnp.asarray(x, float)
    if x.ndim != 1 or not x.size:
        raise ValueError(f"Expected {name} as a vector, got shape {x.shape}.")
    return x


def _filtered(x: jax.Array, coefficients: jax.Array) -> jax.Array:
    return jnp.convolve(x, coefficients, precision="highest")[: x.size]


def correlated_noise_variances(
    coefficients: Number, noise_variances: Number
) -> jax.Array:
    r"""The variance at each step of noise that is correlated over steps.

    .. math:: R_{t,t} = \sum_{j < t} d_j^2 \Phi_{t-j}

    `second_moment_bias` of it is what the noise adds to :math:`\hat v`; a correction is
    to be given its root.

    Args:
      coefficients: :math:`d_0, d_1, \ldots`, shape (lags,).
      noise_variances: :math:`\Phi_i` of the independent draws, shape (steps,).
    """
    d = _vector(coefficients, "coefficients")
    return _filtered(_vector(noise_variances, "noise_variances"), jnp.square(d))


def correlated_second_moment_spread(
    coefficients: Number,
    noise_variances: Number,
    b2: Number = 0.999,
    gradient: Number = 0.0,
) -> jax.Array:
    r"""The standard deviation of :math:`\hat v` due to correlated noise, after a run.

    .. math::
      \sqrt{\sum_{s,t} w_s w_t (2 R_{s,t}^2 + 4 g_s g_t R_{s,t})},
      \qquad w_t = b_2^{T-t} (1 - b_2) / (1 - b_2^T)

    Exact for gradients that do not depend on the noise. For noise that an average of
    decay :math:`\rho` has passed, it is in the limit
    :math:`\sqrt{(1 + b_2 \rho^2) / (1 - b_2 \rho^2)}` times that of independent noise
    of the same variance: 3.1 times for 0.9. A `RelativeFloor` is in units of the
    latter: multiply its factor by this ratio. The gradient of every step is a number or
    of shape (steps,). Time is that of as many convolutions as there are coefficients,
    memory that of one.
    """
    d = _vector(coefficients, "coefficients")
    phi = _vector(noise_variances, "noise_variances")
    steps, lags = phi.size, min(d.size, phi.size)
    # In units of the largest, whose square may be less than float32 can hold.
    unit = jnp.max(phi)
    unit = jnp.where(unit > 0, unit, 1)
    phi, g = phi / unit, jnp.broadcast_to(gradient, steps) / jnp.sqrt(unit)
    w = jnp.power(b2, jnp.arange(steps - 1, -1, -1, dtype=float))
    w = w / jnp.sum(w)
    later = lambda x, k: jax.lax.dynamic_slice_in_dim(
        jnp.concatenate([x, jnp.zeros_like(x)]), k, x.size
    )

    def of_lag(k):
        covariances = _filtered(phi, d * later(d, k))
        squares = 2 * jnp.square(covariances) + 4 * g * later(g, k) * covariances
        return jnp.where(k > 0, 2, 1) * jnp.sum(w * later(w, k) * squares)

    return unit * jnp.sqrt(jnp.sum(jax.lax.map(of_lag, jnp.arange(lags))))


def _bound(
    *,
    scale: float,
    step: float,
    travel: float,
    drift: float,
    dependence: float,
    iterations: int,
    learning_rate: float,
    initial_gap: float,
    smoothness: float,
    weight_decay: float = 0.0,
    initial_norm: float = 0.0,
) -> float:
    """Steps 3 and 4 of the proof, from R, p, how far steps lead, 2 R e and k."""
    validate.non_negative(initial_gap=initial_gap)
    validate.positive(smoothness=smoothness)
    validate.positive(learning_rate=learning_rate)
    validate.non_negative(weight_decay=weight_decay)
    validate.non_negative(initial_norm=initial_norm)
    if learning_rate * weight_decay > 1:
        raise ValueError(
            "Expected learning_rate * weight_decay of at most 1, got"
            f" {learning_rate * weight_decay:g}. Lower one of them."
        )
    decay = weight_decay * (initial_norm + travel)
    constant = 2 * scale * initial_gap / (learning_rate * iterations) + drift
    constant += learning_rate * scale * smoothness * (step + decay) ** 2
    half = scale * (decay + dependence)
    return (half + math.sqrt(half**2 + constant)) ** 2


def adam_convergence_bound(
    *,
    gradient_bound: float,
    noise_stddev: float,
    num_coordinates: int,
    iterations: int,
    learning_rate: float,
    b2: float = 0.999,
    eps_root: float = 1e-8,
    alpha: float = 0.05,
    **problem: float,
) -> float:
    r"""An upper bound on the squared gradient that DP-Adam without momentum reaches.

    For :math:`\theta_{t+1} = \theta_t - \eta_t \tilde g_t / \sqrt{v_t + \epsilon}
    - \eta \lambda \theta_t` with :math:`v_t = \sum_i b_2^{t-i} \tilde g_i^2` and
    :math:`\eta_t = \eta \sqrt{(1 - b_2^t) / (1 - b_2)}`, that is AdamW with b1 = 0, and
    a step drawn evenly from the T of the run,

    .. math::
      \mathbb{E} \|\nabla F\|^2 \le \Big(R w + \sqrt{R^2 w^2 + A}\Big)^2, \quad
      A = \frac{2 R}{\eta T} (F_0 - F_*) + 4 R^2 \sqrt{1 - b_2}\, p^2
        + \eta R L (p + w)^2

    .. math::
      p^2 = \frac{d}{1 - b_2} \Big(\frac{1}{T}
        \ln\big(1 + \frac{R^2}{(1 - b_2) \epsilon}\big) - \ln b_2\Big), \quad
      w = \lambda \big(\|\theta_0\| + \eta T p / \sqrt 2\big)

    where :math:`R - \sqrt\epsilon` is the gradient bound, on any batch and coordinate,
    plus the `noise_bound` at alpha, the probability that this is not about the run.
    (Adam's own epsilon, inside the root of :math:`\hat v`, is :math:`1 - b_2` times as
    large in the limit.) The problem is `initial_gap`, :math:`F_0 - F_*`; `smoothness`,
    L; `weight_decay`, :math:`\lambda`; and `initial_norm`, :math:`\|\theta_0\|`.
    """
    validate.non_negative(gradient_bound=gradient_bound)
    validate.open_unit_interval(b2=b2)
    validate.positive(eps_root=eps_root)
    noise = noise_bound(noise_stddev, num_coordinates, iterations, alpha)
    bound = gradient_bound + noise + math.sqrt(eps_root)
    settling = math.log1p(bound**2 / ((1 - b2) * eps_root)) / iterations
    step = math.sqrt(num_coordinates / (1 - b2) * (settling - math.log(b2)))
    return _bound(
        scale=bound,
        step=step,
        travel=learning_rate * iterations * step / math.sqrt(2),
        drift=4 * bound**2 * math.sqrt(1 - b2) * step**2,
        dependence=0.0,
        iterations=iterations,
        learning_rate=learning_rate,
        **problem,
    )


def adam_bc_convergence_bound(
    *,
    gradient_bound: float,
    noise_stddev: float,
    num_coordinates: int,
    iterations: int,
    learning_rate: float,
    variance_floor: float,
    b2: float = 0.999,
    alpha: float = 0.05,
    **problem: float,
) -> float:
    r"""An upper bound on the squared gradient that DP-AdamBC without momentum reaches.

    For :math:`\theta_{t+1} = \theta_t - \eta (\tilde g_t / \sqrt{\max(\hat v_t - \Phi,
    \gamma')} + \lambda \theta_t)`, that is `adamw_bc` with b1 = 0, a fixed floor and
    constant noise, and a step drawn evenly from the T of the run,

    .. math::
      \mathbb{E} \|\nabla F\|^2 \le \Big(R w + \sqrt{R^2 w^2 + A}\Big)^2, \quad
      A = \frac{2 R}{\eta T} (F_0 - F_*) + \eta R L (p + \lambda B)^2, \quad
      w = \lambda B + k

    .. math::
      p^2 = \frac{d (G^2 + \Phi)}{\gamma'}, \quad
      B = \|\theta_0\| + \eta T p / \sqrt 3, \quad
      4 R^2 = \max\big((G + N)^2 - \Phi,\ \gamma'\big)

    .. math::
      k = \frac{1}{2 \gamma'^{3/2}}
        \sqrt{d (G^2 + \Phi) \big(G^4 / 4 + 4 G^2 \Phi + 2 \Phi^2\big)}
        \Big(1 - b_2 + \frac{\pi}{\sqrt{6 T}}\Big)

    where G is the gradient bound and N the `noise_bound`. The problem is that of
    `adam_convergence_bound`.
    """
    validate.non_negative(gradient_bound=gradient_bound)
    validate.open_unit_interval(b2=b2)
    validate.positive(variance_floor=variance_floor)
    noise = noise_bound(noise_stddev, num_coordinates, iterations, alpha)
    phi, square = noise_stddev**2, gradient_bound**2
    step = math.sqrt(num_coordinates * (square + phi) / variance_floor)
    spread = math.sqrt(square**2 / 4 + 4 * square * phi + 2 * phi**2)
    weight = 1 - b2 + math.pi / math.sqrt(6 * iterations)
    return _bound(
        scale=math.sqrt(max((gradient_bound + noise) ** 2 - phi, variance_floor)) / 2,
        step=step,
        travel=learning_rate * iterations * step / math.sqrt(3),
        drift=0.0,
        dependence=step * spread * weight / (2 * variance_floor),
        iterations=iterations,
        learning_rate=learning_rate,
        **problem,
    )


def decay_shrinkage(
    learning_rates: optax.ScalarOrSchedule, weight_decay: float, iterations: int
) -> float:
    r"""The share of a parameter that decoupled weight decay takes in a whole run.

    .. math:: 1 - \prod_t (1 - \eta_t \lambda)
    """
    steps = np.arange(iterations)
    rates = learning_rates(steps) if callable(learning_rates) else learning_rates
    rates = np.broadcast_to(np.asarray(rates, float), steps.shape)
    return float(1 - np.prod(1 - rates * weight_decay))

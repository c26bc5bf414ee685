"""How far training gets, and how far weight decay shrinks. README.md has the proofs."""

import math

import numpy as np
import optax

from benchmarks.theory.moments import noise_bound
from dpadambc.core import validate


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
            "Expected learning_rate * weight_decay to be at most 1, got "
            f"{learning_rate * weight_decay:g}. Lower one of them: such a step turns "
            "the sign of a parameter."
        )
    decay = weight_decay * (initial_norm + travel)
    constant = (
        2 * scale * initial_gap / (learning_rate * iterations)
        + drift
        + learning_rate * scale * smoothness * (step + decay) ** 2
    )
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

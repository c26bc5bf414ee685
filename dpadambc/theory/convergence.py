"""How far training gets, and how far weight decay shrinks."""

import math

import numpy as np
import optax

from dpadambc._core import validate
from dpadambc.theory.spread import noise_bound


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
    validate.positive(smoothness=smoothness)
    validate.positive(learning_rate=learning_rate)
    validate.positive(eps_root=eps_root)
    validate.open_unit_interval(b2=b2)
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

r"""How far training gets, and how far weight decay shrinks.

Proof of both bounds, for Adam and for DP-AdamBC, with weight decay. Let
:math:`\theta_{t+1} = \theta_t - a_t u_t - \eta \lambda \theta_t` be the step, and
:math:`X = \frac{1}{T} \sum_t \mathbb{E} \|\nabla F(\theta_t)\|^2`.

1. *Descent.* As F is L-smooth,

   .. math::
     F(\theta_{t+1}) \le F(\theta_t) - a_t \nabla F \cdot u_t
       + \eta \lambda \|\nabla F\| \|\theta_t\|
       + \tfrac{L}{2} \|a_t u_t + \eta \lambda \theta_t\|^2

2. *Alignment.* Each method has R, k and e for which, given what was before,

   .. math::
     a_t \mathbb{E}[\nabla F \cdot u_t] \ge
       \frac{\eta}{2R} \|\nabla F\|^2 - \eta k_t \|\nabla F\| - \eta e_t

3. *Sum.* Let p and B be the root mean squares of :math:`\|a_t u_t\| / \eta` and
   :math:`\|\theta_t\|`, k that of :math:`k_t`, and e the mean of :math:`e_t`. By
   Minkowski's and the Cauchy-Schwarz inequality,

   .. math::
     X \le 2 R (\lambda B + k) \sqrt X + A,
     \quad A = \frac{2R}{\eta T} (F_0 - F_*) + 2 R e + \eta R L (p + \lambda B)^2

   so that :math:`X \le \big(R w + \sqrt{R^2 w^2 + A}\big)^2` with
   :math:`w = \lambda B + k`. Without decay and k it is :math:`X \le A`.
4. *Norm.* For :math:`0 \le \eta \lambda \le 1` decay shortens, so
   :math:`\|\theta_t\| \le \|\theta_0\| + \sum_{s<t} \|a_s u_s\|`, which bounds B by p.

*Adam.* Here :math:`a_t = \eta \sqrt{(1 - b_2^t) / (1 - b_2)}` and k = 0. Lemmas 5.1 and
5.2 of Défossez et al. do not ask how the parameters came about, and give

.. math::
  e_t = \frac{2 R\, \mathbb{E}\|u_t\|^2}{\sqrt{1 - b_2}}, \quad
  \sum_t \|u_t\|^2 \le d S, \quad
  S = \ln\Big(1 + \frac{R^2}{(1 - b_2) \epsilon}\Big) - T \ln b_2

so :math:`p^2 = d S / ((1 - b_2) T)` and :math:`2 R e = 4 R^2 \sqrt{1 - b_2}\, p^2`. By
the Cauchy-Schwarz inequality :math:`B \le \|\theta_0\| + \eta T p / \sqrt 2`.

*DP-AdamBC.* Here :math:`a_t = \eta`, :math:`u_t = \tilde g_t / \sqrt{h_t}` and
:math:`h_t = \max(\hat v_t - \Phi, \gamma')`. Let :math:`\bar h_t` be the same with the
last square, :math:`\tilde g_t^2`, at its expectation given what was before. The two
differ by at most :math:`w_t |\tilde g_t^2 - \mathbb{E} \tilde g_t^2|`,
:math:`w_t = (1 - b_2) / (1 - b_2^t)`, and :math:`x^{-1/2}` has a slope of at most
:math:`\gamma'^{-3/2} / 2` above the floor. So

.. math::
  \mathbb{E}[\nabla_i F\, u_{t,i}] \ge \frac{(\nabla_i F)^2}{\sqrt{\bar h_{t,i}}}
    - |\nabla_i F| \frac{w_t}{2 \gamma'^{3/2}}
      \sqrt{\mathbb{E} \tilde g^2 \operatorname{Var} \tilde g^2}

With

.. math::
  \mathbb{E} \tilde g^2 \le G^2 + \Phi, \quad
  \operatorname{Var} \tilde g^2 \le \frac{G^4}{4} + 4 G^2 \Phi + 2 \Phi^2, \quad
  \sqrt{\bar h} \le 2 R, \quad w_t \le 1 - b_2 + \frac1t

this is step 2, with e = 0 and the k that `adam_bc_convergence_bound` states;
:math:`p^2 = d (G^2 + \Phi) / \gamma'`, and
:math:`B \le \|\theta_0\| + \eta T p / \sqrt 3`. Where no noise of the run exceeds its
bound N, all squares are at most :math:`(G + N)^2`, so
:math:`\bar h \le \max((G + N)^2 - \Phi, \gamma') = 4 R^2`. As :math:`\bar h_t` is known
before step t, the sums may end before the first step at which it is larger: then
nothing is conditioned on.
"""

import math

import numpy as np
import optax

from benchmarks.theory.spread import noise_bound
from dpadambc.core import validate


def _bound(
    *,
    scale: float,
    step: float,
    travel: float,
    drift: float,
    dependence: float,
    initial_gap: float,
    smoothness: float,
    iterations: int,
    learning_rate: float,
    weight_decay: float,
    initial_norm: float,
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
    weight_decay: float = 0.0,
    initial_norm: float = 0.0,
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

    where :math:`R - \sqrt\epsilon` bounds the absolute noised gradient. Without weight
    decay w is zero, the bound is A, and A is the theorem of Défossez et al. With it the
    bound does not vanish as T grows, and neither does the squared gradient: decay holds
    it where the two balance. It says something where decay takes little in a whole run,
    for p is about :math:`\sqrt d` or more.

    Gaussian noise has no bound; but cut off at `noise_bound` it is still symmetric, and
    with probability :math:`1 - \alpha` the run with it *is* the run: the expectation is
    that of the cut off one. It assumes that F is L-smooth and bounded below, that
    batches are independent and their gradients unbiased for that of F, so that none is
    clipped. The proof is in this module's docstring.

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
      weight_decay: :math:`\lambda`, AdamW's, which is multiplied by :math:`\eta`.
      initial_norm: :math:`\|\theta_0\|`, which matters with weight decay only.

    Returns:
      The bound, in the unit of the squared gradient.

    Raises:
      ValueError: for a number outside its range, or if the learning rate times the
        weight decay is more than 1.

    Example:
      >>> from benchmarks import theory
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
      <https://arxiv.org/abs/2003.02395>`_, 2022, Theorem 2; `DP-AdamW
      <https://arxiv.org/abs/2511.07843>`_, Theorem 3.5, corrected
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
        initial_gap=initial_gap,
        smoothness=smoothness,
        iterations=iterations,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        initial_norm=initial_norm,
    )


def adam_bc_convergence_bound(
    *,
    initial_gap: float,
    smoothness: float,
    gradient_bound: float,
    noise_stddev: float,
    num_coordinates: int,
    iterations: int,
    learning_rate: float,
    variance_floor: float,
    b2: float = 0.999,
    alpha: float = 0.05,
    weight_decay: float = 0.0,
    initial_norm: float = 0.0,
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

    where N is the `noise_bound`. Without weight decay it vanishes as T grows, with
    :math:`\eta = T^{-1/2}` and :math:`1 - b_2 \le T^{-1/4}` at the rate
    :math:`T^{-1/2}` but for a logarithm; a floor far below :math:`(G + N)^2` makes it
    loose. The floor carries the proof, and the published theorem leaves it out. The
    correction does not: less may be subtracted, or nothing, at the cost of a larger R.

    Runs in which the noise exceeds N somewhere count as zero in the expectation: they
    have probability :math:`\alpha` at most. The assumptions are those of
    `adam_convergence_bound`. The proof is in this module's docstring.

    Args:
      initial_gap: :math:`F_0 - F_*`.
      smoothness: :math:`L`.
      gradient_bound: :math:`G`, on the absolute clean gradient of any batch in any
        coordinate.
      noise_stddev: :math:`\sqrt\Phi`, of the noise in the gradient.
      num_coordinates: :math:`d`.
      iterations: :math:`T`.
      learning_rate: :math:`\eta`.
      variance_floor: :math:`\gamma'`, positive; a `RelativeFloor` falls with the steps
        and is not covered.
      b2: decay rate of the second moment.
      alpha: the probability that the bound is not about this run.
      weight_decay: :math:`\lambda`, which is multiplied by :math:`\eta`.
      initial_norm: :math:`\|\theta_0\|`, which matters with weight decay only.

    Returns:
      The bound, in the unit of the squared gradient.

    Raises:
      ValueError: for a number outside its range, or if the learning rate times the
        weight decay is more than 1.

    Example:
      >>> from benchmarks import theory
      >>> problem = dict(initial_gap=1.0, smoothness=1.0, gradient_bound=1.0,
      ...                num_coordinates=10, variance_floor=1.0)
      >>> for T in (10_000, 1_000_000):
      ...     print(round(theory.adam_bc_convergence_bound(
      ...         noise_stddev=0.1, iterations=T, learning_rate=T**-0.5, b2=1 - 1 / T,
      ...         **problem), 3))
      0.099
      0.01

    References:
      `DP-AdamW <https://arxiv.org/abs/2511.07843>`_, Theorem 3.5, in its place
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
        initial_gap=initial_gap,
        smoothness=smoothness,
        iterations=iterations,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        initial_norm=initial_norm,
    )


def decay_shrinkage(
    learning_rates: optax.ScalarOrSchedule, weight_decay: float, iterations: int
) -> float:
    r"""The share of a parameter that decoupled weight decay takes in a whole run.

    .. math:: 1 - \prod_t (1 - \eta_t \lambda)

    A share of 5e-5, as in the DP-AdamW paper on CIFAR-10, has no effect.

    Args:
      learning_rates: :math:`\eta_t`, a number or a schedule.
      weight_decay: :math:`\lambda`.
      iterations: the number of steps.

    Returns:
      A number in [0, 1], for :math:`\eta_t \lambda \le 1`.

    Example:
      >>> from benchmarks import theory
      >>> print(f"{theory.decay_shrinkage(1.5e-3, 1e-5, 3360):.0e}")
      5e-05

    References:
      `DP-AdamW <https://arxiv.org/abs/2511.07843>`_, its settings for CIFAR-10
    """
    steps = np.arange(iterations)
    rates = learning_rates(steps) if callable(learning_rates) else learning_rates
    rates = np.broadcast_to(np.asarray(rates, float), steps.shape)
    return float(1 - np.prod(1 - rates * weight_decay))

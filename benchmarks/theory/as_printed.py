r"""Theorems 3.5 and 3.6 of arXiv 2511.07843 as printed. They are **not** bounds.

They are here to be refuted: `tests/theory/as_printed_test.py` shows each flaw by a
number or a simulation. `theory.adam_convergence_bound` and
`theory.adam_bc_convergence_bound` are what can be proved.

The setting is that of `Setting`. With :math:`\Phi` the noise variance, C the clip norm,
:math:`C_1 \le C` the bound on gradients and R a logarithm that differs between the
theorems, both take the least :math:`\delta_0` that a tail bound admits, and both add W
for weight decay:

.. math::
  \mu_* = b_2 \frac{1 - b_2^T}{1 - b_2}
    \Big(\Phi - \frac{2 \Phi}{\pi} + \big(C + \sqrt{2 \Phi / \pi}\big)^2\Big), \quad
  \nu_* = 2 b_2^2 \Phi \sqrt{\frac{1 - b_2^{2T}}{1 - b_2^2}}, \quad b_* = 4 b_2 \Phi

.. math::
  \delta_0 \ge \mu_* + \begin{cases}
    \sqrt{2 \nu_*^2 \ln(2 T / \alpha)} & \delta_0 \le \nu_*^2 / b_* \\
    2 b_* \ln(2 T / \alpha) & \delta_0 \ge \nu_*^2 / b_* \end{cases}

.. math::
  W = \frac{1}{2T} \Big(C_1^2 + \|\theta_0\|^2
    + \big(1 + \tfrac1\lambda\big) \max_t (\eta_t + \eta_t^2) R\Big)
    \Big(\lambda \sum_t \eta_t + \frac{L}{2} (\lambda + \lambda^2) \sum_t \eta_t^2\Big)

What is wrong:

1. :math:`\mu_*` grows as :math:`1 / (1 - b_2)`. With the rates for which convergence is
   claimed, :math:`\eta = T^{-2/3}` and :math:`1 - b_2 = T^{-0.99}`, the right side
   *grows* with T: 147, 661, 3,029, 13,911 at T = 1e3, ..., 1e6, where no squared
   gradient exceeds 1.
2. With fixed weight decay the squared gradient does not vanish, as is claimed: it is
   0.20, 0.39, 0.47 at T = 1e3, 1e4, 1e5, where it is 0.026, 0.012, 0.006 without.
3. The proof divides by the factor of the squared gradient, which multiplies everything
   by :math:`2 (\delta_0 + C_1) / \eta`: W lacks it, and half of its L.
4. R has a factor d, and so has what multiplies it: d copies of a problem have d times
   the squared gradient and :math:`d^2` times the printed term. In Theorem 3.6 that
   product is not divided by T either.
5. :math:`\delta_0` bounds a square and :math:`C_1` a gradient; their sum has no unit,
   and the sum in W has three. So the printed number changes with the unit of the loss.
   In small units it is *below* the squared gradient of a run that a large
   :math:`\epsilon_0`, which the sum leaves out, slows down.
6. For DP-AdamW-BC :math:`-\Phi` stands where :math:`\epsilon_0` stood, and the floor is
   nowhere: a large floor stops the run, which the theorem does not see. Half of the
   coordinates without signal have :math:`\hat v < \Phi`, where its root is not real.
7. Theorem 3.6 needs :math:`b_1 < b_2`, which it does not say, and has
   :math:`\delta_0` where its proof has :math:`\delta_0 + C_1`.
"""

import dataclasses
import math

import numpy as np

from dpadambc.core import validate

__all__ = [
    "Setting",
    "adamw",
    "adamw_bc",
    "adamw_bc_with_momentum",
    "adamw_with_momentum",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    r"""The constants of the theorems, by their names in this library.

    Attributes:
      initial_gap: :math:`F(\theta_0) - F_*`.
      smoothness: :math:`L`.
      l2_clip_norm: :math:`C`.
      gradient_bound: :math:`C_1`, on the norm of any batch's gradient, at most C.
      noise_variance: :math:`\Phi`, positive.
      iterations: :math:`T`.
      learning_rate: :math:`\eta`.
      b1: decay rate of the first moment, of Theorem 3.6 alone.
      b2: decay rate of the second moment.
      weight_decay: :math:`\lambda`, positive: W divides by it.
      eps_root: :math:`\epsilon_0`.
      num_coordinates: :math:`d`.
      initial_norm: :math:`\|\theta_0\|`.
      alpha: the probability that the theorem says nothing about a run.

    Example:
      >>> from benchmarks.theory import as_printed
      >>> setting = as_printed.Setting(
      ...     initial_gap=1.0, smoothness=1.0, l2_clip_norm=1.0, gradient_bound=1.0,
      ...     noise_variance=0.01, iterations=1_000, learning_rate=0.01, b2=0.999,
      ...     weight_decay=0.01)
      >>> print(round(setting.second_moment_bound))  # delta_0, for gradients up to 1
      740
    """

    initial_gap: float
    smoothness: float
    l2_clip_norm: float
    gradient_bound: float
    noise_variance: float
    iterations: int
    learning_rate: float
    b2: float
    weight_decay: float
    b1: float = 0.9
    eps_root: float = 1e-4
    num_coordinates: int = 1
    initial_norm: float = 0.0
    alpha: float = 0.05

    def __post_init__(self):
        """Refuses numbers outside of the ranges of the theorems."""
        validate.positive(noise_variance=self.noise_variance)
        validate.positive(weight_decay=self.weight_decay)
        validate.positive(learning_rate=self.learning_rate)
        validate.positive(eps_root=self.eps_root)
        validate.open_unit_interval(b1=self.b1)
        validate.open_unit_interval(b2=self.b2)
        validate.open_unit_interval(alpha=self.alpha)
        validate.count(iterations=self.iterations, least=1)
        if self.gradient_bound > self.l2_clip_norm:
            raise ValueError(
                f"Expected gradient_bound to be at most l2_clip_norm, got "
                f"{self.gradient_bound:g} and {self.l2_clip_norm:g}."
            )

    @property
    def second_moment_bound(self) -> float:
        r"""The least :math:`\delta_0`."""
        phi, b2, steps = self.noise_variance, self.b2, self.iterations
        mean = math.sqrt(2 * phi / math.pi)
        mu = phi - 2 * phi / math.pi + (self.l2_clip_norm + mean) ** 2
        mu *= b2 * (1 - b2**steps) / (1 - b2)
        nu = 2 * b2**2 * phi * math.sqrt((1 - b2 ** (2 * steps)) / (1 - b2**2))
        b = 4 * b2 * phi
        log = math.log(2 * steps / self.alpha)
        first = mu + math.sqrt(2 * nu**2 * log)
        return first if first <= nu**2 / b else max(mu + 2 * b * log, nu**2 / b)

    def decay_term(self, logarithm: float, rate: float) -> float:
        """W, for the theorem's R and the rate that its schedule starts from."""
        steps, decay = np.arange(1, self.iterations + 1), self.weight_decay
        rates = rate * np.sqrt((1 - self.b2**steps) / (1 - self.b2))
        drift = (1 + 1 / decay) * np.max(rates + rates**2) * logarithm
        squares = self.gradient_bound**2 + self.initial_norm**2 + drift
        curvature = self.smoothness / 2 * (decay + decay**2) * np.sum(rates**2)
        return float(squares * (decay * np.sum(rates) + curvature)) / (2 * steps.size)

    def logarithm(self, ratio: float) -> float:
        r"""R, :math:`d (\ln|1 + \cdot| - T \ln b_2)`."""
        fading = self.iterations * math.log(self.b2)
        return self.num_coordinates * (math.log(abs(1 + ratio)) - fading)


def adamw(setting: Setting) -> float:
    r"""The right side of Theorem 3.5 for DP-AdamW, b1 = 0. Not a bound.

    .. math::
      \frac{2 (\delta_0 + C_1)}{\eta T} (F_0 - F_*) + \Big(
        \frac{4 d (C^2 + \Phi)}{\sqrt{1 - b_2}}
        + \frac{\eta d L \sqrt{C^2 + \Phi} (1 + \lambda)}{1 - b_2}\Big) \frac{R}{T} + W,
      \quad R = d \Big(\ln\big(1 + \frac{C^2 + \Phi}{(1 - b_2) \epsilon_0}\big)
        - T \ln b_2\Big)

    Flaws 1 to 5 of this module. Use `theory.adam_convergence_bound`.

    Args:
      setting: the theorem's constants.

    Returns:
      What is printed as a bound on the mean squared gradient.

    Example:
      >>> from benchmarks.theory import as_printed
      >>> for T in (1_000, 1_000_000):  # it grows
      ...     print(round(as_printed.adamw(as_printed.Setting(
      ...         initial_gap=1.0, smoothness=1.0, l2_clip_norm=1.0, gradient_bound=1.0,
      ...         noise_variance=0.01, iterations=T, learning_rate=T**(-2 / 3),
      ...         b2=1 - T**-0.99, weight_decay=0.01))))
      147
      13911

    References:
      `DP-AdamW <https://arxiv.org/abs/2511.07843>`_, Theorem 3.5
    """
    square = setting.l2_clip_norm**2 + setting.noise_variance
    logarithm = setting.logarithm(square / ((1 - setting.b2) * setting.eps_root))
    scale = setting.second_moment_bound + setting.gradient_bound
    return _without_momentum(setting, scale, square, logarithm)


def adamw_bc(setting: Setting) -> float:
    r"""The right side of Theorem 3.5 for DP-AdamW-BC, b1 = 0. Not a bound.

    .. math::
      \frac{2 \sqrt{(\delta_0 + C_1)^2 - \Phi}}{\eta T} (F_0 - F_*) + \Big(
        \frac{4 d C^2}{\sqrt{1 - b_2}} + \frac{\eta d L C (1 + \lambda)}{1 - b_2}\Big)
        \frac{R}{T} + W,
      \quad R = d \Big(\ln\big|1 - \frac{C^2 + \Phi}{(1 - b_2) \Phi}\big|
        - T \ln b_2\Big)

    Flaws 1 to 6 of this module. Use `theory.adam_bc_convergence_bound`.

    Args:
      setting: the theorem's constants.

    Returns:
      What is printed as a bound on the mean squared gradient; nan where its root is not
      real.

    Example:
      >>> from benchmarks.theory import as_printed
      >>> print(round(as_printed.adamw_bc(as_printed.Setting(
      ...     initial_gap=1.0, smoothness=1.0, l2_clip_norm=1.0, gradient_bound=1.0,
      ...     noise_variance=0.01, iterations=1_000_000, learning_rate=1e-4,
      ...     b2=1 - 1e-6, weight_decay=0.01))))
      14786

    References:
      `DP-AdamW <https://arxiv.org/abs/2511.07843>`_, Theorem 3.5
    """
    square, phi = setting.l2_clip_norm**2, setting.noise_variance
    logarithm = setting.logarithm(-(square + phi) / ((1 - setting.b2) * phi))
    scale = setting.second_moment_bound + setting.gradient_bound
    return _without_momentum(setting, _root(scale**2 - phi), square, logarithm)


def adamw_with_momentum(setting: Setting) -> float:
    r"""The right side of Theorem 3.6 for DP-AdamW, b1 > 0. Not a bound.

    .. math::
      \frac{2 (\delta_0 + C_1)}{\eta \tilde T} (F_0 - F_*) + E R + W, \quad
      \tilde T = T - \frac{b_1}{1 - b_1}, \quad
      R = d \Big(\ln\big(1 + \frac{\delta_0^2}{(1 - b_2) \epsilon_0}\big)
        - T \ln b_2\Big)

    .. math::
      E = \frac{\eta d L (1 - b_1) \delta_0}{(1 - b_1 / b_2)(1 - b_2)}
        + \frac{2 \eta^2 d L^2 b_1}{(1 - b_1 / b_2)(1 - b_2)^{3/2}}
        + \frac{12 d \delta_0^2 \sqrt{1 - b_1}}{(1 - b_1 / b_2)^{3/2} \sqrt{1 - b_2}}

    Flaws 1 to 5 and 7 of this module. No bound with momentum is offered in its place.

    Args:
      setting: the theorem's constants.

    Returns:
      What is printed as a bound on the expected squared gradient at a random step.

    Raises:
      ValueError: unless b1 < b2 and T > b1 / (1 - b1).

    Example:
      >>> from benchmarks.theory import as_printed
      >>> setting = as_printed.Setting(
      ...     initial_gap=1.0, smoothness=1.0, l2_clip_norm=1.0, gradient_bound=1.0,
      ...     noise_variance=0.01, iterations=1_000_000, learning_rate=1e-4,
      ...     b2=1 - 1e-6, weight_decay=0.01)
      >>> print(f"{as_printed.adamw_with_momentum(setting):.0e}")
      3e+18

    References:
      `DP-AdamW <https://arxiv.org/abs/2511.07843>`_, Theorem 3.6
    """
    bound = setting.second_moment_bound
    logarithm = setting.logarithm(bound**2 / ((1 - setting.b2) * setting.eps_root))
    first = bound + setting.gradient_bound
    return _with_momentum(setting, first, bound, logarithm)


def adamw_bc_with_momentum(setting: Setting) -> float:
    r"""The right side of Theorem 3.6 for DP-AdamW-BC, b1 > 0. Not a bound.

    It is `adamw_with_momentum` with :math:`\sqrt{(\delta_0 + C_1)^2 - \Phi}` for
    :math:`\delta_0 + C_1`, :math:`\sqrt{\delta_0^2 - \Phi}` for :math:`\delta_0` in E,
    and

    .. math::
      R = d \Big(\ln\big|1 - \frac{\delta_0^2}{(1 - b_2) \Phi}\big| - T \ln b_2\Big)

    Flaws 1 to 7 of this module. No bound with momentum is offered in its place.

    Args:
      setting: the theorem's constants.

    Returns:
      What is printed as a bound on the expected squared gradient at a random step; nan
      where a root is not real.

    Raises:
      ValueError: unless b1 < b2 and T > b1 / (1 - b1).

    Example:
      >>> from benchmarks.theory import as_printed
      >>> as_printed.adamw_bc_with_momentum(as_printed.Setting(
      ...     initial_gap=1.0, smoothness=1.0, l2_clip_norm=1e-4, gradient_bound=1e-4,
      ...     noise_variance=1e-8, iterations=1_000, learning_rate=1e-2, b2=0.999,
      ...     weight_decay=0.01))  # the square of delta_0 is less than the variance
      nan

    References:
      `DP-AdamW <https://arxiv.org/abs/2511.07843>`_, Theorem 3.6
    """
    bound, phi = setting.second_moment_bound, setting.noise_variance
    logarithm = setting.logarithm(-(bound**2) / ((1 - setting.b2) * phi))
    first = _root((bound + setting.gradient_bound) ** 2 - phi)
    return _with_momentum(setting, first, _root(bound**2 - phi), logarithm)


def _root(x: float) -> float:
    """The real square root, or nan."""
    return math.sqrt(x) if x >= 0 else math.nan


def _without_momentum(
    setting: Setting, scale: float, square: float, logarithm: float
) -> float:
    """Theorem 3.5, with its factor of the gap, its squared gradient and its R."""
    s = setting
    gap = 2 * scale * s.initial_gap / (s.learning_rate * s.iterations)
    curvature = s.learning_rate * s.smoothness * math.sqrt(square) / (1 - s.b2)
    variation = s.num_coordinates * (
        4 * square / math.sqrt(1 - s.b2) + curvature * (1 + s.weight_decay)
    )
    decay = s.decay_term(logarithm, s.learning_rate)
    return gap + variation * logarithm / s.iterations + decay


def _with_momentum(
    setting: Setting, scale: float, bound: float, logarithm: float
) -> float:
    """Theorem 3.6, with its factor of the gap, its delta_0 in E and its R."""
    s = setting
    if s.b1 >= s.b2:
        raise ValueError(
            f"Expected b1 to be less than b2, got {s.b1:g} and {s.b2:g}: the theorem "
            "divides by a root of 1 - b1 / b2."
        )
    steps = s.iterations - s.b1 / (1 - s.b1)
    if steps <= 0:
        raise ValueError(
            f"Expected more than b1 / (1 - b1) = {s.b1 / (1 - s.b1):g} iterations, got "
            f"{s.iterations}."
        )
    left, short = 1 - s.b1 / s.b2, 1 - s.b2
    steepness = s.learning_rate * s.smoothness
    variation = s.num_coordinates * (
        steepness * (1 - s.b1) * bound / (left * short)
        + 2 * steepness**2 * s.b1 / (left * short**1.5)
        + 12 * bound**2 * math.sqrt(1 - s.b1) / (left**1.5 * math.sqrt(short))
    )
    gap = 2 * scale * s.initial_gap / (s.learning_rate * steps)
    decay = s.decay_term(logarithm, s.learning_rate * (1 - s.b1))
    return gap + variation * logarithm + decay

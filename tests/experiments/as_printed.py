r"""Theorems 3.5 and 3.6 of DP-AdamW as printed. They are **not** bounds.

They are here to be refuted: the README of `benchmarks/theory` has their formulas and
seven flaws, and the tests show each by a number or a run. What can be proved is in
`theory.adam_convergence_bound` and `theory.adam_bc_convergence_bound`.

Each function returns the right side for a `Setting`: nan where a root is not real.
"""

import dataclasses
import math

import numpy as np

from dpadambc.core import validate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """The constants of the theorems, by their names in this library."""

    initial_gap: float  # F_0 - F_*
    smoothness: float  # L
    l2_clip_norm: float  # C
    gradient_bound: float  # C_1, on the norm of any batch's gradient, at most C
    noise_variance: float  # Phi, positive
    iterations: int  # T
    learning_rate: float  # eta
    b2: float
    weight_decay: float  # lambda, positive: W divides by it
    b1: float = 0.9  # of Theorem 3.6 alone
    eps_root: float = 1e-4  # epsilon_0
    num_coordinates: int = 1  # d
    initial_norm: float = 0.0  # of theta_0
    alpha: float = 0.05  # the probability that the theorem says nothing about a run

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
    """Theorem 3.5 for DP-AdamW, b1 = 0, with flaws 1 to 5."""
    square = setting.l2_clip_norm**2 + setting.noise_variance
    logarithm = setting.logarithm(square / ((1 - setting.b2) * setting.eps_root))
    scale = setting.second_moment_bound + setting.gradient_bound
    return _without_momentum(setting, scale, square, logarithm)


def adamw_bc(setting: Setting) -> float:
    """Theorem 3.5 for DP-AdamW-BC, b1 = 0, with flaws 1 to 6."""
    square, phi = setting.l2_clip_norm**2, setting.noise_variance
    logarithm = setting.logarithm(-(square + phi) / ((1 - setting.b2) * phi))
    scale = setting.second_moment_bound + setting.gradient_bound
    return _without_momentum(setting, _root(scale**2 - phi), square, logarithm)


def adamw_with_momentum(setting: Setting) -> float:
    """Theorem 3.6 for DP-AdamW, b1 > 0, with flaws 1 to 5 and 7."""
    bound = setting.second_moment_bound
    logarithm = setting.logarithm(bound**2 / ((1 - setting.b2) * setting.eps_root))
    first = bound + setting.gradient_bound
    return _with_momentum(setting, first, bound, logarithm)


def adamw_bc_with_momentum(setting: Setting) -> float:
    """Theorem 3.6 for DP-AdamW-BC, b1 > 0, with flaws 1 to 7."""
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

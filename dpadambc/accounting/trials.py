"""Distributions of the number of trials in a search over hyperparameters.

The best of a fixed number of private runs is far less private than one of them: if
*all* other trials did worse, this reveals something of each. A random, secret number of
trials hides the single trial. The distributions are public; the draw is secret.
`search` has the cost of a search.
"""

import abc
import dataclasses
import functools
import math

import numpy as np
import scipy.optimize
import scipy.special
import scipy.stats

from dpadambc.core import validate


class Trials(abc.ABC):
    """A distribution of the number of trials.

    Example:
      >>> from dpadambc import accounting
      >>> isinstance(accounting.GeometricTrials(8), accounting.Trials)
      True
    """

    @property
    @abc.abstractmethod
    def expected(self) -> float:
        """The expected number of trials."""

    @abc.abstractmethod
    def pmf(self, number: np.ndarray | int) -> np.ndarray:
        """Returns the probability of each of these numbers of trials."""

    @abc.abstractmethod
    def sample(self, rng: np.random.Generator) -> int:
        """Draws a number of trials; it is secret, and so is the generator's seed."""


@dataclasses.dataclass(frozen=True)
class _OfMean(Trials):
    """A distribution that is given by its mean."""

    mean: float

    def __post_init__(self):
        validate.non_negative(mean=self.mean)
        if self.mean < 1:
            raise ValueError(
                f"Expected a mean of at least one trial, got mean={self.mean}."
            )

    @property
    def expected(self) -> float:
        """The expected number of trials."""
        return float(self.mean)


@dataclasses.dataclass(frozen=True)
class TruncatedNegativeBinomial(_OfMean):
    r"""A distribution of at least one trial, from concentrated to heavy-tailed.

    .. math:: P(K = k) = \frac{(1 - \gamma)^k}{\gamma^{-\eta} - 1}
        \binom{k + \eta - 1}{k}, \quad k = 1, 2, \dots

    with the shape η, and γ such that the mean is the requested one. Large shapes are
    concentrated. Shape 1 is the geometric distribution, shape 0 (the limit) the
    logarithmic one. Small shapes cost less privacy for the same mean, and end more
    often after a few trials.

    Args:
      mean: the expected number of trials, at least 1.
      shape: η, non-negative.

    Raises:
      TypeError: if a number is not a number.
      ValueError: if a number is out of its range.

    Example:
      >>> from dpadambc import accounting
      >>> logarithmic = accounting.TruncatedNegativeBinomial(8, shape=0)
      >>> geometric = accounting.GeometricTrials(8)
      >>> print(logarithmic.pmf(1).round(3), geometric.pmf(1).round(3))
      0.291 0.125

    References:
      Papernot and Steinke, `Hyperparameter Tuning with Renyi Differential Privacy
      <https://arxiv.org/abs/2110.03620>`_, 2021, Definition 1
    """

    shape: float

    def __post_init__(self):
        super().__post_init__()
        validate.non_negative(shape=self.shape)

    @functools.cached_property
    def gamma(self) -> float:
        """The parameter γ, in (0, 1], that gives the mean; 1 for a mean of 1."""
        if self.mean == 1:
            return 1.0
        least = -2 * math.log(self.mean)  # that of shape 0, whose mean is the least

        def gap(x: float) -> float:
            mean = math.expm1(x) * math.exp(-x) / self._power(x) if x else 1.0
            return math.log(mean / self.mean)

        numbers = dict(bracket=(least, 0.0), xtol=1e-15, rtol=1e-14)
        return math.exp(scipy.optimize.root_scalar(gap, **numbers).root)

    def _power(self, x: float) -> float:
        """Computes (exp(shape x) - 1) / shape, for a shape near 0 its limit."""
        return math.expm1(self.shape * x) / self.shape if self.shape > 1e-12 else x

    @property
    def _first(self) -> float:
        """The probability of one trial, P(K = 1)."""
        if self.gamma == 1:
            return 1.0
        x = math.log(self.gamma)
        return math.expm1(x) * math.exp(self.shape * x) / self._power(x)

    def pmf(self, number: np.ndarray | int) -> np.ndarray:
        """Returns the probability of each of these numbers of trials."""
        k = np.asarray(number)
        later, gammaln = np.maximum(k, 1) - 1.0, scipy.special.gammaln
        log_ratio = gammaln(later + 1 + self.shape) - gammaln(1 + self.shape)
        log_ratio += scipy.special.xlog1py(later, -self.gamma) - gammaln(later + 2)
        return np.where(k >= 1, self._first * np.exp(log_ratio), 0.0)

    def sample(self, rng: np.random.Generator) -> int:
        """Draws a number of trials, by inversion; it is secret."""
        left, probability, k = rng.random(), self._first, 1
        while left >= probability > 0:
            left -= probability
            probability *= (1 - self.gamma) * (k + self.shape) / (k + 1)
            k += 1
        return k


@dataclasses.dataclass(frozen=True)
class GeometricTrials(TruncatedNegativeBinomial):
    """A distribution of at least one trial, with a constant chance of another.

    Args:
      mean: the expected number of trials, at least 1.

    Attributes:
      shape: always 1.

    Raises:
      TypeError: if it is not a number.
      ValueError: if it is less than one.

    Example:
      >>> import numpy as np
      >>> from dpadambc import accounting
      >>> rng = np.random.default_rng(0)
      >>> [accounting.GeometricTrials(8).sample(rng) for _ in range(5)]
      [8, 3, 1, 1, 13]
    """

    shape: float = dataclasses.field(default=1.0, init=False)


@dataclasses.dataclass(frozen=True)
class PoissonTrials(_OfMean):
    """A Poisson number of trials; with none, nothing is returned.

    Args:
      mean: the expected number of trials, at least 1.

    Raises:
      TypeError: if it is not a number.
      ValueError: if it is less than one.

    Example:
      >>> from dpadambc import accounting
      >>> print(accounting.PoissonTrials(8).pmf(0).round(5))
      0.00034

    References:
      Papernot and Steinke, `Hyperparameter Tuning with Renyi Differential Privacy
      <https://arxiv.org/abs/2110.03620>`_, 2021, Theorem 6
    """

    def pmf(self, number: np.ndarray | int) -> np.ndarray:
        """Returns the probability of each of these numbers of trials."""
        return scipy.stats.poisson.pmf(number, self.mean)

    def sample(self, rng: np.random.Generator) -> int:
        """Draws a number of trials; it is secret."""
        return int(rng.poisson(self.mean))


@dataclasses.dataclass(frozen=True)
class FixedTrials(Trials):
    """A fixed number of trials: they compose, and all of them may be published.

    Args:
      number: the number of trials, at least 1.

    Raises:
      TypeError: if it is not an int.
      ValueError: if it is less than one.

    Example:
      >>> from dpadambc import accounting
      >>> accounting.FixedTrials(8).expected
      8.0
    """

    number: int

    def __post_init__(self):
        validate.count(least=1, number=self.number)

    @property
    def expected(self) -> float:
        """The number of trials."""
        return float(self.number)

    def pmf(self, number: np.ndarray | int) -> np.ndarray:
        """Returns one for the number, and zero for others."""
        return np.where(np.asarray(number) == self.number, 1.0, 0.0)

    def sample(self, rng: np.random.Generator) -> int:
        """Returns the number of trials, which is not secret."""
        del rng
        return int(self.number)

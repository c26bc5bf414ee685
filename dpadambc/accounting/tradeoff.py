r"""The meaning of an epsilon: the errors of an attacker on neighboring data sets.

An attacker sees all that was released and says whether one example was in the data.
There are two errors: a false alarm (false positive rate α) and a miss (false negative
rate β). A mechanism that is (ε, δ)-private, for all ε of its profile δ(ε), forces

.. math:: \beta \ge f(\alpha) = \max_{\varepsilon \ge 0} \max(0,\;
    1 - \delta(\varepsilon) - e^\varepsilon \alpha,\;
    e^{-\varepsilon} (1 - \delta(\varepsilon) - \alpha))

on every attack, for either true data set: δ is the larger of the two directions, so f
is symmetric. The profile is from above, and a maximum over fewer ε is smaller, so f is
from below and the success of attackers from above, except for the rounding of the sums
here in float64, some 1e-12. The rounding of compositions is added to δ.
"""

import dataclasses
import math

import numpy as np
import numpy.typing as npt
import scipy.stats

from dpadambc.core import validate
from dpadambc.core.accounting import PLD, rounding_of
from dpadambc.core.mechanism import Mechanism
from dpadambc.mechanisms.checks import check_mechanism

# The privacy losses are on a grid that suits this delta; see `PLD.on_fine_grid`.
_TARGET_DELTA = 1e-6
# The largest ε of the profile is the one that goes with this δ.
_LEAST_DELTA = 1e-12
_NUM_EPSILONS = 2_000


@dataclasses.dataclass(frozen=True)
class TradeOff:
    """The least rate of misses for each rate of false alarms, from a profile δ(ε).

    Attributes:
      epsilons: shape (levels,), increasing, the first at least 0.
      deltas: shape (levels,), the delta of each epsilon.

    Example:
      >>> import dpadambc
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.85, sampling_prob=1024 / 50_000,
      ...     iterations=3_360, normalize_by=1024)
      >>> from dpadambc import accounting
      >>> trade_off = accounting.trade_off(mechanism)  # epsilon 2.9 at delta 1e-5
      >>> print(trade_off.true_positive_rate([1e-3, 1e-2, 1e-1]).round(4))
      [0.0084 0.0514 0.2775]
      >>> print(f"{trade_off.gaussian_mu():.2f}")
      0.70

    References:
      Dong et al., `Gaussian Differential Privacy <https://arxiv.org/abs/1905.02383>`_,
      2019, Proposition 2.5
    """

    epsilons: np.ndarray
    deltas: np.ndarray

    def false_negative_rate(self, false_positive_rate: npt.ArrayLike) -> np.ndarray:
        """Computes the least rate of misses of any attack, f(α), from below.

        Args:
          false_positive_rate: α, in [0, 1], any shape.

        Returns:
          An array of the same shape; 1 - α where nothing is learned.

        Raises:
          ValueError: if a rate is outside [0, 1].
        """
        alpha = np.asarray(false_positive_rate, float)
        for rate in alpha.flat:
            validate.probability(false_positive_rate=rate)
        alpha = alpha[..., None]
        lines = 1 - self.deltas - np.exp(self.epsilons) * alpha
        mirrored = np.exp(-self.epsilons) * (1 - self.deltas - alpha)
        return np.maximum(0, np.maximum(lines, mirrored).max(axis=-1))

    def true_positive_rate(self, false_positive_rate: npt.ArrayLike) -> np.ndarray:
        """Computes the most members that any attack can find, 1 - f(α), from above.

        Args:
          false_positive_rate: the fraction of non-members that it takes for members, in
            [0, 1], any shape.

        Returns:
          An array of the same shape; the false positive rate itself where nothing is
          learned.

        Raises:
          ValueError: if a rate is outside [0, 1].
        """
        return 1 - self.false_negative_rate(false_positive_rate)

    @property
    def equal_error_rate(self) -> float:
        """The least α that an attack can have with as many misses: f(α) = α."""
        return float(np.max((1 - self.deltas) / (1 + np.exp(self.epsilons))))

    def gaussian_mu(self, least_error_rate: float = 1e-6) -> float:
        r"""Computes the μ of Gaussian differential privacy, for countable errors.

        The mechanism is as private as *one* look at a number with Gaussian noise of
        standard deviation 1/μ that an example moves by 1. Precisely, μ is the smallest
        for which no attack whose false positive rate and false negative rate are both
        at least `least_error_rate` does better than the best attack against that
        Gaussian,

        .. math:: f(\alpha) \ge \Phi(\Phi^{-1}(1 - \alpha) - \mu).

        It says nothing of rarer errors: with sampling, the events of one in a billion
        runs are those in which an example took part far more often, and μ grows.

        Args:
          least_error_rate: the least rate that counts, in (0, 1).

        Returns:
          μ, from above: 1/z for the Gaussian with noise multiplier z. Infinity if an
          attack may have fewer errors of both kinds than `least_error_rate`.

        Raises:
          ValueError: if the rate is outside (0, 1).
        """
        validate.open_unit_interval(least_error_rate=least_error_rate)
        last = self.equal_error_rate
        if last < least_error_rate:
            return math.inf
        # Between its corners f is straight, and the Gaussian's curve is convex: where
        # it does not exceed f at corners, it does so nowhere. Beyond f(α) = α both
        # curves are mirrored.
        odds = np.exp(self.epsilons)
        corners = -np.diff(self.deltas) / np.diff(odds)
        corners = np.clip(corners, least_error_rate, last)
        alpha = np.unique([least_error_rate, last, *corners])
        beta = self.false_negative_rate(alpha)
        mu = scipy.stats.norm.isf(alpha) - scipy.stats.norm.ppf(beta)
        return max(0.0, float(np.max(mu)))


def trade_off(mechanism: Mechanism, iterations: int | None = None) -> TradeOff:
    """Computes the errors that no attack on a run can avoid.

    Args:
      mechanism: the public numbers.
      iterations: the number of steps taken; `mechanism.iterations` by default.

    Returns:
      A `TradeOff`. Without noise, or where epsilon is astronomical, no error is left.

    Raises:
      ValueError: if no privacy loss distribution of the sampling is known under the
        neighboring relation.

    Example:
      >>> import dpadambc
      >>> from dpadambc import accounting
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=2.0, sampling_prob=0.1, iterations=100,
      ...     normalize_by=100)
      >>> found = accounting.trade_off(mechanism)
      >>> print(f"{found.true_positive_rate(0.01):.2f}")
      0.04
    """
    check_mechanism(mechanism)
    event, relation = mechanism.dp_event(iterations), mechanism.neighboring_relation
    if PLD.is_astronomical(event):
        return TradeOff(np.zeros(1), np.ones(1))
    losses = PLD.on_fine_grid(event, relation, _TARGET_DELTA).losses
    # Where mass is at infinity, no ε has a δ below it.
    floor = float(losses.get_delta_for_epsilon(math.inf))
    largest = losses.get_epsilon_for_delta(floor + _LEAST_DELTA)
    epsilons = np.unique(np.linspace(0, min(largest, 700.0), _NUM_EPSILONS))
    deltas = np.asarray(losses.get_delta_for_epsilon(epsilons.tolist()))
    deltas += rounding_of(event)  # of the composition
    return TradeOff(epsilons, np.clip(deltas, 0, 1))

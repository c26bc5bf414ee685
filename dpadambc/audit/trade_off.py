"""How well an attack can tell two data sets apart: the claim, and observed errors."""

import dataclasses
import math
from typing import Any, cast

import numpy as np
import scipy.stats

from dpadambc import accounting
from dpadambc.core import validate
from dpadambc.core.mechanism import Mechanism

__all__ = ["Observed", "claimed", "family_epsilon", "observed", "one_run_epsilon"]


def claimed(mechanism: Mechanism, false_positive_rate: np.ndarray) -> np.ndarray:
    """The least rate of misses that the mechanism allows, for each rate of alarms.

    The curve of `accounting.trade_off`, from below: it is no higher than the claim, so
    the grid that it is computed on makes nothing fail.

    Args:
      mechanism: with the PLD accountant.
      false_positive_rate: α, in [0, 1], any shape.

    Returns:
      f(α), of the same shape.

    Example:
      >>> import numpy as np
      >>> import dpadambc
      >>> from dpadambc.audit import trade_off
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=1.0, iterations=1,
      ...     normalize_by=1)
      >>> print(trade_off.claimed(mechanism, np.array([0.05])).round(2))  # Φ(1.64 - 1)
      [0.74]

    References:
      Dong et al., `Gaussian Differential Privacy <https://arxiv.org/abs/1905.02383>`_,
      2019
    """
    return accounting.trade_off(mechanism).false_negative_rate(false_positive_rate)


def _p_value(epsilon: float, correct: int, guesses: int, canaries: int, delta: float):
    """The chance of so many correct guesses, if the run were private."""
    number = np.arange(correct + 1)
    chances = scipy.stats.binom.pmf(number, guesses, 1 / (1 + math.exp(-epsilon)))
    beta = scipy.stats.binom.sf(correct - 1, guesses, 1 / (1 + math.exp(-epsilon)))
    below = np.cumsum(chances[:correct][::-1])  # of correct - i to correct - 1
    alpha = float(np.max(below / np.arange(1, correct + 1), initial=0.0))
    return min(1.0, float(beta) + 2 * canaries * delta * alpha)


def one_run_epsilon(
    correct: int, guesses: int, *, num_canaries: int, delta: float, confidence: float
) -> float:
    """The largest ε that one run refutes, by guesses of which canaries were in it.

    Each canary was in the data with probability 1/2, whatever the others did. Nothing
    else is assumed: not that canaries do not influence each other.

    Args:
      correct: how many guesses were right.
      guesses: how many were made; there may be abstentions.
      num_canaries: how many canaries were drawn.
      delta: the δ that goes with ε.
      confidence: of the statement that ε is larger, in (0, 1).

    Returns:
      A lower bound on ε; 0 if nothing is refuted.

    Example:
      >>> from dpadambc.audit import trade_off
      >>> epsilon = trade_off.one_run_epsilon(
      ...     95, 100, num_canaries=1_000, delta=1e-5, confidence=0.95)
      >>> round(epsilon, 2)
      2.17

    References:
      Steinke et al., `Privacy Auditing with One (1) Training Run
      <https://arxiv.org/abs/2305.08846>`_, 2023, Theorem 5.2
    """
    validate.count(correct=correct)
    validate.count(guesses=guesses, least=correct)
    validate.count(num_canaries=num_canaries, least=max(guesses, 1))
    validate.probability(delta=delta)
    validate.open_unit_interval(confidence=confidence)
    refuted = lambda epsilon: (
        _p_value(epsilon, correct, guesses, num_canaries, delta) < 1 - confidence
    )
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high) and high < 64:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


@dataclasses.dataclass(frozen=True)
class Observed:
    """Bounds on the two errors of an attack, of a stated confidence together.

    Attributes:
      false_positive_rate: upper bounds, one for each threshold. shape=(thresholds,).
      false_negative_rate: upper bounds, one for each threshold. shape=(thresholds,).
    """

    false_positive_rate: np.ndarray
    false_negative_rate: np.ndarray

    def epsilon(self, delta: float) -> float:
        """The largest ε that these errors refute."""
        alpha, beta = self.false_positive_rate, self.false_negative_rate
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.concatenate(
                [(1 - delta - beta) / alpha, (1 - delta - alpha) / beta]
            )
        return float(np.log(np.maximum(ratios, 1.0)).max(initial=0.0))


def observed(
    scores: np.ndarray,
    is_member: np.ndarray,
    *,
    confidence: float,
    num_thresholds: int = 5,
) -> Observed:
    """The errors of an attack that calls high scores members.

    Half of the scores choose the thresholds, and the other half is counted at them. The
    counts have Clopper-Pearson bounds, with the confidence split among all of them.
    They assume that scores are independent given who is a member, as those of canaries
    in separate runs are, or of gradient canaries in coordinates of their own.

    Args:
      scores: shape (canaries,), high for members.
      is_member: shape (canaries,), bool.
      confidence: that all bounds hold, in (0, 1).
      num_thresholds: at how many the errors are bounded.

    Returns:
      An `Observed`.

    Example:
      >>> import numpy as np
      >>> from dpadambc.audit import trade_off
      >>> is_member = np.arange(2_000) % 2 == 0
      >>> scores = np.random.default_rng(0).normal(size=2_000) + 2 * is_member
      >>> errors = trade_off.observed(scores, is_member, confidence=0.95)
      >>> 1 < errors.epsilon(1e-5) < 4
      True
    """
    validate.open_unit_interval(confidence=confidence)
    scores, is_member = np.asarray(scores, float), np.asarray(is_member, bool)
    order = np.random.default_rng(0).permutation(len(scores))
    first, second = order[::2], order[1::2]
    outside = np.sort(scores[first][~is_member[first]])
    inside = np.sort(scores[first][is_member[first]])
    if min(len(outside), len(inside)) < 2:
        raise ValueError(
            f"Expected members and others among {len(scores)} canaries, got"
            f" {int(is_member.sum())} members."
        )
    shares = np.geomspace(0.003, 0.3, num_thresholds)
    thresholds = [
        *(np.quantile(outside, 1 - share) for share in shares),
        *(np.quantile(inside, share) for share in shares),
    ]
    risk = (1 - confidence) / (2 * len(thresholds))
    of = lambda member: scores[second][is_member[second] == member]
    upper = lambda errors, n: (
        1.0 if errors == n else scipy.stats.beta.isf(risk, errors + 1, n - errors)
    )
    alarms = [upper(int(np.sum(of(False) > t)), len(of(False))) for t in thresholds]
    misses = [upper(int(np.sum(of(True) <= t)), len(of(True))) for t in thresholds]
    return Observed(np.array(alarms), np.array(misses))


def _refutes(mechanism: Mechanism, errors: Observed) -> bool:
    """Whether a point is below the trade-off function."""
    least = claimed(mechanism, errors.false_positive_rate)
    return bool(np.any(errors.false_negative_rate < least))


def family_epsilon(
    mechanism: Mechanism, errors: Observed, *, target_delta: float
) -> float:
    """The largest ε that is refuted among mechanisms with more noise than this one.

    Error rates at one threshold refute far more of mechanisms whose trade-off function
    is known than of all that are (ε, δ)-private. So this bound comes closest to the
    claim. It holds for runs whose sampling and steps are those of the mechanism, with
    noise of an unknown level.

    Args:
      mechanism: whose noise multiplier is varied; a number.
      errors: what an attack showed.
      target_delta: the δ that goes with ε.

    Returns:
      A lower bound on ε; 0 if sixteen times the noise is not refuted.

    Example:
      >>> import numpy as np
      >>> import dpadambc
      >>> from dpadambc.audit import trade_off
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=1.0, iterations=1,
      ...     normalize_by=1)
      >>> errors = trade_off.Observed(np.array([0.1]), np.array([0.65]))
      >>> epsilon = trade_off.family_epsilon(mechanism, errors, target_delta=1e-5)
      >>> 3 < epsilon < mechanism.epsilon(1e-5)
      True
    """
    with_noise = lambda factor: dataclasses.replace(
        cast(Any, mechanism), noise_multiplier=mechanism.noise_multiplier * factor
    )
    low, high = 1.0, 16.0
    if _refutes(mechanism, errors):
        return mechanism.epsilon(target_delta)
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (
            (low, middle) if _refutes(with_noise(middle), errors) else (middle, high)
        )
    return with_noise(high).epsilon(target_delta) if high < 16 else 0.0

"""Lower bounds on epsilon, from the scores of canaries after a run."""

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np
import scipy.stats

from dpadambc import accounting
from dpadambc.audit.finding import Finding, combined, not_tested, within
from dpadambc.core import validate
from dpadambc.core.mechanism import Mechanism
from dpadambc.mechanisms.checks import check_mechanism

_CHECK = "empirical epsilon"
_BY_CHANCE = 1e-6
_SHARES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)  # fractions of the canaries to guess


def one_run_epsilon(
    correct: int, guesses: int, *, num_canaries: int, delta: float, confidence: float
) -> float:
    """Finds the largest ε that one run refutes, by guesses of its members.

    Each canary was in the data with probability 1/2, independently of the others.
    Nothing else is assumed; canaries may influence each other.

    References:
      Steinke et al., `Privacy Auditing with One (1) Training Run
      <https://arxiv.org/abs/2305.08846>`_, 2023, Theorem 5.2
    """

    def is_refuted(epsilon: float) -> bool:
        """Returns whether this many correct guesses are unlikely for a private run."""
        prob = 1 / (1 + math.exp(-epsilon))
        chances = scipy.stats.binom.pmf(np.arange(correct + 1), guesses, prob)
        beta = scipy.stats.binom.sf(correct - 1, guesses, prob)
        below = np.cumsum(chances[:correct][::-1])  # correct - i to correct - 1
        alpha = float(np.max(below / np.arange(1, correct + 1), initial=0.0))
        p_value = min(1.0, float(beta) + 2 * num_canaries * delta * alpha)
        return p_value < 1 - confidence

    if not is_refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while is_refuted(high) and high < 64:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if is_refuted(middle) else (low, middle)
    return low


def _best_guesses(
    scores: np.ndarray, is_member: np.ndarray, delta: float, confidence: float
) -> tuple[float, int, int, float]:
    """Finds the best bound over some numbers of guesses, each with a part of the risk.

    Returns:
      Epsilon, the number of right guesses, the number of guesses, and the largest
      epsilon if all had been right.
    """
    count, risk = len(scores), (1 - confidence) / len(_SHARES)
    numbers: dict[str, Any] = dict(num_canaries=count, delta=delta, confidence=1 - risk)
    # Canaries of equal score are in random order, not members first.
    order = np.lexsort((np.random.default_rng(0).permutation(count), scores))
    found, most = [], 0.0
    for share in _SHARES:
        each = max(1, round(share * count / 2))
        correct = int(np.sum(is_member[order[-each:]]))
        correct += int(np.sum(~is_member[order[:each]]))
        if scipy.stats.binom.cdf(correct, 2 * each, 0.5) < _BY_CHANCE:
            raise ValueError(
                "Expected scores that are high for members, got ones by which"
                f" {correct} of {2 * each} guesses are right, fewer than by a coin."
                " Give the decrease of a loss, not the loss."
            )
        found.append((one_run_epsilon(correct, 2 * each, **numbers), correct, 2 * each))
        most = max(most, one_run_epsilon(2 * each, 2 * each, **numbers))
    return *max(found), most


class Errors(NamedTuple):
    """Bounds on the two errors of an attack, which hold jointly with a confidence.

    Attributes:
      false_positive_rate: upper bounds, one for each threshold. shape=(thresholds,).
      false_negative_rate: upper bounds, one for each threshold. shape=(thresholds,).
    """

    false_positive_rate: np.ndarray
    false_negative_rate: np.ndarray

    def epsilon(self, delta: float) -> float:
        """Returns the largest ε that these errors refute."""
        alpha, beta = self.false_positive_rate, self.false_negative_rate
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.array([(1 - delta - beta) / alpha, (1 - delta - alpha) / beta])
        return float(np.log(np.maximum(ratios, 1.0)).max(initial=0.0))

    def shortfall(self, mechanism: Mechanism) -> float:
        """Returns by how much misses are below the trade-off function."""
        curve = accounting.trade_off(mechanism)
        least = curve.false_negative_rate(self.false_positive_rate)
        return float(np.max(least - self.false_negative_rate))

    def family_epsilon(self, mechanism: Mechanism, target_delta: float) -> float:
        """Finds the largest ε refuted among mechanisms with more noise than this one.

        Error rates at one threshold refute many more of the mechanisms with a known
        trade-off function than of all that are (ε, δ)-private. So this bound is closest
        to the claim. It holds for runs with the sampling and steps of the mechanism,
        with noise of an unknown level. It is 0 if sixteen times the noise is not
        refuted.
        """
        own: Any = mechanism
        z = own.noise_multiplier
        with_noise = lambda x: dataclasses.replace(own, noise_multiplier=x * z)
        low, high = 1.0, 16.0
        if self.shortfall(mechanism) > 0:
            return mechanism.epsilon(target_delta)
        while high / low > 1.01:
            middle = math.sqrt(low * high)
            is_refuted = self.shortfall(with_noise(middle)) > 0
            low, high = (low, middle) if is_refuted else (middle, high)
        return with_noise(high).epsilon(target_delta) if high < 16 else 0.0


def observed_errors(
    scores: np.ndarray, is_member: np.ndarray, *, confidence: float
) -> Errors:
    """Bounds the errors of an attack that calls high scores members.

    Half of the scores choose the thresholds, and the errors of the other half are
    counted. The counts have Clopper-Pearson bounds, with the confidence split among all
    of them. They assume that scores are independent given the members, like those of
    canaries in separate runs, or of gradient canaries in separate coordinates.

    Args:
      scores: shape (canaries,), high for members.
      is_member: shape (canaries,), bool.
      confidence: the confidence that all bounds hold, in (0, 1).
    """
    order = np.random.default_rng(0).permutation(len(scores))
    first, second = order[::2], order[1::2]
    outside = np.sort(scores[first][~is_member[first]])
    inside = np.sort(scores[first][is_member[first]])
    if min(len(outside), len(inside)) < 2:
        raise ValueError(
            f"Expected is_member to name members and others among {len(scores)}"
            f" canaries, got {int(is_member.sum())} members."
        )
    shares = np.geomspace(0.003, 0.3, 5)
    thresholds = [*np.quantile(outside, 1 - shares), *np.quantile(inside, shares)]
    risk = (1 - confidence) / (2 * len(thresholds))

    def upper(errors: np.ndarray) -> float:
        number, count = int(np.sum(errors)), len(errors)
        if number == count:
            return 1.0
        return float(scipy.stats.beta.isf(risk, number + 1, count - number))

    others, members = (scores[second][is_member[second] == x] for x in (False, True))
    alarms = [upper(others > threshold) for threshold in thresholds]
    misses = [upper(members <= threshold) for threshold in thresholds]
    return Errors(np.array(alarms), np.array(misses))


def empirical_epsilon(
    scores: np.ndarray,
    is_member: np.ndarray,
    mechanism: Mechanism,
    *,
    target_delta: float,
    confidence: float = 0.95,
    independent: bool = False,
) -> Finding:
    """Bounds epsilon from below by guessing which canaries were in the data.

    Args:
      scores: shape (canaries,), of a finished run: high for a canary that seems to be
        in the data, such as the decrease of its loss, or `GradientCanaries.scores`.
      is_member: shape (canaries,), bool: whether it was in the data, by a fair coin.
      mechanism: the mechanism whose epsilon is claimed.
      target_delta: the δ that goes with it.
      confidence: that of each bound: a sound run fails with probability 1 - confidence.
      independent: whether scores are independent given the members, like those of
        `GradientCanaries` except for the gradients of the data. If so, there is also a
        tighter bound by error rates, and a comparison of these rates with the
        mechanism's trade-off function.

    Returns:
      A `Finding`: the largest lower bound, against the epsilon claimed. *Not tested* if
      it could not fail: if as many canaries, all guessed right, would not refute the
      claim. Its `figure` is the bound in either case.

    Raises:
      ValueError: if the shapes differ, a score is NaN, all or none are members, or the
        scores are low for members.

    Example:
      >>> import numpy as np
      >>> import dpadambc
      >>> from dpadambc import audit
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=2.0, sampling_prob=1.0, iterations=1,
      ...     normalize_by=1)
      >>> is_member = np.arange(2_000) % 2 == 0
      >>> noise = np.random.default_rng(0).normal(size=2_000)
      >>> audit.empirical_epsilon(
      ...     noise + is_member / 2, is_member, mechanism, target_delta=1e-5).passed
      True
      >>> print(audit.empirical_epsilon(
      ...     noise + 6 * is_member, is_member, mechanism, target_delta=1e-5).word)
      FAIL

    References:
      Steinke et al., `Privacy Auditing with One (1) Training Run
      <https://arxiv.org/abs/2305.08846>`_, 2023
    """
    check_mechanism(mechanism)
    validate.open_unit_interval(confidence=confidence)
    scores, is_member = np.asarray(scores, float), np.asarray(is_member, bool)
    if scores.shape != is_member.shape or scores.ndim != 1:
        raise ValueError(
            "Expected scores and is_member of one shape (canaries,), got"
            f" {scores.shape} and {is_member.shape}."
        )
    if np.isnan(scores).any() or is_member.all() or not is_member.any():
        raise ValueError(
            "Expected scores that are numbers, and is_member to name members and"
            f" others, got {int(np.isnan(scores).sum())} NaN and"
            f" {int(is_member.sum())} members of {len(scores)}."
        )
    claim = mechanism.epsilon(target_delta)
    if not np.isfinite(claim):
        return not_tested(_CHECK, "the mechanism claims no finite epsilon.")
    guessed = _best_guesses(scores, is_member, target_delta, confidence)
    bound, correct, number, most = guessed
    sentence = (
        f"Epsilon is at least {bound:.3g} with confidence {confidence:g}"
        f" ({correct} of {number} guesses right); {claim:.3g} is claimed."
    )
    name, fails_if = f"{_CHECK}, one run", "fails if the guesses refute the claim"
    one_run = within(name, bound, claim, sentence, fails_if)
    if most <= claim:
        limit = f"all guesses right, of so few canaries, would show {most:.3g}."
        sentence = f"Not tested: {limit} {sentence}"
        one_run = dataclasses.replace(one_run, passed=None, sentence=sentence)
    if not independent:
        return combined(_CHECK, [one_run])
    errors = observed_errors(scores, is_member, confidence=confidence)
    others = _by_errors(errors, mechanism, target_delta, claim)
    tested = others if one_run.passed is None else [one_run, *others]
    return dataclasses.replace(combined(_CHECK, tested), parts=(one_run, *others))


def _by_errors(
    errors: Errors, mechanism: Mechanism, target_delta: float, claim: float
) -> list[Finding]:
    """Bounds epsilon by error rates: of any mechanism, and by its trade-off function.

    The second bound is for mechanisms with more noise, if the noise is one number.
    """
    try:
        below = errors.shortfall(mechanism)
    except ValueError:  # a sampling that has Rényi divergences alone
        reason = "the mechanism has no trade-off function."
        return [not_tested("trade-off", reason)]
    bounds = {"error rates": (errors.epsilon(target_delta), "by error rates")}
    if not callable(mechanism.noise_multiplier):
        epsilon = errors.family_epsilon(mechanism, target_delta)
        bounds["trade-off"] = epsilon, "if all but the noise level is the mechanism's"
    fails_if, findings = "fails if error rates of the scores refute the claim", []
    for name, (epsilon, condition) in bounds.items():
        least = f"Epsilon is at least {epsilon:.3g} {condition}"
        sentence = f"{least}; {claim:.3g} is claimed."
        findings.append(within(f"{_CHECK}, {name}", epsilon, claim, sentence, fails_if))
    sentence = f"The errors are {-below:.2g} above the claimed trade-off function."
    if below > 0:
        sentence = f"There are {below:.2g} fewer misses than the claim allows."
    fails_if = "fails if a point is below the claimed trade-off function"
    return [*findings, within("trade-off", below, 0.0, sentence, fails_if)]

"""A lower bound on epsilon, from what a run shows of its canaries."""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np
import scipy.stats

from dpadambc.audit import trade_off
from dpadambc.audit._finding import Finding, combined, not_tested, within
from dpadambc.core import validate
from dpadambc.core.accounting import PLD
from dpadambc.core.mechanism import Mechanism, check_mechanism

_CHECK = "empirical epsilon"
# Guesses for so many of the canaries: the surest first.
_BY_CHANCE = 1e-6
_SHARES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)


class _OneRun(NamedTuple):
    """What the guesses of one run show."""

    epsilon: float
    correct: int
    guesses: int
    most: float  # epsilon, had all guesses been right


def _one_run(
    scores: np.ndarray, is_member: np.ndarray, delta: float, confidence: float
) -> _OneRun:
    """The best bound over some numbers of guesses, each with its part of the risk."""
    count = len(scores)
    bound = functools.partial(
        trade_off.one_run_epsilon,
        num_canaries=count,
        delta=delta,
        confidence=1 - (1 - confidence) / len(_SHARES),
    )
    # Canaries of one score are in no order: least of all that of who is a member.
    order = np.lexsort((np.random.default_rng(0).permutation(count), scores))
    found = []
    for share in _SHARES:
        each = max(1, round(share * count / 2))
        guesses = 2 * each
        correct = int(np.sum(is_member[order[-each:]]))
        correct += int(np.sum(~is_member[order[:each]]))
        _refuse_backwards(correct, guesses)
        found.append((bound(correct, guesses), correct, guesses))
    epsilon, correct, guesses = max(found)
    most = max(bound(number, number) for _, _, number in found)
    return _OneRun(epsilon, correct, guesses, most)


def _refuse_backwards(correct: int, guesses: int) -> None:
    """Raises where guesses are wrong more often than those of a coin."""
    if scipy.stats.binom.cdf(correct, guesses, 0.5) < _BY_CHANCE:
        raise ValueError(
            "Expected scores that are high for who was in the data, got ones by which"
            f" {correct} of {guesses} guesses are right, fewer than of a coin. Are they"
            " the wrong way round? A loss is low for members: give its decrease."
        )


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
      is_member: shape (canaries,), bool: who was, by fair coins.
      mechanism: whose epsilon is claimed.
      target_delta: the δ that goes with it.
      confidence: of each bound: a sound run fails with probability 1 - confidence.
      independent: whether scores are independent given who is a member, as those of
        `GradientCanaries` are but for the gradients of the data. If so, there is also a
        tighter bound by error rates, and a comparison of these rates with the
        mechanism's trade-off function.

    Returns:
      A `Finding`: the largest lower bound, against the epsilon claimed. *Not tested*
      where it could not fail: where as many canaries, all of them guessed, would not
      refute the claim. Its `figure` is the bound all the same.

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
            "Expected scores that are numbers, of members and of others, got"
            f" {int(np.isnan(scores).sum())} NaN and {int(is_member.sum())} members of"
            f" {len(scores)}."
        )
    claim = mechanism.epsilon(target_delta)
    if not np.isfinite(claim):
        return not_tested(_CHECK, "the mechanism claims no finite epsilon.")
    shown = _one_run(scores, is_member, target_delta, confidence)
    of_one_run = _of_one_run(shown, claim, confidence)
    if not independent:
        return combined(_CHECK, [of_one_run])
    others = _by_errors(scores, is_member, mechanism, target_delta, confidence)
    tested = [of_one_run, *others] if shown.most > claim else others
    return dataclasses.replace(combined(_CHECK, tested), parts=(of_one_run, *others))


def _of_one_run(shown: _OneRun, claim: float, confidence: float) -> Finding:
    """Not tested, where all guesses right would not refute the claim."""
    sentence = (
        f"Epsilon is at least {shown.epsilon:.3g} with confidence {confidence:g}"
        f" ({shown.correct} of {shown.guesses} guesses are right); {claim:.3g} is"
        " claimed."
    )
    power = "fails if the guesses refute the claim"
    found = within("empirical epsilon, one run", shown.epsilon, claim, sentence, power)
    if shown.most > claim:
        return found
    return dataclasses.replace(
        found,
        passed=None,
        sentence=f"Not tested: all guesses right would show no more than"
        f" {shown.most:.3g}, with so few canaries. {sentence}",
    )


def _by_errors(scores, is_member, mechanism, target_delta, confidence) -> list[Finding]:
    errors = trade_off.observed(scores, is_member, confidence=confidence)
    if PLD not in mechanism.accountants:
        reason = "its accountant has no trade-off function."
        return [not_tested("trade-off", reason)]
    epsilon, claim = errors.epsilon(target_delta), mechanism.epsilon(target_delta)
    least = trade_off.claimed(mechanism, errors.false_positive_rate)
    below = float(np.max(least - errors.false_negative_rate))
    return [
        within(
            "empirical epsilon, error rates",
            epsilon,
            claim,
            f"Epsilon is at least {epsilon:.3g} with confidence {confidence:g}, by"
            f" error rates of independent scores; {claim:.3g} is claimed.",
            "fails if the error rates refute the claim",
        ),
        *_of_family(mechanism, errors, target_delta, claim),
        within(
            "trade-off",
            below,
            0.0,
            f"The errors observed are {-below:.2g} above the trade-off function that is"
            " claimed."
            if below <= 0
            else f"There are {below:.2g} fewer misses than the claim allows.",
            "fails if a point is below the claimed trade-off function",
        ),
    ]


def _of_family(mechanism, errors, target_delta, claim) -> list[Finding]:
    """The bound for the mechanism with more noise, where its noise is one number."""
    if callable(mechanism.noise_multiplier):
        return []
    epsilon = trade_off.family_epsilon(mechanism, errors, target_delta=target_delta)
    return [
        within(
            "empirical epsilon, trade-off",
            epsilon,
            claim,
            f"Epsilon is at least {epsilon:.3g} if all but the noise level is the"
            f" mechanism's; {claim:.3g} is claimed.",
            "fails if error rates are below the claimed trade-off function",
        )
    ]

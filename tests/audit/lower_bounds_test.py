"""Lower bounds on epsilon: below the claim if it holds, and near it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

from dpadambc import accounting, audit, training
from dpadambc.audit import lower_bounds
from tests import common

GAUSSIAN = common.poisson_gaussian(sampling_prob=1.0, iterations=1, normalize_by=1)
DELTA = 1e-5
bound_of = functools.partial(
    audit.empirical_epsilon, mechanism=GAUSSIAN, target_delta=DELTA
)


def p_value_of_definition(epsilon, correct, guesses, canaries, delta):
    """The bound of the theorem, term by term."""
    prob = 1 / (1 + np.exp(-epsilon))
    chance = lambda k: scipy.stats.binom.pmf(k, guesses, prob)
    beta = sum(chance(k) for k in range(correct, guesses + 1))
    alpha = max(
        sum(chance(k) for k in range(correct - i, correct) if k >= 0) / i
        for i in range(1, canaries + 1)
    )
    return min(1, beta + 2 * canaries * delta * alpha)


@pytest.mark.parametrize("numbers", [(9, 10, 12, 1e-3), (30, 40, 60, 1e-5)])
def test_one_run_inverts_the_theorem(numbers):
    correct, guesses, canaries, delta = numbers
    epsilon = lower_bounds.one_run_epsilon(
        correct, guesses, num_canaries=canaries, delta=delta, confidence=0.9
    )
    value = lambda epsilon: p_value_of_definition(epsilon, *numbers)
    assert epsilon > 0 and value(epsilon) == pytest.approx(0.1, rel=1e-4)
    assert value(epsilon * 1.05) > 0.1 > value(epsilon * 0.95)


def test_guessing_shows_nothing():
    bound = lambda correct: lower_bounds.one_run_epsilon(
        correct, 100, num_canaries=100, delta=0.0, confidence=0.95
    )
    assert bound(50) == bound(0) == 0.0
    assert bound(100) > bound(90) > bound(70) > 0


def scores_of(mu, seed, canaries=4_000):
    rng = np.random.default_rng(seed)
    is_member = rng.random(canaries) < 0.5
    return rng.normal(size=canaries) + mu * is_member, is_member


def test_a_sound_run_fails_no_more_often_than_its_confidence_allows():
    """The mechanism at its bound: every score is as far off as it may be."""
    grid = np.concatenate([[0], np.geomspace(1e-4, 1, 400)])
    curve = accounting.trade_off(GAUSSIAN).false_negative_rate(grid)

    def is_below(seed):
        errors = lower_bounds.observed_errors(*scores_of(1.0, seed), confidence=0.8)
        least = np.interp(errors.false_positive_rate, grid, curve)
        return bool(np.any(errors.false_negative_rate < least))

    failed = sum(is_below(seed) for seed in range(300))
    assert failed <= 300 * 0.2 + 3 * np.sqrt(300 * 0.2 * 0.8)
    assert failed > 0  # the bounds are not so wide that none ever fails


@pytest.mark.slow
def test_scores_without_information_show_nothing():
    """In whatever order members and others come."""
    is_member = np.arange(1_000) >= 500
    for scores in (np.zeros(1_000), np.arange(1_000) % 2):
        finding = bound_of(scores, is_member, independent=True)
        assert finding.passed and finding.parts[0].figure < 0.2


def known(canaries):
    """Every guess is right."""
    is_member = np.arange(canaries) % 2 == 0
    return is_member + np.arange(canaries) / canaries / 2, is_member


def test_a_claim_that_so_few_canaries_cannot_refute_is_not_tested():
    """GAUSSIAN claims 4.38."""
    few, many = (bound_of(*known(k)) for k in (100, 4_000))
    assert few.passed is None and many.passed is False
    assert few.figure < GAUSSIAN.epsilon(DELTA) < many.figure
    with_errors = bound_of(*known(100), independent=True)
    assert with_errors.passed is False  # by the trade-off function
    assert with_errors.parts[0].passed is None


@pytest.mark.slow
def test_half_the_noise_is_seen_in_the_errors():
    finding = bound_of(*scores_of(2.0, 0), independent=True)
    failed = {part.check for part in finding.parts if part.passed is False}
    assert finding.passed is False and failed == {"trade-off"}


@pytest.mark.slow
def test_the_bound_of_the_family_comes_near_the_claim():
    finding = bound_of(*scores_of(1.0, 0, 100_000), independent=True)
    figures = {part.check: part.figure for part in finding.parts}
    claim = GAUSSIAN.epsilon(DELTA)
    assert finding.passed
    assert 0.85 * claim < figures["empirical epsilon, trade-off"] < claim
    assert figures["empirical epsilon, one run"] < 0.6 * claim


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Expected noise that hides an example")
def test_gradient_canaries_show_what_was_added():
    """Without noise, a canary is there in full or not at all."""
    params, x = {"w": jnp.zeros(300), "b": jnp.zeros(2)}, jnp.ones((40, 300))
    canaries = audit.GradientCanaries(params, 200, 0.5, seed=3)
    mechanism = common.poisson_gaussian(
        l2_clip_norm=0.5, sampling_prob=1.0, iterations=2, noise_multiplier=1e-6
    )
    result = training.fit(
        canaries.loss(lambda p, x: 0.0 * (p["w"] @ x) + 0.0 * p["b"].sum()),
        params,
        canaries.insert((x,)),
        mechanism,
        canaries.with_sum(optax.adam(0.1)),
        key=jax.random.key(0),
        target_delta=DELTA,
    )
    scores = canaries.scores(result.state.opt_state)
    unit = 2 * 0.5 / mechanism.normalize_by
    np.testing.assert_allclose(scores, canaries.is_member * unit, atol=1e-4 * unit)
    assert 60 < canaries.is_member.sum() < 140


def test_refuses_canaries_and_scores_that_do_not_fit():
    with pytest.raises(ValueError, match="num_canaries"):
        audit.GradientCanaries(jnp.zeros(3), 4, 1.0)
    scores, is_member = known(200)
    for wrong in (-scores, scores[:, None], np.full(200, np.nan)):
        with pytest.raises(ValueError, match="scores"):
            bound_of(wrong, is_member)
    with pytest.raises(ValueError, match="is_member"):
        bound_of(scores, np.ones(200, bool))

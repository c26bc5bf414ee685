"""No attack does better than the trade-off says, and the Gaussian does as well."""

import dataclasses
import math

import numpy as np
import pytest
import scipy.stats

import dpadambc
from dpadambc import accounting
from dpadambc.core import accounting as core

norm = scipy.stats.norm
Relation = dpadambc.NeighboringRelation
RATES = np.concatenate([[0], np.geomspace(1e-6, 0.5, 60), np.linspace(0.5, 1, 20)])


def mechanism(z=1.0, q=1.0, iterations=1, **fields):
    return dpadambc.PoissonGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=z,
        sampling_prob=q,
        iterations=iterations,
        normalize_by=1.0,
        **fields,
    )


@pytest.mark.parametrize(("z", "iterations"), [(0.3, 1), (2.0, 1), (40.0, 1), (9.0, 9)])
def test_of_a_gaussian_it_is_the_closed_form_from_below(z, iterations):
    found = accounting.trade_off(mechanism(z, iterations=iterations))
    mu = math.sqrt(iterations) / z
    exact = norm.cdf(norm.isf(RATES) - mu)
    below = exact - found.false_negative_rate(RATES)
    assert np.all(below > -1e-11)
    assert np.all(below < 1e-4)
    assert mu * (1 - 1e-7) < found.gaussian_mu() < 1.002 * mu


@pytest.mark.parametrize("relation", list(Relation))
def test_it_falls_and_is_convex_and_symmetric(relation):
    found = accounting.trade_off(
        mechanism(1.0, 0.02, 300, neighboring_relation=relation)
    )
    rates = np.linspace(0, 1, 501)
    misses = found.false_negative_rate(rates)
    assert np.all(np.diff(misses) <= 0)
    assert np.all(np.diff(misses, 2) >= -1e-12)
    there_and_back = found.false_negative_rate(misses)
    # Where f is above 0 it is its own inverse.
    inside = misses > 1e-3
    np.testing.assert_allclose(there_and_back[inside], rates[inside], atol=1e-9)
    assert np.all(misses <= 1 - rates)
    error = found.equal_error_rate
    assert found.false_negative_rate(error) == pytest.approx(error, abs=1e-12)


def best_attack(z, q, rates):
    """Misses of the most powerful test on one sampled step, at each alarm rate.

    The likelihood ratio grows with the released number, so it is a threshold.
    """
    with_example = lambda x: (1 - q) * norm.cdf(x / z) + q * norm.cdf((x - 1) / z)
    return with_example(z * norm.isf(rates))


def test_the_best_attack_on_a_sampled_step_reaches_it_and_is_not_below():
    z, q = 0.7, 0.2
    reached = best_attack(z, q, RATES[1:])
    found = accounting.trade_off(mechanism(z, q))
    below = reached - found.false_negative_rate(RATES[1:])
    assert np.all(below > -1e-11)
    # The attacker who tests the other way round does better at large rates.
    assert np.all(below[RATES[1:] < 0.1] < 1e-4)
    # Negative control: with more noise than there was, the claim is refuted.
    claimed = accounting.trade_off(mechanism(1.05 * z, q)).false_negative_rate(
        RATES[1:]
    )
    assert np.any(reached < claimed - 1e-3)


def test_simulated_attackers_on_several_steps_are_not_below():
    z, q, steps, runs = 1.0, 0.3, 5, 200_000
    rng = np.random.default_rng(0)
    noise = rng.normal(scale=z, size=(2, runs, steps))
    noise[1] += rng.random((runs, steps)) < q
    ratio = np.log1p(q * np.expm1((noise - 0.5) / z**2)).sum(-1)
    found = accounting.trade_off(mechanism(z, q, steps))
    for rate in (1e-3, 1e-2, 1e-1):
        threshold = np.quantile(ratio[0], 1 - rate)
        hits = np.mean(ratio[1] > threshold)
        error = 4 * math.sqrt(hits / runs) + 4 * hits / math.sqrt(rate * runs)
        bound = found.true_positive_rate(rate)
        assert hits - error < bound < hits + error + 0.01
        # Negative control.
        with_more_noise = accounting.trade_off(
            mechanism(1.5, q, steps)
        ).true_positive_rate(rate)
        assert hits - error > with_more_noise or rate < 1e-2


def test_mu_bounds_every_attack_within_its_range_and_is_the_least_that_does():
    found = accounting.trade_off(mechanism(0.8, 256 / 60_000, 2_000))
    for least in (1e-3, 1e-6):
        mu = found.gaussian_mu(least)
        rates = np.geomspace(least, found.equal_error_rate, 3_000)
        misses = found.false_negative_rate(rates)
        assert np.all(misses >= norm.cdf(norm.isf(rates) - mu) * (1 - 1e-9))
        smaller = norm.cdf(norm.isf(rates) - 0.999 * mu)
        assert np.any(misses < smaller)
    # Rarer errors tell more, with sampling.
    assert found.gaussian_mu(1e-3) < 0.99 * found.gaussian_mu(1e-6)


def test_without_noise_nothing_is_hidden_and_without_steps_everything():
    for bare in (mechanism(0.0), mechanism(1e-4)):
        found = accounting.trade_off(bare)
        assert found.gaussian_mu() == math.inf
        assert np.all(found.true_positive_rate(RATES) == 1)
    found = accounting.trade_off(mechanism(), iterations=0)
    assert found.gaussian_mu() < 1e-9
    np.testing.assert_allclose(found.true_positive_rate(RATES), RATES, atol=1e-12)


def test_it_is_no_other_statement_than_epsilon():
    """The error rates that (ε, δ) forbids are forbidden here too."""
    trained = mechanism(1.1, 0.01, 1_000)
    found = accounting.trade_off(trained)
    for delta in (1e-4, 1e-6):
        epsilon = trained.epsilon(delta)
        line = 1 - delta - np.exp(epsilon) * RATES
        assert np.all(found.false_negative_rate(RATES) >= line - 1e-5)


def test_relations_and_sampling_are_those_of_the_mechanism():
    replaced = mechanism(2.0, neighboring_relation=Relation.REPLACE_ONE)
    assert accounting.trade_off(replaced).gaussian_mu() == pytest.approx(0.5, rel=1e-3)
    shuffled = dpadambc.ShuffledGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=2.0,
        batch_size=10,
        num_examples=100,
        iterations=40,
        normalize_by=10,
    )
    assert accounting.trade_off(shuffled).gaussian_mu() == pytest.approx(1.0, rel=1e-3)
    nodes = dpadambc.graphs.NodePoissonGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=2.0,
        max_terms=4,
        sampling_prob=1.0,
        iterations=4,
        normalize_by=1,
    )
    assert accounting.trade_off(nodes).gaussian_mu() == pytest.approx(1.0, rel=1e-3)


def test_wrong_numbers_are_refused():
    found = accounting.trade_off(mechanism())
    for rate in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="false_positive_rate"):
            found.true_positive_rate([0.1, rate])
    with pytest.raises(ValueError, match="least_error_rate"):
        found.gaussian_mu(0.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.epsilons = np.zeros(1)


def test_what_rounding_takes_off_delta_is_given_to_the_attacker(monkeypatch):
    false_positives = np.array([1e-6, 1e-2, 0.3])
    of = lambda: accounting.trade_off(mechanism(2.0, iterations=3))
    before = of().false_negative_rate(false_positives)
    monkeypatch.setattr(core, "_ROUNDING", 1e-4)
    after = of().false_negative_rate(false_positives)
    assert np.all(after < before) and before[0] - after[0] > 2e-4

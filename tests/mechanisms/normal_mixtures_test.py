"""Losses of two mixtures on a grid, against sums over all outcomes."""

import dp_accounting
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.integrate
import scipy.stats

from dpadambc.mechanisms import normal_mixtures
from tests import common, worlds


def mixture(means, weights):
    weights = np.array(weights)
    return normal_mixtures.mixture(np.array(means), weights / weights.sum())


def exact(upper, lower, epsilons):
    density = lambda mixture: worlds.density(zip(*mixture, strict=True), 1.0)
    return worlds.hockey_sticks(density(upper), density(lower), epsilons)


sides = st.lists(
    st.tuples(st.floats(0, 4), st.floats(0.001, 1)), min_size=1, max_size=4
)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(sides, sides, st.sampled_from([0.3, 0.05, 0.01]))
def test_every_divergence_is_from_above(right, left, interval):
    right = [(mean + 1e-3, weight) for mean, weight in right]
    upper = mixture(*zip(*right, strict=True))
    lower = mixture(*zip(*[(-mean, weight) for mean, weight in left], strict=True))
    pmf = normal_mixtures.losses_on_grid(upper, lower, interval)
    epsilons = np.linspace(-6, 6, 61)
    excess = pmf.get_delta_for_epsilon(epsilons) - exact(upper, lower, epsilons)
    quadrature = 10 * worlds.QUADRATURE  # the loss is up to ten times as steep
    assert excess.min() >= -quadrature
    assert excess.max() <= quadrature + interval / 4


@pytest.mark.parametrize("z", [0.05, 0.7, 3.0, 100.0])
def test_a_pair_of_normals_is_exact_far_into_its_tail(z):
    upper, lower = mixture([1 / z], [1.0]), mixture([0.0], [1.0])
    loss = 0.5 / z**2
    interval = 1e-3 * (loss + np.sqrt(2 * loss))
    pmf = normal_mixtures.losses_on_grid(upper, lower, interval)
    epsilons = loss + np.linspace(-1, 7, 33) * np.sqrt(2 * loss)
    cdf = scipy.stats.norm.logcdf
    x = 0.5 / z - epsilons * z
    first = np.exp(cdf(x))
    expected = first - np.exp(epsilons + cdf(x - 1 / z))
    found = pmf.get_delta_for_epsilon(epsilons)
    np.testing.assert_array_less(expected * (1 - 1e-6) - 1e-17, found)
    np.testing.assert_allclose(found, expected, rtol=5e-3, atol=1e-16)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("q", [1e-2, *map(common.slow, [0.5, 1e-5])])
def test_one_component_is_that_of_dp_accounting(q, add):
    from dp_accounting.pld import privacy_loss_distribution as pld

    theirs = pld.from_gaussian_mechanism(
        1.0, sampling_prob=q, value_discretization_interval=1e-4
    )
    theirs = theirs._pmf_add if add else theirs._pmf_remove
    sampled, base = mixture([0.0, 1.0], [1 - q, q]), mixture([0.0], [1.0])
    pair = (base, sampled.mirrored()) if add else (sampled, base)
    ours = normal_mixtures.losses_on_grid(*pair, 1e-4)
    epsilons = np.linspace(0, 2 * q, 21)
    np.testing.assert_allclose(
        ours.get_delta_for_epsilon(epsilons),
        theirs.get_delta_for_epsilon(epsilons),
        rtol=1e-4,
        atol=1e-12,
    )


def test_masses_are_those_of_the_density_in_both_tails():
    upper = mixture([0.5, 3.0], [0.9, 0.1])
    edges = np.linspace(-9, 12, 43)
    density = lambda x: sum(
        p * scipy.stats.norm.pdf(x - mean) for mean, p in zip(*upper, strict=True)
    )
    expected = [
        scipy.integrate.quad(density, *pair, epsabs=0, epsrel=1e-12)[0]
        for pair in zip(edges[:-1], edges[1:], strict=True)
    ]
    np.testing.assert_allclose(upper.masses(edges), expected, rtol=1e-9)


def test_it_composes_as_dp_accountings_own():
    upper, lower = mixture([0.0, 1.0], [0.99, 0.01]), mixture([0.0], [1.0])
    pmf = normal_mixtures.losses_on_grid(upper, lower, 1e-3).self_compose(100)
    theirs = dp_accounting.pld.privacy_loss_distribution.from_gaussian_mechanism(
        1.0, sampling_prob=0.01, value_discretization_interval=1e-3
    ).self_compose(100)
    for delta in (1e-3, 1e-6, 1e-9):
        expected = theirs._pmf_remove.get_epsilon_for_delta(delta)
        assert pmf.get_epsilon_for_delta(delta) == pytest.approx(expected, rel=1e-3)

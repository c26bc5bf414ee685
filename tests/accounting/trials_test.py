"""The numbers of trials that are drawn have the distribution that is accounted for."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.stats

from dpadambc import accounting

K = np.arange(4_000)
EVERY = [
    accounting.GeometricTrials(8),
    accounting.TruncatedNegativeBinomial(8, shape=0),
    accounting.TruncatedNegativeBinomial(8, shape=0.5),
    accounting.TruncatedNegativeBinomial(8, shape=5),
    accounting.PoissonTrials(8),
    accounting.FixedTrials(8),
]


@pytest.mark.parametrize("distribution", EVERY, ids=str)
def test_probabilities_add_up_and_have_the_mean(distribution):
    pmf = distribution.pmf(K)
    assert pmf.sum() == pytest.approx(1, abs=1e-12)
    assert pmf @ K == pytest.approx(8, rel=1e-9)
    assert distribution.expected == 8
    assert (pmf[0] > 0) == isinstance(distribution, accounting.PoissonTrials)


@hypothesis.given(st.floats(1, 20), st.floats(0, 20))
def test_for_any_mean_and_shape(mean, shape):
    distribution = accounting.TruncatedNegativeBinomial(mean, shape)
    pmf = distribution.pmf(K)
    assert 0 < distribution.gamma <= 1
    assert pmf.sum() == pytest.approx(1, abs=1e-9)
    assert pmf @ K == pytest.approx(mean, rel=1e-7)


def test_they_are_the_distributions_of_scipy():
    geometric, logarithmic, _, five, *_ = EVERY
    np.testing.assert_allclose(geometric.pmf(K), scipy.stats.geom.pmf(K, 1 / 8))
    np.testing.assert_allclose(
        logarithmic.pmf(K), scipy.stats.logser.pmf(K, 1 - logarithmic.gamma)
    )
    negative = scipy.stats.nbinom.pmf(K, 5, five.gamma)
    expected = negative[1:] / (1 - negative[0])
    np.testing.assert_allclose(five.pmf(K[1:]), expected, rtol=1e-7, atol=1e-300)


def chi_square(drawn, distribution):
    """The p value of draws, in cells of at least ten that are expected."""
    expected = distribution.pmf(K) * len(drawn)
    end = np.flatnonzero(expected >= 10).max() + 1
    cells = np.bincount(np.minimum(drawn, end), minlength=end + 1)
    expected = np.append(expected[:end], len(drawn) - expected[:end].sum())
    kept = expected > 1e-6
    if cells[~kept].any():
        return 0.0
    return scipy.stats.chisquare(cells[kept], expected[kept]).pvalue


@pytest.mark.parametrize("distribution", EVERY[:-1], ids=str)
def test_draws_have_the_probabilities(distribution):
    rng = np.random.default_rng(0)
    drawn = np.array([distribution.sample(rng) for _ in range(10_000)])
    assert chi_square(drawn, distribution) > 1e-3
    assert chi_square(drawn, accounting.GeometricTrials(9)) < 1e-6  # negative control
    assert drawn.dtype.kind == "i"


def test_one_trial_and_fixed_numbers_are_no_chance():
    rng = np.random.default_rng(0)
    for distribution, number in [
        (accounting.GeometricTrials(1), 1),
        (accounting.TruncatedNegativeBinomial(1, shape=0), 1),
        (accounting.FixedTrials(5), 5),
    ]:
        assert {distribution.sample(rng) for _ in range(10)} == {number}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: accounting.GeometricTrials(0.5), ValueError, "mean"),
        (lambda: accounting.PoissonTrials(float("inf")), ValueError, "mean"),
        (lambda: accounting.PoissonTrials("8"), TypeError, "mean"),
        (lambda: accounting.TruncatedNegativeBinomial(8, -0.5), ValueError, "shape"),
        (lambda: accounting.FixedTrials(0), ValueError, "number"),
        (lambda: accounting.FixedTrials(8.0), TypeError, "number"),
    ],
)
def test_no_distribution_of_other_numbers(make, error, message):
    with pytest.raises(error, match=message):
        make()

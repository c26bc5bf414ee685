"""The numbers of the errata in `benchmarks.theory`, and those that they replace."""

import numpy as np
import pytest
import scipy.stats

from benchmarks import theory

SNLI = theory.noise_variance(0.4, 0.1, 256)
LOG = np.log(2 / 0.05)


def nu_and_weight(b2=0.999, count=10_000):
    """The root of the sum of squares in Propositions 3 and 4, and its factor."""
    return (
        np.sqrt((1 - b2 ** (2 * count)) / (1 - b2**2)),
        (1 - b2) / (1 - b2**count),
    )


def second_moment(count, noise_variance, b2=0.999):
    """v-hat under noise alone: nearly a gamma variate of the same mean and spread."""
    relative = float(theory.second_moment_spread(1.0, b2, count))
    return scipy.stats.gamma(relative**-2, scale=noise_variance * relative**2)


def test_proposition_3_in_numbers():
    root, weight = nu_and_weight()
    nu, b = 4 * SNLI * root, 4 * SNLI
    assert (nu, b, nu**2 / b) == pytest.approx(
        (2.184206e-6, 9.765625e-8, 4.8853e-5), rel=1e-5
    )
    # The first branch: the deviation of the sum is less than nu^2 / b.
    found = theory.second_moment_deviation(SNLI, 10_000)
    assert found == pytest.approx(weight * np.sqrt(2 * nu**2 * LOG), rel=1e-5)
    assert float(found) / weight < nu**2 / b
    # As printed it is no deviation at all, and of another unit.
    printed = weight * np.sqrt(np.log(1 / 0.05)) * 2 * nu**2
    assert printed == pytest.approx(1.65e-14, rel=2e-3)
    assert printed < 1e-4 * theory.second_moment_spread(SNLI)
    # The other branch, which is not the larger one here.
    assert weight * 2 * b * LOG == pytest.approx(7.2e-10, rel=2e-3)


def test_proposition_3_is_four_times_what_noise_alone_does():
    weights = 0.001 * 0.999 ** np.arange(6_000)  # the rest weighs 0.2 %
    rng = np.random.default_rng(0)
    moments = weights @ rng.standard_normal((6_000, 2_000), dtype=np.float32) ** 2
    deviations = np.abs(moments / weights.sum() - 1) * SNLI
    # The 95 % quantile of 2,000 normals has a standard error of 2.1 %.
    assert np.quantile(deviations, 0.95) == pytest.approx(1.505e-9, rel=0.08)
    exact = second_moment(10_000, SNLI).interval(0.95)
    assert np.subtract(exact, SNLI) == pytest.approx([-1.5e-9, 1.53e-9], rel=0.01)


def test_proposition_4_in_numbers():
    """Its printed nu, 2 (Phi + sigma C^2 / B), is too small for its own proof."""
    clip_norm, (root, weight) = 0.1, nu_and_weight()
    product = clip_norm * np.sqrt(SNLI)  # sigma C^2 / B
    printed = weight * np.sqrt(2 * LOG) * 2 * (SNLI + product) * root
    corrected = theory.second_moment_deviation(SNLI, 10_000, gradient_bound=clip_norm)
    assert printed == pytest.approx(1.9015e-6, rel=1e-4)
    assert corrected == pytest.approx(2.6850e-6, rel=1e-4)
    assert corrected > 100 * SNLI  # of little use
    spread = theory.second_moment_spread(SNLI, count=10_000, gradient=clip_norm)
    finer = np.sqrt(2 * LOG) * spread + 2 * SNLI * LOG * weight
    assert finer == pytest.approx(1.8987e-6, rel=1e-4)

    def log_moment(x, square):
        """Of 2 g z + z^2 - Phi, by a Gaussian integral; Phi is the unit."""
        return -np.log1p(-2 * x) / 2 - x + 2 * x**2 * square / (1 - 2 * x)

    for square in (0.0, 1.0, 100.0, clip_norm**2 / SNLI):
        x = np.linspace(-0.25, 0.25, 1_001)
        ours = x**2 / 2 * (4 + 8 * square)
        assert np.all(log_moment(x, square) <= ours + 1e-12)
        finer = x**2 * (1 + 2 * square) / (1 - 2 * np.abs(x))
        assert np.all(log_moment(x, square) <= finer + 1e-12)
    theirs = 0.25**2 / 2 * 4 * (1 + np.sqrt(square)) ** 2
    assert log_moment(0.25, square) > 1.9 * theirs


def test_the_illustration_of_sign_descent():
    """Called 0.1 against 1: of gradients whose squares are 0.1 and 10 of Phi."""
    squares = np.array([0.1, 10.0])
    found = theory.sign_descent_ratio(np.sqrt(squares), 1.0)
    np.testing.assert_allclose(found, [0.3015, 0.9535], atol=5e-5)
    # It depends on g over the root of Phi: in other units |g| against Phi says nothing.
    scaled = theory.sign_descent_ratio(1e-4 * np.sqrt(squares), 1e-8)
    np.testing.assert_allclose(scaled, found, rtol=1e-5)


def test_momentum_without_dampening_is_a_multiple_of_the_first_moment():
    """Printed is its inverse."""
    b1, b, mu = 0.9, 0.0, 0.0
    for t, gradient in enumerate(np.random.default_rng(0).normal(size=20), start=1):
        b, mu = b1 * b + gradient, b1 * mu + (1 - b1) * gradient
        mu_hat = mu / (1 - b1**t)
        assert b == pytest.approx((1 - b1**t) / (1 - b1) * mu_hat)
        if t > 1:
            assert abs(b) > 3 * abs((1 - b1) / (1 - b1**t) * mu_hat)


def test_rounded_noise_variances_explain_the_printed_asymptotes():
    for phi, printed, multiplier, clip_norm, exact in [
        (2.4e-8, 0.645, 0.4, 0.1, 0.640),
        (1.5e-5, 0.026, 1.0, 1.0, 0.0256),
    ]:
        rounded = theory.equivalent_sgdm_schedule(1e-3, phi**0.5)(10_000)
        assert rounded == pytest.approx(printed, rel=0.01)
        variance = theory.noise_variance(multiplier, clip_norm, 256)
        schedule = theory.equivalent_sgdm_schedule(1e-3, variance**0.5)
        assert schedule(10_000) == pytest.approx(exact, rel=1e-4)


# Published, and with the noise of the batch that was used, and that was named.
TABLE_2 = {
    "upper quartile": (7e-10, 7.1e-10, 5.2e-10),
    "mean": (6e-10, 5.6e-10, 4.8e-10),
}


def test_table_2_is_that_of_a_batch_of_255():
    assert theory.noise_variance(0.4, 0.1, 255) / SNLI - 1 == pytest.approx(
        0.0079, abs=5e-5
    )
    uniform = (np.arange(100_000) + 0.5) / 100_000
    for batch, column in [(255, 1), (256, 2)]:
        moments = second_moment(10_000, theory.noise_variance(0.4, 0.1, batch))
        corrected = np.maximum(moments.ppf(uniform) - SNLI, 3e-10)
        found = {
            "upper quartile": np.quantile(corrected, 0.75),
            "mean": corrected.mean(),
        }
        for name, row in TABLE_2.items():
            assert found[name] == pytest.approx(row[column], rel=0.01)
            rounds = round(found[name] * 1e10) == round(row[0] * 1e10)
            assert rounds == (batch == 255)


def test_a_log_tells_the_same_of_the_batch():
    """Shares of v-hat above Phi and above the floor, of 7.7 million coordinates."""
    phi = theory.noise_variance(0.532837, 0.1, 256)
    for count, *published in [(11, 0.4507, 0.3150), (241, 0.5224, 0.0525)]:
        shares = {
            batch: second_moment(count, theory.noise_variance(0.532837, 0.1, batch)).sf(
                [phi, phi + 7e-9]
            )
            for batch in (255, 256)
        }
        np.testing.assert_allclose(shares[255], published, atol=6e-4)
        assert np.all(np.abs(shares[256] - published) > 5e-3)


def test_the_short_papers_quartiles_are_those_of_noise():
    """Table 1 of arXiv 2304.11208, at step 20,000; 3.7e-12 is its clean moment."""
    moments = second_moment(20_000, theory.noise_variance(0.4, 0.1, 255))
    quartiles = np.asarray(moments.ppf([0.25, 0.5, 0.75])) + 3.7e-12
    np.testing.assert_allclose(quartiles, [2.408e-8, 2.460e-8, 2.513e-8], atol=6e-12)


def test_logged_quartiles_of_the_graph_experiment_are_those_of_noise():
    quartiles = second_moment(50, 0.0096**2, b2=0.99).ppf([0.25, 0.5, 0.75])
    assert [float(f"{q:.0e}") for q in quartiles] == [8e-5, 9e-5, 1e-4]


def test_epsilon_inside_of_the_root_shortens_the_step():
    for moment, inside, outside in [(SNLI, 0.16, 6.4e-5), (1e-8, 0.29, 1e-4)]:
        step = 1 / np.sqrt(moment)
        assert 1 - 1 / np.sqrt(moment + 1e-8) / step == pytest.approx(inside, abs=5e-3)
        found = 1 - 1 / (np.sqrt(moment) + 1e-8) / step
        assert found == pytest.approx(outside, rel=0.01)


def test_the_fraction_that_is_subtracted_twice():
    """arXiv 2304.11208: Phi with its factor is not what v-hat has too much of."""
    b2, count = 0.999, 100
    bias = theory.second_moment_bias(np.full(count, SNLI), b2)[-1]
    assert bias == pytest.approx(SNLI, rel=1e-4)
    assert (1 - b2**count) * SNLI < 0.1 * bias

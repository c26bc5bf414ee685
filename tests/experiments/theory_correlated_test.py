"""Correlated noise against a dense matrix in double precision, and simulated."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.signal

from benchmarks import theory
from dpadambc.contrib.filtering import impulse_response

# Of a mechanism that takes noise back, of a filter, and of none.
COEFFICIENTS = {
    "canceling": np.array([1.0, -0.6, -0.2]),
    "low pass": impulse_response((0.2,), (1.0, -0.8), 40),
    "longer than the run": impulse_response((0.1, 0.1), (1.0, -0.8), 90),
    "independent": np.array([1.0]),
}
STEPS, B2 = 50, 0.95
# A clip norm that moves, in steps and smoothly.
VARIANCES = np.where(np.arange(STEPS) < 20, 1.0, 0.3) * 0.99 ** np.arange(STEPS)
every_filter = pytest.mark.parametrize("name", COEFFICIENTS)


def covariances(coefficients):
    """The matrix R, from the matrix that correlates the draws."""
    rows = np.subtract.outer(np.arange(STEPS), np.arange(STEPS))
    padded = np.append(coefficients, np.zeros(STEPS))
    mixing = np.where(rows >= 0, padded[np.maximum(rows, 0)], 0)
    return mixing, mixing @ np.diag(VARIANCES) @ mixing.T


def weights():
    w = B2 ** np.arange(STEPS - 1, -1, -1.0)
    return w / w.sum()


@pytest.mark.slow
@every_filter
@pytest.mark.parametrize("gradient", [0.0, 0.7, np.linspace(-1, 1, STEPS)])
def test_variances_and_spread_are_those_of_the_dense_matrix(name, gradient):
    _, dense = covariances(COEFFICIENTS[name])
    found = theory.correlated_noise_variances(COEFFICIENTS[name], VARIANCES)
    np.testing.assert_allclose(found, np.diag(dense), rtol=1e-5)
    w, g = weights(), np.broadcast_to(gradient, STEPS)
    expected = np.sqrt(w @ (2 * dense**2 + 4 * np.outer(g, g) * dense) @ w)
    found = theory.correlated_second_moment_spread(
        COEFFICIENTS[name], VARIANCES, B2, gradient
    )
    assert found == pytest.approx(expected, rel=2e-5)


@pytest.mark.slow
@every_filter
@pytest.mark.parametrize("gradient", [0.0, 0.7])
def test_bias_and_spread_are_as_simulated(name, gradient):
    """Within 4.5 standard errors, of 60,000 coordinates."""
    mixing, dense = covariances(COEFFICIENTS[name])
    draws = np.random.default_rng(0).normal(size=(STEPS, 60_000))
    noise = mixing @ (np.sqrt(VARIANCES)[:, None] * draws)
    nu_hat = weights() @ (gradient + noise) ** 2
    variances = theory.correlated_noise_variances(COEFFICIENTS[name], VARIANCES)
    bias = float(theory.second_moment_bias(variances, B2)[-1])
    error = nu_hat.std() / np.sqrt(nu_hat.size)
    assert abs(nu_hat.mean() - gradient**2 - bias) < 4.5 * error
    spread = float(
        theory.correlated_second_moment_spread(
            COEFFICIENTS[name], VARIANCES, B2, gradient
        )
    )
    squares = (nu_hat - nu_hat.mean()) ** 2
    error = squares.std() / np.sqrt(squares.size)
    assert abs(squares.mean() - spread**2) < 4.5 * error
    # Negative controls: the variance of the draws, and noise as if independent.
    if name != "independent":
        naive = float(theory.second_moment_bias(jnp.asarray(VARIANCES), B2)[-1])
        assert abs(nu_hat.mean() - gradient**2 - naive) > 50 * nu_hat.std() / 245
        diagonal = np.diag(dense)
        alone = weights() ** 2 @ (2 * diagonal**2 + 4 * gradient**2 * diagonal)
        assert abs(squares.mean() - alone) > 10 * error


def test_independent_constant_noise_is_the_case_known_before():
    for steps, gradient in [(1, 0.0), (30, 0.0), (300, 0.4)]:
        found = theory.correlated_second_moment_spread(
            [1.0], np.full(steps, 0.09), 0.99, gradient
        )
        known = theory.second_moment_spread(0.09, 0.99, steps, gradient)
        assert found == pytest.approx(float(known), rel=2e-5)


def test_correlation_of_either_sign_widens_the_spread_of_noise_alone():
    ones, spreads = np.ones(400), []
    for second in (-0.5, 0.0, 0.5):
        d = np.array([1.0, second]) / np.sqrt(1 + second**2)
        spreads.append(float(theory.correlated_second_moment_spread(d, ones, 0.98)))
    assert spreads[0] == pytest.approx(spreads[2], rel=1e-3)
    assert min(spreads) == spreads[1] < 0.9 * spreads[0]


@pytest.mark.parametrize("decay", [0.5, 0.9])
def test_the_ratio_behind_an_average_is_as_stated(decay):
    response = impulse_response((1 - decay,), (1.0, -decay), 200)
    found = theory.correlated_second_moment_spread(response, np.ones(2_000), 0.99)
    alone = theory.second_moment_spread((1 - decay) / (1 + decay), 0.99)
    ratio = np.sqrt((1 + 0.99 * decay**2) / (1 - 0.99 * decay**2))
    assert float(found / alone) == pytest.approx(ratio, rel=1e-4)


def test_small_variances_do_not_vanish_in_single_precision():
    tiny = 1e-22
    found = theory.correlated_second_moment_spread([1.0, 0.5], tiny * VARIANCES, B2)
    one = theory.correlated_second_moment_spread([1.0, 0.5], VARIANCES, B2)
    assert float(found) == pytest.approx(tiny * float(one), rel=1e-5)
    assert theory.correlated_second_moment_spread([1.0], np.zeros(3)) == 0


@pytest.mark.parametrize(
    "coefficients", [((0.3,), (1.0,)), ((0.1, 0.2), (1.0, -0.5, 0.2)), ((1.0,), (1, 0))]
)
def test_impulse_response_is_that_of_scipy(coefficients):
    one = np.zeros(30)
    one[0] = 1
    np.testing.assert_allclose(
        impulse_response(*coefficients, 30),
        scipy.signal.lfilter(*coefficients, one),
        atol=1e-15,
    )


def test_refuses_numbers_that_are_no_sequence():
    with pytest.raises(ValueError, match="noise_variances"):
        theory.correlated_noise_variances([1.0], 2.0)
    with pytest.raises(ValueError, match="coefficients"):
        theory.correlated_second_moment_spread([], [1.0])

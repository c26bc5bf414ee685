"""The sensitivity of a strategy, against every pattern in a dense matrix."""

import itertools

import numpy as np
import pytest
import scipy.linalg

from dpadambc.contrib import strategies

N = 8


def dense(coefficients, n=N):
    column = np.zeros(n)
    column[: len(coefficients)] = coefficients[:n]
    return scipy.linalg.toeplitz(column, np.zeros(n))


def patterns(n, separation):
    """All sets of steps that are so far apart."""
    for size in range(n + 1):
        for steps in itertools.combinations(range(n), size):
            if all(b - a >= separation for a, b in itertools.pairwise(steps)):
                yield list(steps)


def worst(strategy, separation):
    """Over patterns, and contributions of one sign or the other in one coordinate."""
    furthest = 0.0
    for steps in patterns(len(strategy), separation):
        for signs in itertools.product([1, -1], repeat=len(steps)):
            furthest = max(furthest, np.linalg.norm(strategy[:, steps] @ signs))
    return furthest


NOISING = {
    "white": (1.0,),
    "bisr": strategies.banded_inverse_square_root(4),
    "lambda": (1.0, -0.8),
    "all of it": (1.0, -1.0),
    "added": (1.0, 0.7),  # a strategy of both signs
    "grows": (1.0, -1.3),
    "waves": (1.0, -0.9, 0.8),
}


@pytest.mark.parametrize("separation", [1, 2, 3, 5, N])
@pytest.mark.parametrize("name", NOISING)
def test_no_pattern_moves_more_and_one_moves_as_much(name, separation):
    strategy = np.linalg.inv(dense(NOISING[name]))
    coefficients = strategies.coefficients_of_inverse(NOISING[name], N)
    np.testing.assert_allclose(strategy, dense(coefficients), atol=1e-12)
    bound = strategies.sensitivity(coefficients, N, separation=separation)
    furthest = worst(strategy, separation)
    assert furthest <= bound * (1 + 1e-12)
    decreases = min(coefficients) >= 0 and np.all(np.diff(coefficients) <= 0)
    assert decreases == (name in ("white", "bisr", "lambda", "all of it"))
    if decreases:
        assert bound == pytest.approx(furthest, rel=1e-12)
        # The negative controls: one participation, and patterns further apart.
        if separation < N:
            assert strategies.sensitivity(coefficients, N) < furthest / 1.2
            wide = strategies.sensitivity(coefficients, N, separation=separation + 4)
            assert wide < furthest


@pytest.mark.parametrize("coefficients", [(1.0, 0.2, 0.9), (1.0, -2.0, 0.5), (1.0,)])
def test_columns_that_do_not_overlap_add_up_by_squares(coefficients):
    strategy = dense(coefficients)
    bound = strategies.sensitivity(coefficients, N, separation=3)
    assert bound == pytest.approx(worst(strategy, 3), rel=1e-12)
    assert bound <= 3**0.5 * np.linalg.norm(coefficients) * (1 + 1e-12)
    # The negative control: closer, they overlap, and squares are too little.
    if len(coefficients) > 1:
        assert worst(strategy, 1) > 1.2 * N**0.5 * np.linalg.norm(coefficients)
        close = strategies.sensitivity(coefficients, N, separation=1)
        assert worst(strategy, 1) <= close * (1 + 1e-12)


def test_the_columns_alone_are_too_little_where_coefficients_increase():
    """Why the bound is of a sequence that does not increase: a negative control."""
    coefficients = (1.0, 0.0, 0.0, 0.9)
    assert worst(dense(coefficients, 4), 2) > 1.2 * np.linalg.norm(
        dense(coefficients, 4)[:, [0, 2]].sum(axis=1)
    )
    assert worst(dense(coefficients, 4), 2) <= strategies.sensitivity(
        coefficients, 4, separation=2
    )


@pytest.mark.parametrize("name", NOISING)
def test_more_iterations_never_have_less(name):
    found = [
        strategies.sensitivity(
            strategies.coefficients_of_inverse(NOISING[name], n), n, separation=3
        )
        for n in range(12)
    ]
    assert found[:2] == [0, 1]
    assert np.all(np.diff(found) >= -1e-12)


def test_the_square_of_the_inverse_square_root_takes_differences():
    d = strategies.banded_inverse_square_root(50)
    np.testing.assert_allclose(np.convolve(d, d)[:50], [1, -1, *[0] * 48], atol=1e-14)
    assert min(np.cumsum(d)) > 0
    # Prefix sums have far less error at the same sensitivity than by white noise.
    ones, noise = np.tril(np.ones((50, 50))), dense(d, 50)
    c = strategies.coefficients_of_inverse(d, 50)
    error = np.linalg.norm(ones @ noise) * strategies.sensitivity(c, 50)
    assert error < 0.6 * np.linalg.norm(ones)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: strategies.checked((0.5, 1.0)), ValueError, "noising_coefficients"),
        (lambda: strategies.checked(()), ValueError, "noising_coefficients"),
        (lambda: strategies.checked(1.0), TypeError, "noising_coefficients"),
        (lambda: strategies.checked("1"), TypeError, "noising_coefficients"),
        (lambda: strategies.checked((1.0, None)), TypeError, "noising_coefficients"),
        (lambda: strategies.checked((1.0, np.nan)), ValueError, "noising_coefficients"),
        (
            lambda: strategies.checked((1.0, -np.inf)),
            ValueError,
            "noising_coefficients",
        ),
        (lambda: strategies.banded_inverse_square_root(0), ValueError, ">= 1"),
        (lambda: strategies.sensitivity((1.0,), 3, separation=0), ValueError, ">= 1"),
    ],
)
def test_refuses_what_is_no_strategy(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_a_strategy_that_overflows_hides_nothing():
    c = strategies.coefficients_of_inverse((1.0, -100.0), 400)
    assert strategies.sensitivity(c, 400) == np.inf

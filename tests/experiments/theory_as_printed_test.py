"""Each flaw of two published theorems, by a number or a run that breaks them.

The numbers are those of the list in the README of `benchmarks/theory`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import theory
from tests import common
from tests.experiments import as_printed

# Where the claim of convergence is made: eta = T^-a, 1 - b2 = T^-b, a = 2/3, b near 1.
CLAIMED = dict(
    initial_gap=1.0,
    smoothness=1.0,
    l2_clip_norm=1.0,
    gradient_bound=1.0,
    noise_variance=0.01,
    weight_decay=0.01,
)


def claimed(iterations, **changes):
    rates = dict(learning_rate=iterations ** (-2 / 3), b2=1 - iterations**-0.99)
    return as_printed.Setting(iterations=iterations, **CLAIMED | rates | changes)


@functools.partial(jax.jit, static_argnames=("iterations", "floor"))
def run(
    *,
    iterations,
    rate,
    b2,
    b1=0.0,
    eps_root=0.0,
    noise_stddev=0.0,
    decay=0.0,
    slope=1.0,
    width=1.0,
    center=0.0,
    start=0.0,
    floor=None,
):
    """Squared gradients of F = slope sqrt(width^2 + (x - center)^2), (steps, 64 runs).

    In the theorems' notation: a schedule multiplies the decay too. With a floor, the
    noise variance is subtracted.
    """

    def step(carry, t):
        x, mu, nu = carry
        clean = slope * (x - center) / jnp.sqrt(width**2 + (x - center) ** 2)
        key = jax.random.fold_in(jax.random.key(0), t)
        noised = clean + noise_stddev * jax.random.normal(key, x.shape)
        mu, nu = b1 * mu + noised, b2 * nu + noised**2
        scheduled = jnp.sqrt(-jnp.expm1(t * jnp.log(b2)) / (1 - b2))
        if floor is None:
            update = scheduled * mu / jnp.sqrt(nu + eps_root)
        else:
            corrected = nu / scheduled**2 - noise_stddev**2
            update = mu / jnp.sqrt(jnp.maximum(corrected, floor))
        x = x - rate * (1 - b1) * (update + scheduled * decay * x)
        return (x, mu, nu), clean**2

    begin = jnp.full(64, start), jnp.zeros(64), jnp.zeros(64)
    return jax.lax.scan(step, begin, jnp.arange(1, iterations + 1))[1]


def mean_and_error(squares, weights=None):
    """Of the squared gradient at a random step, over the runs."""
    runs = np.average(np.float64(squares), axis=0, weights=weights)
    return runs.mean(), runs.std() / np.sqrt(runs.size)


def small_units(iterations, distance, noise, **changes):
    """A slope of 1e-6, a start at `distance` of the way that a run can go.

    The setting of the theorems, and the same problem for `run`.
    """
    slope, rate = 1e-6, 1e-9
    start = distance * rate * iterations
    width = start / 2
    setting = as_printed.Setting(
        initial_gap=slope * (np.hypot(width, start) - width),
        smoothness=slope / width,
        l2_clip_norm=slope,
        gradient_bound=slope,
        noise_variance=(noise * slope) ** 2,
        iterations=iterations,
        learning_rate=rate,
        weight_decay=1e-12,
        initial_norm=start,
        **changes,
    )
    problem = dict(
        iterations=iterations,
        rate=rate,
        b2=setting.b2,
        eps_root=setting.eps_root,
        decay=setting.weight_decay,
        noise_stddev=noise * slope,
        slope=slope,
        width=width,
        start=start,
    )
    return setting, problem


def test_the_right_side_grows_with_the_steps():
    """Flaw 1: where no squared gradient exceeds one."""
    sides = [as_printed.adamw(claimed(10**k)) for k in (3, 4, 5, 6)]
    np.testing.assert_allclose(sides, [147, 661, 3_029, 13_911], rtol=4e-3)
    # It is the factor of the gap, and that is all delta_0, which bounds a square.
    assert claimed(10**3).second_moment_bound == pytest.approx(717.975, rel=1e-5)
    last = claimed(10**6)
    gap = 2 * last.second_moment_bound / (last.learning_rate * last.iterations)
    assert gap == pytest.approx(sides[-1], rel=1e-3)
    # What can be proved falls, without decay.
    provable = [
        theory.adam_convergence_bound(
            initial_gap=1.0,
            smoothness=1.0,
            gradient_bound=1.0,
            noise_stddev=0.1,
            num_coordinates=1,
            iterations=10**k,
            learning_rate=10 ** (-2 * k / 3),
            b2=1 - 10 ** (-0.99 * k),
            eps_root=1e-4,
        )
        for k in (3, 4, 5, 6)
    ]
    assert provable[-1] < 0.2 * provable[0]


@pytest.mark.parametrize(
    ("iterations", "with_decay", "without"),
    [(10**3, 0.20, 0.026), (10**4, 0.39, 0.012), common.slow(10**5, 0.47, 0.0056)],
)
def test_with_weight_decay_the_squared_gradient_does_not_vanish(
    iterations, with_decay, without
):
    """Flaw 2, and 3: what decay costs is more than W, at 100,000 steps."""
    setting = claimed(iterations, weight_decay=0.1, initial_gap=2**0.5 - 1)
    found = {}
    for decay, expected in [(0.1, with_decay), (0.0, without)]:
        squares = run(
            iterations=iterations,
            rate=setting.learning_rate,
            b2=setting.b2,
            eps_root=setting.eps_root,
            noise_stddev=0.1,
            decay=decay,
            center=1.0,
        )
        found[decay], error = mean_and_error(squares)
        assert error < 1e-3
        assert found[decay] == pytest.approx(expected, abs=5e-3 if decay else 5e-4)
    allowed = setting.decay_term(
        setting.logarithm(1.01 / ((1 - setting.b2) * setting.eps_root)),
        setting.learning_rate,
    )
    if iterations == 10**5:
        assert found[0.1] - found[0.0] > 3 * allowed


def test_with_the_decay_of_adamw_it_does_not_vanish_either():
    """Flaw 2, without the schedule: steps are signs, so they balance at 2 x = 1."""
    schedule = 10.0  # in the limit, for this b2
    squares = run(
        iterations=20_000, rate=1e-2, b2=0.99, decay=2.0 / schedule, center=1.0
    )
    assert np.mean(squares[-1]) == pytest.approx(0.5**2 / (1 + 0.5**2), rel=0.05)


def test_in_other_units_the_right_side_is_another_one():
    """Flaws 3 and 5: a loss c times as large has squared gradients c^2 times so."""

    def printed(c):
        setting = claimed(
            1_000,
            initial_gap=c,
            smoothness=c,
            l2_clip_norm=c,
            gradient_bound=c,
            noise_variance=0.01 * c**2,
            eps_root=1e-4 * c**2,
        )
        return as_printed.adamw(setting) / c**2

    def provable(c):
        bound = theory.adam_convergence_bound(
            initial_gap=c,
            smoothness=c,
            gradient_bound=c,
            noise_stddev=0.1 * c,
            eps_root=1e-4 * c**2,
            num_coordinates=1,
            iterations=1_000,
            learning_rate=0.01,
            weight_decay=1e-3,
        )
        return bound / c**2

    assert printed(10.0) > 9 * printed(1.0)  # delta_0 + C_1
    assert printed(1e-3) > 1e3 * printed(1.0)  # W
    for c in (10.0, 1e-3):
        assert provable(c) == pytest.approx(provable(1.0))


def test_the_factor_that_is_missing():
    """Flaw 3: where W is 0.8."""
    setting = claimed(1_000)
    factor = 2 * (setting.second_moment_bound + 1) / setting.learning_rate
    assert factor == pytest.approx(1.4e5, rel=0.03)
    logarithm = setting.logarithm(1.01 / ((1 - setting.b2) * 1e-8))
    allowed = setting.decay_term(logarithm, setting.learning_rate)
    assert allowed == pytest.approx(0.82, abs=5e-3)


def test_copies_of_a_problem_multiply_a_term_by_the_square_of_their_number():
    """Flaw 4, where that term is all there is."""
    one = claimed(1_000, initial_gap=0.0, weight_decay=1e-9, learning_rate=1e-9)
    ten = dataclasses.replace(one, num_coordinates=10)
    assert as_printed.adamw(ten) == pytest.approx(100 * as_printed.adamw(one), rel=1e-6)
    # Theorem 3.6 does not divide it by T: it grows with the steps, and much faster.
    sides = [as_printed.adamw_with_momentum(claimed(10**k)) for k in (3, 4, 5)]
    assert sides[2] > 10 * sides[1] > 100 * sides[0] > 1e9


def test_in_small_units_a_run_is_above_the_right_side_without_momentum():
    """Flaw 5: epsilon slows it down, and is not in the factor of the gap."""
    setting, problem = small_units(2_000, 0.2, 1e-5, b2=0.999, eps_root=1e-6)
    mean, error = mean_and_error(run(**problem))
    assert mean - 5 * error > 2 * as_printed.adamw(setting)
    # What can be proved is not broken.
    assert mean < theory.adam_convergence_bound(
        initial_gap=setting.initial_gap,
        smoothness=setting.smoothness,
        gradient_bound=setting.gradient_bound,
        noise_stddev=setting.noise_variance**0.5,
        num_coordinates=1,
        iterations=setting.iterations,
        learning_rate=setting.learning_rate,
        b2=setting.b2,
        eps_root=setting.eps_root,
    )


def test_in_small_units_a_run_is_above_the_right_side_with_momentum():
    """Flaws 5 and 7: delta_0, a square, for what the noise is."""
    setting, problem = small_units(2_000, 0.25, 3.0, b1=0.1, b2=0.9, eps_root=1e-20)
    weights = 1 - 0.1 ** np.arange(2_000, 0, -1.0)
    mean, error = mean_and_error(run(**problem, b1=0.1), weights)
    assert mean - 5 * error > as_printed.adamw_with_momentum(setting)
    # The proof's delta_0 + C_1 would make the last term of E this much larger.
    delta = setting.second_moment_bound
    assert ((delta + setting.gradient_bound) / delta) ** 2 > 1e6


def test_a_floor_that_stops_the_run_is_above_the_right_side_with_correction():
    """Flaw 6: the floor is not in it."""
    setting, problem = small_units(10_000, 0.2, 1.0, b2=0.999)
    mean, error = mean_and_error(run(**problem, floor=1e-6))
    assert mean - 5 * error > 2 * as_printed.adamw_bc(setting)
    assert mean < theory.adam_bc_convergence_bound(
        initial_gap=setting.initial_gap,
        smoothness=setting.smoothness,
        gradient_bound=setting.gradient_bound,
        noise_stddev=setting.noise_variance**0.5,
        num_coordinates=1,
        iterations=setting.iterations,
        learning_rate=setting.learning_rate,
        b2=setting.b2,
        variance_floor=1e-6,
    )


def test_the_root_of_the_corrected_theorems_need_not_be_real():
    """Flaw 6: nor is that of half of the second moments without signal."""
    setting, _ = small_units(10_000, 0.2, 3.0, b2=0.999)
    assert np.isnan(as_printed.adamw_bc(setting))
    assert np.isnan(as_printed.adamw_bc_with_momentum(setting))
    assert np.isfinite(as_printed.adamw_bc_with_momentum(claimed(1_000)))
    squares = np.random.default_rng(0).normal(size=(1_000, 10_000)) ** 2
    weights = 0.01 * 0.99 ** np.arange(1_000)
    below = np.mean(weights @ squares < 1)
    assert 0.5 < below < 0.6


def test_theorem_3_6_says_nothing_for_slow_first_moments():
    """Flaw 7: its E has a root of 1 - b1 / b2."""
    setting = claimed(1_000, b1=0.95, b2=0.9)
    with pytest.raises(ValueError, match="b1 to be less than b2"):
        as_printed.adamw_with_momentum(setting)
    with pytest.raises(ValueError, match="more than b1"):
        as_printed.adamw_with_momentum(claimed(8, b1=0.9, b2=0.95))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(gradient_bound=2.0), "at most l2_clip_norm"),
        (dict(weight_decay=0.0), "weight_decay"),
        (dict(noise_variance=0.0), "noise_variance"),
        (dict(b2=1.0), "b2"),
    ],
)
def test_a_setting_outside_of_the_theorems_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        claimed(1_000, **change)

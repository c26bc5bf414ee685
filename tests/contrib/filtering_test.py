"""The filter against that of SciPy, and the noise behind it against simulations."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.signal

import dpadambc
from benchmarks import theory
from dpadambc import audit, contrib
from dpadambc.contrib.filtering import impulse_response
from tests import common

FILTERS = {
    "average": ((0.1,), (1.0, -0.9)),
    "first order": ((0.1, 0.1), (1.0, -0.8)),
    "butter": tuple(tuple(x.tolist()) for x in scipy.signal.butter(2, 0.2)),
    "of the last four": ((0.25, 0.25, 0.25, 0.25),),
    "none": ((2.0,),),
}
every_filter = pytest.mark.parametrize("name", FILTERS)
STEPS = 40
GRADIENTS = {
    "w": np.random.default_rng(0).normal(size=(STEPS, 3, 2)).astype(np.float32),
    "b": np.random.default_rng(1).normal(size=(STEPS, 2)).astype(np.float32),
}
PARAMS = jax.tree.map(lambda g: jnp.zeros(g.shape[1:]), GRADIENTS)


def filtered(tx, gradients=GRADIENTS, params=PARAMS):
    step = lambda state, g: tx.update(g, state, params)[::-1]
    return jax.lax.scan(step, tx.init(params), gradients)[::-1]


@every_filter
def test_is_the_filter_of_scipy_over_its_response_to_one(name):
    found, state = filtered(contrib.low_pass(*FILTERS[name]))
    b, a = (*FILTERS[name], (1.0,))[:2]
    one = scipy.signal.lfilter(b, a, np.ones(STEPS))
    for leaf, g in GRADIENTS.items():
        y = scipy.signal.lfilter(b, a, np.float64(g), axis=0)
        expected = y / one.reshape(-1, *(1,) * (g.ndim - 1))
        np.testing.assert_allclose(found[leaf], expected, rtol=1e-4, atol=1e-5)
    assert len(state.delays) == max(len(b), len(a)) - 1


def test_of_one_coefficient_each_it_is_the_average_of_optax():
    ours, _ = filtered(contrib.low_pass((0.1,), (1.0, -0.9)))
    theirs, _ = filtered(optax.ema(0.9))
    chex.assert_trees_all_close(ours, theirs, rtol=1e-4, atol=1e-6)


@every_filter
def test_a_constant_gradient_comes_out_as_it_went_in(name):
    constant = jax.tree.map(lambda g: np.full_like(g, 0.7), GRADIENTS)
    found, _ = filtered(contrib.low_pass(*FILTERS[name]), constant)
    chex.assert_trees_all_close(found, constant, rtol=1e-4)


LEVELS = {"constant": 0.5, "schedule": lambda t: 0.8 * 0.97**t}


@every_filter
@pytest.mark.parametrize("level", common.rest_slow(LEVELS, quick=1))
def test_noise_behind_it_has_the_stated_level_at_every_step(name, level):
    """Within 5 standard errors, of 10,000 coordinates, at each of 40 steps."""
    sigma, size = LEVELS[level], 10_000
    levels = np.array([sigma(t) if callable(sigma) else sigma for t in range(STEPS)])
    draws = np.random.default_rng(2).normal(size=(STEPS, size))
    noise = np.float32(levels[:, None] * draws)
    found, _ = filtered(contrib.low_pass(*FILTERS[name]), noise, noise[0])
    schedule = contrib.low_pass_noise_stddev(sigma, *FILTERS[name])
    stated = np.array([float(schedule(t)) for t in range(STEPS)])
    ratios = np.std(found, axis=1) / stated
    assert np.max(abs(ratios - 1)) < 5 / np.sqrt(2 * size)
    # Negative control: the level that went in.
    if name != "none":
        assert np.max(abs(np.std(found, axis=1) / levels - 1)) > 0.4


@pytest.mark.guarantee
def test_the_correction_behind_it_takes_out_the_noise_that_arrives():
    """E[v-hat - phi-hat] is the clean moment within 4.5 standard errors."""
    level, signal, size = 0.4, jnp.float32(0.1), 40_000
    noise = dpadambc.add_dp_noise(level, key=jax.random.key(1))
    coefficients = FILTERS["average"]
    behind = contrib.low_pass_noise_stddev(level, *coefficients)

    def excess(stddev):
        rms = dpadambc.scale_by_rms_bc(stddev, decay=0.95)
        tx = optax.chain(noise, contrib.low_pass(*coefficients), rms)
        gradient = common.summed(jnp.full(size, signal))
        step = lambda state, _: (tx.update(gradient, state)[1], None)
        state, _ = jax.lax.scan(step, tx.init(jnp.zeros(size)), length=STEPS)
        settled = 1 - 0.95**STEPS
        return (np.float64(state[2].nu) - float(state[2].noise_variance)) / settled

    found = excess(behind)
    error = found.std() / np.sqrt(size)
    assert abs(found.mean() - 0.1**2) < 4.5 * error
    # Negative controls: the mechanism's level, and the one once the filter has settled.
    assert excess(level).mean() < -0.05
    assert abs(excess(float(behind(1_000))).mean() - 0.1**2) > 20 * error


def test_the_floor_for_the_correlation_is_what_the_second_moment_resolves():
    """The stated 3.1 of an average of 0.9, simulated within 5 standard errors."""
    coefficients, b2, size, steps = FILTERS["average"], 0.99, 3_000, 600
    draws = np.random.default_rng(3).normal(size=(size, steps))
    noise = scipy.signal.lfilter(*coefficients, draws)
    weights = b2 ** np.arange(steps - 1, -1, -1.0)
    nu_hat = noise**2 @ (weights / weights.sum())
    response = impulse_response(*coefficients, 200)
    spread = theory.correlated_second_moment_spread(response, np.ones(steps), b2)
    squares = (nu_hat - nu_hat.mean()) ** 2
    error = squares.std() / np.sqrt(size)
    assert abs(squares.mean() - float(spread) ** 2) < 5 * error
    independent = theory.second_moment_spread(0.1 / 1.9, b2)
    assert squares.mean() > 2.5**2 * float(independent) ** 2


def test_levels_may_be_a_tree_and_counts_traced():
    schedules = contrib.low_pass_noise_stddev(
        {"w": 1.0, "b": lambda t: 0.5 + 0 * t}, *FILTERS["average"]
    )
    compiled = {k: float(jax.jit(schedule)(7)) for k, schedule in schedules.items()}
    assert compiled["w"] == pytest.approx(float(schedules["w"](7)), rel=1e-5)
    assert compiled["b"] == pytest.approx(compiled["w"] / 2, rel=1e-5)
    dpadambc.scale_by_adam_bc(schedules).init(PARAMS)


@pytest.mark.parametrize(
    ("coefficients", "name"),
    [
        (((1.0,), (1.0, -1.0)), "denominator"),  # does not settle
        (((1.0,), (1.0, -1.5)), "denominator"),
        (((0.0, 1.0),), "numerator"),  # no response to the first gradient
        (((1.0, -1.0),), "numerator"),
        (((-1.0,),), "numerator"),
        (((1.0,), (2.0, -1.0)), "denominator"),
        (((float("nan"),),), "numerator"),
        (((),), "numerator"),
        (((0.0,),), "numerator"),
    ],
)
def test_refuses_coefficients_of_no_low_pass(coefficients, name):
    with pytest.raises(ValueError, match=name):
        contrib.low_pass(*coefficients)
    with pytest.raises(ValueError, match=name):
        contrib.low_pass_noise_stddev(1.0, *coefficients)


def test_injected_arrays_are_refused_and_tuples_are_not():
    inject = optax.inject_hyperparams(contrib.low_pass)
    inject(*FILTERS["average"]).init(PARAMS)
    tx = inject(*map(np.array, FILTERS["average"]))
    with pytest.raises(TypeError, match="numerator"):
        jax.jit(tx.init)(PARAMS)


@pytest.mark.slow
def test_the_audit_tells_the_level_that_arrives_from_the_one_that_went_in():
    mechanism = common.poisson_gaussian()
    first = FILTERS["first order"]
    levels = {
        "arrives": contrib.low_pass_noise_stddev(mechanism.noise_stddev, *first),
        "went in": mechanism.noise_stddev,
    }
    found = {}
    for name, level in levels.items():
        behind = contrib.low_pass(*first), dpadambc.adam_bc(0.1, level)
        make = lambda key, behind=behind: optax.chain(
            dpadambc.privatize(mechanism, key=key), *behind
        )
        found[name] = audit.correction(make, jnp.zeros(20), mechanism).word
    assert found == {"arrives": "pass", "went in": "FAIL"}

"""One object draws the batches, adds the noise and accounts for both."""

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.linalg
import scipy.stats

import dpadambc
from dpadambc import NeighboringRelation, accounting, audit, training
from dpadambc.contrib import CorrelatedGaussian, strategies
from tests import common

NUMBERS = dict(
    l2_clip_norm=2.0,
    noise_multiplier=3.0,
    noising_coefficients=(1.0, -0.7, -0.1),
    batches_per_epoch=4,
    iterations=11,
    normalize_by=8.0,
)


def made(**changed):
    return CorrelatedGaussian(**{**NUMBERS, **changed})


def dense(coefficients, n):
    column = np.zeros(n)
    column[: len(coefficients)] = coefficients[:n]
    return scipy.linalg.toeplitz(column, np.zeros(n))


def delta_of_gaussian(epsilon, mu):
    """The closed form of the Gaussian mechanism with sensitivity mu."""
    upper, lower = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
    cdf = scipy.stats.norm.cdf
    return cdf(upper) - np.exp(epsilon) * cdf(lower)


def test_epsilon_is_that_of_the_noise_that_is_added_to_the_sums_of_batches():
    """In dense matrices: whitened by its covariance, the worst batch moves so much."""
    mechanism = made()
    n, level = mechanism.iterations, mechanism.noise_multiplier
    noise = level * dense(mechanism.noising_coefficients, n)
    inverse = np.linalg.inv(noise @ noise.T)
    moved = [(np.arange(n) % 4 == batch).astype(float) for batch in range(4)]
    mu = np.sqrt(max(v @ inverse @ v for v in moved))
    epsilon = mechanism.epsilon(1e-5)
    assert delta_of_gaussian(epsilon, mu) == pytest.approx(1e-5, rel=1e-3)
    assert mu * level == pytest.approx(mechanism.strategy_sensitivity())
    # The negative control: independent noise of the same standard deviation.
    independent = np.linalg.norm(moved[0]) / mechanism.noise_stddev(n) * 0.25
    assert delta_of_gaussian(epsilon, independent) < 1e-8


def test_independent_noise_costs_what_a_shuffled_order_does():
    mechanism = made(
        noising_coefficients=(1.0,),
        neighboring_relation=NeighboringRelation.REPLACE_ONE,
    )
    shuffled = dpadambc.ShuffledGaussian(
        l2_clip_norm=2.0,
        noise_multiplier=3.0,
        batch_size=8,
        num_examples=32,
        iterations=11,
        normalize_by=8.0,
    )
    for accountant in (accounting.PLD, accounting.RDP):
        one = mechanism.epsilon(1e-5, accountant=accountant)
        assert one == pytest.approx(shuffled.epsilon(1e-5, accountant=accountant), 1e-3)
    assert float(mechanism.noise_stddev(7)) == pytest.approx(shuffled.noise_stddev)


def test_epsilon_never_decreases_with_steps_and_is_infinite_without_noise():
    mechanism = made()
    found = [mechanism.epsilon(1e-5, iterations=n) for n in (0, 1, 4, 5, 11, 40)]
    assert found[0] == 0
    assert np.all(np.diff(found) > 0)
    assert made(noise_multiplier=0.0).epsilon(1e-5) == np.inf
    # The steps that were taken count, whatever the run was to have.
    assert made(iterations=5).epsilon(1e-5) == found[3]
    noises = [made(iterations=n).noise_stddev(2) for n in (3, 300)]
    assert noises[0] == noises[1]


def test_calibration_meets_the_target():
    numbers = {k: v for k, v in NUMBERS.items() if k != "noise_multiplier"}
    mechanism = CorrelatedGaussian.calibrate(
        target_epsilon=8.0, target_delta=1e-5, **numbers
    )
    assert 7.9 < mechanism.epsilon(1e-5) <= 8
    with pytest.raises(TypeError, match="noise_multiplier"):
        CorrelatedGaussian.calibrate(
            target_epsilon=8.0,
            target_delta=1e-5,
            **{k: v for k, v in NUMBERS.items() if k != "iterations"},
        )


def steps_of_examples(batches, num_examples):
    """For each example, in which steps it takes part."""
    found = [[] for _ in range(num_examples)]
    for step, batch in enumerate(batches):
        for i in batch.indices[~batch.is_padding_example]:
            found[i].append(step)
    return found


def test_an_example_comes_again_after_one_epoch_and_not_before():
    draw = lambda made, seed: made.batches(jax.random.key(seed), num_examples=40)
    firsts = []
    for seed in (0, 1):
        found = steps_of_examples(draw(made(), seed), 40)
        assert all(steps == list(range(steps[0], 11, 4)) for steps in found)
        firsts.append([steps[0] for steps in found])
        assert set(firsts[-1]) == {0, 1, 2, 3}
    assert firsts[0] != firsts[1]
    # The negative control: a new deal in each epoch comes closer.
    dealt = dpadambc.RandomAllocationGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        batches_per_epoch=4,
        iterations=11,
        normalize_by=8,
    )
    again = steps_of_examples(draw(dealt, 0), 40)
    assert min(min(np.diff(steps)) for steps in again) < 4


def test_the_correction_follows_the_noise_that_is_added():
    mechanism = made(noise_multiplier=20.0)
    params = jnp.zeros(50_000)
    summed = dpadambc.as_clipped_sum(
        params,
        l2_clip_norm=mechanism.l2_clip_norm,
        normalize_by=mechanism.normalize_by,
    )
    tx = mechanism.add_noise(key=jax.random.key(0))
    adam = dpadambc.scale_by_adam_bc(mechanism.noise_stddev, b1=0.9, b2=0.5)

    def step(states, _):
        noised, noise_state = tx.update(summed, states[0], params)
        _, adam_state = adam.update(noised, states[1], params)
        return (noise_state, adam_state), noised

    states = tx.init(params), adam.init(params)
    (_, state), drawn = jax.jit(lambda s: jax.lax.scan(step, s, length=6))(states)
    expected = [float(mechanism.noise_stddev(t)) for t in range(6)]
    assert expected == sorted(expected)
    assert expected[0] == pytest.approx(20 * 2 / 8)
    assert expected[2:] == [pytest.approx(20 * 2 / 8 * (1 + 0.49 + 0.01) ** 0.5)] * 4
    np.testing.assert_allclose(np.std(drawn, axis=1), expected, rtol=0.02)
    np.testing.assert_allclose(state.nu.mean(), state.noise_variance, rtol=0.03)
    # The negative control: the level of the draws alone is too little.
    assert state.nu.mean() > 1.3 * (20 * 2 / 8) ** 2 * (1 - 0.5**6)


def loss_fn(w, x):
    return jnp.sum((w - x) ** 2)


DATA = (np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32),)


@pytest.mark.slow
def test_fit_trains_with_it_and_goes_on_bit_for_bit(tmp_path):
    common.assert_fit_goes_on_bit_for_bit(made, tmp_path)


def test_fit_stops_before_the_budget_is_exceeded():
    mechanism = made(iterations=40)
    result = training.fit(
        loss_fn,
        jnp.zeros(3),
        DATA,
        mechanism,
        optax.sgd(0.1),
        key=jax.random.key(6),
        target_epsilon=mechanism.epsilon(1e-5, iterations=9) + 1e-6,
        target_delta=1e-5,
        steps_per_call=1,
    )
    assert result.iterations == 9


def test_it_is_a_value_whose_runs_compose():
    mechanism = made(noising_coefficients=np.array([1.0, -0.5]))
    assert mechanism == made(noising_coefficients=[1, -0.5])
    assert hash(mechanism) == hash(made(noising_coefficients=(1.0, -0.5)))
    # Two runs are two Gaussians, and no longer run: their noise is not taken back.
    spent = accounting.compose([mechanism, mechanism])
    assert spent.dp_event() == dp_accounting.ComposedDpEvent(
        [dp_accounting.SelfComposedDpEvent(mechanism.dp_event(), 2)]
    )


def test_wrong_use_is_an_error():
    for error, wrong in [
        (TypeError, dict(noise_multiplier=lambda step: 1.0)),
        (ValueError, dict(noising_coefficients=(2.0, -1.0))),
        (ValueError, dict(batches_per_epoch=0)),
    ]:
        with pytest.raises(error, match=[*wrong][0]):
            made(**wrong)


def test_the_audit_says_that_it_knows_independent_noise_alone():
    mechanism, params = made(), jnp.zeros(10)
    make = lambda key: dpadambc.dp_adam_bc(0.1, mechanism, key=key)
    refused = pytest.raises(ValueError, match="mechanism.*CorrelatedGaussian")
    with refused:
        audit.noise(make, params, mechanism)
    with refused:
        audit.Pipeline.of_fit(loss_fn, jnp.zeros(3), DATA, mechanism, optax.sgd(0.1))
    found = audit.sampling(
        lambda seed: mechanism.batches(jax.random.key(seed), num_examples=40),
        mechanism,
        num_examples=40,
    )
    assert found.word == "not tested"


@pytest.mark.parametrize("bandwidth", [2, 4, 8])
def test_the_sum_of_steps_has_less_noise_at_the_same_epsilon(bandwidth):
    """Over one epoch and by the same epsilon, which is what it is for."""
    total = {}
    for d in ((1.0,), strategies.banded_inverse_square_root(bandwidth)):
        one = made(noising_coefficients=d, batches_per_epoch=100, iterations=100)
        level = one.strategy_sensitivity()  # of the draws, at one epsilon
        total[d] = level * np.linalg.norm(np.tril(np.ones((100, 100))) @ dense(d, 100))
    white, correlated = total.values()
    assert correlated < 0.85 * white

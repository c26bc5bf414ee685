"""Adafactor without the noise in the means of its rows and columns."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from dpadambc import contrib
from dpadambc.audit.correction import is_corrected
from tests import common

STEPS = 30
RNG = np.random.default_rng(0)
SHAPES = {"matrix": (6, 5), "kernel": (3, 7, 5), "equal": (4, 4), "vector": (9,)}
GRADIENTS = {
    name: RNG.normal(size=(STEPS, *shape)).astype(np.float32)
    for name, shape in SHAPES.items()
}
PARAMS = {name: jnp.full(shape, 0.5) for name, shape in SHAPES.items()}
SMALL = dict(min_dim_size_to_factor=4)


def updates_of(tx, params=PARAMS, gradients=GRADIENTS):
    """Of every step, and the last state."""
    step = lambda state, g: tx.update(g, state, params)[::-1]
    state, updates = jax.lax.scan(step, tx.init(params), gradients)
    return updates, state


@pytest.mark.slow
def test_without_noise_it_is_that_of_optax():
    floor = dict(variance_floor=1e-30)
    ours = contrib.scale_by_adafactor_bc(0.0, **floor, **SMALL)
    theirs = optax.scale_by_factored_rms(**SMALL)
    ours, theirs = (updates_of(tx)[0] for tx in (ours, theirs))
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5)
    # The chains too, with the defaults of both.
    ours = contrib.adafactor_bc(0.1, 0.0, **floor, **SMALL)
    theirs = optax.adafactor(0.1, **SMALL)
    ours, theirs = (updates_of(tx)[0] for tx in (ours, theirs))
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5)


def test_what_is_not_factored_is_adams_second_moment_with_other_weights():
    """A matrix below the least size, under a level of noise for each parameter."""
    levels = {name: 0.1 * (i + 1) for i, name in enumerate(SHAPES)}
    tx = contrib.scale_by_adafactor_bc(levels, variance_floor=1e-3)
    updates, state = updates_of(tx)
    nu, weights = dict.fromkeys(SHAPES, 0.0), 0.0
    for t in range(STEPS):
        new = (t + 1.0) ** -0.8
        weights = (1 - new) ** 2 * weights + new**2
        for name, g in GRADIENTS.items():
            nu[name] = (1 - new) * nu[name] + new * np.float64(g[t]) ** 2
            v = np.maximum(nu[name] - levels[name] ** 2, 1e-3)
            np.testing.assert_allclose(
                updates[name][t], g[t] / np.sqrt(v), rtol=1e-3, atol=1e-5
            )
    assert state.squared_weights == pytest.approx(weights, rel=1e-5)


CLEAN = np.float32(np.outer([0.1, 0.4, 1.0, 0.2], [1.0, 0.3, 0.6, 0.2, 0.8]))
LEVELS = {"constant": 0.7, "schedule": lambda t: 0.9 * 0.95**t}


def noised_averages(level, runs=4_000):
    """The last state of each run, with the same clean gradient at every step."""
    tx = contrib.scale_by_adafactor_bc(level, **SMALL)

    def run(key):
        noise = dpadambc.add_dp_noise(level, key=key)

        def step(states, _):
            noised, noise_state = noise.update(common.summed(CLEAN), states[0])
            return (noise_state, tx.update(noised, states[1])[1]), None

        start = noise.init(CLEAN), tx.init(CLEAN)
        return jax.lax.scan(step, start, length=STEPS)[0][1]

    return jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(3), runs))


@pytest.mark.parametrize("name", LEVELS)
def test_corrected_means_of_rows_and_columns_are_the_clean_ones(name):
    """Each of the nine within 4.5 standard errors, of 4,000 runs."""
    state = noised_averages(LEVELS[name])
    clean = np.float64(CLEAN) ** 2
    for averages, axis in [(state.nu.row, 1), (state.nu.column, 0)]:
        averages, expected = np.float64(averages), clean.mean(axis)
        phi = float(state.noise_variance[0])
        error = averages.std(0) / np.sqrt(len(averages))
        assert (abs(averages.mean(0) - phi - expected) < 4.5 * error).all()
        # Negative controls: nothing is subtracted, or the level of the last step.
        assert (abs(averages.mean(0) - expected) > 40 * error).all()
        if name == "schedule":
            last = LEVELS[name](STEPS - 1) ** 2
            assert (abs(averages.mean(0) - last - expected) > 20 * error).all()


def test_the_product_has_the_means_of_the_rows_and_columns():
    """And noise that is subtracted after it leaves others."""
    tx = contrib.scale_by_adafactor_bc(0.2, variance_floor=1e-9, **SMALL)
    noised = np.sqrt(CLEAN**2 + 0.2**2)
    updates, _ = tx.update(noised, tx.init(noised))
    v = np.float64(noised / updates) ** 2
    np.testing.assert_allclose(v, CLEAN**2, rtol=1e-3)
    for axis in range(2):
        np.testing.assert_allclose(v.mean(axis), (CLEAN**2).mean(axis), rtol=1e-3)
    row, column = (np.float64(CLEAN**2).mean(i, keepdims=True) for i in (1, 0))
    mean, phi = row.mean(), 0.2**2
    after = (row + phi) * (column + phi) / (mean + phi) - phi
    excess = phi * (row - mean) * (mean - column) / (mean * (mean + phi))
    np.testing.assert_allclose(after - row * column / mean, excess, atol=1e-12)
    assert (after < 0).any() and np.max(abs(excess)) > 0.01


def test_the_relative_floor_is_what_the_averages_resolve():
    """Noise alone: the spread of rows of five and columns of four, of 4,000 runs."""
    phi, runs = 0.3**2, 4_000
    tx = contrib.scale_by_adafactor_bc(0.3, **SMALL)
    noise = 0.3 * np.random.default_rng(1).normal(size=(STEPS, runs, 4, 5))

    def run(gradients):
        step = lambda state, g: (tx.update(g, state)[1], None)
        return jax.lax.scan(step, tx.init(CLEAN), gradients)[0]

    state = jax.jit(jax.vmap(run, in_axes=1))(np.float32(noise))
    weights = float(state.squared_weights[0])
    for averages, size in [(state.nu.row, 5), (state.nu.column, 4)]:
        spread = phi * np.sqrt(2 * weights / size)
        # Of four or more squares the standard deviation has an error below this.
        error = np.sqrt((2 + 12 / size) / (4 * averages.size))
        assert np.std(averages) == pytest.approx(spread, rel=5 * error)
    # Where all is noise, no step is longer than the floor lets it be.
    updates, _ = updates_of(tx, CLEAN, np.float32(noise[:, 0]))
    floor = phi * np.sqrt(2 * weights / 4)
    largest = np.max(abs(np.float32(noise[-1, 0])))
    assert np.max(abs(updates[-1])) <= largest / np.sqrt(floor) * 1.001


def test_a_quiet_row_and_a_quiet_column_are_floored_together():
    gradient = np.float32(np.outer([0.01, 1.0, 1.0, 1.0], [0.01, 1.0, 1.0, 1.0]))
    tx = contrib.scale_by_adafactor_bc(0.0, variance_floor=0.01, **SMALL)
    updates, _ = tx.update(gradient, tx.init(gradient))
    assert updates[0, 0] == pytest.approx(gradient[0, 0] / 0.1)


def test_zero_gradients_without_noise_stay_zero():
    tx = contrib.scale_by_adafactor_bc(0.0, **SMALL)
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    updates, _ = tx.update(zeros, tx.init(PARAMS))
    chex.assert_trees_all_equal(updates, zeros)


def test_state_is_of_rows_and_columns_and_seen_by_the_audit():
    params = jnp.zeros((200, 300), jnp.bfloat16)
    tx = contrib.adafactor_bc(0.1, 0.1)
    (state, *_) = tx.init(params)
    assert state.nu.row.shape == (200,) and state.nu.column.shape == (300,)
    chex.assert_type(jax.tree.leaves(state.nu), jnp.float32)
    assert is_corrected(lambda key: tx, params)
    assert not is_corrected(lambda key: optax.adafactor(0.1), params)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(decay_rate=0.0),
        dict(min_dim_size_to_factor=0),
        dict(clipping_threshold=0.0),
        dict(variance_floor=-1.0),
    ],
)
def test_refuses_numbers_out_of_their_range(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        contrib.adafactor_bc(0.1, 0.1, **wrong)


def test_injected_it_says_which_argument_is_static():
    inject = optax.inject_hyperparams(contrib.adafactor_bc)
    with pytest.raises(TypeError, match="min_dim_size_to_factor"):
        inject(0.1, 0.1).init(PARAMS)

"""AdEMAMix without the noise in its second moment."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from dpadambc import RelativeFloor, contrib
from dpadambc.audit.correction import is_corrected
from tests import common

GRADIENTS = np.random.default_rng(0).normal(size=(40, 300)).astype(np.float32)
SETTINGS = {
    "relative": dict(variance_floor=RelativeFloor(0.5)),
    "absolute": dict(variance_floor=1e-3),
    "floor alone": dict(correction=0.0),
    "schedule": dict(noise_stddev=lambda t: 0.5 * 0.95**t),
}


def updates_of(tx):
    """Of every step, shape (steps, coordinates), and the last state."""
    step = lambda state, g: tx.update(g, state, g)[::-1]
    state, updates = jax.lax.scan(step, tx.init(GRADIENTS[0]), GRADIENTS)
    return updates, state


@pytest.mark.parametrize("name", SETTINGS)
def test_without_the_slow_moment_it_is_the_corrected_adam(name):
    settings = {"noise_stddev": 0.7} | SETTINGS[name]
    make = contrib.scale_by_ademamix_bc
    ours, _ = updates_of(make(**settings, alpha=0.0))
    adam, _ = updates_of(dpadambc.scale_by_adam_bc(**settings))
    chex.assert_trees_all_close(ours, adam, rtol=1e-6)
    # Negative control: the slow moment is not nothing.
    other, _ = updates_of(make(**settings, b3=0.99))
    assert np.max(abs(ours - other)) > 0.1


SCHEDULES = dict(b3=lambda t: 0.9 + 0.001 * t, alpha=lambda t: 0.1 * t)


@pytest.mark.parametrize("settings", [{}, SCHEDULES], ids=["numbers", "schedules"])
def test_without_noise_it_is_that_of_optax(settings):
    floor = dict(variance_floor=1e-30)
    ours, _ = updates_of(contrib.scale_by_ademamix_bc(0.0, **floor, **settings))
    theirs = optax.contrib.scale_by_ademamix(eps=0.0, **settings)
    chex.assert_trees_all_close(ours, updates_of(theirs)[0], rtol=1e-5, atol=1e-6)
    # The chains too, with the defaults of both.
    ours, _ = updates_of(contrib.ademamix_bc(0.1, 0.0, **floor, **settings))
    theirs = optax.contrib.ademamix(0.1, eps=0.0, **settings)
    chex.assert_trees_all_close(ours, updates_of(theirs)[0], rtol=1e-5, atol=1e-6)


def test_slow_moment_has_the_noise_and_the_signal_that_are_advised_of():
    """Within 5 standard errors, of 20,000 coordinates."""
    signal, size, b3, steps = 0.3, 20_000, 0.99, 80
    noise = dpadambc.add_dp_noise(1.0, key=jax.random.key(1))
    tx = contrib.scale_by_ademamix_bc(1.0, b3=b3)
    gradient = jnp.full(size, signal)

    def step(states, _):
        noised, noise_state = noise.update(common.summed(gradient), states[0])
        return (noise_state, tx.update(noised, states[1])[1]), None

    start = noise.init(gradient), tx.init(gradient)
    (_, state), _ = jax.lax.scan(step, start, length=steps)
    m2, held = np.float64(state.m2), 1 - b3**steps
    stddev = np.sqrt((1 - b3) / (1 + b3) * (1 - b3 ** (2 * steps)))
    assert abs(m2.mean() - held * signal) < 5 * stddev / np.sqrt(size)
    assert abs(m2.std() / stddev - 1) < 5 / np.sqrt(2 * size)
    # Negative control: a moment that is corrected for its start holds all of it.
    assert abs(m2.mean() - signal) > 20 * stddev / np.sqrt(size)


def test_moments_are_in_the_dtypes_asked_for():
    params = {"w": jnp.zeros((3, 2), jnp.bfloat16)}
    tx = contrib.scale_by_ademamix_bc(0.1, mu_dtype="bfloat16")
    state = tx.init(params)
    _, after = tx.update({"w": jnp.ones((3, 2))}, state)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, after)
    assert {x.dtype for x in (after.m1["w"], after.m2["w"])} == {jnp.dtype("bfloat16")}
    assert after.nu["w"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (dict(b3=1.0), r"Expected b3 in \[0, 1\)"),
        (dict(alpha=-1.0), "Expected alpha to be non-negative"),
        (dict(correction=-1.0), "Expected correction to be non-negative"),
    ],
)
def test_refuses_what_is_out_of_range(wrong, match):
    with pytest.raises(ValueError, match=match):
        contrib.ademamix_bc(0.1, 0.1, **wrong)


def test_behind_privatize_it_sees_the_private_gradient_alone():
    """Other examples of the same clipped sum: the same state and updates."""
    mechanism = common.poisson_gaussian(noise_multiplier=0.5, normalize_by=4.0)
    tx = optax.chain(
        dpadambc.privatize(mechanism, key=jax.random.key(2)),
        contrib.ademamix_bc(0.1, mechanism.noise_stddev),
    )
    params, padding = jnp.zeros(2), jnp.zeros(2, bool)
    rows = jnp.array([[0.5, 0.25], [0.25, 0.5]])

    def run(rows):
        examples = dpadambc.as_per_example(rows, is_padding_example=padding)
        return common.plain(tx.update(examples, tx.init(params), params))

    moved = rows + jnp.array([[0.25, 0.0], [-0.25, 0.0]])
    chex.assert_trees_all_equal(run(rows), run(moved))
    # Negative control: another sum.
    with pytest.raises(AssertionError):
        chex.assert_trees_all_equal(run(rows), run(2 * moved))


def test_the_audit_sees_the_correction():
    params = jnp.zeros(2)
    ours = lambda key: contrib.ademamix_bc(0.1, 0.3)
    plain = lambda key: optax.contrib.ademamix(0.1)
    assert is_corrected(ours, params)
    assert not is_corrected(plain, params)

"""RMSProp without the noise in its second moment."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from dpadambc import RelativeFloor
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
    step = lambda state, g: tx.update(g, state)[::-1]
    state, updates = jax.lax.scan(step, tx.init(GRADIENTS[0]), GRADIENTS)
    return updates, state


@pytest.mark.parametrize("name", SETTINGS)
def test_is_the_corrected_adam_without_a_first_moment(name):
    settings = {"noise_stddev": 0.7} | SETTINGS[name]
    rms, _ = updates_of(dpadambc.scale_by_rms_bc(**settings, decay=0.95))
    adam, _ = updates_of(dpadambc.scale_by_adam_bc(**settings, b1=0.0, b2=0.95))
    chex.assert_trees_all_close(rms, adam, rtol=1e-6)
    # Negative control: a first moment is another update.
    other, _ = updates_of(dpadambc.scale_by_adam_bc(**settings, b1=0.5, b2=0.95))
    assert np.max(abs(rms - other)) > 0.1


def test_without_noise_it_is_that_of_optax():
    ours, _ = updates_of(dpadambc.scale_by_rms_bc(0.0, variance_floor=0.0))
    optaxs, _ = updates_of(
        optax.scale_by_rms(eps=0.0, eps_in_sqrt=False, bias_correction=True)
    )
    chex.assert_trees_all_close(ours, optaxs, rtol=1e-5)


def test_corrected_second_moment_is_the_clean_one():
    """Within 4 standard errors, from 40,000 coordinates, at a level that moves."""
    level, decay, steps = lambda t: 0.4 * 0.98**t, 0.95, 60
    signal = jnp.full(40_000, 0.1)
    noise = dpadambc.add_dp_noise(level, key=jax.random.key(1))
    rms = dpadambc.scale_by_rms_bc(level, decay=decay)

    def step(states, _):
        noised, noise_state = noise.update(common.summed(signal), states[0])
        return (noise_state, rms.update(noised, states[1])[1]), None

    start = noise.init(signal), rms.init(signal)
    (_, state), _ = jax.lax.scan(step, start, length=steps)
    settled = 1 - decay**steps
    excess = (np.float64(state.nu) - float(state.noise_variance)) / settled
    error = excess.std() / np.sqrt(excess.size)
    assert abs(excess.mean() - 0.1**2) < 4 * error
    # Negative control: the level of the last step.
    off = np.float64(state.nu) / settled - level(steps - 1) ** 2
    assert abs(off.mean() - 0.1**2) > 20 * error


def test_state_has_one_array_for_each_parameter():
    params = {"w": jnp.zeros((3, 2), jnp.bfloat16), "b": jnp.zeros(2)}
    state = dpadambc.scale_by_rms_bc(0.1).init(params)
    chex.assert_trees_all_equal_shapes(state.nu, params)
    chex.assert_type(jax.tree.leaves(state.nu), jnp.float32)
    assert len(jax.tree.leaves(state)) == 4


def test_refuses_what_is_no_decay_rate():
    with pytest.raises(ValueError, match=r"Expected decay in \[0, 1\)"):
        dpadambc.rms_bc(0.1, 0.1, decay=1.0)


def test_the_chain_is_the_private_gradient_and_the_rule():
    mechanism = common.poisson_gaussian(noise_multiplier=0.5, normalize_by=4.0)
    key, params = jax.random.key(2), jnp.zeros(3)
    chain = dpadambc.dp_rms_bc(0.1, mechanism, key=key, decay=0.8)
    parts = optax.chain(
        dpadambc.privatize(mechanism, key=key),
        dpadambc.rms_bc(0.1, mechanism.noise_stddev, decay=0.8),
    )
    gradients = dpadambc.as_per_example(
        jnp.eye(3), is_padding_example=jnp.zeros(3, bool)
    )
    first, second = (
        tx.update(gradients, tx.init(params), params)[0] for tx in (chain, parts)
    )
    chex.assert_trees_all_equal(first, second)

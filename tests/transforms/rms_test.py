"""RMSProp without the noise in its second moment."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from dpadambc import RelativeFloor

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


def test_state_has_one_array_for_each_parameter():
    params = {"w": jnp.zeros((3, 2), jnp.bfloat16), "b": jnp.zeros(2)}
    state = dpadambc.scale_by_rms_bc(0.1).init(params)
    chex.assert_trees_all_equal_shapes(state.nu, params)
    chex.assert_type(jax.tree.leaves(state.nu), jnp.float32)
    assert len(jax.tree.leaves(state)) == 4


def test_refuses_what_is_no_decay_rate():
    with pytest.raises(ValueError, match="decay"):
        dpadambc.rms_bc(0.1, 0.1, decay=1.0)

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


def test_moments_are_in_the_dtypes_asked_for():
    params = {"w": jnp.zeros((3, 2), jnp.bfloat16)}
    tx = contrib.scale_by_ademamix_bc(0.1, mu_dtype="bfloat16")
    state = tx.init(params)
    _, after = tx.update({"w": jnp.ones((3, 2))}, state)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, after)
    assert {x.dtype for x in (after.m1["w"], after.m2["w"])} == {jnp.dtype("bfloat16")}
    assert after.nu["w"].dtype == jnp.float32


@pytest.mark.parametrize(
    "wrong", [dict(b3=1.0), dict(alpha=-1.0), dict(correction=-1.0)]
)
def test_refuses_numbers_out_of_their_range(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        contrib.ademamix_bc(0.1, 0.1, **wrong)


def test_the_audit_sees_the_correction():
    params = jnp.zeros(2)
    ours = lambda key: contrib.ademamix_bc(0.1, 0.3)
    plain = lambda key: optax.contrib.ademamix(0.1)
    assert is_corrected(ours, params)
    assert not is_corrected(plain, params)

"""The bound of the next step is found in every state that has one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from dpadambc import contrib, diagnostics, training

FIXED = dpadambc.PoissonGaussian(
    l2_clip_norm=0.5,
    noise_multiplier=1.0,
    sampling_prob=0.5,
    iterations=4,
    normalize_by=20,
)
MOVES = dataclasses.replace(
    FIXED, clip_rule=contrib.QuantileClipping(), noise_multiplier=0.5
)
DATA = (np.full((40, 3), 5.0, np.float32),)


def test_the_bound_is_that_of_the_state_wherever_it_is():
    result = training.fit(
        lambda w, x: jnp.sum((w - x) ** 2),
        jnp.zeros(3),
        DATA,
        MOVES,
        optax.sgd(0.1),
        key=jax.random.key(1),
        target_delta=1e-5,
        spent=(),
    )
    expected = result.state.noise.l2_clip_norm
    assert expected != 0.5
    for state in (result.state, result.state.noise, (result.state.noise, ())):
        found = jax.jit(lambda s: diagnostics.clip_bound(MOVES, s))(state)
        assert found == expected
    assert diagnostics.clip_bound(MOVES, result) == expected
    with pytest.raises(ValueError, match="state"):
        diagnostics.clip_bound(MOVES, (result.state.noise, result.state.noise))


def test_a_fixed_bound_is_the_mechanisms():
    state = dpadambc.dp_adam(0.1, FIXED, key=jax.random.key(0)).init(jnp.zeros(3))
    assert diagnostics.clip_bound(FIXED, state) == 0.5
    with pytest.raises(TypeError, match="mechanism"):
        diagnostics.clip_bound(0.5, state)

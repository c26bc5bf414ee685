"""The rule of a run and its bound are found in every state that has them."""

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
    for state in (result, result.state, result.state.noise, (result.state.noise, ())):
        found = jax.jit(lambda s: diagnostics.clip_bound(MOVES, s))(
            state if state is not result else result.state
        )
        assert found.l2_clip_norm == expected != 0.5
        assert found.relative_to_start == pytest.approx(float(expected) / 0.5)
        assert found.rule == MOVES.clip_rule
    assert diagnostics.clip_bound(MOVES, result).l2_clip_norm == expected
    assert str(found) == (
        f"{MOVES.clip_rule!r} at {float(expected):.4g},"
        f" {float(expected) / 0.5:.3g} of the first"
    )


def test_a_bound_that_stays_is_the_mechanisms():
    state = dpadambc.dp_adam(0.1, FIXED, key=jax.random.key(0)).init(jnp.zeros(3))
    found = diagnostics.clip_bound(FIXED, state)
    assert found.l2_clip_norm == 0.5
    assert found.relative_to_start == 1
    assert str(found) == "Flat() at 0.5, which stays"


def test_the_state_of_another_run_is_refused():
    make = lambda m: dpadambc.dp_adam(0.1, m, key=jax.random.key(0))
    fixed, moves = (make(m).init(jnp.zeros(3)) for m in (FIXED, MOVES))
    with pytest.raises(ValueError, match="got one with 0 bounds that move"):
        diagnostics.clip_bound(MOVES, fixed)
    with pytest.raises(ValueError, match=r"with Flat\(\), got one with 1 bounds"):
        diagnostics.clip_bound(FIXED, moves)
    with pytest.raises(ValueError, match="got one with 2 bounds"):
        diagnostics.clip_bound(MOVES, (moves, moves))
    with pytest.raises(TypeError, match="mechanism to be a dpadambc mechanism"):
        diagnostics.clip_bound(0.5, fixed)

"""Stages behind the noise: the level of their input, and arguments without noise.

Such arguments are passed on: `docs/pitfalls.md` has the cost.
"""

import chex
import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest

import dpadambc
from dpadambc import contrib
from tests.attacks import MECHANISM, PARAMS, B, C, X, gradients


@pytest.mark.parametrize(("k", "level"), [(4, 0.5), (4, 1.0)])
def test_behind_multi_steps_the_level_is_that_of_the_mean(k, level):
    """With sigma / sqrt(k) the corrected moment of noise alone is zero; with sigma it
    is off by -0.75 of the variance (the negative control)."""
    tx = optax.MultiSteps(dpadambc.scale_by_adam_bc(level, b2=0.9), k)
    params = jnp.zeros(20_000)
    draws = jax.random.normal(jax.random.key(0), (40 * k, 20_000))
    step = lambda state, g: (tx.update(g, state, params)[1], None)
    state, _ = jax.jit(lambda s: jax.lax.scan(step, s, draws))(tx.init(params))
    adam = state.inner_opt_state
    off = float(adam.nu.mean() - adam.noise_variance)
    assert off == pytest.approx(1 / k - level**2, abs=0.02)


PRIVATIZERS = {
    "one stage": (dpadambc.privatize(MECHANISM, key=jax.random.key(0)),),
    "clip and noise": (
        dpadambc.clip_per_example(C, normalize_by=B),
        dpadambc.add_dp_noise(100.0, key=jax.random.key(0)),
    ),
}


def ascent(learning_rate):
    """Sharpness-aware: the gradient of a second point is asked for, and not noised."""
    toward = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    return optax.contrib.sam(
        optax.sgd(learning_rate), toward, sync_period=2, opaque_mode=True
    )


@pytest.mark.parametrize(
    "noise",
    [
        dpadambc.add_dp_noise(1.0, key=jax.random.key(0)),
        contrib.add_correlated_noise(1.0, (1.0, -0.5), key=jax.random.key(1)),
        contrib.add_banded_noise(1.0, (1.0, 0.5), key=jax.random.key(2)),
    ],
    ids=["add_dp_noise", "add_correlated_noise", "add_banded_noise"],
)
def test_a2_what_a_loss_past_the_noise_did(noise):
    """A rate that tells of the label: `docs/pitfalls.md`, on extra arguments."""
    tx = optax.chain(noise, optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1))
    summed = dpadambc.as_clipped_sum(PARAMS, l2_clip_norm=C, normalize_by=B)
    states = []
    for value in (0.0, -1e4):  # of one label that is another
        state = tx.init(PARAMS)
        for step in range(3):
            _, state = tx.update(summed, state, PARAMS, value=value * step)
        states.append(state[-1].scale)
    assert states[0] != states[1]


@pytest.mark.parametrize("privatizer", PRIVATIZERS.values(), ids=PRIVATIZERS)
def test_a2_what_a_gradient_function_behind_the_noise_did(privatizer):
    """The update is the gradient without noise."""
    tx = optax.chain(*privatizer, ascent(1.0))
    total = lambda w: jnp.mean(X @ w)
    updates, _ = tx.update(
        gradients(), tx.init(PARAMS), PARAMS, grad_fn=lambda w, _: jax.grad(total)(w)
    )
    chex.assert_trees_all_close(updates, -X.mean(0), rtol=1e-5)

"""Muon for the hidden matrices and `adam_bc` for the rest, behind one private gradient.

`optax_contract_test` and `refusals_test` show private gradients alone to Muon.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import dpadambc
from dpadambc import training
from tests import common

RNG = np.random.default_rng(0)
DATA = {
    "x": jnp.asarray(RNG.normal(size=(200, 3)), jnp.float32),
    "y": jnp.asarray(RNG.normal(size=200), jnp.float32),
}
PARAMS = {
    "in": {"w": jnp.asarray(RNG.normal(size=(3, 6)), jnp.float32), "b": jnp.zeros(6)},
    "hidden": {"w": jnp.eye(6), "b": jnp.zeros(6)},
    "out": jnp.ones((6, 1)),
}
HIDDEN = {"in": "adam_bc", "hidden": {"w": "muon", "b": "adam_bc"}, "out": "adam_bc"}
MECHANISM = common.poisson_gaussian(iterations=8)
# Sums that differ by rounding have noise of their own.
SILENT = common.poisson_gaussian(iterations=8, noise_multiplier=0.0)
KEY = jax.random.key(0)
MUON = optax.contrib.muon(0.02)
ADAM_BC = dpadambc.adam_bc(0.01, MECHANISM.noise_stddev)


def optimizer():
    return optax.multi_transform({"muon": MUON, "adam_bc": ADAM_BC}, HIDDEN)


def loss_fn(params, example):
    h = jnp.tanh(example["x"] @ params["in"]["w"] + params["in"]["b"])
    h = jnp.tanh(h @ params["hidden"]["w"] + params["hidden"]["b"])
    return jnp.square((h @ params["out"])[0] - example["y"])


def private_gradients():
    """Of two steps, as they leave `privatize`."""
    tx = dpadambc.privatize(MECHANISM, key=KEY)
    gradient = jax.jit(dpadambc.per_example_grad(loss_fn))
    state, found = tx.init(PARAMS), []
    padding = jnp.zeros(50, bool)
    for start in (0, 50):
        rows = jax.tree.map(lambda x, at=start: x[at : at + 50], DATA)
        grads = gradient(PARAMS, rows, is_padding_example=padding)
        private, state = tx.update(grads, state, PARAMS)
        found.append(private)
    return found


@pytest.mark.slow
def test_hidden_matrices_get_muons_update_and_the_rest_the_corrected_one():
    """Each as if it were alone, with the level of noise that the mechanism adds."""
    hidden = PARAMS["hidden"]["w"]
    rest = PARAMS | {"hidden": {"b": PARAMS["hidden"]["b"]}}
    together, alone, adam = optimizer(), MUON.init(hidden), ADAM_BC.init(rest)
    state = together.init(PARAMS)
    for private in private_gradients():
        updates, state = jax.jit(together.update)(private, state, PARAMS)
        expected, alone = jax.jit(MUON.update)(private["hidden"]["w"], alone, hidden)
        chex.assert_trees_all_close(updates["hidden"]["w"], expected, rtol=1e-5)
        # Which has lost the sizes of the gradient: singular values about one.
        values = np.linalg.svd(updates["hidden"]["w"] / 0.02, compute_uv=False)
        assert (values > 0.5).all() and (values < 1.4).all()
        others = private | {"hidden": {"b": private["hidden"]["b"]}}
        expected, adam = ADAM_BC.update(others, adam, rest)
        updates["hidden"].pop("w")
        chex.assert_trees_all_close(updates, expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.guarantee
def test_state_is_of_noised_gradients_alone():
    """Data whose clipped sums agree at each step leave the same state, not others."""

    def end(scale, sign=1.0):
        loss = lambda params, x: (
            sign * sum(jnp.sum(x * leaf) for leaf in jax.tree.leaves(params))
        )
        result = training.fit(
            loss,
            PARAMS,
            (scale * jnp.ones(200),),
            dataclasses.replace(SILENT, iterations=3, sampling_prob=1.0),
            optimizer(),
            key=KEY,
            target_delta=1e-5,
        )
        return training.releasable(result)[1:]

    # Far above the clip norm the size of a gradient is no part of the clipped sum.
    chex.assert_trees_all_close(end(1e3), end(1e5), rtol=2e-3, atol=2e-3)
    # Negative control.
    with pytest.raises(AssertionError):
        chex.assert_trees_all_close(end(1e3), end(1e3, sign=-1.0), rtol=2e-3, atol=2e-3)


def test_a_private_gradient_for_each_part_is_refused():
    """Two sensitivities of C where one is accounted for."""
    part = lambda tx: optax.chain(dpadambc.privatize(MECHANISM, key=KEY), tx)
    parts = {"muon": part(MUON), "adam_bc": part(ADAM_BC)}
    with pytest.raises(ValueError, match="params"):
        optax.multi_transform(parts, HIDDEN).init(PARAMS)

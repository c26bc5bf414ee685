"""The chain is the `tx` of Flax Linen and Flax NNX, unchanged."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

import dpadambc
from tests import common

MECHANISM = common.poisson_gaussian(
    noise_multiplier=0.01, sampling_prob=0.5, iterations=60, normalize_by=32.0
)


def written_out(learning_rate=0.05):
    return optax.chain(
        dpadambc.clip_per_example(
            MECHANISM.l2_clip_norm, normalize_by=MECHANISM.normalize_by
        ),
        dpadambc.add_dp_noise(MECHANISM.noise_stddev, key=jax.random.key(0)),
        dpadambc.scale_by_adam_bc(noise_stddev=MECHANISM.noise_stddev),
        dpadambc.add_decoupled_weight_decay(1e-5),
        optax.scale_by_learning_rate(learning_rate),
    )


def two_moons(num_examples=64):
    rng = np.random.default_rng(0)
    label = np.arange(num_examples) % 2
    angle = np.pi * rng.uniform(size=num_examples)
    x = np.cos(angle) * (1 - 2 * label) + label
    y = np.sin(angle) * (1 - 2 * label) + 0.5 * label
    points = np.stack([x, y], 1) + 0.1 * rng.normal(size=(num_examples, 2))
    return jnp.asarray(points, jnp.float32), jnp.asarray(label)


def cross_entropy(logits, label):
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


class LinenMLP(nn.Module):
    @nn.compact
    def __call__(self, x, *, train=False):
        x = jnp.tanh(nn.Dense(16)(x))
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(2)(x)


class NNXMLP(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(2, 16, rngs=rngs)
        self.out = nnx.Linear(16, 2, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(self.hidden(x)))


def poisson_batches():
    return MECHANISM.batches(jax.random.key(1), num_examples=64)


@pytest.mark.slow
def test_linen_train_state_with_dropout_and_padding_given_to_the_gradient():
    x, label = two_moons()
    model = LinenMLP()
    state = train_state.TrainState.create(
        apply_fn=model.apply,
        params=model.init(jax.random.key(1), x[0])["params"],
        tx=written_out(),
    )

    def loss_fn(params, x, label, key):
        logits = model.apply({"params": params}, x, train=True, rngs={"dropout": key})
        return cross_entropy(logits, label)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(state, x, label, padding, key):
        grads = dpadambc.per_example_grad(loss_fn, prng_argnum=3)(
            state.params, x, label, key, is_padding_example=padding
        )
        return state.apply_gradients(grads=grads)

    for i, batch in enumerate(poisson_batches()):
        key = jax.random.key(i)
        take = batch.indices
        state = step(state, x[take], label[take], batch.is_padding_example, key)
    accuracy = (model.apply({"params": state.params}, x).argmax(-1) == label).mean()
    assert accuracy > 0.8


@pytest.mark.parametrize("whole_module", [True, False], ids=["module", "state"])
def test_nnx_optimizer_with_padding_given_to_the_update(whole_module):
    x, label = two_moons()
    model = NNXMLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, written_out(), wrt=nnx.Param)

    def module_loss_fn(model, x, label):
        return cross_entropy(model(x), label)

    @nnx.jit
    def step(model, optimizer, x, label, padding):
        if whole_module:
            grads = dpadambc.per_example_grad(module_loss_fn)(model, x, label)
        else:
            graph, params = nnx.split(model)
            state_loss_fn = lambda p, x, y: module_loss_fn(nnx.merge(graph, p), x, y)
            grads = dpadambc.per_example_grad(state_loss_fn)(params, x, label)
        optimizer.update(model, grads, is_padding_example=padding)

    for batch in poisson_batches():
        take = batch.indices
        step(model, optimizer, x[take], label[take], batch.is_padding_example)
    assert (model(x).argmax(-1) == label).mean() > 0.9


def test_linen_and_nnx_take_the_same_private_step():
    x, label = two_moons(8)
    nnx_model = NNXMLP(nnx.Rngs(0))
    linen = LinenMLP()
    params = {
        f"Dense_{i}": {"kernel": layer.kernel[...], "bias": layer.bias[...]}
        for i, layer in enumerate([nnx_model.hidden, nnx_model.out])
    }
    clip = lambda loss_fn: dpadambc.clipped_grad(
        loss_fn, l2_clip_norm=0.1, normalize_by=8.0, microbatch_size=3
    )
    linen_fn = clip(lambda p, x, y: cross_entropy(linen.apply({"params": p}, x), y))
    graph, state = nnx.split(nnx_model)
    nnx_fn = clip(lambda p, x, y: cross_entropy(nnx.merge(graph, p)(x), y))
    both = linen_fn(params, x, label), nnx_fn(state, x, label)
    one, two = dpadambc.materialize(both)
    np.testing.assert_allclose(
        one["Dense_1"]["kernel"], two["out"]["kernel"][...], rtol=1e-4, atol=1e-6
    )


@pytest.mark.slow
def test_part_of_a_linen_model_is_trained():
    x, label = two_moons(16)
    model = LinenMLP()
    params = model.init(jax.random.key(0), x[0])["params"]
    trained, frozen = {"Dense_1": params["Dense_1"]}, {"Dense_0": params["Dense_0"]}
    loss_fn = lambda trained, frozen, x, y: cross_entropy(
        model.apply({"params": {**frozen, **trained}}, x), y
    )
    grad_fn = dpadambc.per_example_grad(loss_fn, batch_argnums=(2, 3))
    tx = written_out()
    updates, _ = tx.update(
        grad_fn(trained, frozen, x, label), tx.init(trained), trained
    )
    assert set(updates) == {"Dense_1"}


class ScannedBlock(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.LoRALinear(4, 4, lora_rank=2, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.dense(x))


class Scanned(nnx.Module):
    """Layers with adapters, made by nnx.vmap and called by nnx.scan."""

    def __init__(self, rngs):
        self.layers = nnx.split_rngs(splits=2)(nnx.vmap(ScannedBlock))(rngs)

    def __call__(self, x):
        carry = (0, nnx.Carry)
        call = nnx.scan(lambda layer, x: layer(x), in_axes=carry, out_axes=nnx.Carry)
        return call(self.layers, x)


@pytest.mark.parametrize("method", ["factored", "vmap"])
def test_adapters_of_nnx_layers_that_are_scanned_beside_their_base(method):
    """`nnx.merge` alone mixes the traces of both, which Flax refuses."""
    graph, adapters, base = nnx.split(Scanned(nnx.Rngs(0)), nnx.LoRAParam, ...)
    x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    merged = lambda copy: (
        lambda adapters, base, x: (
            nnx.merge(graph, adapters, base, copy=copy)(x).sum() ** 2
        )
    )
    grads = dpadambc.per_example_grad(
        merged(copy=False), batch_argnums=2, method=method
    )(adapters, base, x)
    expected = jax.vmap(jax.grad(merged(copy=True)), (None, None, 0))(adapters, base, x)
    chex.assert_trees_all_close(
        jax.tree.leaves(dpadambc.materialize(grads)),
        jax.tree.leaves(expected),
        rtol=1e-4,
        atol=1e-6,
    )

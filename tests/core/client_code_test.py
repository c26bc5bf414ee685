"""Losses as users of Flax, Equinox and JAX write them: each remedy is tried."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import dpadambc
from dpadambc import training
from tests import common

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
CLIP = dict(l2_clip_norm=1.0, normalize_by=1.0)


def refusal(fun, *args):
    """The error of a call with its notes, but without those of JAX."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the test reads it
        fun(*args)
    return " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


def test_a_loss_that_closes_over_its_batch_is_told_to_take_it():
    closed = lambda w: jnp.mean(X @ w)
    for made in (
        dpadambc.per_example_grad(closed),
        dpadambc.clipped_grad(closed, **CLIP),
    ):
        text = refusal(made, jnp.ones(3))
        assert "argument of loss_fn" in text and "prng_argnum" not in text
    grads = dpadambc.per_example_grad(lambda w, x: x @ w)(jnp.ones(3), X)
    np.testing.assert_allclose(grads.materialize(), X)


def test_a_model_of_equinox_is_told_to_be_split():
    model = eqx.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))
    loss = lambda model, x: jnp.sum(model(x))
    assert "eqx.partition" in refusal(dpadambc.per_example_grad(loss), model, X)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    split = lambda params, x: loss(eqx.combine(params, static), x)
    grads = dpadambc.materialize(dpadambc.per_example_grad(split)(params, X))
    of_one = eqx.filter_grad(loss)
    expected = jax.tree.leaves(of_one(model, X[1]))
    for got, want in zip(jax.tree.leaves(grads), expected, strict=True):
        np.testing.assert_allclose(got[1], want, atol=1e-6)


class Normalized(nn.Module):
    norm: nn.Module

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(self.norm(nn.Dense(3)(x)))


def gradient_of_normalized(norm, made_with):
    variables = Normalized(made_with).init(jax.random.key(0), X[:1])

    def loss(params, x):
        found = {**variables, "params": params}
        out, _ = Normalized(norm).apply(found, x[None], mutable=["batch_stats"])
        return jnp.sum(out**2)

    return dpadambc.per_example_grad(loss)(variables["params"], X)


def test_statistics_of_a_batch_are_named():
    of_a_batch = nn.BatchNorm(use_running_average=False, axis_name="batch")
    fixed = nn.BatchNorm(use_running_average=True)
    text = refusal(gradient_of_normalized, of_a_batch, fixed)
    assert "collective" in text and "BatchNorm" in text
    for remedy in (nn.LayerNorm(), nn.GroupNorm(1), fixed):
        grads = dpadambc.materialize(gradient_of_normalized(remedy, remedy))
        assert all(map(np.any, jax.tree.leaves(grads)))


def test_a_misspelled_name_is_no_collective():
    loss = lambda w, x: w @ y  # noqa: F821
    assert "collective" not in refusal(dpadambc.per_example_grad(loss), X[0], X)


def test_an_array_on_an_explicit_mesh_that_the_loss_closes_over_is_an_argument():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    split = lambda x, *axes: jax.device_put(
        x, NamedSharding(mesh, PartitionSpec(*axes))
    )
    with jax.set_mesh(mesh):
        frozen, w, rows = split(jnp.eye(3)), split(jnp.ones((3, 2))), split(X, "data")
        loss = lambda frozen, w, x: jnp.sum(jnp.tanh(x @ frozen @ w))
        closed = dpadambc.clipped_grad(lambda w, x: loss(frozen, w, x), **CLIP)
        assert "closes over" in refusal(closed, w, rows)
        given = dpadambc.clipped_grad(loss, 1, batch_argnums=2, **CLIP)
        got = given(frozen, w, rows).value
    plain = dpadambc.clipped_grad(lambda w, x: loss(jnp.eye(3), w, x), **CLIP)
    np.testing.assert_allclose(got, plain(jnp.ones((3, 2)), X).value, rtol=1e-5)


def test_a_function_that_is_called_for_one_example_after_the_other():
    square = lambda x: x**2
    of = lambda fun: dpadambc.per_example_grad(lambda w, x: w @ fun(x))
    sequential = jax.custom_batching.sequential_vmap(square)
    assert "without custom_vmap" in refusal(of(sequential), X[0], X)

    def on_host(method):
        shape = jax.typeof(X[0])
        call = lambda x: jax.pure_callback(square, shape, x, vmap_method=method)
        return of(lambda x: call(jax.lax.stop_gradient(x)))

    assert "sequential" in refusal(on_host("expand_dims"), X[0], X)
    for remedy in (of(square), on_host("sequential")):
        np.testing.assert_allclose(remedy(X[0], X).materialize(), X**2, rtol=1e-6)


def fit(optimizer, loss_fn=lambda w, x: w @ x):
    return training.fit(
        *(loss_fn, jnp.ones(3), (X,), common.poisson_gaussian(iterations=2), optimizer),
        key=jax.random.key(0),
        target_delta=1e-2,
    )


SGD = optax.sgd(0.1)
ASK_FOR_MORE = {
    "lbfgs": optax.lbfgs(),
    "polyak": optax.polyak_sgd(),
    "momo": optax.contrib.momo(),
    "plateau": optax.chain(SGD, optax.contrib.reduce_on_plateau()),
    "sophia": optax.contrib.sophia(0.1),
    "sam by itself": optax.contrib.sam(SGD, SGD, opaque_mode=True),
    "lookahead": optax.lookahead(SGD, 5, 0.5),
}


@pytest.mark.parametrize("name", ASK_FOR_MORE)
def test_an_optimizer_that_asks_for_the_loss_is_refused_before_the_loss_is_traced(name):
    def untraced(w, x):
        raise AssertionError

    with pytest.raises(TypeError, match="No loss of a batch is private"):
        fit(ASK_FOR_MORE[name], untraced)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.contrib.sam(SGD, SGD),
        optax.apply_if_finite(SGD, 3),
        optax.chain(optax.clip_by_global_norm(1.0), SGD),
    ],
)
def test_an_optimizer_that_asks_for_nothing_more_is_not(optimizer):
    assert fit(optimizer).iterations == 2

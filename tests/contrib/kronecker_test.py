"""Preconditioned losses: the matrices, the map, and that it keeps the guarantee."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from dpadambc import contrib

DAMPING = 1e-2


def loss_fn(params, x, y):
    """Of a dense layer at several positions, and of a vector."""
    hidden = jnp.tanh(x @ params["w"] + params["b"][None])
    return jnp.sum((hidden - y) ** 2)


def data(seed, num_examples=6, positions=2, scale=1.0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_examples, positions, 7)) * np.logspace(0, 1, 7)
    y = rng.normal(size=(num_examples, positions, 8))
    return jnp.asarray(scale * x / 10), jnp.asarray(y)


def params_of(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "b": jnp.asarray(rng.normal(size=8)),
        "w": jnp.asarray(rng.normal(size=(7, 8))),
    }


def slow_root(moment):
    values, vectors = np.linalg.eigh(moment)
    return vectors @ np.diag((values + DAMPING * values.mean()) ** -0.5) @ vectors.T


def slow_roots(params, x, y):
    """By a loop over examples and positions: of the inputs, the outputs, the bias."""
    a, g, b = np.zeros((7, 7)), np.zeros((8, 8)), np.zeros((8, 8))
    for x_one, y_one in zip(np.float64(x), np.float64(y), strict=True):
        total = np.zeros(8)
        for x_at, y_at in zip(x_one, y_one, strict=True):
            hidden = np.tanh(x_at @ params["w"] + params["b"])
            of_output = 2 * (hidden - y_at) * (1 - hidden**2)
            a += np.outer(x_at, x_at) / len(x_one) / len(x)
            g += np.outer(of_output, of_output) / len(x)
            total += of_output
        b += np.outer(total, total) / len(x)
    return slow_root(a), slow_root(g), slow_root(b)


def made(params, *examples, **options):
    return contrib.kronecker_preconditioner(
        loss_fn, params, public_examples=examples, damping=DAMPING, **options
    )


@pytest.mark.slow
def test_it_is_the_product_with_the_roots_of_both_moments(x64):
    params, public, private = params_of(), data(1, 20), data(2)
    scaled = contrib.preconditioned(loss_fn, made(params, *public))
    a, g, b = slow_roots(params, *public)
    found = dpadambc.per_example_grad(scaled)(params, *private)
    assert found["w"].rule == "gram"
    plain = [jax.grad(loss_fn)(params, *each) for each in zip(*private, strict=True)]
    expected = {
        "b": np.stack([b @ each["b"] for each in plain]),
        "w": np.stack([a @ each["w"] @ g for each in plain]),
    }
    chex.assert_trees_all_close(dpadambc.materialize(found), expected, rtol=1e-9)
    norms = [
        np.sqrt(sum(np.sum(expected[name][i] ** 2) for name in expected))
        for i in range(6)
    ]
    np.testing.assert_allclose(dpadambc.per_example_norms(found), norms, rtol=1e-6)
    chex.assert_trees_all_close(
        scaled(params, *(x[0] for x in private)),
        loss_fn(params, *(x[0] for x in private)),
        rtol=0,
    )


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(16, 16), (20, 16), (16, 20)])
def test_a_kernel_of_any_shape_stays_in_its_factors(shape):
    linear_loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))
    w, x = jnp.ones(shape) / 8, jax.random.normal(jax.random.key(0), (9, 3, shape[0]))
    scaled = contrib.preconditioned(
        linear_loss,
        contrib.kronecker_preconditioner(linear_loss, w, public_examples=(x,)),
    )
    assert dpadambc.explain(scaled, w, x[0], batch_size=9).rules == {"params": "gram"}
    materialized = jax.vmap(jax.grad(scaled), (None, 0))(w, x)
    grads = dpadambc.per_example_grad(scaled)(w, x)
    np.testing.assert_allclose(
        dpadambc.materialize(grads), materialized, rtol=1e-3, atol=1e-4
    )


@pytest.mark.slow
def test_a_convolution_has_the_moment_of_its_patches(x64):
    def conv_loss(kernel, x, y):
        out = jax.lax.conv_general_dilated(
            x[None], kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.sum(jnp.sin(out[0]) * y)

    rng = np.random.default_rng(0)
    kernel, x, y = (
        jnp.asarray(rng.normal(size=shape))
        for shape in [(3, 3, 2, 4), (5, 4, 4, 2), (5, 4, 4, 4)]
    )
    found = contrib.kronecker_preconditioner(
        conv_loss, kernel, public_examples=(x, y), damping=DAMPING
    )
    patches = np.zeros((5, 16, 3, 3, 2))
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    for i in range(4):
        for j in range(4):
            patches[:, 4 * i + j] = padded[:, i : i + 3, j : j + 3]
    patches = patches.reshape(5, 16, 18)
    of_output = np.cos(patches @ np.reshape(kernel, (18, 4))) * np.reshape(
        y, (5, 16, 4)
    )
    a = slow_root(np.einsum("nti,ntj->ij", patches, patches) / 5 / 16)
    g = slow_root(np.einsum("nti,ntj->ij", of_output, of_output) / 5)
    scaled = contrib.preconditioned(conv_loss, found)
    plain = np.reshape(jax.grad(conv_loss)(kernel, x[0], y[0]), (18, 4))
    np.testing.assert_allclose(
        jax.grad(scaled)(kernel, x[0], y[0]),
        np.reshape(a @ plain @ g, (3, 3, 2, 4)),
        rtol=1e-8,
    )
    # The patches are not formed again, but the gradients are.
    explained = dpadambc.explain(scaled, kernel, x[0], y[0], batch_size=5)
    assert explained.rules == {"params": "direct"}


@pytest.mark.slow
def test_stacked_layers_and_heads_have_matrices_of_their_own(x64):
    def stacked_loss(params, x):
        def layer(x, w):
            return jnp.tanh(jnp.einsum("i,iho->ho", x, w)).reshape(-1), None

        return jnp.sum(jax.lax.scan(layer, x, params)[0] ** 2)

    rng = np.random.default_rng(0)
    params, x = (jnp.asarray(rng.normal(size=s)) for s in [(3, 6, 2, 3), (20, 6)])
    found = contrib.kronecker_preconditioner(
        stacked_loss, params, public_examples=(x,), damping=DAMPING
    )
    scaled = contrib.preconditioned(stacked_loss, found)
    plain = jax.vmap(jax.grad(stacked_loss), (None, 0))(params, x)
    result = jax.vmap(jax.grad(scaled), (None, 0))(params, x)
    inputs = [x]
    for w in params[:2]:
        inputs.append(jnp.tanh(jnp.einsum("ni,iho->nho", inputs[-1], w)).reshape(20, 6))
    for at, values in enumerate(inputs):
        a = slow_root(np.einsum("ni,nj->ij", values, values) / 20)
        matrix = plain[:, at].reshape(20, 6, 6)
        of_output = matrix[:, 0] / values[:, :1]  # of an outer product
        g = slow_root(np.einsum("ni,nj->ij", of_output, of_output) / 20)
        np.testing.assert_allclose(
            result[:, at].reshape(20, 6, 6), a @ matrix @ g, rtol=1e-6
        )


@pytest.mark.slow
def test_what_it_does_not_know_stays_as_it_is(x64):
    def table_loss(params, ids, x):
        rows = params["table"][ids]
        return jnp.sum((rows @ params["w"] * params["scale"] - x) ** 2)

    rng = np.random.default_rng(0)
    params = {
        "scale": jnp.asarray(rng.normal(size=(4, 3))),
        "table": jnp.asarray(rng.normal(size=(9, 5))),
        "w": jnp.asarray(rng.normal(size=(5, 3))),
    }
    ids, x = jnp.asarray(rng.integers(0, 9, (6, 4))), jnp.ones((6, 4, 3))
    make = lambda **options: contrib.kronecker_preconditioner(
        table_loss, params, public_examples=(ids, x), **options
    )
    assert make().untouched == ("['scale']", "['table']")
    scaled = contrib.preconditioned(table_loss, make())
    plain, found = (jax.grad(f)(params, ids[0], x[0]) for f in (table_loss, scaled))
    chex.assert_trees_all_close(plain["table"], found["table"])
    assert not np.allclose(plain["w"], found["w"])
    # Of the kernel the side that is too large is left out, and with both, the kernel.
    assert [len(each) for each in make(max_size=4).factors] == [0, 0, 1]
    with pytest.raises(ValueError, match="params"):
        make(max_size=2)


@jax.jit
def clipped_sum(params, public, private, is_padding):
    scaled = contrib.preconditioned(loss_fn, made(params, *public))
    clipped = dpadambc.clipped_grad(scaled, l2_clip_norm=1.0, normalize_by=1.0)
    found = clipped(params, *private, is_padding_example=is_padding)
    return dpadambc.materialize(found)


def distance(public_of_batch):
    """How far the clipped sum moves when one example goes, at the most of two."""
    params, (x, y), public, distances = (
        params_of(),
        data(2, 5, scale=3.0),
        data(1, 20),
        [],
    )
    for i in range(2):
        private = x.at[i].mul(100.0), y  # one that would turn the matrices
        rest = jax.tree.map(lambda x, i=i: jnp.delete(x, i, axis=0), private)
        examples = (private, rest) if public_of_batch else (public, public)
        whole, without = (
            clipped_sum(params, of_matrices, private, jnp.asarray(is_padding))
            for of_matrices, is_padding in zip(
                examples, (np.zeros(5, bool), np.arange(5) == i), strict=True
            )
        )
        distances.append(float(optax.tree.norm(optax.tree.sub(whole, without))))
    return max(distances)


@pytest.mark.guarantee
def test_one_example_moves_the_sum_by_the_clip_norm_if_the_matrices_are_public():
    assert distance(public_of_batch=False) <= 1.0 + 1e-4
    # The negative control: matrices made of the batch let it turn all the others.
    assert distance(public_of_batch=True) > 1.2


@pytest.mark.guarantee
def test_an_example_that_overflows_contributes_nothing():
    params, (x, y), public = params_of(), data(2, 3), data(1, 20)
    first = jnp.arange(3) == 0
    expected = clipped_sum(params, public, (x, y), first)
    for value in (jnp.nan, jnp.inf, 1e30):
        bad = x, y.at[0].set(value)
        found = clipped_sum(params, public, bad, jnp.zeros(3, bool))
        chex.assert_trees_all_close(found, expected, rtol=1e-5)


@pytest.mark.slow
def test_a_new_one_compiles_nothing_anew_and_low_precision_works():
    params = params_of()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(params, preconditioner, x, y):
        scaled = contrib.preconditioned(loss_fn, preconditioner)
        return dpadambc.clipped_grad(scaled, l2_clip_norm=1.0, normalize_by=4)(
            params, x, y, is_padding_example=jnp.zeros(len(x), bool)
        )

    first, second = (
        step(params, jax.jit(made)(params, *data(seed, 20)), *data(2))
        for seed in (1, 3)
    )
    assert not np.allclose(first["w"].value, second["w"].value)
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, data(1, 20), data(2)))
    grads = dpadambc.per_example_grad(
        contrib.preconditioned(loss_fn, made(low[0], *low[1]))
    )(low[0], *low[2])
    assert grads["w"].dtype == jnp.bfloat16
    assert jnp.all(jnp.isfinite(dpadambc.per_example_norms(grads)))


def test_wrong_use_is_refused():
    params, public = params_of(), data(1)
    with pytest.raises(TypeError, match="public_examples"):
        contrib.kronecker_preconditioner(loss_fn, params, public_examples=public[0])
    with pytest.raises(ValueError, match="batch"):
        made(params, public[0], public[1][:2])
    with pytest.raises(ValueError, match="damping"):
        contrib.kronecker_preconditioner(
            loss_fn, params, public_examples=public, damping=0.0
        )
    with pytest.raises(TypeError, match="preconditioner"):
        contrib.preconditioned(loss_fn, params)
    scaled = contrib.preconditioned(loss_fn, made(params, *public))
    with pytest.raises(ValueError, match="params"):
        jax.grad(scaled)({"w": params["w"]}, public[0][0], public[1][0])

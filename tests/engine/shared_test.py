"""Gradients beside arrays that all examples share: norms, rows, rounding and memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpadambc
from dpadambc.engine import rounding, shared, weighted
from dpadambc.engine.forms import Full
from dpadambc.engine.product import Product
from dpadambc.engine.shared import Shared, Term

BATCH_SIZE, ROWS, INPUTS, OUTPUTS = 6, 3, 48, 40


def factors(rng, dtype=np.float32):
    shape = (BATCH_SIZE, ROWS)
    a, g = rng.normal(size=(*shape, INPUTS)), rng.normal(size=(*shape, OUTPUTS))
    return jnp.asarray(a, dtype), jnp.asarray(g, dtype)


def beside(a, g, w, c=None):
    """Finished gradients of all examples."""

    def one(a, g, c):
        product = Product(a, g, (0, 1), (0, 2), (1, 2), (INPUTS, OUTPUTS))
        return shared.finished(Shared(product, (Term(w, c),), None, product.shape))

    return jax.vmap(one)(a, g, c)


def formed(a, g, w, c=None):
    """The same arrays in double precision."""
    a, g, w = (np.asarray(x, np.float64) for x in (a, g, w))
    d = w[None] if c is None else w[None] * np.asarray(c, np.float64)
    return np.einsum("bti,bto->bio", a, g) + d


def lengths(x):
    return np.linalg.norm(x.reshape(len(x), -1), axis=1)


def squared_norms(grads):
    return np.asarray(jax.vmap(type(grads).squared_norm)(grads), np.float64)


def cancelling(rng, i):
    """A term that is nearly the negative of one example's product."""
    a, g = factors(rng)
    w = -formed(a, g, np.zeros((INPUTS, OUTPUTS)))[i]
    near = 1 + rng.choice([0, 1e-7, 1e-5]) * rng.normal(size=w.shape)
    return a, g, jnp.asarray(w * near, jnp.float32)


def test_a_norm_is_not_below_the_true_one_where_a_term_cancels():
    rng, below = np.random.default_rng(0), []
    for trial in range(40):
        i = trial % BATCH_SIZE
        a, g, w = cancelling(rng, i)
        grads, truth = beside(a, g, w), lengths(formed(a, g, w))
        found = np.sqrt(squared_norms(grads))
        assert np.all(found >= truth * (1 - 1e-6))
        assert found[i] >= truth[i]
        rest = np.arange(BATCH_SIZE) != i
        np.testing.assert_allclose(found[rest], truth[rest], 1e-5)
        # Negative control: without the allowance some are below.
        product = a[i].T @ g[i]
        bare = jnp.sum(product**2) + 2 * jnp.sum(product * w) + jnp.sum(w * w)
        below.append(float(bare) < truth[i] ** 2)
    assert any(below)


def clipped(grads, weights):
    finite = jnp.isfinite(squared_norms(grads)).all()
    return weighted.sums(rounding.FULL, [grads], jnp.asarray(weights), finite)[0]


WEIGHTS = np.array([0, 0.5, 1, 0, 2, 0.25], np.float32)


@pytest.mark.parametrize("of_example", [False, True])
def test_the_sum_is_that_of_gradients_formed_though_rows_are_padding(of_example):
    rng = np.random.default_rng(1)
    a, g = factors(rng)
    w = jnp.asarray(rng.normal(size=(INPUTS, OUTPUTS)), jnp.float32)
    c = rng.normal(size=(BATCH_SIZE, 1, OUTPUTS)) if of_example else None
    c = None if c is None else jnp.asarray(c, jnp.float32)
    blank = lambda x: x.at[jnp.array([0, 3])].set(0)
    grads = jax.tree.map(blank, beside(a, g, w, c))
    expected = np.tensordot(WEIGHTS.astype(float), formed(a, g, w, c), 1)
    np.testing.assert_allclose(clipped(grads, WEIGHTS), expected, 1e-4, 1e-4)


def test_a_sum_without_examples_is_zero_whatever_the_array_holds():
    a, g = factors(np.random.default_rng(2))
    grads = beside(a, g, jnp.full((INPUTS, OUTPUTS), jnp.nan))
    assert np.isnan(squared_norms(grads)).all()
    assert not np.any(clipped(grads, 0 * WEIGHTS))


def test_rows_of_programs_with_other_arrays_are_not_added_up():
    rng = np.random.default_rng(3)
    a, g = factors(rng)
    one, two = (beside(a, g, jnp.full((INPUTS, OUTPUTS), x)) for x in (1.0, 1.5))
    joined = jax.tree.map(lambda x, y: jnp.concatenate([x[:3], y[3:]]), one, two)
    assert np.isnan(clipped(joined, np.ones(BATCH_SIZE, np.float32))).all()
    same = jax.tree.map(lambda x, y: jnp.concatenate([x[:3], y[3:]]), one, one)
    assert np.isfinite(clipped(same, np.ones(BATCH_SIZE, np.float32))).all()


def test_a_term_alone_has_its_norm():
    w = jnp.asarray(np.random.default_rng(4).normal(size=(5, 7)), jnp.float32)
    zero = Full(jnp.zeros(()), (5, 7), True)
    grad = shared.finished(Shared(zero, (Term(w, None),), None, (5, 7)))
    np.testing.assert_allclose(grad.squared_norm(), np.sum(np.square(w)), 1e-5)


def temporaries(loss_fn, params, x):
    fun = dpadambc.clipped_grad(loss_fn, l2_clip_norm=1.0, normalize_by=1.0)
    memory = jax.jit(fun).lower(params, x).compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def plain(p, x):
    return jax.nn.logsumexp(jnp.tanh(x @ p["w"]))


def penalized(p, x):
    return plain(p, x) + 1e-3 * jnp.sum(p["w"] ** 2)


def normalized(p, x):
    return plain({"w": p["w"] / jnp.linalg.norm(p["w"], axis=0)[None]}, x)


def of_entries(p, x):
    return plain({"w": jnp.sin(p["w"])}, x)


@pytest.mark.parametrize("loss_fn", [penalized, normalized])
def test_no_array_is_made_for_each_example(loss_fn):
    params, x = {"w": jnp.ones((256, 512))}, jnp.ones((64, 256))
    of_kernel = params["w"].nbytes
    limit = temporaries(plain, params, x) + 4 * of_kernel
    assert temporaries(loss_fn, params, x) < limit
    assert temporaries(of_entries, params, x) > 64 * of_kernel  # negative control

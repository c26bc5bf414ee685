"""`audit.sensitivity`: a bounded sum passes, others fail, at their stage."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpadambc
from dpadambc import audit
from dpadambc.engine import rounding
from tests import common
from tests.engine import rounding_test

RELATION = dpadambc.NeighboringRelation
X = jax.random.normal(jax.random.key(0), (8, 5))
BATCH = X, jnp.ones(8)
PARAMS = {"a": jnp.ones(5), "b": jnp.ones(5)}


def loss_fn(params, x, y):
    return jnp.tanh(params["a"] @ x - y) * 3 + params["b"] @ x


def clipped(**options):
    numbers = dict(l2_clip_norm=1.0, normalize_by=4)
    return dpadambc.clipped_grad(loss_fn, **numbers | options)


@pytest.mark.parametrize(
    "options",
    [{}, common.slow(dict(microbatch_size=3)), common.slow(dict(method="vmap"))],
    ids=str,
)
@pytest.mark.parametrize("relation", RELATION)
def test_a_clipped_sum_reaches_its_bound_and_keeps_it(relation, options):
    fun = clipped(**options)
    bound = dpadambc.sensitivity(1.0, normalize_by=4, neighboring_relation=relation)
    finding = audit.sensitivity(
        fun, PARAMS, BATCH, bound=bound, neighboring_relation=relation
    )
    assert finding.passed and 0.99 * bound < finding.figure <= 1.001 * bound


def test_a_bound_that_is_half_a_percent_too_small_is_found():
    finding = audit.sensitivity(clipped(), PARAMS, BATCH, bound=0.25 / 1.005)
    assert finding.passed is False
    assert finding.figure / finding.bound == pytest.approx(1.005, rel=1e-3)


def test_the_bound_of_add_or_remove_does_not_hold_for_replacement():
    finding = audit.sensitivity(
        clipped(),
        PARAMS,
        BATCH,
        bound=0.25,
        neighboring_relation=RELATION.REPLACE_ONE,
    )
    assert finding.passed is False and finding.figure > 0.49


def averaged(params, x, y):
    summed = dpadambc.materialize(clipped()(params, x, y))
    return jax.tree.map(lambda g: 2 * g * 4 / len(x), summed)


def without_mask(params, x, y, is_padding_example=None):
    return clipped()(params, x, y)


def of_the_batch(params, x, y, is_padding_example=None):
    centered = x - x.mean(0, keepdims=True)
    return clipped()(params, centered, y, is_padding_example=is_padding_example)


def nan_unsafe(params, x, y, is_padding_example=None):
    present = 1.0 if is_padding_example is None else ~is_padding_example
    norms = jnp.linalg.norm(x, axis=1)
    weights = jnp.minimum(1, 1 / norms) * present
    return jnp.sum(jnp.where(present, weights, 0.0)[:, None] * x, axis=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fun", "stage"),
    [
        (averaged, "clip"),
        (without_mask, "padding"),
        (of_the_batch, "mixing of examples"),
        (nan_unsafe, "examples that are not finite"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_the_stage_that_leaks_is_named(fun, stage):
    finding = audit.sensitivity(fun, PARAMS, BATCH, bound=1 / 4)
    assert finding.passed is False and stage in finding.sentence


def test_a_parameter_that_is_left_out_of_the_norm_is_found_by_search():
    """No example of the batch shows it."""

    def loss(params, x, y):
        return params["a"] @ x + 1e-3 * jnp.sin(x[0]) * params["b"][0]

    def fun(params, x, y, is_padding_example=None):
        grads = jax.vmap(jax.grad(loss), (None, 0, 0))(params, x, y)
        norms = jnp.linalg.norm(grads["a"], axis=1)
        weights = jnp.minimum(1.0, 1.0 / norms)
        if is_padding_example is not None:
            weights = jnp.where(is_padding_example, 0.0, weights)
        return jax.tree.map(lambda g: weights @ jnp.nan_to_num(g) * 1000, grads)

    batch = 1000 * X.at[:, 1:].set(0.0), jnp.ones(8)
    finding = audit.sensitivity(fun, PARAMS, batch, bound=1000.01)
    assert finding.passed is False


def test_a_function_of_the_host_is_replayed_as_it_is():
    def fun(params, x, is_padding_example=None):
        x = np.asarray(x, np.float64)
        norms = np.linalg.norm(x, axis=1, keepdims=True)
        with np.errstate(all="ignore"):
            rows = np.where(np.isfinite(norms), x * np.minimum(1, 1 / norms), 0.0)
        rows = np.nan_to_num(rows)
        present = slice(None) if is_padding_example is None else ~is_padding_example
        return rows[present].sum(0)

    assert audit.sensitivity(fun, None, (X,), bound=1.0).passed
    assert audit.sensitivity(fun, None, (X,), bound=0.9).passed is False


def test_a_random_function_is_not_tested():
    rng = np.random.default_rng(0)
    fun = lambda params, x: np.asarray(x).sum(0) + rng.normal(size=5)
    assert audit.sensitivity(fun, None, (X,), bound=1.0).passed is None


def test_refuses_a_bound_a_relation_and_a_batch_that_are_none():
    fails = functools.partial(audit.sensitivity, clipped(), PARAMS)
    with pytest.raises(ValueError, match="bound"):
        fails(BATCH, bound=0.0)
    with pytest.raises(TypeError, match="neighboring_relation"):
        fails(BATCH, bound=1.0, neighboring_relation="add")
    with pytest.raises(ValueError, match="batch"):
        fails((X[:1], jnp.ones(1)), bound=1.0)


@pytest.mark.parametrize("is_clipped", [True, False])
def test_tokens_with_parameters_of_zero_show_a_missing_clip(is_clipped):
    """No two of the batch have a token twice, and no multiple of zero is larger."""
    tokens, labels = jnp.arange(24).reshape(8, 3), jnp.arange(8) % 2
    loss = lambda w, x, y: jnp.logaddexp(0.0, (1 - 2 * y) * w[x].sum())

    def summed(params, tokens, labels, is_padding_example):
        grads = jax.vmap(jax.grad(loss), (None, 0, 0))(params, tokens, labels)
        norms = jnp.linalg.norm(grads, axis=1, keepdims=True)
        grads = grads / jnp.maximum(norms, 1) if is_clipped else grads
        return jnp.where(is_padding_example[:, None], 0, grads).sum(0)

    finding = audit.sensitivity(summed, jnp.zeros(24), (tokens, labels), bound=1.0)
    assert finding.passed is is_clipped


def dropped(params, x, y, is_padding_example=None, by_place=True, factor=1.0):
    """Dropout with keys of places, or of contents."""

    def loss(params, x, y, key):
        kept = jax.random.bernoulli(key, shape=x.shape)
        return loss_fn(params, jnp.where(kept, x, 0.0), y)

    key, numbers = jax.random.key(0), dict(l2_clip_norm=1.0, normalize_by=4)
    keys = jax.random.split(key, len(x)) if by_place else key
    summed = dpadambc.clipped_grad(
        loss, **numbers, **({} if by_place else {"prng_argnum": 3})
    )
    found = summed(params, x, y, keys, is_padding_example=is_padding_example)
    return jax.tree.map(lambda x: factor * x, dpadambc.materialize(found))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "says_so"),
    [({}, True), ({"factor": 0.05}, True), ({"by_place": False}, False)],
)
def test_keys_that_depend_on_the_place_in_a_batch_are_reported(options, says_so):
    """Only if they are secret does the bound hold for one who stands in front.

    Also if all examples together move less than the bound.
    """
    fun = functools.partial(dropped, **options)
    finding = audit.sensitivity(fun, PARAMS, BATCH, bound=1 / 4)
    assert finding.passed and ("place in the batch" in finding.sentence) is says_so


def test_a_batch_that_must_keep_its_size_is_left_at_it():
    def of_eight(params, x, y, is_padding_example=None):
        if len(x) != 8:
            raise ValueError(f"Expected 8 examples, got {len(x)}.")
        return dropped(params, x, y, is_padding_example)

    finding = audit.sensitivity(of_eight, PARAMS, BATCH, bound=1 / 4)
    assert finding.passed and "place" not in finding.sentence


def product_loss(params, x, y):
    """A kernel whose gradient is no smaller than its factors."""
    return jnp.sum(jnp.tanh(x @ params) * y)


SEQUENCES = jax.random.normal(jax.random.key(1), (8, 4, 24)), jnp.ones((8, 4, 20))
KERNEL = jnp.ones((24, 20)) / 5


def clipped_by(units, monkeypatch):
    """A clip at 1 of products that round, as on an accelerator."""
    run = lambda fun, _, *operands: fun(units, *operands)
    monkeypatch.setattr(rounding, "on_device", run)
    return dpadambc.clipped_grad(product_loss, l2_clip_norm=1.0, normalize_by=4)


@pytest.mark.parametrize("name", ["tf32 truncated", "bf16"])
def test_a_clip_by_products_that_round_keeps_its_bound(name, monkeypatch):
    """Without a tolerance for that; a bound that is a percent too small is found."""
    fun = clipped_by(rounding_test.UNITS[name], monkeypatch)
    finding = audit.sensitivity(fun, KERNEL, SEQUENCES, bound=1 / 4)
    assert finding.passed and 0.98 * 0.25 < finding.figure <= 0.25 * (1 + 1e-6)
    reached = finding.figure / 1.01
    assert audit.sensitivity(fun, KERNEL, SEQUENCES, bound=reached).passed is False


def test_a_clip_that_takes_rounded_products_for_exact_is_found(monkeypatch):
    coarse = rounding_test.Emulated(None, jnp.float32, bits=4)
    fun = clipped_by(rounding.Units(coarse, coarse), monkeypatch)
    assert audit.sensitivity(fun, KERNEL, SEQUENCES, bound=1 / 4).passed is False

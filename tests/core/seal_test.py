"""Nothing comes between the gradients of examples and the clip."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import dpadambc
from tests.attacks import (
    BATCH,
    NO_PADDING,
    PARAMS,
    RNG,
    SILENT,
    B,
    C,
    X,
    both_methods,
    clipped,
    distance,
    gradients,
    mesh_of,
)

pytestmark = pytest.mark.guarantee


BEFORE = {
    "clip_by_global_norm": optax.clip_by_global_norm(64.0),
    "normalize_by_update_norm": optax.normalize_by_update_norm(),
    "adaptive_grad_clip": optax.adaptive_grad_clip(0.1),
    "clip_by_block_rms": optax.clip_by_block_rms(1.0),
    "clip": optax.clip(1.0),
    "scale": optax.scale(0.5),
    "scale_by_adam": optax.scale_by_adam(),
    "ema": optax.ema(0.9),
    "trace": optax.trace(0.9),
    "add_noise": optax.add_noise(0.1, 0.5, jax.random.key(0)),
    "add_decayed_weights": optax.add_decayed_weights(0.1),
    "sgd": optax.sgd(0.1),
}


@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
@both_methods
def test_a1_nothing_comes_before_the_clip(method, before):
    tx = optax.chain(before, dpadambc.dp_sgd(0.1, SILENT, key=jax.random.key(0)))
    state = tx.init(PARAMS)
    with pytest.raises((TypeError, ValueError), match="clip_per_example"):
        jax.jit(tx.update)(gradients(method=method), state, PARAMS)
    with pytest.raises((TypeError, ValueError, NotImplementedError)):
        tx.update(gradients(method=method), state, PARAMS)


MAPS = {
    "times": lambda g: g * 2.0,
    "over": lambda g: g / BATCH,
    "minus": lambda g: -g,
    "masked": lambda g: jnp.where(jnp.isfinite(g).all(), g, 0),
    "centered": lambda g: g - g.mean(0),
    "summed": lambda g: g.sum(0, keepdims=True),
    "cast": lambda g: g.astype(jnp.bfloat16),
    "if finite": lambda g: g * jnp.isfinite(X).all(),
}


@pytest.mark.parametrize("change", MAPS.values(), ids=MAPS)
@both_methods
def test_a1_arithmetic_of_tree_map_is_an_error(method, change):
    def step(grads):
        grads = jax.tree.map(change, grads)
        clip = dpadambc.clip_per_example(C, normalize_by=B)
        return clip.update(grads, clip.init(PARAMS), PARAMS)

    with pytest.raises((TypeError, ValueError, AttributeError, NotImplementedError)):
        jax.jit(step)(gradients(method=method))
    with pytest.raises((TypeError, ValueError, AttributeError, NotImplementedError)):
        step(gradients(method=method))


def of_floats(fun):
    """What is done in mixed precision: only to what is a float."""
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    return lambda tree: jax.tree.map(lambda x: fun(x) if is_float(x) else x, tree)


@both_methods
def test_a1_what_picks_floats_finds_none(method):
    grads = gradients(method=method)
    found = of_floats(lambda x: 0 * x)(grads)
    arrays, static = eqx.partition(grads, eqx.is_inexact_array)
    assert not jax.tree.leaves(arrays)
    for same in (found, eqx.combine(arrays, static)):
        np.testing.assert_array_equal(clipped(same), clipped(grads))


def test_a1_other_rows_for_another_parameter_are_an_error():
    """The rows of one parameter in another order: nobody's gradients any more."""
    params = {"w": PARAMS, "v": PARAMS}
    loss = lambda p, x: p["w"] @ x + p["v"] @ x**2
    grads = dpadambc.per_example_grad(loss)(params, X)
    mixed = grads | {"v": jax.tree.map(lambda g: g[::-1], grads["v"])}
    assert all(np.isnan(x).all() for x in clipped(mixed, params).values())
    both = jax.tree.map(lambda g: g[::-1], grads)
    assert np.isfinite(clipped(both, params)["w"]).all()


TAKEN_TWICE = {
    "one row alone": np.zeros(BATCH, int),
    "the first row, with a copy": np.arange(BATCH) - (np.arange(BATCH) == 1),
    "more rows than there were": np.arange(2 * BATCH) % BATCH,
    "the last row, extended": np.minimum(np.arange(BATCH + 1), BATCH - 1),
}
TAKEN_ONCE = {
    "a slice": np.arange(3, 10),
    "every other row": np.arange(0, BATCH, 2),
    "a mask": np.flatnonzero(np.asarray(X[:, 0] > 0)),
    "one row": np.array([BATCH - 1]),
    "none": np.arange(0),
    "an order": RNG.permutation(BATCH),
    "some, in an order": RNG.permutation(BATCH)[:9],
}
jit_or_not = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["", "jit"])


@pytest.mark.parametrize("rows", TAKEN_TWICE.values(), ids=TAKEN_TWICE)
@jit_or_not
def test_rows_that_are_taken_twice_give_nan(wrap, rows):
    """Such an example would be in the sum twice, under the noise for one."""
    of_rows = wrap(lambda grads: clipped(jax.tree.map(lambda g: g[rows], grads)))
    assert np.isnan(of_rows(gradients())).all()
    inside = wrap(lambda x: clipped(jax.tree.map(lambda g: g[rows], gradients(x))))
    assert np.isnan(inside(X)).all()


@pytest.mark.parametrize("rows", TAKEN_ONCE.values(), ids=TAKEN_ONCE)
@jit_or_not
def test_rows_that_are_taken_once_are_the_sum_of_their_examples(wrap, rows):
    of_rows = wrap(lambda grads: clipped(jax.tree.map(lambda g: g[rows], grads)))
    expected = clipped(gradients(X[rows]))
    np.testing.assert_allclose(of_rows(gradients()), expected, atol=1e-5)


def test_rows_of_several_devices_are_distinct():
    mesh = mesh_of(("data",), (2,))
    split = {"in_specs": P("data"), "out_specs": P("data")}
    grads = jax.jit(jax.shard_map(gradients, mesh=mesh, **split))(X)
    np.testing.assert_allclose(clipped(grads), clipped(gradients()), atol=1e-5)
    twice = jax.tree.map(lambda g: g[np.arange(BATCH) // 2], grads)
    assert np.isnan(clipped(twice)).all()


def test_what_a_row_taken_twice_did():
    """Negative control: it moves the sum by C as often as it is in it."""
    row = np.zeros(BATCH, int)
    repeated = dpadambc.materialize(gradients(100 * X))[row]
    assert distance(clipped(dpadambc.as_per_example(repeated)), PARAMS) > 63 * C


def test_a1_a_broken_seal_is_told_from_a_whole_one():
    broken = dataclasses.replace(gradients(), seal=jnp.zeros(BATCH))
    clip = dpadambc.clip_per_example(C, normalize_by=B)
    with pytest.raises(TypeError, match="seal"):
        clip.update(broken, clip.init(PARAMS), PARAMS)


@both_methods
def test_a1_what_examples_may_go_through_leaves_the_seal_whole(method):
    """An order, a selection, jit, scan and cond: nothing that mixes examples."""
    whole = gradients(method=method)
    expected = clipped(whole)
    order = RNG.permutation(BATCH)
    shuffled = jax.tree.map(lambda g: g[order], whole)
    np.testing.assert_allclose(clipped(shuffled), expected, atol=1e-4)
    compiled = jax.jit(functools.partial(gradients, method=method))(X)
    np.testing.assert_allclose(jax.jit(clipped)(compiled), expected, atol=1e-4)
    stacked = jax.tree.map(lambda g: g[None], whole)
    _, (scanned,) = jax.lax.scan(lambda c, g: (c, clipped(g)), None, stacked)
    np.testing.assert_allclose(scanned, expected, atol=1e-4)
    chosen = jax.lax.cond(True, lambda g: g, lambda g: shuffled, whole)
    np.testing.assert_allclose(clipped(chosen), expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [1e6, np.nan])
def test_a1_what_a_clip_of_the_batch_did(bad):
    """Negative control: one of 64 examples moves the sum by far more than 2 C."""

    def total(x, first):
        arrays = dpadambc.materialize(gradients(x))
        arrays, _ = first.update(arrays, first.init(PARAMS), PARAMS)
        tx = dpadambc.dp_sgd(1.0, SILENT, key=jax.random.key(0))
        grads = dpadambc.as_per_example(arrays, is_padding_example=NO_PADDING)
        return tx.update(grads, tx.init(PARAMS), PARAMS)[0]

    # All examples alike, which the first of them can shrink to nothing together.
    alike = jnp.tile(X[:1], (BATCH, 1))
    other = alike.at[0].set(jnp.full(8, bad))
    clipped_first = optax.clip_by_global_norm(64.0)
    moved = distance(total(alike, clipped_first), total(other, clipped_first))
    assert moved > 60
    without = optax.identity()
    assert distance(total(alike, without), total(other, without)) <= 2 * C * 1.0001

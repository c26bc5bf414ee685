"""Factored gradients agree with a loop over examples, and keep the form expected."""

import functools
from typing import Any, NamedTuple
from unittest import mock

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import sparse

import dpadambc
from dpadambc.core import keys
from dpadambc.core.gradient import is_per_example, per_example_leaves
from dpadambc.engine import (
    convolution,
    evaluate,
    forms,
    isolation,
    lookup,
    product,
    rounding,
    rules,
    transform,
    view,
    weighted,
)
from dpadambc.engine.interface import Norm
from tests import common
from tests.engine import factored_models as models

PADDING = np.array([False, True, False, False, False])


def arguments(model, batch_size, seed=0):
    """Everything that the loss takes, for a batch."""
    rng = np.random.default_rng(seed)
    params, frozen = model.params(rng), model.frozen(rng)
    batch = [jnp.asarray(draw(rng, batch_size)) for draw in model.batch]
    key = [jax.random.key(seed)] if model.with_key else []
    return [params, *frozen, *batch, *key]


def options(model, args):
    """The keywords of `per_example_grad` that say which argument is what."""
    end = len(args) - model.with_key
    return dict(
        batch_argnums=tuple(range(end - len(model.batch), end)),
        prng_argnum=end if model.with_key else None,
        has_aux=model.has_aux,
    )


def looped_grads(model, args):
    """Gradients of one example after the other, stacked: the slow twin."""
    loss_fn = model.reference or model.loss_fn
    grad_fn = jax.jit(jax.grad(loss_fn, has_aux=model.has_aux))
    batched = options(model, args)["batch_argnums"]

    row = lambda tree, i: jax.tree.map(lambda x: np.asarray(x)[i], tree)

    def grad_of(i):
        example = [row(x, i) if at in batched else x for at, x in enumerate(args)]
        if model.with_key:
            own = [example[at] for at in batched]
            example[-1] = keys.of_example(args[-1], own)
        grad = grad_fn(*example)
        return grad[0] if model.has_aux else grad

    batch_size = args[batched[0]].shape[0]
    return jax.tree.map(lambda *x: np.stack(x), *map(grad_of, range(batch_size)))


def norms_of(grads):
    rows = [x.reshape(len(x), -1) for x in jax.tree.leaves(grads)]
    return np.linalg.norm(np.concatenate(rows, 1), axis=1)


def assert_close(actual, expected, tolerance):
    """Relative to the largest number of a leaf: its zeros are rounded as well.

    A leaf that is nothing but rounding, as that of a bias of all keys in attention, is
    compared to the others.
    """
    size = lambda x: np.abs(x).max(initial=1e-100)
    largest = max(map(size, jax.tree.leaves(expected)))

    def check(path, x, y):
        scale = tolerance * max(size(y), 1e-3 * largest)
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(x, y, tolerance, scale, err_msg=name)

    jax.tree_util.tree_map_with_path(check, actual, expected)


def rules_of(grads):
    """The rule of each leaf, by path."""
    leaves_ = jax.tree_util.tree_leaves_with_path(grads, is_leaf=is_per_example)
    show = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    name = lambda path: show(path).removesuffix("/value")  # of an NNX variable
    return {name(path): leaf.rule for path, leaf in leaves_}


def is_rule(rule, expected):
    if expected == models.PLAIN:
        return rule.isidentifier() and rule not in ("gram", "lookup")
    if expected == models.FALLBACK:
        return "materialized: " in rule
    if expected == models.CHEAPEST:
        is_product = not is_rule(rule, models.PLAIN) or rule == "direct"
        return is_product and not is_rule(rule, models.FALLBACK)
    return rule == expected


def check_rules(grads, expected):
    found = rules_of(grads)
    assert found.keys() == expected.keys()
    wrong = {k: v for k, v in found.items() if not is_rule(v, expected[k])}
    assert not wrong, f"Expected {expected}, got {found}."


def without_a_number(model, args, i):
    """The arguments with NaN for the numbers of example i."""

    def blank(x):
        x = np.array(x)  # indexing a JAX array compiles a program for each shape
        if x.dtype.kind == "f":
            x[i] = np.nan
        return x

    batched = options(model, args)["batch_argnums"]
    return [jax.tree.map(blank, x) if at in batched else x for at, x in enumerate(args)]


def clipped_by_weights(grads, l2_clip_norm):
    """The clipped sum without padding, divided by 3, from all gradients."""
    factors = ~PADDING / np.maximum(1, norms_of(grads) / l2_clip_norm) / 3
    return jax.tree.map(lambda x: np.tensordot(factors, x, 1), grads)


def clip(grads, params, l2_clip_norm, padding=None):
    """The clipped sum, divided by 3."""
    tx = dpadambc.clip_per_example(l2_clip_norm, normalize_by=3.0)
    state = tx.init(params)
    updates, _ = tx.update(grads, state, params, is_padding_example=padding)
    return dpadambc.materialize(updates)


class Fast(NamedTuple):
    """What the engine makes of a batch."""

    arrays: Any
    norms: jax.Array
    clipped: Any


def fast(model, args, l2_clip_norm):
    """A compiled function of the arguments and the padding."""
    keywords = options(model, args)

    def fun(args, padding):
        grads = dpadambc.per_example_grad(model.loss_fn, **keywords)(*args)
        grads = grads[0] if model.has_aux else grads
        clipped = clip(grads, args[0], l2_clip_norm, padding)
        norms = dpadambc.per_example_norms(grads)
        return Fast(dpadambc.materialize(grads), norms, clipped)

    return jax.jit(fun)


def check(model):
    """The norms; raises unless gradients, norms and clipped sum are the slow twin's."""
    args = arguments(model, len(PADDING))
    slow = looped_grads(model, args)
    norms, tolerance = norms_of(slow), model.tolerance
    l2_clip_norm = float(np.median(norms)) or 1.0
    fun = fast(model, args, l2_clip_norm)

    actual = fun(args, PADDING)
    assert_close(actual.arrays, slow, tolerance)
    assert_close(actual.norms, norms, tolerance)
    chex.assert_trees_all_equal_dtypes(actual.arrays, args[0])

    args = without_a_number(model, args, int(PADDING.argmax()))
    expected = clipped_by_weights(slow, l2_clip_norm)
    assert_close(fun(args, PADDING).clipped, expected, tolerance)
    return norms


def check_forms(model):
    """Raises unless each parameter has the rule expected."""
    args = arguments(model, len(PADDING))
    grad_fn = dpadambc.per_example_grad(model.loss_fn, **options(model, args))
    grads = jax.eval_shape(grad_fn, *args)
    check_rules(grads[0] if model.has_aux else grads, model.rules)


# One for each form of gradient, and for each kind of argument.
KINDS = [
    "mlp of few vectors",
    "experts of few",
    "parameters without gradient",
    "layers by index",
    "lora with a frozen argument",
    "lstm",
    "layers by scan",
    "kernel in both branches",
    "dropout",
    "auxiliary output",
    "masked kernel",
    "conv",
    "groups of few positions",
    "embedding of repeated ids",
    "tied head",
]


@pytest.mark.parametrize(
    "name", [name if name in KINDS else common.slow(name) for name in models.MODELS]
)
def test_gradients_norms_and_clipped_sums_are_those_of_a_loop(name, x64):
    assert check(models.MODELS[name]).any()


@pytest.mark.parametrize(
    "name", [name if name in KINDS else common.slow(name) for name in models.MODELS]
)
def test_each_parameter_keeps_its_form(name, x64):
    check_forms(models.MODELS[name])


@pytest.mark.parametrize("name", common.rest_slow(KINDS, quick=5))
def test_microbatches_with_padding_change_rounding_only(name, x64):
    model = models.MODELS[name]
    args = arguments(model, len(PADDING))
    slow = looped_grads(model, args)
    l2_clip_norm = float(np.median(norms_of(slow)))
    args = without_a_number(model, args, int(PADDING.argmax()))
    fun = dpadambc.clipped_grad(
        model.loss_fn,
        l2_clip_norm=l2_clip_norm,
        normalize_by=3.0,
        microbatch_size=2,
        **options(model, args),
    )
    clipped = jax.jit(fun)(*args, is_padding_example=PADDING)
    clipped = clipped[0] if model.has_aux else clipped
    found = dpadambc.materialize(clipped)
    assert_close(found, clipped_by_weights(slow, l2_clip_norm), model.tolerance)


@pytest.mark.parametrize("name", common.rest_slow(KINDS, quick=5))
def test_an_empty_batch_has_no_gradients_and_sums_to_zero(name, x64):
    model = models.MODELS[name]
    args = arguments(model, 0)
    arrays, norms, clipped = fast(model, args, 1.0)(args, np.zeros(0, bool))
    none = jax.tree.map(lambda p: np.zeros((0, *p.shape)), args[0])
    chex.assert_trees_all_equal_shapes((arrays, norms), (none, np.zeros(0)))
    chex.assert_trees_all_equal(clipped, optax.tree.zeros_like(args[0]))


def clipped_with_and_without(method, is_formed, hostile):
    """Clipped sums of four examples, one of them hostile, and of the other three."""
    conv = models.Conv(groups=2)
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(3, 3, 8, 24)), rng.normal(size=(4, 3, 3, 16))
    x[1] = hostile
    mask = rng.random(w.shape) < 0.5 if is_formed else 1
    loss_fn = jax.checkpoint(lambda w, x: models.score(conv(w * mask, x)))
    clipped = jax.jit(
        dpadambc.clipped_grad(
            loss_fn, l2_clip_norm=1.0, normalize_by=1.0, method=method
        )
    )
    w, x = jnp.asarray(w, jnp.float32), jnp.asarray(x, jnp.float32)
    return clipped(w, x).value, clipped(w, jnp.delete(x, 1, 0)).value


@pytest.mark.parametrize("hostile", [np.nan, common.slow(np.inf)])
@pytest.mark.parametrize("is_formed", [False, True])
@pytest.mark.parametrize("method", ["factored", "vmap"])
def test_a_broken_example_leaves_others_alone_in_a_grouped_convolution(
    method, is_formed, hostile
):
    """In single precision, where XLA on CPU has a program of its own for groups."""
    assert_close(*clipped_with_and_without(method, is_formed, hostile), 1e-5)


def test_it_is_the_isolation_that_keeps_a_broken_example_to_itself(monkeypatch):
    """If this fails, XLA may have been mended, and the isolation can go."""
    monkeypatch.setitem(isolation.BY_PRIMITIVE, "conv_general_dilated", lambda fun: fun)
    both, others = clipped_with_and_without("vmap", True, np.nan)
    assert np.abs(both - others).max() > 0.1


def test_a_partial_sum_of_a_carry_that_is_used_elsewhere_is_not_dropped():
    """Reverse mode writes no such loop, but a rule of a user's own may."""

    def running(x):
        def step(carry, row):
            partial = carry + row[None].T @ row[None]
            return partial + row[None].T @ row[None] ** 2, partial

        return (), jax.lax.scan(step, jnp.zeros((9, 9)), x)

    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 9)), jnp.float32)
    _, found, _, _ = transform.factored_outputs(running, frozenset())(x)
    _, expected = running(x)
    assert_close([grad.dense() for grad in found], list(expected), 1e-5)


@pytest.mark.slow
def test_parameters_and_inputs_of_no_size_have_no_gradient():
    def loss_fn(params, x):
        hidden = x @ params["w"]
        nothing = hidden @ params["no columns"] @ params["no rows"]
        rows = params["table"][jnp.zeros(0, int)]
        return (
            models.score(hidden) + nothing.sum() + rows.sum() + (x[:0] @ rows.T).sum()
        )

    shapes = {"w": (5, 9), "no columns": (9, 0), "no rows": (0, 9), "table": (50, 5)}
    params = {k: jnp.ones(shape) for k, shape in shapes.items()}
    grads = dpadambc.per_example_grad(loss_fn)(params, jnp.ones((4, 3, 5)))
    found = {k: leaf.rule for k, leaf in grads.items()}
    assert found.pop("w") in ("gram", "direct")
    assert set(found.values()) == {"no gradient"}
    assert_close(
        dpadambc.materialize(grads),
        dpadambc.materialize(
            dpadambc.per_example_grad(loss_fn, method="vmap")(
                params, jnp.ones((4, 3, 5))
            )
        ),
        1e-5,
    )


@pytest.mark.parametrize("length", [256, 2048])
def test_no_parameter_of_a_decoder_takes_more_in_a_long_context(length):
    """Than its gradients take when they are formed; nor is it said to lack a rule."""
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    heads = dict.fromkeys("qkv", shape(2, 512, 8, 64)) | {"o": shape(2, 8, 64, 512)}
    mlp = dict.fromkeys(["gate", "up"], shape(2, 512, 2048))
    layers = {**heads, **mlp, "down": shape(2, 2048, 512)}
    params = {"table": shape(32_000, 512), "layers": layers}
    ids = jax.ShapeDtypeStruct((length,), jnp.int32)
    cost = dpadambc.explain(models.decoder, params, ids, batch_size=8)
    assert not cost.warnings
    assert all(row.factored_bytes <= row.materialized_bytes for row in cost.parameters)


SIZES = dict(t=st.integers(1, 6), d=st.integers(1, 14), p=st.integers(1, 14))


@pytest.mark.slow  # the table has every rule
@hypothesis.settings(max_examples=15)
@hypothesis.given(**SIZES, transposed=st.booleans(), twice=st.booleans())
def test_kernels_of_any_size(t, d, p, transposed, twice):
    rule = "gram" if (1 + twice) * t * (d + p) < d * p else "direct"
    loss_fn = lambda w, x: models.score(x[0] @ (w.T if transposed else w))
    both = lambda w, x: loss_fn(w, x) + loss_fn(w, x[1:]) if twice else loss_fn(w, x)
    shape = (p, d) if transposed else (d, p)
    model = models.w_only(both, shape, (2, t, d), rule)
    with jax.enable_x64(True):
        check_forms(model)
        check(model)


def axes(low, high):
    return st.tuples(st.integers(low, high), st.integers(low, high))


@pytest.mark.slow  # the table has every rule
@hypothesis.settings(max_examples=20)
@hypothesis.given(
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    size=axes(1, 6),
    strides=axes(1, 3),
    padding=st.tuples(axes(-1, 2), axes(-1, 2)),
    lhs_dilation=axes(1, 2),
    rhs_dilation=axes(1, 2),
    groups=st.integers(1, 2),
    channels=axes(1, 4),
    is_formed=st.booleans(),
)
def test_convolutions_of_any_kind(kernel, size, groups, channels, is_formed, **kwargs):
    conv = models.Conv(groups=groups, **kwargs)
    inputs, outputs = channels[0], groups * channels[1]
    x, w = (*size, groups * inputs), (*kernel, inputs, outputs)
    padded = [n + sum(pad) for n, pad in zip(size, conv.padding, strict=True)]
    hypothesis.assume(min(padded) > 0)
    hypothesis.assume(0 not in jax.eval_shape(conv, jnp.zeros(w), jnp.zeros(x)).shape)
    chosen = convolution.Convolution.dense if is_formed else lambda grad: grad
    settle = lambda grad: forms.as_gradient(chosen(grad), "direct")
    with jax.enable_x64(True):
        with mock.patch.object(convolution.Convolution, "settled", settle):
            check(conv.model(w, x, "of either form"))


@pytest.mark.slow  # the table has every rule
@hypothesis.settings(max_examples=15)
@hypothesis.given(
    v=st.integers(1, 30),
    t=st.integers(1, 8),
    d=st.integers(1, 8),
    distinct=st.integers(1, 8),
)
def test_embeddings_of_any_size(v, t, d, distinct):
    rule = "lookup" if t * (1 + d) < v * d else "direct"
    model = models.rows(
        lambda table, i: table[i], (v, d), (t,), high=min(v, distinct), rule=rule
    )
    with jax.enable_x64(True):
        check_forms(model)
        check(model)


def norm_without_pairs(grad, *_):
    """Of a product: the squared norms of its parts, as if they were orthogonal."""
    (a, _), (g, _) = (
        grad.matrix(grad.a, grad.a_axes),
        grad.matrix(grad.g, grad.g_axes),
    )
    return Norm(jnp.sum((a**2).sum(2) * (g**2).sum(2)), 0.0, 0.0)


def interleaved_groups(grad, x, dtype=None):
    del dtype
    stacked = int(np.prod(x.shape[: grad.num_stacked]))
    positions = int(np.prod(x.shape[grad.num_stacked : -1]))
    groups = grad.window.groups
    x = x.reshape(stacked, positions, -1, groups)
    return jnp.moveaxis(x, 3, 1).reshape(stacked * groups, positions, -1)


def block_at_the_end(grad, units):
    widths = [(n - m, 0) for n, m in zip(grad.shape, grad.block.shape, strict=True)]
    return jnp.pad(grad.block.dense(units), widths)


STARTS = convolution.Convolution._starts
LOOKUP_WITH_HEAD = lookup.Lookup.inner
AT_IDS, UPDATE = lookup._at_ids, lookup.dynamic_update_slice
STACKED, TIMES = product.Product.stacked, product.Product.times
ROWS_TIMES, SPARSE = lookup.Lookup.times, lookup.sparse_dot_general

MUTANTS = {
    "gram matrices without what is off the diagonal": (
        "mlp of few vectors",
        product.Product,
        "norm",
        norm_without_pairs,
    ),
    "gram matrices without what is off the diagonal, scan": (
        "lstm",
        product.Product,
        "norm",
        norm_without_pairs,
    ),
    "repeated ids as if distinct": (
        "embedding of repeated ids",
        lookup.Lookup,
        "norm",
        lambda grad, *_: Norm(jnp.sum(grad.g**2), 0.0, 0.0),
    ),
    "repeated ids as if distinct, longer than wide": (
        "embedding longer than wide",
        lookup.Lookup,
        "norm",
        lambda grad, *_: Norm(jnp.sum(grad.g**2), 0.0, 0.0),
    ),
    "taps in reverse": (
        "conv",
        convolution.Convolution,
        "_starts",
        lambda grad, axes: STARTS(grad, axes)[::-1],
    ),
    "groups interleaved": (
        "groups",
        convolution.Convolution,
        "grouped",
        interleaved_groups,
    ),
    "a sum without cross terms": (
        "tied head",
        forms.Sum,
        "norm",
        lambda grad, *_: Norm.of_all([x.norm(rounding.FULL) for x in grad.parts]),
    ),
    "cross terms counted twice": (
        "tied head",
        lookup.Lookup,
        "inner",
        lambda x, y: 2 * LOOKUP_WITH_HEAD(x, y),
    ),
    "the product of sums over time": (
        "reverse scan",
        product.Product,
        "summed",
        lambda grad: jax.tree.map(lambda x: x.sum(0), grad),
    ),
    "the last step of a scan": (
        "reverse scan",
        product.Product,
        "summed",
        lambda grad: jax.tree.map(lambda x: x[-1], grad),
    ),
    "the last step of a scan of convolutions": (
        "conv in a scan",
        convolution.Convolution,
        "summed",
        lambda grad: jax.tree.map(lambda x: x[-1], grad),
    ),
    "a transposed kernel as it was": (
        "batch dimensions",
        product.Product,
        "transpose",
        lambda grad, _: grad,
    ),
    "a block in the wrong place": (
        "part of a kernel",
        forms.Block,
        "dense",
        block_at_the_end,
    ),
    "entries that stay where they are": (
        "reversed kernel",
        view.View,
        "dense",
        lambda grad, *_: grad.base.dense(),
    ),
    "entries that move by layers": (
        "layers reshaped in a scan",
        product.Product,
        "stacked",
        lambda grad: STACKED(grad.map_scale(lambda x: x[::-1])),
    ),
    "a low-rank update as if it were one": (
        "lora merged into the kernel",
        product.Product,
        "times",
        lambda grad, x, *axes: TIMES(grad, jnp.ones_like(x), *axes),
    ),
    "the first row whatever the index": (
        "embedding of one index, out of range",
        lookup,
        "dynamic_update_slice",
        lambda shape, update, starts: UPDATE(
            shape, update, (jnp.zeros_like(starts[0]), *starts[1:])
        ),
    ),
    "one of two ids": (
        "pairs of ids",
        lookup,
        "_at_ids",
        lambda ids, rows, shape: AT_IDS({**ids, 0: 0 * ids[0]}, rows, shape),
    ),
    "rows times another matrix": (
        "factorized table",
        lookup.Lookup,
        "times",
        lambda grad, x, *axes: ROWS_TIMES(grad, jnp.ones_like(x), *axes),
    ),
    "a row of padding that is not held": (
        "padding row",
        lookup,
        "kept_by_scatter",
        lambda shape, *_: jnp.ones([1] * len(shape), bool),
    ),
    "entries of the first row, whatever the id": (
        "table, entry by entry",
        lookup.Lookup,
        "_at_ids",
        lambda grad, x: x[:1],
    ),
    "sparse numbers as if they were one": (
        "sparse matrix",
        lookup,
        "sparse_dot_general",
        lambda data, *args: SPARSE(jnp.ones_like(data), *args),
    ),
    "something in the branches not taken": (
        "kernel in both branches",
        evaluate,
        "_zeros_like",
        lambda tree: jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), tree),
    ),
    "padding that is not blanked": (
        "mlp of few vectors",
        weighted,
        "_blanked_unless",
        lambda skip, grads, keep: grads,
    ),
}


@pytest.mark.parametrize("mutant", common.rest_slow(MUTANTS, quick=4))
def test_the_table_finds_a_wrong_rule(mutant, monkeypatch, x64):
    name, owner, attribute, wrong = MUTANTS[mutant]
    monkeypatch.setattr(owner, attribute, wrong)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(models.MODELS[name])


FORMED_WITHOUT = {
    "dot_general": "lstm",
    "conv_general_dilated": "conv",
    "scatter-add": "tied head",
    "bcoo_dot_general": "sparse matrix",
}


@pytest.mark.parametrize("primitive", FORMED_WITHOUT)
def test_the_table_finds_a_silent_fallback(primitive, monkeypatch, x64):
    monkeypatch.delitem(rules.PRODUCERS, primitive)
    with pytest.raises(AssertionError, match="Expected"):
        check_forms(models.MODELS[FORMED_WITHOUT[primitive]])


TABLE, BATCH = (2000, 64), 32


def of_rows(table, ids):
    return models.score(jnp.tanh(table[ids]))


# Losses of a table of numbers, with a frozen one, that no example forms.
TABLES = {
    "merged": lambda t, frozen, ids: of_rows(frozen + t[:, :4] @ t[:64, 4:8].T, ids),
    "held": lambda t, _, ids: of_rows(t.at[0].set(0.0), ids),
    "factorized": lambda t, frozen, ids: of_rows(t @ frozen[:64], ids),
    "normalized": lambda t, _, ids: of_rows(
        t / jnp.linalg.norm(t, axis=1, keepdims=True), ids
    ),
    "sparse": lambda t, _, ids: models.score(
        jnp.tanh(sparse.BCOO((jnp.ones(8), ids[:, None]), shape=TABLE[:1]) @ t)
    ),
}


@pytest.mark.parametrize("name", common.rest_slow(TABLES, quick=2))
def test_no_example_has_a_table_of_its_own(name):
    """A control: `jax.vmap` makes one for each."""

    def tables(method):
        clipped = dpadambc.clipped_grad(
            TABLES[name],
            batch_argnums=2,
            l2_clip_norm=1.0,
            normalize_by=1.0,
            method=method,
        )
        shape = jax.ShapeDtypeStruct(TABLE, jnp.float32)
        ids = jax.ShapeDtypeStruct((BATCH, 8), jnp.int32)
        compiled = jax.jit(clipped).lower(shape, shape, ids).compile()
        return compiled.memory_analysis().temp_size_in_bytes / (4 * np.prod(TABLE))

    assert tables("factored") < 8
    assert tables("vmap") > BATCH


RAGGED = ["top expert, ragged", "top expert, ragged, in loops"]


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("method", ["factored", "vmap"])
def test_a_ragged_product_is_mapped_though_kernels_are_shared(name, method, x64):
    model = models.MODELS[name]
    args = arguments(model, 3)
    grad_fn = dpadambc.per_example_grad(model.loss_fn, method=method)
    found = dpadambc.materialize(grad_fn(*args))
    assert_close(found, looped_grads(model, args), model.tolerance)


def test_jax_does_not_map_a_ragged_product(monkeypatch):
    """If this fails, JAX may have a rule, and ours can go."""
    monkeypatch.delitem(isolation.BY_PRIMITIVE, "ragged_dot_general")
    model = models.MODELS[RAGGED[0]]
    with pytest.raises(NotImplementedError, match="ragged_dot"):
        dpadambc.per_example_grad(model.loss_fn)(*arguments(model, 3))


def gradients(name="tied head"):
    """Gradients of one compiled function, and the parameters."""
    model = models.MODELS[name]
    args = arguments(model, len(PADDING))
    return jax.jit(dpadambc.per_example_grad(model.loss_fn))(*args), args


BORDERS = ["mlp of few vectors", "tied head", "conv", "layers by index"]


@pytest.mark.parametrize("name", common.rest_slow(BORDERS, quick=2))
def test_gradients_cross_jit_and_donation(name, x64):
    model = models.MODELS[name]
    args = arguments(model, len(PADDING))
    expected = fast(model, args, 0.1)(args, PADDING).clipped
    grads, _ = gradients(name)
    step = functools.partial(clip, l2_clip_norm=0.1, padding=PADDING)
    assert_close(jax.jit(step)(grads, args[0]), expected, 1e-12)
    donated = jax.jit(step, donate_argnums=0)
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        assert_close(donated(grads, args[0]), expected, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", BORDERS)
def test_gradients_are_carried_and_emitted_by_a_scan(name, x64):
    model = models.MODELS[name]
    params, *batch = arguments(model, 6)
    grad_fn = dpadambc.per_example_grad(model.loss_fn)

    @jax.jit
    def by_halves(params, batch):
        halves = jax.tree.map(lambda x: x.reshape(2, 3, *x.shape[1:]), batch)
        before = grad_fn(params, *jax.tree.map(lambda x: x[1], halves))
        step = lambda grads, half: (grad_fn(params, *half), grads)
        last, emitted = jax.lax.scan(step, before, halves)
        add = lambda total, grads: (
            optax.tree.add(total, clip(grads, params, 0.1)),
            None,
        )
        total, _ = jax.lax.scan(add, clip(last, params, 0.1), emitted)
        return total

    # The second half is clipped twice, as the first carry and as the last.
    twice = [jnp.concatenate([x, x[3:]]) for x in batch]
    expected = fast(model, [params, *twice], 0.1)([params, *twice], np.zeros(9, bool))
    assert_close(by_halves(params, batch), expected.clipped, 1e-10)


@pytest.mark.parametrize("name", BORDERS)
def test_a_round_trip_through_the_tree_keeps_everything(name):
    grads, _ = gradients(name)
    arrays, structure = jax.tree.flatten(grads)
    assert all(x.shape[0] == len(PADDING) for x in arrays if x.ndim)
    again = jax.tree.unflatten(structure, arrays)
    assert jax.tree.structure(again) == jax.tree.structure(
        jax.tree.map(jnp.copy, grads)
    )
    assert rules_of(again) == rules_of(grads)
    for x, y in zip(per_example_leaves(again), per_example_leaves(grads), strict=True):
        assert (x.shape, x.dtype, x.batch_size) == (y.shape, y.dtype, y.batch_size)


@pytest.mark.parametrize("name", BORDERS)
def test_a_gradient_is_shown_in_one_short_line(name):
    grads, _ = gradients(name)
    for leaf in per_example_leaves(grads):
        assert "\n" not in repr(leaf)
        assert len(repr(leaf)) < 120


@pytest.mark.slow
def test_clipping_precedes_a_chain_that_divides_the_parameters(x64):
    grads, (params, _) = gradients()
    labels = {"table": "trained", "w": "frozen"}
    parts = {"trained": optax.sgd(1.0), "frozen": optax.set_to_zero()}
    tx = optax.chain(
        dpadambc.clip_per_example(0.1, normalize_by=3.0),
        dpadambc.add_dp_noise(0.0, key=jax.random.key(0)),
        optax.multi_transform(parts, labels),
        optax.masked(optax.scale(2.0), {"table": True, "w": False}),
    )
    updates, _ = tx.update(grads, tx.init(params), params)
    expected = clip(grads, params, 0.1)
    assert_close(updates["table"], -2 * expected["table"], 1e-12)
    assert not updates["w"].any()


def test_a_clip_of_a_part_of_the_parameters_is_refused():
    """Two clips of two parts would move the sum by more than one norm."""
    grads, (params, _) = gradients()
    mask = {"table": True, "w": False}
    tx = optax.masked(dpadambc.clip_per_example(0.1, normalize_by=3.0), mask)
    with pytest.raises(ValueError, match="params"):
        tx.init(params)
    part = lambda tree: {"table": tree["table"]}
    with pytest.raises(ValueError, match="gradient|2 parameters"):
        clip(part(grads), part(params), 0.1)

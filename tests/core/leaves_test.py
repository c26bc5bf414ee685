"""Factored gradients keep the guarantee of the clip, and stay within their memory."""

import copy
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from dpadambc.engine import precision, product

pytestmark = pytest.mark.guarantee


def bilinear_loss(params, a, g):
    """Its gradient is the product of the data: any factors can be had."""
    return jnp.sum((a @ params) * g)


@functools.cache
def compiled(l2_clip_norm, has_allowance=True):
    del has_allowance  # it was traced with the one or the other
    return jax.jit(
        dpadambc.clipped_grad(
            bilinear_loss, l2_clip_norm=l2_clip_norm, normalize_by=1.0
        )
    )


def clipped_sum(a, g, l2_clip_norm=1.0, has_allowance=True, is_padding=None):
    """The clipped sum of factors with axes (batch, t, i) and (batch, t, j)."""
    params = jnp.zeros((a.shape[-1], g.shape[-1]), a.dtype)
    if is_padding is None:
        is_padding = jnp.zeros(len(a), bool)
    fun = compiled(l2_clip_norm, has_allowance)
    found = fun(params, a, g, is_padding_example=is_padding)
    return np.float64(found.value)


def factors(seed, batch_size, contracted, dtype=np.float32):
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.normal(0, 2, (batch_size, 1, 1)))
    draw = lambda width: rng.normal(size=(batch_size, contracted, width))
    return (sizes * draw(7)).astype(dtype), draw(9).astype(dtype)


def canceling(a, g):
    """Large terms that cancel to 16, of which their squares in float32 see nothing."""
    a, g = np.zeros_like(a), np.zeros_like(g)
    a[..., :4] = 2**26
    g[:, 0, 0] = 1
    g[:, -1, 0] -= np.float32(1 + 2**-23)
    return a, g


HOSTILE = {
    "huge": lambda a, g: (1e15 * a, g),
    "tiny times huge": lambda a, g: (1e-24 * a, 1e24 * g),
    "huge times tiny": lambda a, g: (1e24 * a, 1e-24 * g),
    "zero": lambda a, g: (0 * a, g),
    "nan": lambda a, g: (a, np.nan * g),
    "nan in the other factor": lambda a, g: (np.nan * a, g),
    "inf times zero": lambda a, g: (np.inf * np.ones_like(a), 0 * g),
    "overflows when squared": lambda a, g: (1e25 * a, 1e10 * g),
    "vanishes when squared": lambda a, g: (1e-23 * a, 1e18 * g),
    "cancels": canceling,
}


def distances(a, g, row, **kwargs):
    """How far the clipped sum moves when an example is added, or blanked."""
    both = [np.concatenate(x).astype(x[0].dtype) for x in zip((a, g), row, strict=True)]
    is_added = jnp.arange(len(a) + 1) == len(a)
    nothing = [np.concatenate([x, 0 * x[:1]]) for x in (a, g)]
    whole = clipped_sum(*nothing, **kwargs)
    added = clipped_sum(*both, **kwargs)
    blanked = clipped_sum(*both, is_padding=is_added, **kwargs)
    return np.linalg.norm(added - whole), np.linalg.norm(blanked - whole)


@pytest.mark.parametrize("contracted", [1, 2, 3], ids=lambda t: f"t{t}")
@pytest.mark.parametrize("hostile", HOSTILE)
@hypothesis.settings(max_examples=3)
@hypothesis.given(seed=st.integers(0, 2**32 - 1))
def test_one_hostile_example_moves_the_sum_by_at_most_the_sensitivity(
    contracted, hostile, seed
):
    a, g = factors(seed, 4, contracted)
    row = HOSTILE[hostile](*factors(seed + 1, 1, contracted))
    added, blanked = distances(a, g, row)
    # What rounding moves is added to the norm; 1e-5 is of the other examples' sum.
    assert added <= 1 + 1e-5
    assert blanked <= 1e-5


def _without_vanished(grad):
    """The squared norm of one term, which may be zero where its factors are not."""
    return jnp.sum(grad.a**2) * jnp.sum(grad.g**2)


@pytest.mark.parametrize(
    "hostile, contracted, l2_clip_norm",
    [("cancels", 2, 1.0), ("vanishes when squared", 1, 1e-6)],
)
def test_the_allowance_is_what_keeps_the_bound(
    hostile, contracted, l2_clip_norm, monkeypatch
):
    a, g = factors(0, 4, contracted)
    row = HOSTILE[hostile](*factors(1, 1, contracted))
    added, _ = distances(a, g, row, l2_clip_norm=l2_clip_norm)
    assert added <= l2_clip_norm * (1 + 1e-3)
    # Negative control.
    monkeypatch.setattr(precision, "rounding_error", lambda *_: 0.0)
    monkeypatch.setattr(product.Product, "_outer_squared_norm", _without_vanished)
    added, _ = distances(a, g, row, l2_clip_norm=l2_clip_norm, has_allowance=False)
    assert added > 1.5 * l2_clip_norm


def convolved_loss(params, x, g):
    numbers = ("NWC", "WIO", "NWC")
    out = jax.lax.conv_general_dilated(
        x[None], params, (1,), "VALID", dimension_numbers=numbers
    )
    return jnp.sum(out[0] * g)


def looked_up_loss(params, ids, g):
    return jnp.sum(params[ids] * g)


def row_that_cancels(rng, shape):
    """Large rows whose sum is what float32 rounds away."""
    g = 1e9 * rng.normal(size=shape)
    g[:, -1] = -g[:, :-1].sum(1)
    return g.astype(np.float32)


# The loss, the shape of the parameter, one example, and the rule of its norm.
CANCELS = {
    "taps": (
        convolved_loss,
        (3, 42, 54),
        lambda rng: np.repeat(rng.normal(size=(1, 1, 42)), 10, 1).astype(np.float32),
        lambda rng: row_that_cancels(rng, (1, 8, 54)),
        "convolution: gram",
    ),
    "equal ids": (
        looked_up_loss,
        (100, 9),
        lambda rng: np.full((1, 8), rng.integers(100)),
        lambda rng: row_that_cancels(rng, (1, 8, 9)),
        "lookup",
    ),
    "equal ids, longer than wide": (
        looked_up_loss,
        (100, 3),
        lambda rng: np.full((1, 8), rng.integers(100)),
        lambda rng: row_that_cancels(rng, (1, 8, 3)),
        "lookup",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CANCELS)
def test_what_cancels_differently_in_the_sum_stays_within_the_clip_norm(
    name, monkeypatch
):
    """The sum over examples rounds otherwise than the norm of one of them."""
    loss_fn, shape, draw_x, draw_g, rule = CANCELS[name]
    params = jnp.zeros(shape)

    def longest():
        clipped = jax.jit(
            dpadambc.clipped_grad(loss_fn, l2_clip_norm=1.0, normalize_by=1.0)
        )
        rngs = map(np.random.default_rng, range(200))
        sums = [clipped(params, draw_x(rng), draw_g(rng)) for rng in rngs]
        return max(np.linalg.norm(np.float64(x.value)) for x in sums)

    rng = np.random.default_rng(0)
    grads = dpadambc.per_example_grad(loss_fn)(params, draw_x(rng), draw_g(rng))
    assert grads.rule == rule
    assert longest() <= 1 + 1e-3
    # Negative control.
    monkeypatch.setattr(precision, "rounding_error", lambda *_: 0.0)
    assert longest() > 1.2


def test_the_norm_is_never_less_than_the_true_one():
    grad_fn = dpadambc.per_example_grad(bilinear_loss)
    norms_of = jax.jit(lambda *args: dpadambc.per_example_norms(grad_fn(*args)))
    for contracted in (1, 2, 3):
        a, g = factors(contracted, 200, contracted)
        norms = norms_of(np.zeros((7, 9), "f"), a, g)
        true = np.sqrt(
            np.square(np.einsum("bti,btj->bij", *map(np.float64, (a, g)))).sum((1, 2))
        )
        assert (norms >= true * (1 - 3e-7)).all()
        np.testing.assert_allclose(norms, true, rtol=1e-4)


@pytest.mark.slow
def test_low_precision_factors_are_squared_and_summed_in_float32():
    """jax_privacy in float16 overflows, and drops every example."""
    a, g = factors(0, 5, 3)
    a = 300 * a / np.abs(a).max()
    params = jnp.zeros((7, 9), jnp.float16)
    fun = dpadambc.clipped_grad(bilinear_loss, l2_clip_norm=1.0, normalize_by=1.0)
    half = [jnp.asarray(x, jnp.float16) for x in (a, g)]
    clipped = fun(params, *half)
    assert clipped.dtype == clipped.value.dtype == jnp.float32
    exact = clipped_sum(*(np.asarray(x, np.float32) for x in half))
    np.testing.assert_allclose(clipped.value, exact, rtol=1e-3, atol=1e-4)


def mlp(sizes=(64, 128, 128, 10)):
    rng = np.random.default_rng(0)
    params = [
        {"w": jnp.asarray(rng.normal(size=pair), jnp.float32), "b": jnp.zeros(pair[1])}
        for pair in zip(sizes, sizes[1:], strict=False)
    ]

    def loss_fn(params, x, label):
        for layer in params:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return optax.softmax_cross_entropy_with_integer_labels(x, label)

    return loss_fn, params, lambda n: (jnp.ones((n, 64)), jnp.zeros(n, int))


def peak_bytes(fun, *args):
    analysis = jax.jit(fun).lower(*args).compile().memory_analysis()
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        + analysis.temp_size_in_bytes
    )


@pytest.mark.slow
def test_peak_memory_is_near_that_of_the_ordinary_gradient():
    loss_fn, params, draw = mlp()
    batch = draw(256)

    def mean_loss(params, *batch):
        in_axes = (None, *(0 for _ in batch))
        return jax.vmap(loss_fn, in_axes)(params, *batch).mean()

    ordinary = peak_bytes(jax.grad(mean_loss), params, *batch)
    private = peak_bytes(
        dpadambc.clipped_grad(loss_fn, l2_clip_norm=1.0, normalize_by=256.0),
        params,
        *batch,
    )
    vmapped = dpadambc.clipped_grad(
        loss_fn, l2_clip_norm=1.0, normalize_by=256.0, method="vmap"
    )
    assert private < 1.5 * ordinary
    # Negative control: what the bound would catch.
    assert peak_bytes(vmapped, params, *batch) > 3 * ordinary


def test_a_leaf_knows_its_parameter_and_names_the_clip():
    grad = dpadambc.per_example_grad(lambda w, x: w @ x)(jnp.ones(3), jnp.ones((4, 3)))
    assert (grad.shape, grad.dtype, grad.batch_size) == ((3,), np.float32, 4)
    assert "PerExampleGradient(shape=(3,)" in repr(grad)
    for name in ("mean", "other"):
        with pytest.raises(AttributeError, match="clip_per_example"):
            getattr(grad, name)
    assert not hasattr(copy.copy(grad), "__len__")


def test_blanking_happens_only_where_a_norm_is_not_finite(x64):
    """Both ways give the same sum, for examples that are left out."""
    a, g = factors(0, 6, 2, np.float64)
    is_padding = jnp.array([False, True, False, False, True, False])
    plain = clipped_sum(a, g, is_padding=is_padding)
    a[1], g[4] = np.nan, np.inf
    np.testing.assert_array_equal(clipped_sum(a, g, is_padding=is_padding), plain)


def test_more_cells_than_an_integer_numbers_are_not_looked_up():
    """Two of them would get one number, and cancel in the norm."""
    loss_fn = lambda table, i, j, x: jnp.sum(table[i, j] * x)
    ids = jax.ShapeDtypeStruct((2,), jnp.int32)
    x = jax.ShapeDtypeStruct((2,), jnp.float32)
    rule = lambda *shape: dpadambc.explain(
        loss_fn, jax.ShapeDtypeStruct(shape, jnp.float32), ids, ids, x, batch_size=1
    ).rules["params"]
    assert rule(40_000, 50_000) == "lookup"
    assert rule(60_000, 60_000).startswith("materialized")


@pytest.mark.parametrize(
    "change",
    [
        lambda grads: grads * 0.5,
        lambda grads: jnp.ones(3) * grads,
        lambda grads: -grads,
        lambda grads: grads / 2 + grads,
        lambda grads: optax.apply_updates(jnp.zeros(3), grads),
    ],
    ids=["scaled", "of an array", "negative", "sum", "applied"],
)
def test_arithmetic_before_the_clip_says_what_to_do(change):
    grads = dpadambc.per_example_grad(lambda w, x: w @ x)(jnp.ones(3), jnp.ones((8, 3)))
    with pytest.raises(TypeError, match="clip_per_example"):
        change(grads)

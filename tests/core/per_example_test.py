"""Per-example gradients and their clipped sum agree with a loop over examples."""

import functools

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from dpadambc.core import microbatches
from tests import common


def mlp_loss(params, x, y):
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.sum((hidden @ params["w2"] - y) ** 2)


def conv_loss(params, x, y):
    dims = ("NHWC", "HWIO", "NHWC")
    out = jax.lax.conv_general_dilated(
        x[None], params["kernel"], (1, 1), "SAME", dimension_numbers=dims
    )
    return jnp.sum(jnp.tanh(out).mean((0, 1, 2)) @ params["w"] - y) ** 2


def embedding_loss(params, ids, y):
    return jnp.sum((jnp.tanh(params["table"][ids]).mean(0) @ params["w"] - y) ** 2)


def attention_loss(params, x, y):
    q, k, v = (x @ params[name] for name in "qkv")
    weights = jax.nn.softmax(q @ k.T / np.sqrt(k.shape[-1]))
    return jnp.sum(((weights @ v).mean(0) - y) ** 2)


def shapes(name):
    """The parameters' shapes, and a function that draws a batch."""
    normal = lambda rng, *shape: rng.normal(size=shape)
    return {
        "mlp": (
            mlp_loss,
            {"w1": (4, 5), "b1": (5,), "w2": (5, 2)},
            lambda rng, n: (normal(rng, n, 4), normal(rng, n, 2)),
        ),
        "conv": (
            conv_loss,
            {"kernel": (3, 3, 2, 4), "w": (4, 3)},
            lambda rng, n: (normal(rng, n, 6, 5, 2), normal(rng, n, 3)),
        ),
        "embedding": (
            embedding_loss,
            {"table": (7, 3), "w": (3, 2)},
            lambda rng, n: (rng.integers(7, size=(n, 6)), normal(rng, n, 2)),
        ),
        "attention": (
            attention_loss,
            {"q": (4, 3), "k": (4, 3), "v": (4, 2)},
            lambda rng, n: (normal(rng, n, 5, 4), normal(rng, n, 2)),
        ),
    }[name]


MODELS = ["mlp", "conv", "embedding", "attention"]


def problem(name, batch_size, seed=0):
    loss_fn, sizes, draw = shapes(name)
    rng = np.random.default_rng(seed)
    params = {k: jnp.asarray(rng.normal(size=s)) for k, s in sizes.items()}
    x, y = (jnp.asarray(a) for a in draw(rng, batch_size))
    return loss_fn, params, x, y


@functools.cache
def grad_of_one(loss_fn):
    return jax.jit(jax.grad(loss_fn))


def looped_grads(loss_fn, params, *batch):
    grad_fn = grad_of_one(loss_fn)
    grads = [grad_fn(params, *example) for example in zip(*batch, strict=True)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads)


def looped_clipped_sum(loss_fn, params, *batch, l2_clip_norm, normalize_by):
    total = jax.tree.map(jnp.zeros_like, params)
    for example in zip(*batch, strict=True):
        grad = grad_of_one(loss_fn)(params, *example)
        factor = 1 / jnp.maximum(1, optax.tree.norm(grad) / l2_clip_norm)
        total = jax.tree.map(lambda t, g, f=factor: t + f * g, total, grad)
    return jax.tree.map(lambda t: t / normalize_by, total)


def assert_close(a, b, tolerance=1e-12):
    a, b = dpadambc.materialize((a, b))
    chex.assert_trees_all_close(a, b, rtol=tolerance, atol=tolerance)


both_methods = pytest.mark.parametrize("method", ["factored", "vmap"])


def clipped(loss_fn, l2_clip_norm=1e9, normalize_by=1.0, **options):
    return dpadambc.clipped_grad(
        loss_fn, l2_clip_norm=l2_clip_norm, normalize_by=normalize_by, **options
    )


@both_methods
@pytest.mark.parametrize("name", common.rest_slow(MODELS, quick=1))
def test_per_example_grad_agrees_with_a_loop(name, method, x64):
    loss_fn, params, x, y = problem(name, 5)
    grad_fn = dpadambc.per_example_grad(loss_fn, return_values=True, method=method)
    values, grads = jax.jit(grad_fn)(params, x, y)
    looped = looped_grads(loss_fn, params, x, y)
    assert_close(dpadambc.materialize(grads), looped)
    norms = jax.vmap(optax.tree.norm)(looped)
    assert_close(dpadambc.per_example_norms(grads), norms)
    assert_close(values, jnp.stack([loss_fn(params, *e) for e in zip(x, y)]))  # noqa: B905


@both_methods
@pytest.mark.parametrize("name", common.rest_slow(MODELS, quick=1))
@pytest.mark.parametrize("size", [3, *map(common.slow, [None, 1, 7])])  # of 7 examples
def test_clipped_grad_agrees_with_a_loop(name, size, method, x64):
    loss_fn, params, x, y = problem(name, 7)
    numbers = dict(l2_clip_norm=0.5, normalize_by=3.0)
    fun = clipped(loss_fn, microbatch_size=size, method=method, **numbers)
    slow = looped_clipped_sum(loss_fn, params, x, y, **numbers)
    assert_close(jax.jit(fun)(params, x, y), slow)
    if size == 3:
        assert_close(fun(params, x, y), slow)


@functools.cache
def clipped_mlp(size, skip_padding):
    return jax.jit(
        clipped(mlp_loss, 1.0, 2.0, microbatch_size=size, skip_padding=skip_padding)
    )


@pytest.mark.slow
@hypothesis.given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([None, 1, 3, 8, 9]),
    skip_padding=st.booleans(),
    padding=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_microbatches_padding_and_order_change_rounding_only(
    seed, size, skip_padding, padding
):
    with jax.enable_x64(True):
        loss_fn, params, x, y = problem("mlp", 8, seed)
        mask = np.array(padding)
        batch = np.asarray(x)[~mask], np.asarray(y)[~mask]
        expected = looped_clipped_sum(
            loss_fn, params, *batch, l2_clip_norm=1.0, normalize_by=2.0
        )
        fun = clipped_mlp(size, skip_padding)
        order = np.random.default_rng(seed).permutation(8)
        for rows in (np.arange(8), order):
            found = fun(params, x[rows], y[rows], is_padding_example=mask[rows])
            assert_close(found, expected)


@pytest.mark.parametrize("skip_padding", [False, True])
def test_microbatches_of_padding_are_left_out_if_asked(skip_padding):
    options = dict(microbatch_size=2, skip_padding=skip_padding, return_values=True)
    fun = clipped(lambda w, x: w * x, 9.0, **options)
    x, padding = jnp.arange(1.0, 8.0), jnp.arange(7) > 2
    values, gradient = jax.jit(fun)(2.0, x, is_padding_example=padding)
    assert gradient.value == 1 + 2 + 3
    # Of three examples there are two microbatches; what is computed has a value.
    assert (values[:4] == 2 * x[:4]).all()
    assert (values[4:] == (0 if skip_padding else 2 * x[4:])).all()


@functools.cache
def clipped_mlp_in_parts(size):
    """Of 40 rows eight are computed at once, and then four at a time."""
    return jax.jit(clipped(mlp_loss, 1.0, 8, microbatch_size=size, skip_padding=True))


@pytest.fixture
def no_cheap_rows(monkeypatch):
    """Rows beyond the expected batch are left out of the smallest models, too."""
    monkeypatch.setattr(microbatches, "_CHEAP", -1)


@pytest.mark.slow
@pytest.mark.usefixtures("no_cheap_rows")
@hypothesis.given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([None, 1, 3, 4]),
    count=st.one_of(st.sampled_from([0, 1, 8, 9, 12, 13, 40]), st.integers(0, 40)),
    is_last=st.booleans(),
)
def test_rows_beyond_the_expected_batch_count_wherever_they_are(
    seed, size, count, is_last
):
    with jax.enable_x64(True):
        loss_fn, params, x, y = problem("mlp", 40, seed)
        mask = np.arange(40) >= count
        if not is_last:  # padding is not at the end, as a draw has it
            mask = np.random.default_rng(seed).permutation(mask)
        x = np.where(mask[:, None], np.nan, x)
        expected = looped_clipped_sum(
            loss_fn, params, x[~mask], y[~mask], l2_clip_norm=1.0, normalize_by=8
        )
        fun = clipped_mlp_in_parts(size)
        assert_close(fun(params, x, y, is_padding_example=mask), expected)
        assert fun._cache_size() == 1


@pytest.mark.usefixtures("no_cheap_rows")
@pytest.mark.parametrize("count", [0, 3, 8, 9, 12, 13, 39])
def test_parts_of_padding_beyond_the_expected_batch_are_left_out(count):
    fun = clipped(lambda w, x: w * x, 99.0, 8, skip_padding=True, return_values=True)
    x = jnp.arange(1.0, 41.0)
    values, gradient = jax.jit(fun)(2.0, x, is_padding_example=jnp.arange(40) >= count)
    assert gradient.value == sum(range(count + 1)) / 8
    computed = 8 + 4 * max(0, -(-(count - 8) // 4))  # the rest in eight parts of four
    assert (values[:computed] == 2 * x[:computed]).all()
    assert (values[computed:] == 0).all()


def test_the_loss_is_in_the_program_once_where_the_rows_beyond_cost_nothing():
    fun = clipped(lambda w, x: jnp.sin(w[0] * x), 9.0, 8, skip_padding=True)

    def count(num_params):
        args = jnp.ones(num_params), jnp.ones(40), jnp.ones(40, bool)
        traced = jax.make_jaxpr(lambda w, x, mask: fun(w, x, is_padding_example=mask))
        return str(traced(*args)).count(" sin ")

    assert (count(1), count(2**20)) == (1, 2)


@pytest.mark.usefixtures("no_cheap_rows")
def test_a_normalizer_that_is_no_batch_size_gives_no_tiny_parts():
    fun = clipped(lambda w, x: w * x, 99.0, 1, skip_padding=True, return_values=True)
    x = jnp.arange(1.0, 41.0)
    values, gradient = jax.jit(fun)(2.0, x, is_padding_example=jnp.arange(40) >= 12)
    assert gradient.value == sum(range(13))
    # Five rows, and parts of five.
    assert (values[:15] == 2 * x[:15]).all() and (values[15:] == 0).all()


@pytest.mark.slow
def test_padding_given_to_the_gradient_or_to_the_clip_is_the_same():
    """Flax's TrainState.apply_gradients forwards no extra arguments."""
    loss_fn, params, x, y = problem("mlp", 6)
    x = x.at[4].set(jnp.nan)
    mask = jnp.array([False, True, False, False, True, False])
    clip = dpadambc.clip_per_example(0.3, normalize_by=5.0)
    state, grad_fn = clip.init(params), dpadambc.per_example_grad(loss_fn)
    masked = grad_fn(params, x, y, is_padding_example=mask)
    early, _ = clip.update(masked, state, params)
    grads = grad_fn(params, x, y)
    late, _ = clip.update(grads, state, params, is_padding_example=mask)
    assert_close(early, late, 1e-6)
    at_once = clipped(loss_fn, 0.3, 5.0)
    assert_close(early, at_once(params, x[~mask], y[~mask]), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("size", [None, 2])
def test_an_empty_batch_gives_zero(size):
    """jax_privacy 2.0.0 raises."""
    loss_fn, params, x, y = problem("mlp", 0)
    fun = clipped(loss_fn, 1.0, 2.0, microbatch_size=size, return_values=True)
    values, grad = fun(params, x, y)
    chex.assert_shape(values, (0,))
    zeros = optax.tree.zeros_like(params)
    chex.assert_trees_all_equal(dpadambc.materialize(grad), zeros)


def test_auxiliary_output_and_values_come_back_per_example():
    loss_fn = lambda w, x: (w * x, {"twice": 2 * x, "shape": jnp.ones(3)})
    x = jnp.arange(5.0)
    grads, aux = dpadambc.per_example_grad(loss_fn, has_aux=True)(2.0, x)
    np.testing.assert_array_equal(grads.materialize(), x)
    np.testing.assert_array_equal(aux["twice"], 2 * x)
    for size in (None, 2, 5):
        options = dict(microbatch_size=size, has_aux=True)
        (values, aux), grad = clipped(loss_fn, return_values=True, **options)(2.0, x)
        same, only_aux = clipped(loss_fn, **options)(2.0, x)
        np.testing.assert_array_equal(values, 2 * x)
        np.testing.assert_array_equal(aux["twice"], 2 * x)
        chex.assert_trees_all_equal(aux, only_aux)
        assert aux["shape"].shape == (5, 3)
        assert grad.value == same.value == 10.0


def test_each_example_has_a_key_of_its_own():
    loss_fn = lambda w, x, key: w * x * jax.random.normal(key)
    key, x = jax.random.key(0), jnp.arange(1.0, 7.0)
    grad_fn = dpadambc.per_example_grad(loss_fn, prng_argnum=2)
    grads = grad_fn(1.0, x, key).materialize()
    assert len(np.unique(grads / x)) == 6
    # Neither the batch size nor the microbatch size decides which.
    fewer = grad_fn(1.0, x[:4], key).materialize()
    np.testing.assert_allclose(fewer, grads[:4], rtol=1e-6)  # two programs
    for size in (1, 4, None):
        fun = clipped(loss_fn, microbatch_size=size, prng_argnum=2)
        found = jax.jit(fun)(1.0, x, key)
        assert found.value == pytest.approx(float(grads.sum()), rel=1e-5)


def test_part_of_the_parameters():
    loss_fn = lambda w, frozen, x: jnp.sum(w * frozen * x)
    w, frozen = jnp.ones(3), jnp.array([1.0, 2.0, 3.0])
    x = jnp.array([[1.0, 1.0, 1.0], [2.0, 0.0, 1.0]])
    grads = dpadambc.per_example_grad(loss_fn, batch_argnums=2)(w, frozen, x)
    np.testing.assert_array_equal(grads.materialize(), frozen[None] * x)
    for size in (None, 1):
        fun = clipped(loss_fn, microbatch_size=size, batch_argnums=2)
        assert_close(fun(w, frozen, x), frozen * x.sum(0))


def test_several_parameter_arguments():
    loss_fn = lambda a, x, b: a * x + b * x**2
    x = jnp.arange(3.0)
    grads = dpadambc.per_example_grad(loss_fn, (0, 2))(1.0, x, 1.0)
    assert_close(grads, (x, x**2))
    found = clipped(loss_fn, microbatch_size=2, argnums=(0, 2))(1.0, x, 1.0)
    assert dpadambc.materialize(found) == (3.0, 5.0)


def test_batches_of_keys_are_batches():
    loss_fn = lambda w, key: w * jax.random.normal(key)
    keys = jax.random.split(jax.random.key(0), 5)
    grads = dpadambc.per_example_grad(loss_fn)(1.0, keys).materialize()
    found = clipped(loss_fn, microbatch_size=2)(1.0, keys)
    assert found.value == pytest.approx(float(grads.sum()), rel=1e-5)


def test_examples_do_not_leak_into_each_other():
    loss_fn, params, x, y = problem("attention", 4)
    grad_fn = dpadambc.per_example_grad(loss_fn)
    materialized = jax.jit(lambda *args: dpadambc.materialize(grad_fn(*args)))
    before = materialized(params, x, y)
    after = materialized(params, x.at[2].set(17.0), y)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(jnp.delete(a, 2, 0), jnp.delete(b, 2, 0))
        assert (a[2] != b[2]).any()


@both_methods
@pytest.mark.parametrize("size", [None, 2])
def test_memory_is_bounded_by_the_microbatch_or_by_the_factors(size, method):
    """Temporary memory of the compiled program, 64 examples of a 256 x 256 kernel."""
    loss_fn = lambda w, x: jnp.sum(jnp.tanh(x @ w))
    fun = jax.jit(clipped(loss_fn, 1.0, microbatch_size=size, method=method))
    compiled = fun.lower(jnp.ones((256, 256)), jnp.ones((64, 256))).compile()
    kernels = compiled.memory_analysis().temp_size_in_bytes / (256 * 256 * 4)
    if method == "vmap" and size is None:
        assert kernels > 60
    else:
        assert kernels < (8 if size else 2)


LOSS = lambda w, x: w * x
ROWS, RAW = jnp.ones(3), jnp.zeros(2, jnp.uint32)
STEPS = {"w": jnp.ones(2), "steps": jnp.zeros(3, int)}
REFUSED = {
    "a loss of another shape": (LOSS, {}, (1.0, jnp.ones((3, 2))), "loss_fn"),
    "a pair for a loss": (lambda w, x: (w, x), {}, (1.0, ROWS), "loss_fn"),
    "a loss of integers": (lambda w, x: jnp.int32(1), {}, (1.0, ROWS), "loss_fn"),
    "integer parameters": (lambda p, x: p["w"].sum() * x, {}, (STEPS, ROWS), "params"),
    "words for parameters": (LOSS, {}, ("bert", ROWS), "params"),
    "batches of two sizes": (lambda w, x, y: w, {}, (1.0, ROWS, ROWS[1:]), "batch"),
    "a scalar for a batch": (LOSS, {}, (1.0, 2.0), "batch"),
    "a key for a batch": (LOSS, {}, (1.0, jax.random.key(0)), "prng_argnum"),
    "no batch": (lambda w: w, {}, (1.0,), "batch"),
    "overlap": (LOSS, dict(batch_argnums=0), (1.0, ROWS), "argnums"),
    "overlap of the key": (LOSS, dict(prng_argnum=0), (1.0, ROWS), "argnums"),
    "no such batch": (LOSS, dict(batch_argnums=5), (1.0, ROWS), "argnums"),
    "no such parameters": (LOSS, dict(argnums=2), (1.0, ROWS), "argnums"),
    "negative": (LOSS, dict(argnums=-1), (1.0, ROWS), "argnums"),
    "raw key": (lambda w, x, k: w, dict(prng_argnum=2), (1.0, ROWS, RAW), "key"),
    "another method": (LOSS, dict(method="ghost"), (1.0, ROWS), "method"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_is_no_loss_of_an_example(name):
    loss_fn, options, args, parameter = REFUSED[name]
    for make in (dpadambc.per_example_grad, clipped):
        with pytest.raises((TypeError, ValueError), match=parameter):
            make(loss_fn, **options)(*args)


def test_refuses_a_mask_of_another_length_and_microbatches_of_none():
    with pytest.raises(ValueError, match="is_padding_example"):
        fun = dpadambc.per_example_grad(LOSS)
        fun(1.0, ROWS, is_padding_example=jnp.zeros(4, bool))
    for bad in (0, -1, 2.0):
        with pytest.raises((TypeError, ValueError), match="microbatch_size"):
            clipped(LOSS, microbatch_size=bad)

"""The table of explain: rules, bytes and warnings, before anything runs."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.ode import odeint

import dpadambc
from dpadambc.clipping import memory, plan
from tests import common
from tests.engine import factored_models as models
from tests.engine import factored_test


def loss_fn(params, ids, x):
    h = jnp.tanh(params["table"][ids] + x @ params["w"] + params["b"][None])
    return jnp.sum(h)


PARAMS = {
    "table": jnp.ones((500, 64)),
    "w": jnp.ones((32, 64)),
    "b": jnp.ones(64),
}
EXAMPLE = (jnp.zeros(5, int), jnp.ones((5, 32)))


def test_every_parameter_has_a_rule_and_its_bytes():
    found = dpadambc.explain(loss_fn, PARAMS, *EXAMPLE, batch_size=10)
    assert found.rules == {
        "['b']": "reduce_sum",
        "['table']": "lookup",
        "['w']": "gram",
    }
    by_name = {row.name: row for row in found.parameters}
    rows = 10 * 5 * 64 * 4
    assert by_name["['table']"].factored_bytes == rows + 10 * 5 * 4
    assert by_name["['w']"].factored_bytes == rows + 10 * 5 * 32 * 4
    assert by_name["['w']"].materialized_bytes == 10 * 32 * 64 * 4
    assert found.materialized_bytes == 10 * (500 * 64 + 32 * 64 + 64) * 4
    assert not found.warnings


def test_all_bytes_are_those_of_the_compiled_gradients():
    found = dpadambc.explain(loss_fn, PARAMS, *EXAMPLE, batch_size=10)
    batch = [jnp.stack([x] * 10) for x in EXAMPLE]
    private = dpadambc.clipped_grad(loss_fn, l2_clip_norm=1.0, normalize_by=10)
    assert found.factored_bytes == pytest.approx(temporaries(private, batch), rel=0.1)
    mean_loss = lambda p, *x: jax.vmap(loss_fn, (None, 0, 0))(p, *x).mean()
    ordinary = temporaries(jax.grad(mean_loss), batch)
    assert found.ordinary_bytes == pytest.approx(ordinary, rel=0.1)


def temporaries(grad_fn, batch):
    compiled = jax.jit(grad_fn).lower(PARAMS, *batch).compile()
    return memory.of_program(compiled).temp_size_in_bytes


QUICK = {"low rank", "made", "rms norm"}
ALL = [x if x in QUICK else common.slow(x) for x in models.ARCHITECTURES]


@pytest.mark.parametrize("name", ALL)
def test_the_bytes_of_an_architecture_are_those_of_its_compiled_gradient(name):
    """Of that which users call: without a padding mask, and of arrays."""
    model = models.ARCHITECTURES[name]
    args = factored_test.arguments(model, batch_size=16)
    options = factored_test.options(model, args)
    private = dpadambc.clipped_grad(
        model.loss_fn, l2_clip_norm=1.0, normalize_by=1.0, **options
    )
    compiled = jax.jit(private).lower(*args).compile()
    bytes_of_all = memory.of_program(compiled).temp_size_in_bytes

    row = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    batched = options["batch_argnums"]
    example = [jax.tree.map(row, x) if i in batched else x for i, x in enumerate(args)]
    found = dpadambc.explain(model.loss_fn, *example, batch_size=16, **options)
    assert 1 / 1.3 < found.factored_bytes / bytes_of_all < 1.3


def test_with_a_limit_all_bytes_are_those_of_the_plan():
    found = dpadambc.explain(loss_fn, PARAMS, *EXAMPLE, batch_size=10, memory_limit=1e9)
    assert found.plan is not None
    assert found.factored_bytes == found.plan.factored[0].temporary_bytes
    assert found.ordinary_bytes == found.plan.ordinary.temporary_bytes
    alone = dpadambc.explain(loss_fn, PARAMS, *EXAMPLE, batch_size=10)
    assert found.factored_bytes == alone.factored_bytes


@pytest.fixture
def untold(monkeypatch):
    """A compiler that does not tell the memory of its programs."""
    monkeypatch.setattr(memory, "is_stated_by_compiler", lambda: False)


def test_where_the_compiler_does_not_tell_the_factors_are_counted(untold):
    found = dpadambc.explain(loss_fn, PARAMS, *EXAMPLE, batch_size=10)
    held = sum(row.factored_bytes for row in found.parameters)
    assert found.factored_bytes == held
    assert not found.is_compiled
    assert found.ordinary_bytes is None
    assert "all, shared factors once" in str(found)


def test_a_loss_that_jax_does_not_map_over_a_batch_is_compared_with_nothing(
    monkeypatch,
):
    def refused(programs):
        raise NotImplementedError

    monkeypatch.setattr(plan.Programs, "ordinary", refused)
    found = dpadambc.explain(loss_fn, PARAMS, *EXAMPLE, batch_size=10)
    assert found.is_compiled
    assert found.ordinary_bytes is None
    assert "without privacy" not in str(found)


def test_factors_that_serve_two_parameters_count_once(untold):
    loss = lambda p, x: jnp.sum(jnp.tanh(x @ p["v"] + x @ p["w"]))
    params = {"v": jnp.ones((32, 64)), "w": jnp.ones((32, 64))}
    found = dpadambc.explain(loss, params, jnp.ones((5, 32)), batch_size=10)
    both = sum(row.factored_bytes for row in found.parameters)
    assert found.factored_bytes == both // 2 == 10 * 5 * (32 + 64) * 4


@pytest.mark.slow
def test_the_bytes_are_those_of_the_gradients_that_are_made():
    found = dpadambc.explain(loss_fn, PARAMS, *EXAMPLE, batch_size=3)
    batch = [jnp.stack([x] * 3) for x in EXAMPLE]
    grads = dpadambc.per_example_grad(loss_fn)(PARAMS, *batch)
    for row, name in zip(found.parameters, sorted(PARAMS), strict=True):
        held = sum(x.nbytes for x in jax.tree.leaves(grads[name].open()))
        assert row.factored_bytes == held
        assert row.materialized_bytes == grads[name].materialize().nbytes


def test_nothing_runs():
    def forbidden(w, x):
        jax.debug.callback(lambda x: pytest.fail("the loss ran"), x)
        return jnp.sum(w * x)

    shape = jax.ShapeDtypeStruct((10**6, 10**6), jnp.float32)
    found = dpadambc.explain(forbidden, shape, shape, batch_size=3)
    assert found.materialized_bytes == 3 * 4 * 10**12


def test_the_printed_table_has_a_line_for_each_parameter_and_a_total():
    lines = str(dpadambc.explain(loss_fn, PARAMS, *EXAMPLE, batch_size=10)).split("\n")
    assert lines[0] == "batch of 10"
    assert len(lines) == 2 + len(PARAMS) + 2 + 5
    assert [line.split()[0] for line in lines[-3:]] == ["cuda", "tpu", "cpu"]
    assert "lookup" in next(line for line in lines if "table" in line)


def test_keys_frozen_parameters_and_auxiliary_output():
    def loss_fn(trained, frozen, x, key):
        mask = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.sum(jnp.where(mask, x, 0) @ frozen @ trained), x

    arguments = jnp.ones((30, 40)), jnp.ones((20, 30)), jnp.ones((2, 20))
    found = dpadambc.explain(
        loss_fn,
        *arguments,
        jax.random.key(0),
        batch_size=4,
        batch_argnums=2,
        prng_argnum=3,
        has_aux=True,
    )
    assert found.rules == {"params": "gram"}


def test_warns_of_a_parameter_without_gradient():
    params = {**PARAMS, "unused": jnp.ones(3)}
    (warning,) = dpadambc.explain(loss_fn, params, *EXAMPLE, batch_size=2).warnings
    assert "['unused'] gets no gradient" in warning


def test_warns_of_a_parameter_without_a_rule():
    loss = lambda w, x: jnp.sum(jnp.cumsum(w, axis=0) * (x @ w))
    found = dpadambc.explain(loss, jnp.ones((8, 8)), jnp.ones((8, 8)), batch_size=2)
    assert found.rules["params"].startswith("materialized")
    assert "has no rule" in found.warnings[0]


KERNEL = jnp.ones((64, 64))


def squares(w):
    return jnp.sum(w**2)


def of_layers(w, x):
    step = lambda x, w: (jnp.tanh(x @ w), squares(w))
    x, sizes = jax.lax.scan(step, x, w.reshape(4, 16, 64)[:, :, :16])
    return jnp.sum(x) + jnp.sum(sizes)


PENALIZED = {
    "squares": lambda w, x: jnp.sum(jnp.sin(x @ w)) + 0.1 * squares(w),
    "lengths": lambda w, x: jnp.sum(jnp.sin(x @ w)) + jnp.sum(jnp.abs(w)),
    "half of both": lambda w, x: (jnp.sum(jnp.sin(x @ w)) - squares(w)) / 2,
    "stacked": lambda w, x: jnp.stack([jnp.sum(jnp.sin(x @ w)), squares(w)]).mean(),
    "in calls": jax.jit(
        jax.checkpoint(lambda w, x: jnp.sum(jnp.sin(x @ w)) + squares(w))
    ),
    "in a scan": lambda w, x: of_layers(w, x[:16]),
}


@pytest.mark.parametrize("name", PENALIZED)
def test_says_where_a_penalty_belongs(name, untold):
    explained = dpadambc.explain(PENALIZED[name], KERNEL, jnp.ones(64), batch_size=2)
    (warning,) = explained.warnings
    assert "is in a penalty" in warning
    assert "add_decayed_weights" in warning


NOT_PENALIZED = {
    "tied head": lambda w, x: jnp.sum(jnp.sin(w[jnp.argmax(x)] @ w.T)),
    "of activations": lambda w, x: jnp.sum(jnp.sin(x @ w)) + squares(x @ w),
    "under a square root": lambda w, x: jnp.sqrt(jnp.sum(x @ w) ** 2 + squares(w)),
    "times a number of the example": lambda w, x: x[0] * (jnp.sum(x @ w) + squares(w)),
    "residual": lambda w, x: jnp.sum(jnp.sin(x + x @ w)),
    "over data": lambda w, x: 1 / (jnp.sum(jnp.sin(x @ w)) + squares(w)),
}


@pytest.mark.parametrize("name", NOT_PENALIZED)
def test_calls_no_penalty_what_data_changes(name, untold):
    loss_fn = NOT_PENALIZED[name]
    explained = dpadambc.explain(loss_fn, KERNEL, jnp.ones(64), batch_size=2)
    assert not explained.parameters[0].is_penalized


MASK = jnp.tri(64)
FORMED = {
    "mask": lambda w, x: x @ (w * MASK),
    "exponential": lambda w, x: x @ jnp.exp(w),
    "two terms of a derivative": lambda w, x: x @ jnp.tanh(w),
    "times data": lambda w, x: x @ (w * jnp.tanh(jnp.outer(x, x))),
    "lookup": lambda w, x: jnp.cumsum(w, axis=0)[jnp.argmax(x)],
    "convolution": lambda w, x: jnp.convolve(x, jnp.exp(w).reshape(-1)),
    "in a scan": lambda w, x: jax.lax.scan(
        lambda x, _: (jnp.tanh(x @ (w * MASK)), None), x, length=2
    )[0],
    "in branches": lambda w, x: jax.lax.cond(
        x[0] > 0, lambda: x @ (w * MASK), lambda: x @ jnp.exp(w)
    ),
    "repeated": lambda w, x: x @ jnp.repeat(jnp.exp(w), 2, axis=1),
    "rematerialized": jax.checkpoint(lambda w, x: x @ jnp.exp(w)),
    "one slice of two": lambda w, x: jnp.tanh(x[:32] @ w[:32])[:32] @ jnp.exp(w[32:]),
}


@pytest.mark.parametrize("name", FORMED)
def test_warns_of_a_kernel_that_is_formed_whatever_else_takes(name, untold):
    def loss(params, x):
        return jnp.sum(jnp.sin(FORMED[name](params["w"], x))) + jnp.sum(x @ params["v"])

    params = {"w": KERNEL, "v": jnp.ones((64, 1024))}
    (warning,) = dpadambc.explain(loss, params, jnp.ones(64), batch_size=2).warnings
    assert "['w'] is formed for each example" in warning


def test_warns_of_each_formed_kernel_with_its_bytes(untold):
    def masked(params, x):
        for name in "abc":
            x = jnp.tanh(x @ (params[name] * MASK))
        return jnp.sum(x)

    params = dict.fromkeys("abc", KERNEL)
    warnings = dpadambc.explain(masked, params, jnp.ones(64), batch_size=2).warnings
    assert len(warnings) == 3
    assert all("(mul): 32.8 kB" in warning for warning in warnings)


def test_warns_of_all_parameters_that_share_a_kernel(untold):
    loss = lambda p, x: jnp.sum(jnp.tanh(x @ (p["w"] + jnp.exp(p["v"]))))
    params = {"w": KERNEL, "v": KERNEL}
    warnings = dpadambc.explain(loss, params, jnp.ones(64), batch_size=2).warnings
    assert ["is formed" in warning for warning in warnings] == [True, True]


def test_does_not_warn_of_scales_of_the_heads_of_a_kernel(untold):
    loss = lambda p, x: jnp.sum(jnp.einsum("d,dhk", x, p["w"] * p["scale"][None]) ** 2)
    params = {"w": jnp.ones((32, 4, 8)), "scale": jnp.ones((4, 8))}
    found = dpadambc.explain(loss, params, jnp.ones(32), batch_size=2)
    formed = {row.name: row.is_formed for row in found.parameters}
    assert not formed["['scale']"]


UNFORMED = {
    "kernel": lambda w, x: x @ w,
    "more positions than columns": lambda w, x: jnp.tile(x, (200, 1)) @ w,
    "positions": lambda w, x: (x[:50, None] + w[:50]) @ KERNEL,
    "scales": lambda w, x: jnp.tanh(x * w) @ KERNEL,
    "bias of attention": lambda w, x: jax.nn.softmax(jnp.outer(x, x) + w) @ KERNEL,
    "biases by scan": lambda w, x: jax.lax.scan(
        lambda x, b: (jnp.tanh(x @ KERNEL + b), None), x, w
    )[0],
    "biases in a loop": lambda w, x: jax.lax.fori_loop(
        0, 2, lambda i, x: jnp.tanh(x @ KERNEL + jnp.exp(w)[3]), x
    ),
}


@pytest.mark.parametrize("name", UNFORMED)
def test_does_not_warn_of(name, untold):
    """Gradients that are products, or are no larger than what they are added to."""
    loss = lambda w, x: jnp.sum(jnp.sin(UNFORMED[name](w, x)))
    with jax.numpy_rank_promotion("allow"):
        found = dpadambc.explain(loss, KERNEL, jnp.ones(64), batch_size=2)
    assert not found.warnings
    assert not found.parameters[0].is_formed


@pytest.mark.parametrize("bad", [0, -3])
def test_refuses_a_batch_of_none(bad):
    with pytest.raises(ValueError, match="batch_size"):
        dpadambc.explain(loss_fn, PARAMS, *EXAMPLE, batch_size=bad)


def bilinear(params, a, g):
    return jnp.einsum("ti,ij,tj->", a, params, g)


def products(*args, **options):
    found = dpadambc.explain(bilinear, *args, batch_size=4, **options).products
    return {x.platform: (x.algorithms, x.given_away) for x in found}


def test_of_one_example_it_says_which_share_of_the_clip_norm_rounding_costs():
    """Of the sum of two unit matrices that are orthogonal, by hand."""
    eye, params = jnp.eye(2, 8), jnp.zeros((8, 8))
    found = products(params, eye, eye)
    norm, k, of_sum = math.sqrt(2), 1.01 * (2**-9 + 2**-20), 1.01 * 2**-8
    # The norm of each factor is the root of two, as that of its Gram matrix.
    s = math.sqrt(2 * (math.sqrt(2) + 2 * k)) + 2 * k
    share = 1 - norm / (norm + 2 * k * s)
    # Both bounds hold what float32 sums round, 1e-5 of the norm.
    assert found["cuda"] == (("TF32_TF32_F32",), pytest.approx(share, abs=2e-5))
    share = 1 - norm / (norm + of_sum * math.sqrt(2 * math.sqrt(2)))
    assert found["tpu"] == (("BF16_BF16_F32",), pytest.approx(share, abs=2e-5))
    assert found["cpu"] == (("HIGHEST",), 0.0)


def test_the_precision_and_the_dtypes_choose_the_products():
    eye, params = jnp.eye(2, 8), jnp.zeros((8, 8))
    exact = products(params, eye, eye, precision=jax.lax.Precision.HIGHEST)
    assert set(exact.values()) == {(("HIGHEST",), 0.0)}
    low = [x.astype(jnp.bfloat16) for x in (params, eye, eye)]
    assert products(*low)["cuda"][0] == ("BF16_BF16_F32",)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in low]
    assert products(*shapes)["cuda"] == (("BF16_BF16_F32",), None)
    # A gradient of zero gives nothing away.
    assert products(params, 0 * eye, eye)["tpu"][1] == 0
    with pytest.raises(ValueError, match="precision"):
        products(params, eye, eye, precision=jax.lax.Precision.HIGH)


W = jnp.ones((128, 128)) / 128
A, B = jnp.ones((128, 4)), jnp.ones((4, 128))
FACTORS = {"a": A, "b": B}


@pytest.mark.parametrize(
    "kernel",
    [
        lambda p: W * (1 + p["a"] @ p["b"]),
        lambda p: W + (p["a"] @ p["b"]) * (p["a"] @ p["b"]),
    ],
)
def test_warns_of_a_kernel_that_is_made_of_parameters(kernel):
    loss = lambda p, x: jnp.sum(jnp.tanh(x @ kernel(p)))
    found = dpadambc.explain(loss, FACTORS, jnp.ones((4, 128)), batch_size=16)
    assert found.factored_bytes > 4 * found.ordinary_bytes
    (sentence,) = found.warnings
    assert "kernel of parameters" in sentence


@pytest.mark.parametrize(
    "layer",
    [
        lambda p, x: x @ W + x @ p["a"] @ p["b"],
        lambda p, x: x @ (W + p["a"] @ p["b"]),
        lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"],
    ],
)
@pytest.mark.parametrize("batch_size", [1, 16, 256])
def test_does_not_warn_where_a_kernel_costs_nothing(layer, batch_size):
    loss = lambda p, x: jnp.sum(jnp.tanh(layer(p, x)))
    example = jnp.ones((4, 128))
    assert not dpadambc.explain(loss, FACTORS, example, batch_size=batch_size).warnings


def test_of_an_ode_it_names_the_loop_and_a_scan_keeps_the_factors():
    field = lambda y, t, w: jnp.tanh(w @ y)
    times = jnp.array([0.0, 1.0])
    adaptive = lambda w, x: jnp.sum(odeint(field, x, times, w)[-1])
    euler = lambda y, t, w: (y + 0.1 * field(y, t, w), None)
    fixed = lambda w, x: jnp.sum(
        jax.lax.scan(lambda y, t: euler(y, t, w), x, length=10)[0]
    )
    w, x = jnp.eye(32), jnp.ones(32)
    (sentence,) = dpadambc.explain(adaptive, w, x, batch_size=4).warnings
    assert "loop of unknown length" in sentence and "jax.lax.scan" in sentence
    found = dpadambc.explain(fixed, w, x, batch_size=4)
    assert found.rules == {"params": "gram"} and not found.warnings


def test_a_size_without_a_limit_is_refused():
    of = functools.partial(dpadambc.explain, loss_fn, PARAMS, *EXAMPLE, batch_size=10)
    noise = dpadambc.add_dp_noise(1.0, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"limit to plan for.*memory_limit=bytes"):
        _ = of().microbatch_size
    with pytest.raises(ValueError, match="memory_limit to plan for, with an optimizer"):
        of(optimizer=noise)
    assert of(optimizer=noise, memory_limit=1e9).microbatch_size == 10


def test_where_no_size_fits_it_says_what_one_example_takes():
    found = dpadambc.explain(loss_fn, PARAMS, *EXAMPLE, batch_size=10, memory_limit=1e4)
    with pytest.raises(ValueError, match=r"into 10 kB: one of 1 takes .*checkpoint"):
        _ = found.microbatch_size
    assert "No microbatch fits" in str(found)
    least = found.plan.factored[-1].peak_bytes
    again = functools.partial(dpadambc.explain, loss_fn, PARAMS, *EXAMPLE)
    assert again(batch_size=10, memory_limit=least).microbatch_size == 1


ROWS, COLUMNS = jnp.arange(1.0, 65), jnp.arange(1.0, 65) / 9
OF_ACTIVATIONS = {
    "a scale of rows": (
        lambda w, x: x @ (w * ROWS[:, None]),
        lambda w, x: x * ROWS @ w,
    ),
    "a scale of columns": (
        lambda w, x: x @ (w * COLUMNS),
        lambda w, x: x @ w * COLUMNS,
    ),
    "a cumulative sum": (
        lambda w, x: x @ jnp.cumsum(w, axis=1),
        lambda w, x: jnp.cumsum(x @ w),
    ),
}


@pytest.mark.parametrize("name", OF_ACTIVATIONS)
def test_the_advice_about_a_kernel_that_is_formed_works(name, untold):
    """The same function of the activations: equal, and in factors."""
    w, x = KERNEL, jnp.arange(64.0) / 64
    with jax.numpy_rank_promotion("allow"):
        kernel, activations = OF_ACTIVATIONS[name]
        np.testing.assert_allclose(kernel(w, x), activations(w, x), rtol=1e-5)
        formed, kept = (
            dpadambc.explain(
                lambda w, x, of=of: jnp.sum(jnp.tanh(of(w, x))), w, x, batch_size=2
            )
            for of in (kernel, activations)
        )
    (warning,) = formed.warnings
    assert "change the activations instead" in warning
    assert not kept.warnings and kept.rules == {"params": "outer product"}


def test_microbatches_take_less_where_a_kernel_is_made_of_parameters():
    loss = lambda p, x: jnp.sum(jnp.tanh(x @ (W * (1 + p["a"] @ p["b"]))))
    of = functools.partial(dpadambc.explain, loss, FACTORS, jnp.ones((4, 128)))
    (sentence,) = of(batch_size=16).warnings
    assert "else take microbatches" in sentence
    assert of(batch_size=2).factored_bytes < of(batch_size=16).factored_bytes / 4

"""The table of explain: rules, bytes and warnings, before anything runs."""

import math

import jax
import jax.numpy as jnp
import pytest

import dpadambc


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
    held = sum(row.factored_bytes for row in found.parameters)
    assert found.factored_bytes == held
    assert not found.warnings


def test_factors_that_serve_two_parameters_count_once():
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
    assert len(lines) == 2 + len(PARAMS) + 1 + 5
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


def test_warns_of_a_kernel_that_is_formed_and_takes_most_of_the_memory():
    mask = jnp.tri(64)

    def masked(params, x):
        return jnp.sum(jnp.tanh(x @ (params["w"] * mask) + params["b"]))

    params = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
    (warning,) = dpadambc.explain(masked, params, jnp.ones(64), batch_size=2).warnings
    assert "['w'] is formed for each example" in warning
    assert "(mul): 32.8 kB" in warning
    # A bias and a scale are formed as well, and take little.
    plain = lambda params, x: jnp.sum(jnp.tanh(x @ params["w"] + params["b"]))
    assert not dpadambc.explain(plain, params, jnp.ones(64), batch_size=2).warnings


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
    assert found["cuda"] == (("TF32_TF32_F32",), pytest.approx(share, rel=1e-3))
    share = 1 - norm / (norm + of_sum * math.sqrt(2 * math.sqrt(2)))
    assert found["tpu"] == (("BF16_BF16_F32",), pytest.approx(share, rel=1e-3))
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

"""The table of explain: rules, bytes and warnings, before anything runs."""

import flax.linen as nn
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


def test_a_batch_in_place_of_an_example_is_warned_of():
    """A loss of one example takes a batch of them too, by NumPy's rules."""
    loss = lambda w, x, y: jnp.sum((x @ w - y) ** 2)
    w, x, y = jnp.ones(3), jnp.ones((10, 3)), jnp.ones(10)
    with pytest.warns(UserWarning, match="10 along axis 0, as many as a batch"):
        dpadambc.explain(loss, w, x, y, batch_size=10)
    # Warnings are errors here.
    dpadambc.explain(loss, w, x, y, batch_size=11)
    dpadambc.explain(loss, w, x[0], y[0], batch_size=10)
    of_rows = lambda w, x, y: jnp.sum((x @ w - y) ** 2, axis=0)
    dpadambc.explain(of_rows, w, x, y, batch_size=10)  # ten rows make an example


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
        held = sum(x.nbytes for x in jax.tree.leaves(grads[name].factored))
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
    assert len(lines) == 2 + len(PARAMS) + 1
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


class Normalized(nn.Module):
    norm: type
    kwargs: dict

    @nn.compact
    def __call__(self, x):
        x = self.norm(**self.kwargs)(nn.Conv(8, (3, 3))(x))
        return nn.Dense(2)(nn.relu(x).reshape(x.shape[0], -1))


def normalized_warnings(norm, shape=(6, 6, 3), **kwargs):
    model = Normalized(norm, kwargs)
    variables = model.init(jax.random.key(0), jnp.ones((1, *shape)))
    params, rest = variables["params"], {**variables}
    del rest["params"]

    def loss_fn(params, x):
        variables = {"params": params, **rest}
        out, _ = model.apply(variables, x[None], mutable=list(rest))
        return jnp.sum(out**2)

    return dpadambc.explain(loss_fn, params, jnp.ones(shape), batch_size=2).warnings


def test_warns_of_batch_normalization():
    (warning,) = normalized_warnings(nn.BatchNorm, use_running_average=False)
    assert "mixes the examples of a batch" in warning


@pytest.mark.parametrize(
    "norm, kwargs",
    [
        (nn.BatchNorm, dict(use_running_average=True)),
        (nn.GroupNorm, dict(num_groups=4)),
        (nn.LayerNorm, {}),
        (nn.RMSNorm, {}),
    ],
    ids=["fixed statistics", "group", "layer", "rms"],
)
def test_does_not_warn_of_norms_within_an_example(norm, kwargs):
    assert not normalized_warnings(norm, **kwargs)


NOT_CENTERED = {
    "a sum of constants": lambda w, x: jnp.sum(
        (1.0 - (x @ w) / jnp.ones(1).sum()) ** 2
    ),
    "a constant row": lambda w, x: jnp.sum(
        (1.0 - jnp.ones((1, 3)).sum(0) * w[:, 0]) ** 2
    ),
    "an autoencoder of one channel": lambda w, x: jnp.sum(
        (x[:, None] - (jnp.tanh(x[:, None].mean(-1) @ w) @ w.T)[:, None]) ** 2
    ),
}


def test_does_not_warn_of_standardized_kernels():
    """Of one pixel: it is the example that must not be centered."""

    def loss(kernel, x):
        centered = kernel - kernel.mean((0, 1, 2), keepdims=True)
        shape = dict(window_strides=(1, 1), padding="SAME")
        numbers = "NHWC", "HWIO", "NHWC"
        out = jax.lax.conv_general_dilated(
            x[None], centered, **shape, dimension_numbers=numbers
        )
        return jnp.sum(out**2)

    kernel, x = jnp.ones((1, 1, 4, 2)), jnp.ones((5, 5, 4))
    assert not dpadambc.explain(loss, kernel, x, batch_size=2).mixing
    of_example = lambda x, kernel: loss(kernel, x)
    found = dpadambc.explain(of_example, jnp.ones((5, 5, 4)), kernel, batch_size=2)
    assert found.mixing


@pytest.mark.parametrize("loss", NOT_CENTERED.values(), ids=NOT_CENTERED)
def test_does_not_warn_where_nothing_is_centered(loss):
    found = dpadambc.explain(loss, jnp.ones((3, 2)), jnp.ones(3), batch_size=2)
    assert not found.mixing


def test_does_not_warn_of_a_mean_over_a_batch_of_one():
    loss = lambda w, x: jnp.mean(jnp.sum((x[None] @ w - 1.0) ** 2, axis=-1))
    found = dpadambc.explain(loss, jnp.ones((3, 2)), jnp.ones(3), batch_size=2)
    assert not found.warnings


@pytest.mark.parametrize("bad", [0, -3])
def test_refuses_a_batch_of_none(bad):
    with pytest.raises(ValueError, match="Expected batch_size >= 1"):
        dpadambc.explain(loss_fn, PARAMS, *EXAMPLE, batch_size=bad)

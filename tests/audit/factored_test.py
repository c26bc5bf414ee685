"""Factored gradients are compared with those of vmap, on a model of the user's own."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from dpadambc import audit, training
from dpadambc.engine import convolution, lookup, product, rounding
from tests import common
from tests.engine import rounding_test

KEYS = jax.random.split(jax.random.key(0), 4)
DRAW = lambda i, *shape: jax.random.normal(KEYS[i], shape)
ROWS = DRAW(0, 8, 3, 50)  # sequences


def conv_loss(w, x):
    out = jax.lax.conv_general_dilated(x[None], w, (1, 1), "SAME")
    return jnp.sum(jnp.tanh(out))


def scan_loss(w, x):
    cell = lambda h, row: (jnp.tanh(row @ w["x"] + h @ w["h"]), None)
    return jnp.sum(jax.lax.scan(cell, jnp.zeros(40), x)[0])


def attention_loss(w, x):
    scores = (x @ w["q"]) @ (x @ w["k"] + w["b"][None]).T
    return jnp.sum(jnp.tanh(jax.nn.softmax(scores) @ x))


SEQUENCE = lambda w, x: jnp.sum(jnp.tanh(x @ w))
EMBEDDING = lambda w, ids: jnp.sum(jnp.tanh(w[ids].sum(0)))
TOKENS = jax.random.randint(KEYS[1], (8, 6), 0, 30)
IMAGES = DRAW(1, 8, 32, 4, 4)
MODELS = {
    "dense": (SEQUENCE, DRAW(2, 50, 40), ROWS),
    "dense at zero": (SEQUENCE, jnp.zeros((50, 40)), ROWS),
    "bfloat16": (
        training.with_compute_dtype(SEQUENCE, jnp.bfloat16),
        *(DRAW(2, 50, 40), ROWS),
    ),
    "bfloat16 parameters": (SEQUENCE, DRAW(2, 50, 40).astype(jnp.bfloat16), ROWS),
    "float16": (
        training.with_compute_dtype(SEQUENCE, jnp.float16),
        *(DRAW(2, 50, 40), ROWS),
    ),
    "convolution": (conv_loss, DRAW(2, 32, 32, 3, 3), IMAGES),
    "embedding": (EMBEDDING, DRAW(2, 30, 40), TOKENS),
    "scan": (scan_loss, {"x": DRAW(2, 50, 40), "h": DRAW(3, 40, 40)}, ROWS),
    # The gradient of b is zero but for rounding.
    "attention": (
        attention_loss,
        {"q": DRAW(2, 50, 40), "k": DRAW(3, 50, 40), "b": jnp.ones(40)},
        ROWS,
    ),
    # Terms that cancel: the allowance for rounding makes the norm larger.
    "cancellation": (
        lambda w, x: jnp.sum(jnp.concatenate([x, 1e-6 - x]) @ w),
        DRAW(2, 50, 40),
        ROWS,
    ),
}


def pipeline_of(name):
    loss, params, x = MODELS[name]
    mechanism = common.poisson_gaussian(normalize_by=4)
    make = lambda key: None
    return audit.Pipeline.of_chain(loss, params, (x,), mechanism, make)


@pytest.mark.parametrize("name", MODELS)
def test_models_of_all_kinds_pass(name):
    finding = audit.factored(pipeline_of(name))
    assert finding.passed, finding
    assert finding.bound < (0.04 if "16" in name else 2e-3)


def of_squares_times(factor, right):
    """The norm of a form with its square times a number."""

    def norm(grad, units):
        found = right(grad, units)
        return found._replace(squared=factor * found.squared)

    return norm


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("dense", product.Product),
        ("convolution", convolution.Convolution),
        ("embedding", lookup.Lookup),
    ],
)
@pytest.mark.parametrize("factor", [0.98, 0.0])
def test_a_rule_whose_norm_is_too_small_is_found(name, rule, factor, monkeypatch):
    monkeypatch.setattr(rule, "norm", of_squares_times(factor, rule.norm))
    finding = audit.factored(pipeline_of(name))
    assert finding.passed is False
    assert finding.figure == pytest.approx(1 - factor**0.5, rel=1e-2)


def test_a_rule_whose_sum_is_wrong_is_found(monkeypatch):
    """Its norm is right."""
    right = product.Product.summed
    wrong = lambda self: right(self).scaled(1.01)
    monkeypatch.setattr(product.Product, "summed", wrong)
    finding = audit.factored(pipeline_of("dense"))
    assert finding.passed is False and 1e-3 < finding.figure < 0.02


def test_a_rule_whose_norm_is_too_large_hides_nothing(monkeypatch):
    four_times = of_squares_times(4, product.Product.norm)
    monkeypatch.setattr(product.Product, "norm", four_times)
    finding = audit.factored(pipeline_of("dense"))
    assert finding.passed and "more by 0.5" in finding.sentence


def test_without_a_loss_or_a_gradient_it_is_not_tested():
    shown = pipeline_of("dense")
    hidden = dataclasses.replace(shown, gradients_by=None)
    nothing = dataclasses.replace(shown, batch=(0 * ROWS,))
    assert audit.factored(hidden).passed is audit.factored(nothing).passed is None


def test_a_gradient_that_is_not_finite_by_one_method_fails():
    shown = pipeline_of("dense")
    right = shown.gradients_by

    def gradients_by(method, params, *batch):
        factor = jnp.nan if method == "vmap" else 1.0
        return right(method, params, *(factor * x for x in batch))

    broken = dataclasses.replace(shown, gradients_by=gradients_by)
    assert audit.factored(broken).passed is False


def use(units, monkeypatch):
    """Lets the clip multiply by these units."""
    run = lambda fun, _, *operands: fun(units, *operands)
    monkeypatch.setattr(rounding, "on_device", run)


UNITS = rounding_test.UNITS


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("unit", ["tf32 truncated", "bf16"])
def test_models_pass_by_products_that_round(name, unit, monkeypatch):
    use(UNITS[unit], monkeypatch)
    finding = audit.factored(pipeline_of(name))
    assert finding.passed, finding


def test_without_what_products_round_it_would_be_a_false_alarm(monkeypatch):
    use(UNITS["bf16"], monkeypatch)
    monkeypatch.setattr(rounding.Unit, "error", 0.0)
    assert audit.factored(pipeline_of("attention")).passed is False


@pytest.mark.parametrize("name", ["dense", "convolution", "attention"])
def test_a_clip_that_takes_products_for_exact_is_found(name, monkeypatch):
    coarse = rounding_test.Emulated(None, jnp.float32, bits=5)
    use(rounding.Units(coarse, coarse), monkeypatch)
    assert audit.factored(pipeline_of(name)).passed is False


def test_a_sum_of_rounded_products_that_is_too_large_is_found(monkeypatch):
    use(UNITS["tf32 truncated"], monkeypatch)
    right = product.Product.summed
    wrong = lambda self: right(self).scaled(1.02)
    monkeypatch.setattr(product.Product, "summed", wrong)
    assert audit.factored(pipeline_of("dense")).passed is False

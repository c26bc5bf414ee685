"""Scales that are products over the axes keep the form, and are those of a loop."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from dpadambc.contrib.scaling import OuterProduct, scale_examples
from dpadambc.core.gradient import per_example_leaves, weighted_sums
from tests import common
from tests.engine import factored_models as models
from tests.engine import factored_test

# Of every form one, and whether it is kept.
FORMS = {
    "mlp of one vector": True,
    "experts of few": True,
    "layers by scan": True,
    "split kernel": True,
    "tied head": True,
    "embedding along the last axis": True,
    "patches": True,
    "conv": False,
    "pairs of ids": True,
}


def scales_of(params, seed=0):
    """For each parameter a vector for each axis, over two orders of magnitude."""
    rng = np.random.default_rng(seed)

    def of_one(param):
        draw = lambda n: jnp.asarray(10 ** rng.uniform(-1, 1, n))
        if not param.ndim:
            return draw(())
        return OuterProduct(tuple(map(draw, param.shape)))

    return jax.tree.map(of_one, params)


def looped(gradients, scales):
    """By one outer product after another, in float64."""

    def of_one(gradient, scale):
        total = np.ones(())
        vectors = scale.vectors if isinstance(scale, OuterProduct) else [scale]
        for vector in vectors:
            total = np.multiply.outer(total, vector)
        return np.stack([total * one for one in gradient])

    return jax.tree.map(of_one, gradients, scales)


def check(model):
    args = factored_test.arguments(model, 5)
    options = factored_test.options(model, args)
    grads = dpadambc.per_example_grad(model.loss_fn, **options)(
        *args, is_padding_example=factored_test.PADDING
    )
    grads = grads[0] if model.has_aux else grads
    scales = scales_of(args[0])
    found = jax.jit(scale_examples)(grads, scales)
    expected = looped(dpadambc.materialize(grads), scales)
    tolerance = max(1e-12, model.tolerance)
    factored_test.assert_close(dpadambc.materialize(found), expected, tolerance)
    norms = dpadambc.per_example_norms(found)
    np.testing.assert_allclose(
        norms, factored_test.norms_of(expected), max(1e-6, tolerance), 1e-9
    )
    weights = jnp.linspace(0.0, 1.0, 5)
    sums = weighted_sums(found, weights, jnp.array(True))
    factored_test.assert_close(
        sums,
        jax.tree.map(lambda x: np.tensordot(weights, x, 1), expected),
        max(1e-10, tolerance),
    )
    return grads, found


@pytest.mark.parametrize("name", common.rest_slow(FORMS, quick=1))
def test_it_is_the_scale_of_each_coordinate_and_keeps_the_form(name, x64):
    grads, found = check(models.MODELS[name])
    rules = [factored_test.rules_of(tree) for tree in (grads, found)]
    assert (rules[0] == rules[1]) == FORMS[name]


@pytest.mark.slow
def test_from_low_precision_it_comes_in_float32():
    model = models.MODELS["tied head"]
    args = factored_test.arguments(model, 5)
    args[0] = jax.tree.map(lambda x: x.astype(jnp.bfloat16), args[0])
    grads = dpadambc.per_example_grad(model.loss_fn)(*args)
    scales = jax.tree.map(jnp.float32, scales_of(args[0]))
    found = scale_examples(grads, scales)
    expected = looped(dpadambc.materialize(grads), scales)
    materialized = dpadambc.materialize(found)
    chex.assert_trees_all_equal_dtypes(materialized, jax.tree.map(jnp.float32, args[0]))
    factored_test.assert_close(
        jax.tree.map(np.float64, materialized),
        expected,
        2e-2,
    )


@pytest.mark.slow
@pytest.mark.guarantee
@pytest.mark.parametrize("size", [1.0, 1e-25, 1e25, np.nan])
def test_what_was_scaled_is_sealed_masked_and_clipped_whatever_the_scale(size):
    model = models.MODELS["tied head"]
    args = factored_test.arguments(model, 5)
    args = jax.tree.map(lambda x: x.astype(jnp.int32) if x.dtype == int else x, args)
    grads = dpadambc.per_example_grad(model.loss_fn)(
        *args, is_padding_example=factored_test.PADDING
    )
    scales = jax.tree.map(lambda x: jnp.float32(size * x), scales_of(args[0]))
    found = scale_examples(grads, scales)
    leaves = per_example_leaves(found)
    assert all(leaf.is_masked for leaf in leaves)
    with pytest.raises(TypeError):
        jax.tree.map(lambda x: 2 * x, found)
    clip = dpadambc.clip_per_example(1.0, normalize_by=1.0)
    total, _ = clip.update(found, clip.init(args[0]), args[0])
    norm = float(optax.tree.norm(dpadambc.materialize(total)))
    assert norm <= 4.001  # of four examples; not a number is none of them
    assert (norm > 0) == (1e-20 < size < 1e20)
    one = jax.tree.map(lambda x: x[::-1], found["w"])
    mixed, _ = clip.update(found | {"w": one}, clip.init(args[0]), args[0])
    mixed = jax.tree.leaves(dpadambc.materialize(mixed))
    assert all(np.isnan(x).all() for x in mixed)

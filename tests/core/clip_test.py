"""The clipped sum moves by no more than its stated sensitivity."""

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from dpadambc import NeighboringRelation, clipping

pytestmark = pytest.mark.guarantee

PARAMS = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}  # and no gradient


def clipped_sum(gradients, l2_clip_norm=1.0, normalize_by=1.0, **kwargs):
    params = jax.tree.map(lambda g: jnp.zeros(g.shape[1:], g.dtype), gradients)
    clip = dpadambc.clip_per_example(l2_clip_norm, normalize_by=normalize_by)
    sealed = dpadambc.as_per_example(gradients)
    updates, _ = clip.update(sealed, clip.init(params), params, **kwargs)
    return dpadambc.materialize(updates)


def random_gradients(seed, batch_size, dtype=np.float32, scale=1.0):
    rng = np.random.default_rng(seed)
    # Norms over several orders of magnitude, so that some clip and some do not.
    sizes = scale * np.exp(rng.normal(0, 2, batch_size))
    draw = lambda *shape: rng.normal(size=(batch_size, *shape))
    scaled = lambda g: g * sizes.reshape((-1,) + (1,) * (g.ndim - 1))
    tree = {"w": scaled(draw(3, 2)), "b": scaled(draw(2))}
    return jax.tree.map(lambda g: np.asarray(g, dtype), tree)


def slow_clipped_sum(gradients, l2_clip_norm, normalize_by):
    """A loop over examples, in double precision."""
    gradients = jax.tree.map(lambda g: np.asarray(g, np.float64), gradients)
    total = jax.tree.map(lambda g: np.zeros(g.shape[1:]), gradients)
    for i in range(len(jax.tree.leaves(gradients)[0])):
        example = jax.tree.map(lambda g, i=i: g[i], gradients)
        norm = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(example)))
        if np.isfinite(norm):
            factor = 1 / max(1, norm / l2_clip_norm)
            total = jax.tree.map(lambda t, g, f=factor: t + f * g, total, example)
    return jax.tree.map(lambda t: t / normalize_by, total)


def distance(a, b):
    """The L2 distance of two trees, in double precision."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return np.sqrt(sum(np.sum((np.float64(x) - np.float64(y)) ** 2) for x, y in pairs))


def with_row(gradients, i, row):
    return jax.tree.map(
        lambda g, r: np.concatenate([g[:i], r[None], g[i + 1 :]]), gradients, row
    )


def without_row(gradients, i):
    return jax.tree.map(lambda g: np.delete(g, i, axis=0), gradients)


# What one example can hold, as a multiple of ordinary gradients.
HOSTILE = {
    "ordinary": 1.0,
    "huge": 1e15,
    "tiny": 1e-15,
    "zero": 0.0,
    "nan": np.nan,
    "inf": np.inf,
    "overflows float32 when squared": 1e25,
}


def test_agrees_with_a_loop_over_examples(x64):
    gradients = random_gradients(0, 20, np.float64)
    fast = clipped_sum(gradients, 0.7, 3.0)
    assert distance(fast, slow_clipped_sum(gradients, 0.7, 3.0)) < 1e-14


def test_infinite_clip_norm_is_the_mean_gradient():
    gradients = random_gradients(1, 16)
    fast = clipped_sum(gradients, jnp.inf, 16)
    assert distance(fast, jax.tree.map(lambda g: g.mean(0), gradients)) < 1e-5


def test_small_gradients_are_left_alone():
    gradients = random_gradients(2, 4, scale=1e-6)
    plain = jax.tree.map(lambda g: g.sum(0), gradients)
    assert distance(clipped_sum(gradients), plain) == 0


def test_norm_is_taken_over_the_whole_tree():
    one = {"w": jnp.full((1, 3, 2), 3.0), "b": jnp.full((1, 2), -1.0)}
    clipped = clipped_sum(one, 2.0)
    norm = distance(clipped, jax.tree.map(jnp.zeros_like, clipped))
    assert norm == pytest.approx(2.0, rel=1e-5)


@pytest.mark.slow
@hypothesis.given(
    seed=st.integers(0, 2**32 - 1),
    batch_size=st.sampled_from([1, 2, 9]),
    hostile=st.sampled_from(sorted(HOSTILE)),
    l2_clip_norm=st.floats(1e-3, 1e3),
    normalize_by=st.floats(0.5, 1e4),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
)
def test_neighbors_differ_by_at_most_the_sensitivity(
    seed, batch_size, hostile, l2_clip_norm, normalize_by, dtype
):
    gradients = random_gradients(seed, batch_size, dtype)
    with np.errstate(over="ignore"):
        row = jax.tree.map(
            lambda g: (HOSTILE[hostile] * g[0].astype(float)).astype(dtype),
            random_gradients(seed + 1, 1, dtype),
        )
    # Compiled once for a dtype and a size of the batch.
    compiled_sum = jax.jit(clipped_sum)
    total = compiled_sum(gradients, l2_clip_norm, normalize_by)
    added = jax.tree.map(lambda g, r: np.concatenate([g, r[None]]), gradients, row)
    is_first = np.arange(batch_size) == 0
    neighbors = {
        (NeighboringRelation.ADD_OR_REMOVE_ONE, "add"): dict(gradients=added),
        (NeighboringRelation.ADD_OR_REMOVE_ONE, "remove"): dict(
            gradients=without_row(gradients, 0)
        ),
        (NeighboringRelation.REPLACE_ONE, "replace"): dict(
            gradients=with_row(gradients, 0, row)
        ),
        (NeighboringRelation.REPLACE_SPECIAL, "blank"): dict(
            gradients=gradients, is_padding_example=is_first
        ),
    }
    for (relation, _), neighbor in neighbors.items():
        bound = dpadambc.sensitivity(
            l2_clip_norm, normalize_by=normalize_by, neighboring_relation=relation
        )
        other = compiled_sum(
            l2_clip_norm=l2_clip_norm, normalize_by=normalize_by, **neighbor
        )
        chex.assert_tree_all_finite(other)
        chex.assert_trees_all_equal_shapes_and_dtypes(total, other)
        # A float32 sum of n clipped gradients is off by some n units in the last place.
        rounding = 1e-6 * batch_size * l2_clip_norm / normalize_by
        assert distance(total, other) <= bound + rounding


def test_the_bounds_are_reached():
    opposite = {"w": jnp.array([[1e3], [-1e3]])}
    both, one = clipped_sum(opposite), clipped_sum(without_row(opposite, 1))
    assert distance(both, one) == pytest.approx(1.0, rel=1e-5)
    flipped = clipped_sum({"w": -opposite["w"][:1]})
    assert distance(one, flipped) == pytest.approx(2.0, rel=1e-5)


def test_clipping_each_leaf_alone_would_break_the_bound():
    """Negative control: the published graph code clips leaf by leaf."""
    gradients = random_gradients(3, 5, scale=1e3)
    leafwise = {k: clipped_sum({k: g})[k] for k, g in gradients.items()}
    rest = without_row(gradients, 0)
    leafwise_rest = {k: clipped_sum({k: g})[k] for k, g in rest.items()}
    assert distance(leafwise, leafwise_rest) > 1.3
    assert distance(clipped_sum(gradients), clipped_sum(rest)) < 1.0 + 1e-5


@pytest.mark.parametrize("hostile", ["nan", "inf", "overflows float32 when squared"])
def test_a_non_finite_example_contributes_exactly_zero(hostile):
    gradients = random_gradients(4, 6)
    spoilt = jax.tree.map(lambda g: HOSTILE[hostile] * g[2], gradients)
    with_it = clipped_sum(with_row(gradients, 2, spoilt))
    assert distance(with_it, clipped_sum(without_row(gradients, 2))) == 0


def test_one_bad_coordinate_drops_the_whole_example():
    gradients = random_gradients(5, 6)
    spoilt = {**gradients, "b": gradients["b"].copy()}
    spoilt["b"][1, 0] = np.nan
    assert distance(clipped_sum(spoilt), clipped_sum(without_row(gradients, 1))) == 0


def test_an_empty_batch_is_exactly_zero():
    empty = jax.tree.map(lambda p: jnp.zeros((0, *p.shape)), PARAMS)
    total = clipped_sum(empty)
    chex.assert_trees_all_equal(total, PARAMS)


@pytest.mark.parametrize("hostile", sorted(HOSTILE))
def test_padding_alone_is_exactly_zero(hostile):
    gradients = jax.tree.map(lambda g: HOSTILE[hostile] * g, random_gradients(6, 3))
    total = clipped_sum(gradients, is_padding_example=jnp.ones(3, bool))
    chex.assert_trees_all_equal(total, PARAMS)


def test_zero_gradients_are_exactly_zero():
    total = clipped_sum(jax.tree.map(lambda p: jnp.zeros((4, *p.shape)), PARAMS))
    chex.assert_trees_all_equal(total, PARAMS)


def test_padding_changes_nothing_but_the_shape():
    gradients = random_gradients(7, 5)
    junk = random_gradients(8, 3, scale=1e9)
    padded = jax.tree.map(lambda g, j: jnp.concatenate([g, j]), gradients, junk)
    total = clipped_sum(padded, is_padding_example=jnp.arange(8) >= 5)
    assert distance(total, clipped_sum(gradients)) < 1e-6


def test_normaliser_is_the_constant_and_never_the_batch_size():
    """Dividing by the realized Poisson batch size would make it depend on the data."""
    gradients = random_gradients(9, 6)
    padded = clipped_sum(
        gradients, normalize_by=10, is_padding_example=jnp.arange(6) >= 4
    )
    short = clipped_sum(jax.tree.map(lambda g: g[:4], gradients), normalize_by=10)
    assert distance(padded, short) < 1e-6
    assert (
        distance(
            short, slow_clipped_sum(jax.tree.map(lambda g: g[:4], gradients), 1.0, 10)
        )
        < 1e-6
    )


def test_jax_privacy_fp16_overflow_does_not_drop_every_example():
    """Squares of float16 numbers above 256 are infinite in float16."""
    gradients = {"w": jnp.full((4, 2), 300.0, jnp.float16)}
    total = clipped_sum(gradients)
    assert total["w"].dtype == jnp.float32
    np.testing.assert_allclose(total["w"], 4 / np.sqrt(2), rtol=1e-5)


def test_optax_nan_example_does_not_poison_the_batch():
    gradients = {"w": jnp.array([[jnp.nan], [0.5]])}
    assert clipped_sum(gradients)["w"] == 0.5


def test_optax_empty_batch_is_not_nan():
    assert clipped_sum({"w": jnp.zeros((0, 2))})["w"].tolist() == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 10, 1000, 100_000])
def test_jax_privacy_clipped_norm_does_not_exceed_the_bound_by_rounding(size):
    rng = np.random.default_rng(size)
    for _ in range(20):
        gradient = {"w": jnp.asarray(rng.normal(size=(1, size)) * 10, jnp.float32)}
        clipped = np.float64(clipped_sum(gradient, 1.0)["w"])
        assert np.sqrt(np.sum(clipped**2)) <= 1.0


@pytest.mark.slow
def test_sum_is_not_rounded_to_bfloat16_before_the_noise():
    """Rounded so, a sum near 256 moves by 2 when one example of norm 1 leaves."""
    ones = {"w": jnp.ones((258, 1), jnp.bfloat16)}
    total, rest = (clipped_sum(g)["w"][0] for g in (ones, without_row(ones, 0)))
    assert total.dtype == jnp.float32
    assert total - rest == pytest.approx(1.0, rel=1e-4)
    rounded = [x.astype(jnp.bfloat16).astype(float) for x in (total, rest)]
    assert rounded[0] - rounded[1] == pytest.approx(2.0)


def test_double_precision_stays_double(x64):
    assert clipped_sum({"w": jnp.ones((2, 3), jnp.float64)})["w"].dtype == jnp.float64


def test_sensitivity_of_each_relation():
    of = lambda relation: dpadambc.sensitivity(
        3.0, normalize_by=6, neighboring_relation=relation
    )
    assert of(NeighboringRelation.ADD_OR_REMOVE_ONE) == 0.5
    assert of(NeighboringRelation.REPLACE_SPECIAL) == 0.5
    assert of(NeighboringRelation.REPLACE_ONE) == 1.0


@pytest.mark.parametrize("bad", [-1.0, 0.0, np.nan, jnp.float32(-2.0), "1.0"])
def test_refuses_numbers_that_are_not_positive(bad):
    with pytest.raises((TypeError, ValueError), match="l2_clip_norm"):
        dpadambc.clip_per_example(bad, normalize_by=1)
    with pytest.raises((TypeError, ValueError), match="normalize_by"):
        dpadambc.clip_per_example(1.0, normalize_by=bad)


SEALED = dpadambc.as_per_example({"w": jnp.ones((4, 3, 2)), "b": jnp.ones((4, 2))})
LONGER = dpadambc.as_per_example({"w": jnp.ones((4, 3, 2)), "b": jnp.ones((5, 2))})
REFUSED = {
    "averaged": (PARAMS, PARAMS, "gradient"),
    "averaged, of a square kernel": (jnp.ones((4, 4)), jnp.ones((4, 4)), "gradient"),
    "batches of two sizes": (LONGER, PARAMS, "gradients"),
    "no parameters": (SEALED, None, "params"),
    "another parameter": (SEALED, {"w": PARAMS["w"], "c": PARAMS["b"]}, "gradients"),
    "another shape": (SEALED, {**PARAMS, "b": jnp.zeros(3)}, "gradients"),
}


@pytest.mark.parametrize(("gradients", "params", "name"), REFUSED.values(), ids=REFUSED)
def test_refuses_gradients_that_are_not_of_single_examples(gradients, params, name):
    clip = dpadambc.clip_per_example(1.0, normalize_by=1)
    with pytest.raises((TypeError, ValueError), match=name):
        clip.update(gradients, optax.EmptyState(), params)


@pytest.mark.parametrize(
    "mask",
    [jnp.zeros(4), [False] * 4, jnp.zeros(3, bool), jnp.zeros((4, 1), bool)],
    ids=["floats", "a list", "shorter", "a column"],
)
def test_refuses_a_mask_of_another_kind(mask):
    clip = dpadambc.clip_per_example(1.0, normalize_by=1)
    with pytest.raises((TypeError, ValueError), match="is_padding_example"):
        clip.update(SEALED, optax.EmptyState(), PARAMS, is_padding_example=mask)
    with pytest.raises((TypeError, ValueError), match="is_padding_example"):
        dpadambc.as_per_example(jnp.ones((4, 2)), is_padding_example=mask)


def test_refuses_integers_and_a_relation_that_is_none():
    with pytest.raises(TypeError, match="gradients"):
        dpadambc.as_per_example(jnp.ones((4, 2), int))
    with pytest.raises(TypeError, match="neighboring_relation"):
        dpadambc.sensitivity(1.0, normalize_by=1, neighboring_relation="replace")


def test_refuses_a_clip_norm_rounded_to_bfloat16():
    inject = optax.inject_hyperparams(dpadambc.clip_per_example)
    clip = inject(0.3, normalize_by=10.0)
    with pytest.raises(TypeError, match="l2_clip_norm"):
        clip.init(jnp.zeros(2, jnp.bfloat16))


def test_accelerators_may_not_round_the_gradients_of_the_sum():
    """By default they would: to bfloat16 on TPU, to TensorFloat-32 on GPU."""
    text = str(jax.make_jaxpr(clipped_sum)({"w": jnp.ones((4, 3))}))
    products = text.count("dot_general[")
    assert products == 3  # on CUDA, on a TPU, and elsewhere
    assert text.count("Precision.HIGHEST") >= products


class _Groups(clipping.ClipRule):
    """Groups of one parameter each, with these shares of the bound."""

    def __init__(self, shares, places=(0, 1)):
        self.shares, self.places = shares, places

    def weight(self, norm, l2_clip_norm):
        return jnp.where(norm <= l2_clip_norm, 1, l2_clip_norm / norm)

    def groups(self, params):
        several = zip(self.shares, self.places, strict=True)
        return {str(i): (share, [i]) for share, i in several}


@pytest.mark.guarantee
@pytest.mark.parametrize(
    "rule", [_Groups((1.0, 1.0)), _Groups((0.6,), (0,)), _Groups((0.6, 0.6), (0, 0))]
)
def test_groups_that_would_exceed_the_bound_are_refused(rule):
    params = [jnp.zeros(2), jnp.zeros(2)]
    grads = dpadambc.as_per_example([jnp.full((1, 2), 9.0)] * 2)
    tx = dpadambc.clip_per_example(1.0, normalize_by=1, clip_rule=rule)
    with pytest.raises(ValueError, match="clip_rule"):
        tx.init(params)
    with pytest.raises(ValueError, match="clip_rule"):
        tx.update(grads, optax.EmptyState(), params)


def test_groups_within_the_bound_are_taken():
    params = [jnp.zeros(2), jnp.zeros(2)]
    grads = dpadambc.as_per_example([jnp.full((1, 2), 9.0)] * 2)
    rule = _Groups((0.6, 0.8))
    tx = dpadambc.clip_per_example(1.0, normalize_by=1, clip_rule=rule)
    sums, _ = tx.update(grads, tx.init(params), params)
    norms = [float(jnp.linalg.norm(x.value)) for x in sums]
    np.testing.assert_allclose(norms, [0.6, 0.8], rtol=1e-5)

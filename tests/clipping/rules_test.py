"""The rules of clipping: formulas, bounds on neighboring data, groups."""

import dataclasses
import json
import pickle

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from dpadambc import accounting, audit, clipping, contrib, training
from dpadambc.core import clip as flat
from dpadambc.core.spending import public_numbers
from dpadambc.diagnostics import not_private
from tests import common

C, B = 0.7, 4.0
PARAMS = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}
GROUPS = clipping.PerGroup({"w": "w", "b": "b"}, {"w": 3.0, "b": 4.0})
RULES = {
    "flat": clipping.Flat(),
    "AUTO-S": clipping.Automatic(0.01),
    "AUTO-V": clipping.Automatic(0.0),
    "DP-PSAC": contrib.PerSampleAdaptive(0.1),
    "groups": GROUPS,
    "groups, AUTO-S": dataclasses.replace(GROUPS, rule=clipping.Automatic(0.01)),
}
# Factor of a norm and a bound, in float64.
FORMULAS = {
    "flat": lambda norm, c: min(1.0, c / norm) if norm else 1.0,
    "AUTO-S": lambda norm, c: c / (norm + 0.01),
    "AUTO-V": lambda norm, c: c / norm if norm else 0.0,
    "DP-PSAC": lambda norm, c: c / (norm + 0.1 / (norm + 0.1)),
}


def clipped(rule, gradients, padding=None, l2_clip_norm=C):
    params = jax.tree.map(lambda x: jnp.zeros(x.shape[1:]), gradients)
    clip = dpadambc.clip_per_example(l2_clip_norm, normalize_by=B, clip_rule=rule)
    per_example = dpadambc.as_per_example(gradients)
    updates, _ = clip.update(
        per_example, clip.init(params), params, is_padding_example=padding
    )
    return dpadambc.materialize(updates)


_compiled = jax.jit(clipped, static_argnums=(0, 3))


def _random(seed, num=5, scale=1.0):
    rng = np.random.default_rng(seed)
    sizes = scale * 10 ** rng.uniform(-2, 2, size=num)
    return {
        name: jnp.asarray(
            rng.normal(size=(num, *x.shape)) * sizes.reshape(-1, *(1 for _ in x.shape)),
            jnp.float32,
        )
        for name, x in PARAMS.items()
    }


def _by_hand(name, gradients):
    """One example after the other, in float64."""
    gradients = {k: np.asarray(x, np.float64) for k, x in gradients.items()}
    bounds = {"w": 0.6 * C, "b": 0.8 * C}
    formula = FORMULAS[name.removeprefix("groups, ").replace("groups", "flat")]
    total = {k: np.zeros(x.shape[1:]) for k, x in gradients.items()}
    for i in range(len(gradients["b"])):
        own = {k: x[i] for k, x in gradients.items()}
        whole = np.sqrt(sum(np.sum(x**2) for x in own.values()))
        for k, x in own.items():
            if name.startswith("groups"):
                factor = formula(np.linalg.norm(x), bounds[k])
            else:
                factor = formula(whole, C)
            total[k] += factor * x / B
    return total


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", range(3))
def test_rules_are_their_formulas(name, seed):
    gradients = _random(seed)
    found = clipped(RULES[name], gradients)
    expected = _by_hand(name, gradients)
    for key, x in found.items():
        np.testing.assert_allclose(x, expected[key], rtol=2e-5, atol=1e-7)


def _distance(a, b):
    return float(optax.tree.norm(jax.tree.map(lambda x, y: x - y, a, b)))


_NUMBERS = st.sampled_from(
    [0.0, 1e-30, 1e-22, 1e-19, 3e-12, 1e-3, 1.0, 1e10, 1e19, 1e38, np.inf, np.nan]
)


@pytest.mark.guarantee
@pytest.mark.parametrize("name", RULES)
@hypothesis.given(
    size=_NUMBERS, other=_NUMBERS, seed=st.integers(0, 2**16), place=st.integers(0, 4)
)
@hypothesis.settings(max_examples=40, deadline=None)
def test_one_example_moves_the_sum_by_no_more_than_the_sensitivity(
    name, size, other, seed, place
):
    gradients = _random(seed)

    def with_row(number):
        row = lambda x: jnp.ones(x.shape[1:]) * jnp.float32(number)
        return {k: x.at[place].set(row(x)) for k, x in gradients.items()}

    here, there = (_compiled(RULES[name], with_row(x)) for x in (size, other))
    padding = jnp.arange(5) == place
    without = _compiled(RULES[name], with_row(size), padding)
    # A sum of five rows of float32 is rounded.
    rounding = 1e-6 * C
    assert _distance(here, without) <= C / B + rounding
    assert _distance(here, there) <= 2 * C / B + rounding


@pytest.mark.guarantee
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", RULES)
def test_gradients_of_low_precision_are_clipped_in_full(name, dtype):
    row = {k: jnp.full((1, 500), 0.117, dtype) for k in "wb"}
    found = clipped(RULES[name], row)
    assert all(x.dtype == jnp.float32 for x in found.values())
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), found)
    norm = np.sqrt(sum(np.sum(x**2) for x in wide.values()))
    assert 0.98 * C / B <= norm <= C / B


@dataclasses.dataclass(frozen=True)
class Greedy(clipping.ClipRule):
    """Asks for more than there is."""

    factor: float

    def weight(self, norm, l2_clip_norm):
        return self.factor * l2_clip_norm / norm


@pytest.mark.guarantee
@pytest.mark.parametrize("factor", [1.5, 1e30, -1.0, np.inf, np.nan])
def test_no_rule_of_ones_own_exceeds_the_bound(factor):
    gradients = _random(0, num=1)
    norm = float(optax.tree.norm(clipped(Greedy(factor), gradients)))
    assert norm <= C / B


def test_without_the_limit_a_greedy_rule_would_exceed_it(monkeypatch):
    """The control of the test above."""
    monkeypatch.setattr(flat.jnp, "clip", lambda x, low, high: x)
    norm = float(optax.tree.norm(clipped(Greedy(1.5), _random(0, num=1))))
    assert norm > 1.4 * C / B


@dataclasses.dataclass(frozen=True)
class Relative(clipping.ClipRule):
    """Tries to look at the other examples."""

    def weight(self, norm, l2_clip_norm):
        return l2_clip_norm / jnp.max(norm)


@pytest.mark.guarantee
def test_a_rule_sees_one_example_alone():
    """Else the longest gradient would decide how much of all others there is."""
    gradients = _random(0)
    several = clipped(Relative(), gradients)
    one_by_one = [
        clipped(Relative(), jax.tree.map(lambda x, i=i: x[i : i + 1], gradients))
        for i in range(5)
    ]
    chex.assert_trees_all_close(
        several, jax.tree.map(lambda *x: sum(x), *one_by_one), rtol=1e-5
    )


@pytest.mark.guarantee
@pytest.mark.parametrize("name", ["AUTO-V", "AUTO-S", "DP-PSAC"])
def test_what_the_norm_does_not_see_is_not_made_long(name):
    """A million coordinates whose squares vanish, beside one that is seen, barely."""
    row = jnp.full((1, 1_000_000), 1e-20).at[0, 0].set(2e-19)
    true_norm = np.linalg.norm(np.asarray(row, np.float64))
    found = clipped(RULES[name], {"w": row})
    # Scaled to C by the norm that is seen, it would be 50 times as long.
    assert true_norm / 2e-19 > 50
    assert float(jnp.linalg.norm(found["w"] * 1e15)) / 1e15 <= 1.002 * C / B


@pytest.mark.parametrize("name", common.rest_slow(RULES, quick=2))
def test_factored_gradients_are_clipped_as_formed_ones(name):
    def loss_fn(params, x, y):
        out = jnp.tanh(x @ params["w"] + params["b"])
        return jnp.sum((out - y) ** 2)

    key = jax.random.key(0)
    params = jax.tree.map(lambda x: x + 0.3, PARAMS)
    batch = jax.random.normal(key, (6, 3)), jnp.ones((6, 2))
    of = lambda method: dpadambc.clipped_grad(
        loss_fn,
        l2_clip_norm=0.1,
        normalize_by=6,
        microbatch_size=4,
        method=method,
        clip_rule=RULES[name],
    )(params, *batch)
    found, expected = dpadambc.materialize((of("factored"), of("vmap")))
    chex.assert_trees_all_close(found, expected, rtol=3e-5)


WRONG = {
    "clip_rule": lambda: dpadambc.clip_per_example(
        1.0, normalize_by=1, clip_rule=clipping.Automatic
    ),
    "clip_rule ": lambda: dataclasses.replace(MECHANISM, clip_rule="automatic"),
    "rule": lambda: dataclasses.replace(GROUPS, rule=GROUPS),
    "gamma": lambda: clipping.Automatic(-1.0),
    " r ": lambda: contrib.PerSampleAdaptive(0.0),
    "share": lambda: clipping.PerGroup({"w": "w"}, {"w": 0.0}),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_refused(name):
    with pytest.raises((TypeError, ValueError), match=name):
        WRONG[name]()


@pytest.mark.parametrize(
    "labels", [{"w": "w", "b": "other"}, {"w": "w", "b": "w"}, {"w": "w"}]
)
def test_groups_that_are_not_those_of_the_parameters_are_refused(labels):
    rule = clipping.PerGroup(labels, {"w": 1.0, "b": 1.0})
    with pytest.raises(ValueError, match="label"):
        dpadambc.clip_per_example(1.0, normalize_by=1, clip_rule=rule).init(PARAMS)


def test_labels_may_be_a_function_of_the_parameters():
    gradients = _random(1)
    of = lambda params: {k: k for k in params}
    rule = clipping.PerGroup(of, GROUPS.shares)
    chex.assert_trees_all_equal(clipped(rule, gradients), clipped(GROUPS, gradients))


def test_rules_are_equal_where_their_numbers_are():
    again = clipping.PerGroup({"w": "w", "b": "b"}, {"b": 4.0, "w": 3.0})
    assert again == GROUPS and hash(again) == hash(GROUPS)
    assert dataclasses.replace(GROUPS, shares={"w": 3.0, "b": 5.0}) != GROUPS
    assert GROUPS != clipping.Flat()


MECHANISM = dpadambc.PoissonGaussian(
    l2_clip_norm=0.5,
    noise_multiplier=0.5,
    sampling_prob=0.5,
    iterations=3,
    normalize_by=8,
)


@pytest.mark.parametrize("name", ["AUTO-S", "groups"])
def test_privatize_adds_noise_of_one_level_whatever_the_rule(name, monkeypatch):
    drawn, gradients = common.drawn_later(monkeypatch), _random(2)
    mechanism = dataclasses.replace(MECHANISM, clip_rule=RULES[name])
    tx = dpadambc.privatize(mechanism, key=jax.random.key(1))
    padding = jnp.zeros(5, bool)
    per_example = dpadambc.as_per_example(gradients, is_padding_example=padding)
    private, _ = tx.update(per_example, tx.init(PARAMS), PARAMS)
    jax.effects_barrier()
    (leaves,) = drawn
    draws = jax.tree.unflatten(jax.tree.structure(PARAMS), leaves)
    # The sum of the rule, over 8 in place of B.
    sums = clipped(RULES[name], gradients, l2_clip_norm=0.5)
    expected = jax.tree.map(
        lambda x, z: x * B / 8 + MECHANISM.noise_stddev * z, sums, draws
    )
    chex.assert_trees_all_close(private, expected, atol=1e-6)


LOSS = lambda w, x, y: (w @ x - y) ** 2
X = jax.random.normal(jax.random.key(0), (16, 2))
DATA = X, X[:, 0]
ALMOST_PUBLIC = dataclasses.replace(
    MECHANISM, noise_multiplier=1e-6, sampling_prob=1.0, clip_rule=clipping.Automatic(0)
)


def _by_fit(mechanism):
    return training.fit(
        LOSS,
        jnp.ones(2),
        DATA,
        mechanism,
        optax.sgd(1.0),
        key=jax.random.key(2),
        target_delta=1e-3,
    ).state.params


def _by_a_chain(mechanism):
    optimizer = dpadambc.dp_sgd(1.0, mechanism, key=jax.random.key(2))
    gradients = dpadambc.per_example_grad(LOSS)
    params = jnp.ones(2)
    state = optimizer.init(params)
    for _ in range(3):
        found = gradients(params, *DATA, is_padding_example=jnp.zeros(16, bool))
        updates, state = optimizer.update(found, state, params)
        params = optax.apply_updates(params, updates)
    return params


def _by_the_audit(mechanism):
    step = audit.Pipeline.of_fit(LOSS, jnp.ones(2), DATA, mechanism, optax.sgd(1.0))
    state = step.init(jax.random.key(2))
    for _ in range(3):
        state = step.step(state, *DATA)
    return state.params


@pytest.mark.slow
@pytest.mark.parametrize("run", [_by_fit, _by_a_chain, _by_the_audit])
def test_all_who_clip_for_a_mechanism_use_its_rule(run):
    # Three steps of the mean of gradients of length C.
    w = np.ones(2)
    for _ in range(3):
        each = 2 * (X @ w - X[:, 0])[:, None] * X
        norms = np.linalg.norm(each, axis=1, keepdims=True)
        w = w - np.sum(0.5 * each / norms, 0) / 8
    found = run(ALMOST_PUBLIC)
    np.testing.assert_allclose(found, w, rtol=1e-3, atol=1e-3)
    usual = run(dataclasses.replace(ALMOST_PUBLIC, clip_rule=clipping.Flat()))
    assert not np.allclose(usual, found, atol=1e-2)


@pytest.mark.parametrize("name", RULES)
def test_no_rule_changes_epsilon(name):
    changed = dataclasses.replace(MECHANISM, clip_rule=RULES[name])
    assert changed.epsilon(1e-5) == MECHANISM.epsilon(1e-5)
    assert changed.sensitivity == MECHANISM.sensitivity
    assert changed.noise_stddev == MECHANISM.noise_stddev
    assert accounting.compose([changed]) == accounting.compose([MECHANISM])
    text = json.dumps(accounting.spending_to_json(accounting.compose([changed])))
    assert accounting.spending_from_json(json.loads(text)).epsilon(
        1e-5
    ) == changed.epsilon(1e-5)


def test_a_rule_is_one_of_the_public_numbers():
    of = lambda rule: public_numbers(dataclasses.replace(MECHANISM, clip_rule=rule))[
        "clip_rule"
    ]
    assert of(clipping.Automatic(0.1)) == "Automatic(gamma=0.1)"
    assert json.dumps(of(GROUPS))
    by_name = clipping.PerGroup(lambda params: params, {"w": 1.0})
    assert "0x" in repr(by_name) and "0x" not in of(by_name)


@pytest.mark.slow
def test_a_run_does_not_go_on_with_another_rule(tmp_path):
    def run(**changes):
        return training.fit(
            LOSS,
            jnp.ones(2),
            DATA,
            dataclasses.replace(MECHANISM, **changes),
            optax.sgd(1.0),
            key=jax.random.key(2),
            target_delta=1e-3,
            checkpoints=training.Checkpoints(tmp_path, every=1),
        )

    run(clip_rule=clipping.Automatic(0.1))
    with pytest.raises(ValueError, match="clip_rule"):
        run(clip_rule=clipping.Flat(), iterations=5)
    assert run(clip_rule=clipping.Automatic(0.1), iterations=5).iterations == 5


@pytest.mark.parametrize("name", ["AUTO-S", "groups, AUTO-S"])
def test_a_node_in_several_terms_moves_the_sum_by_its_sensitivity(name):
    """Each term is clipped by the rule, and a node changes several."""
    mechanism = dpadambc.graphs.NodePoissonGaussian(
        l2_clip_norm=C,
        noise_multiplier=1.0,
        max_terms=3,
        sampling_prob=1.0,
        iterations=1,
        normalize_by=B,
        neighboring_relation=dpadambc.NeighboringRelation.REPLACE_ONE,
        clip_rule=RULES[name],
    )
    here = _random(3, scale=1e3)
    there = jax.tree.map(lambda x: x.at[:3].multiply(-1), here)
    moved = _distance(
        clipped(mechanism.clip_rule, here), clipped(mechanism.clip_rule, there)
    )
    assert moved <= mechanism.sensitivity
    # The directions are random: negative control with a bound for one term.
    assert moved > mechanism.sensitivity / 6


@pytest.mark.parametrize("name", RULES)
def test_what_is_read_of_a_batch_is_clipped_by_the_rule(name):
    mechanism = dataclasses.replace(
        MECHANISM, l2_clip_norm=C, normalize_by=B, clip_rule=RULES[name]
    )
    gradients = _random(4)
    per_example = dpadambc.as_per_example(gradients)
    seen = not_private.gradient_statistics(per_example, mechanism)
    signal = optax.tree.norm(clipped(RULES[name], gradients))
    np.testing.assert_allclose(seen.signal_norm, signal, rtol=1e-6)
    norms = {
        k: np.linalg.norm(np.reshape(x, (5, -1)), axis=1) for k, x in gradients.items()
    }
    expected = {
        "flat": np.hypot(norms["w"], norms["b"]) > C,
        "groups": (norms["w"] > 0.6 * C) | (norms["b"] > 0.8 * C),
    }.get(name, np.ones(5, bool))
    assert float(seen.clip_fraction) == pytest.approx(expected.mean())


def test_the_clips_are_pickled_by_name():
    for public in (dpadambc.clip_per_example, dpadambc.clipped_grad):
        assert pickle.loads(pickle.dumps(public)) is public

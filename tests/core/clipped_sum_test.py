"""The clipped sum goes to the noise as it is, whole, and with its numbers.

What changes it, a part of it, and what was never clipped are errors by type, the same
in and out of `jax.jit`. What moves it, and changes nothing, goes through.
"""

import functools
import os

import chex
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dpadambc
from dpadambc import contrib
from tests import common
from tests.attacks import BATCH, PADDED, B, C, X, distance, mechanism, mesh_of

pytestmark = pytest.mark.guarantee

KEY = jax.random.key(0)
PARAMS = {"w": jnp.zeros((8, 3)), "b": jnp.zeros(3)}
MECHANISM = mechanism()
NOISES = {
    "independent": lambda level: dpadambc.add_dp_noise(level, key=KEY),
    "correlated": lambda level: contrib.add_correlated_noise(
        level, (1.0, -0.5), key=KEY
    ),
    "banded": lambda level: contrib.add_banded_noise(level, (1.0, 0.5), key=KEY),
}
NOISE = dpadambc.add_dp_noise(MECHANISM, key=KEY)
SILENT = dpadambc.add_dp_noise(0.0, key=KEY)
REFUSED = TypeError, ValueError, NotImplementedError, AttributeError
jit_or_not = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["", "jit"])
all_noises = pytest.mark.parametrize(
    "make", common.rest_slow(NOISES.values(), quick=1), ids=NOISES
)


def loss(params, x):
    return jnp.sum(jnp.tanh(x @ params["w"] + params["b"] + jnp.arange(3.0)))


@functools.cache
def total():
    """Those of all examples, of concrete numbers even where a test is traced."""
    with jax.ensure_compile_time_eval():
        return sums()


def sums(x=X, params=PARAMS, l2_clip_norm=C, normalize_by=B, loss=loss):
    """The clipped sums of a batch."""
    numbers = dict(l2_clip_norm=l2_clip_norm, normalize_by=normalize_by)
    is_padding_example = jnp.zeros(len(x), bool)
    fun = dpadambc.clipped_grad(loss, **numbers)
    return fun(params, x, is_padding_example=is_padding_example)


def once(tx, clipped, params=PARAMS):
    """The update of the first step."""
    return tx.update(clipped, tx.init(params), params)[0]


def looked_at(*args, **numbers):
    found = sums(*args, **numbers) if args or numbers else total()
    return dpadambc.materialize(found)


# A stage of Optax between the clip and the noise, or a wrapper around the noise.

STAGES = {
    "scale": optax.scale(2.0),
    "clip": optax.clip(1.0),
    "clip_by_global_norm": optax.clip_by_global_norm(1.0),
    "clip_by_block_rms": optax.clip_by_block_rms(1.0),
    "adaptive_grad_clip": optax.adaptive_grad_clip(0.1),
    "normalize_by_update_norm": optax.normalize_by_update_norm(),
    "trace": optax.trace(0.9),
    "ema": optax.ema(0.9),
    "scale_by_adam": optax.scale_by_adam(),
    "scale_by_adam_bc": dpadambc.scale_by_adam_bc(0.1),
    "scale_by_schedule": optax.scale_by_schedule(lambda count: 1.0 + count),
    "add_decayed_weights": optax.add_decayed_weights(0.1),
    "add_noise": optax.add_noise(0.1, 0.5, KEY),
    "centralize": optax.centralize(),
    "sgd": optax.sgd(0.1),
    "noise": NOISE,
}
BETWEEN = {name: optax.chain(stage, NOISE) for name, stage in STAGES.items()} | {
    "MultiSteps": optax.MultiSteps(NOISE, 2),
    "flatten": optax.flatten(NOISE),
    "apply_if_finite": optax.apply_if_finite(NOISE, 3),
}


@pytest.mark.parametrize("tx", BETWEEN.values(), ids=BETWEEN)
@jit_or_not
def test_a_stage_between_is_refused(wrap, tx):
    with pytest.raises(REFUSED):
        wrap(functools.partial(once, tx))(total())


HARMLESS = {
    "identity": optax.identity(),
    "zero_nans": optax.zero_nans(),  # a clipped sum has none, and it finds none
    "masked": optax.masked(optax.identity(), {"w": True, "b": False}),
}


@pytest.mark.parametrize("stage", HARMLESS.values(), ids=HARMLESS)
@jit_or_not
def test_a_stage_that_changes_nothing_is_not(wrap, stage):
    update = wrap(functools.partial(once, optax.chain(stage, SILENT)))
    chex.assert_trees_all_close(update(total()), looked_at(), rtol=1e-6)


def test_what_stages_between_did():
    """Negative control: on what `value` shows, one of 64 moves the sum by many C."""
    loud = jnp.full((BATCH, 8), 10.0)
    only_b = lambda params, x: jnp.sum(params["b"] * x[:3])
    total = lambda stage, x: once(stage, looked_at(x, loss=only_b))
    nearby = loud.at[0].set(-loud[0])
    moved = lambda stage: distance(*(total(stage, x) for x in (loud, nearby)))
    assert moved(optax.identity()) <= 2 * C * 1.0001
    assert moved(optax.scale(100.0)) > 190 * C
    pair = jnp.stack([loud[0], -loud[0]])  # they cancel, up to rounding
    sums_of = [total(optax.normalize_by_update_norm(100.0), x) for x in (pair, loud)]
    assert distance(*sums_of) > 90 * C


# Arithmetic.

MAPS = {
    "times": lambda g: g * 2.0,
    "over": lambda g: g / BATCH,
    "minus": lambda g: -g,
    "plus": lambda g: g + g,
    "times an array": lambda g: jnp.float32(2.0) * g,
    "where with a number": lambda g: jnp.where(jnp.ones(g.shape, bool), g, 0.0),
    "astype": lambda g: g.astype(jnp.bfloat16),
    "sum": lambda g: g.sum(),
    "jnp.sum": jnp.sum,
    "mean": lambda g: jnp.mean(g, 0),
    "cumsum": jnp.cumsum,
    "clip": lambda g: jnp.clip(g, -1, 1),
    "maximum": lambda g: jnp.maximum(g, 0.0),
    "added in place": lambda g: g.at[0].add(1.0),
    "bits": lambda g: jax.lax.bitcast_convert_type(g, jnp.uint32),
    "drawn with": lambda g: jax.random.normal(g.ravel()[0]),
}


@pytest.mark.parametrize("change", MAPS.values(), ids=MAPS)
@pytest.mark.parametrize("of_leaves", [True, False], ids=["leaves", "sums"])
@jit_or_not
def test_arithmetic_is_refused(wrap, of_leaves, change):
    is_sum = lambda x: isinstance(x, dpadambc.ClippedSum)

    def step(clipped):
        is_leaf = None if of_leaves else is_sum
        return once(NOISE, jax.tree.map(change, clipped, is_leaf=is_leaf))

    with pytest.raises(REFUSED):
        wrap(step)(total())


def test_operators_and_methods_of_arrays_are_refused():
    of_b, array = total()["b"], jnp.ones(3)
    for change in (
        lambda: np.ones(3) * of_b,
        lambda: array - of_b,
        lambda: -of_b,
        lambda: of_b @ array,
        lambda: of_b.astype(jnp.float32),
    ):
        with pytest.raises((TypeError, AttributeError), match="ClippedSum"):
            change()


# A part of the sums.

PARTS = {
    "without a key": lambda s: {"w": s["w"]},
    "a sum alone": lambda s: s["w"],
    "None": lambda s: s | {"b": None},
    "the same twice": lambda s: {"b": s["b"], "w": s["b"]},
    "clipped apart": lambda s: {
        name: dpadambc.as_clipped_sum(x.value, l2_clip_norm=C, normalize_by=B)
        for name, x in s.items()
    },
}


DIVIDED = {
    "masked": lambda noise: optax.masked(noise, {"w": True, "b": False}),
    "multi_transform": lambda noise: optax.multi_transform(
        {"w": noise, "b": noise}, {"w": "w", "b": "b"}
    ),
    "partition": lambda noise: optax.partition(
        {"w": noise, "b": optax.identity()}, {"w": "w", "b": "b"}
    ),
}


@jit_or_not
@all_noises
def test_a13_a_part_is_refused(make, wrap):
    def of_part(change, clipped):
        part = change(clipped)
        params = jax.tree.map(jnp.zeros_like, dpadambc.materialize(part))
        return once(make(1.0), part, params)

    calls = [functools.partial(of_part, change) for change in PARTS.values()]
    calls += [
        functools.partial(once, wrapper(make(1.0))) for wrapper in DIVIDED.values()
    ]
    for call in calls:
        with pytest.raises(ValueError, match="gradient|params"):
            wrap(call)(total())


def test_noise_for_all_parts_inside_a_wrapper_is_not():
    tx = optax.masked(SILENT, True)
    chex.assert_trees_all_close(once(tx, total()), looked_at())


def test_a13_what_is_left_out_has_no_noise():
    """Negative control: where each part is vouched for by itself, a part is bare."""
    vouched = PARTS["clipped apart"](total())
    noise = dpadambc.add_dp_noise(1.0, key=KEY)
    bare = optax.partition({"w": noise, "b": optax.identity()}, {"w": "w", "b": "b"})
    found = dpadambc.materialize(once(bare, vouched))
    np.testing.assert_array_equal(found["b"], vouched["b"].value)
    assert distance(found["w"], vouched["w"].value) > 1


def test_sums_of_two_clips_are_refused_together():
    """Each of them has a norm of C by itself."""
    apart = {
        name: sums(loss=lambda p, x, n=name: loss(PARAMS | {n: p}, x), params=value)
        for name, value in PARAMS.items()
    }
    with pytest.raises(ValueError, match="gradient"):
        once(NOISE, apart)
    for numbers in (dict(l2_clip_norm=2 * C), dict(normalize_by=2 * B)):
        mixed = total() | {"b": sums(**numbers)["b"]}
        with pytest.raises(ValueError, match="l2_clip_norm|normalize_by"):
            once(SILENT, mixed)


def test_what_sums_of_two_clips_of_the_same_parameters_do():
    """Nobody sees these: their types are one, and the norm is the root of 2."""
    row = jnp.full((1, 8), 10.0)
    of_w = sums(row, loss=lambda p, x: jnp.sum(x @ p["w"]) + 0 * p["b"].sum())
    of_b = sums(row, loss=lambda p, x: jnp.sum(p["b"]) * x[0] + 0 * p["w"].sum())
    mixed = once(SILENT, {"w": of_w["w"], "b": of_b["b"]})
    for whole in (of_w, of_b):
        assert optax.tree.norm(dpadambc.materialize(whole)) <= C
    assert optax.tree.norm(mixed) == pytest.approx(np.sqrt(2) * C, rel=1e-3)


# What was never clipped, or is not summed.


def summed(x=X, params=PARAMS):
    return jax.grad(lambda p: jax.vmap(loss, (None, 0))(p, x).sum())(params)


NEVER = {
    "a gradient": summed,
    "what was looked at": lambda: looked_at(),
    "one of several": lambda: total() | {"b": looked_at()["b"]},
    "noised": lambda: once(NOISE, total()),
    "gradients of examples": lambda: dpadambc.per_example_grad(loss)(PARAMS, X),
    "numbers": lambda: {"w": 0.0, "b": 0.0},
}


@pytest.mark.parametrize("given", NEVER.values(), ids=NEVER)
@jit_or_not
@all_noises
def test_what_is_no_clipped_sum_is_refused(make, wrap, given):
    with pytest.raises(TypeError, match="gradient"):
        wrap(lambda: once(make(1.0), given()))()


SHAPES = {
    "a row": lambda g: g[0],
    "a row repeated": lambda g: jnp.stack([g[0]] * 2),
    "one more axis": lambda g: g[None],
    "in a line": lambda g: g.reshape(-1)[None],
    "twice": lambda g: jnp.concatenate([g, g]),
}


@pytest.mark.parametrize("change", SHAPES.values(), ids=SHAPES)
@jit_or_not
def test_another_shape_is_refused(wrap, change):
    step = lambda clipped: once(NOISE, jax.tree.map(change, clipped))
    with pytest.raises(ValueError, match="gradient"):
        wrap(step)(total())


def test_the_shapes_of_other_parameters_are_refused():
    others = PARAMS | {"b": jnp.zeros(4)}
    with pytest.raises(ValueError, match="gradient"):
        NOISE.update(total(), NOISE.init(others), others)
    with pytest.raises(ValueError, match="gradient"):
        once(NOISE, jax.vmap(lambda x: sums(x))(X.reshape(2, -1, 8)))


# Other numbers than the mechanism's.

OTHERS = {
    "l2_clip_norm": dict(l2_clip_norm=2 * C),
    "a lower one": dict(l2_clip_norm=C / 2),
    "no bound": dict(l2_clip_norm=np.inf),
    "normalize_by": dict(normalize_by=2 * B),
}


@pytest.mark.parametrize("numbers", OTHERS.values(), ids=OTHERS)
@jit_or_not
def test_other_numbers_than_the_mechanisms_are_refused(wrap, numbers):
    with pytest.raises(ValueError, match="l2_clip_norm|normalize_by"):
        wrap(lambda: once(NOISE, sums(**numbers)))()
    level = NOISES["independent"](1.0)  # says nothing of the sum
    chex.assert_tree_all_finite(once(level, sums(**numbers)))


def test_numbers_that_differ_by_rounding_are_the_mechanisms():
    made = dpadambc.add_dp_noise(mechanism(l2_clip_norm=0.1), key=KEY)
    for number in (0.1, np.float32(0.1), jnp.float32(0.1), np.float64(0.1)):
        chex.assert_tree_all_finite(once(made, sums(l2_clip_norm=number)))


def test_what_another_divisor_did():
    """Negative control: eight times the sensitivity is an eighth of the noise."""
    given = looked_at(normalize_by=1.0), looked_at(X[1:], normalize_by=1.0)
    bound = dpadambc.sensitivity(
        C, normalize_by=8.0, neighboring_relation=MECHANISM.neighboring_relation
    )
    assert distance(*given) > 4 * bound
    stated = common.poisson_gaussian(normalize_by=8.0)
    spent = common.poisson_gaussian(normalize_by=8.0, noise_multiplier=1 / 8)
    assert spent.epsilon(1e-5) > 20 * stated.epsilon(1e-5)


# What is moved or added up as it may be.


def assert_same(got, expected=None):
    expected = looked_at() if expected is None else expected
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)


def test_a_sum_goes_through_jit_scan_cond_and_donation():
    step = functools.partial(once, SILENT)
    assert_same(jax.jit(step)(jax.jit(sums)(X)))
    carried, _ = jax.lax.scan(lambda s, _: (s, None), total(), length=3)
    assert_same(step(carried))
    chosen = jax.lax.cond(X.sum() > 1e9, lambda s: s, lambda s: total(), sums(2 * X))
    assert_same(step(chosen))
    held = jax.lax.fori_loop(0, 3, lambda _, s: s, total())
    assert_same(step(held))
    assert_same(jax.jit(step, donate_argnums=0)(sums()))
    shapes = jax.eval_shape(sums, X)
    assert jax.tree.structure(shapes) == jax.tree.structure(total())
    assert jax.tree.map(jnp.shape, jax.eval_shape(step, shapes)) == {
        "w": (8, 3),
        "b": (3,),
    }


@all_noises
def test_jax_sees_no_key_that_is_used_twice(make):
    noise = make(0.1)

    def run(x):
        def step(state, x):
            clipped = sums(x)
            doubled = jax.tree.map(lambda _, s: s.plus(s).value, PARAMS, clipped)
            noised, state = noise.update(clipped, state, PARAMS)
            return state, (noised, doubled)

        return jax.lax.scan(step, noise.init(PARAMS), x)[1]

    with jax.debug_key_reuse(True):
        chex.assert_tree_all_finite(jax.jit(run)(X.reshape(4, -1, 8)))


def test_a_sum_of_other_numbers_is_another_type():
    """A compiled step sees them, and branches of one have to agree."""
    with pytest.raises(TypeError, match="ClippedSum"):
        jax.lax.cond(True, lambda: sums(), lambda: sums(normalize_by=2.0))


@all_noises
def test_steps_go_through_scan(make):
    noise, rows = make(0.0), X.reshape(4, -1, 8)
    step = lambda s, x: noise.update(sums(x), s, PARAMS)[::-1]
    _, clean = jax.jit(lambda s: jax.lax.scan(step, s, rows))(noise.init(PARAMS))
    for i, x in enumerate(rows):
        assert_same(jax.tree.map(lambda c, i=i: c[i], clean), looked_at(x))
    doubled = lambda x: once(NOISE, jax.tree.map(lambda g: g * 2, sums(x)))
    with pytest.raises(TypeError, match="add_dp_noise"):
        jax.lax.scan(lambda s, x: (s, doubled(x)), None, rows)


@jit_or_not
def test_microbatches_add_up_to_the_batch(wrap):
    def step(x):
        parts = [sums(part) for part in x.reshape(4, -1, 8)]
        added = functools.reduce(
            lambda a, b: jax.tree.map(
                lambda _, one, other: one.plus(other), PARAMS, a, b
            ),
            parts,
        )
        return once(dpadambc.add_dp_noise(0.0, key=KEY), added)

    assert_same(wrap(step)(X))


def test_a_sum_is_added_to_one_of_the_same_parameter_and_numbers_alone():
    b = total()["b"]
    with pytest.raises(TypeError, match="other"):
        b.plus(b.value)
    for other in (
        total()["w"],
        sums(l2_clip_norm=2.0)["b"],
        sums(normalize_by=2.0)["b"],
    ):
        with pytest.raises(ValueError, match="other"):
            b.plus(other)


# Over devices.


ROWS = P("data")


def on_devices(fun, rows=ROWS, **options):
    """The function of two devices' rows, with one result."""
    mesh = mesh_of(("data",), (2,))
    mapped = jax.shard_map(fun, mesh=mesh, in_specs=rows, out_specs=P(), **options)
    return jax.jit(mapped)(X)


def sum_over_devices(clipped):
    return jax.tree.map(lambda _, s: s.sum_over("data"), PARAMS, clipped)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_sum_over_devices_is_that_of_one_and_a_collective_is_refused(check_vma):
    found = on_devices(lambda x: sum_over_devices(sums(x)), check_vma=check_vma)
    assert_same(once(SILENT, found))
    for collective in (jax.lax.psum, jax.lax.pmean):
        with pytest.raises(TypeError, match="add_dp_noise"):
            on_devices(lambda x: collective(sums(x), "data"), check_vma=check_vma)  # noqa: B023


@all_noises
def test_noise_behind_the_sum_over_devices_is_added_once(make):
    noise = make(0.0)
    assert_same(on_devices(lambda x: once(noise, sum_over_devices(sums(x)))))
    noisy = on_devices(lambda x: once(make(1.0), sum_over_devices(sums(x))))
    assert distance(noisy, looked_at()) > 1


def test_noise_on_the_sum_of_one_device_is_refused():
    with pytest.raises(ValueError, match="key"):
        on_devices(lambda x: once(NOISE, sums(x)))
    parts = jax.shard_map(
        sums, mesh=mesh_of(("data",), (2,)), in_specs=P("data"), out_specs=P("data")
    )
    with pytest.raises(ValueError, match="gradient"):
        jax.eval_shape(lambda x: once(NOISE, parts(x)), X)


def test_a_sum_that_all_devices_have_is_not_summed_over_them():
    with pytest.raises(ValueError, match="axis_name"):
        on_devices(lambda x: sum_over_devices(sum_over_devices(sums(x))))
    with pytest.raises(ValueError, match="axis_name"):
        on_devices(lambda x: sum_over_devices(sums(x)), rows=P())
    mesh = mesh_of(("data", "model"), (2, 2))
    for axes in ("model", ("data", "model")):
        over = lambda x, axes=axes: sums(x)["b"].sum_over(axes)
        mapped = jax.shard_map(over, mesh=mesh, in_specs=P("data"), out_specs=P())
        with pytest.raises(ValueError, match="model"):
            jax.eval_shape(mapped, X)


def test_what_a_sum_of_what_all_have_did():
    """Negative control: where JAX does not follow it, each example counts twice."""
    twice = lambda x: sum_over_devices(sum_over_devices(sums(x)))
    found = dpadambc.materialize(on_devices(twice, check_vma=False))
    assert_same(found, jax.tree.map(lambda x: 2 * x, looked_at()))


def test_sums_are_split_as_the_parameters():
    mesh = mesh_of(("model",), (2,))
    split = {
        "w": NamedSharding(mesh, P("model")),
        "b": NamedSharding(mesh, P()),
    }
    params = jax.device_put(PARAMS, split)
    found = jax.jit(lambda p: sums(X, p), out_shardings=split)(params)
    assert found["w"].closed.sharding.is_equivalent_to(split["w"], 2)
    assert_same(jax.jit(functools.partial(once, SILENT), out_shardings=split)(found))
    assert_same(once(SILENT, jax.device_put(total(), split)))


# Numbers that are traced, and what another library has clipped.


def clipped_by(clip, x, **masks):
    grads = dpadambc.per_example_grad(loss)(PARAMS, x)
    return clip.update(grads, clip.init(PARAMS), PARAMS, **masks)[0]


MASK = dict(is_padding_example=jnp.zeros(BATCH, bool))
INJECT = optax.inject_hyperparams(dpadambc.clip_per_example)
TRACED = {
    "C": lambda x: INJECT(C, normalize_by=B),
    "C of a schedule": lambda x: INJECT(lambda count: C + count, normalize_by=B),
    "B of the batch": lambda x: dpadambc.clip_per_example(
        C, normalize_by=B + 0 * jnp.sum(x)
    ),
}


@pytest.mark.parametrize("make", TRACED.values(), ids=TRACED)
def test_numbers_that_are_traced_are_refused_before_the_noise_of_a_mechanism(make):
    step = lambda x: clipped_by(make(x), x, **MASK)
    traced, known = jax.jit(step)(X), step(X)
    assert None in (traced["b"].l2_clip_norm, traced["b"].normalize_by)
    assert (known["b"].l2_clip_norm, known["b"].normalize_by) == (C, B)
    with pytest.raises(ValueError, match="traced (l2_clip_norm|normalize_by)"):
        once(NOISE, traced)
    assert_same(once(SILENT, traced))
    assert once(NOISE, known)["b"].shape == (3,)


def clipped_at(bound, divisor):
    return clipped_by(dpadambc.clip_per_example(bound, normalize_by=divisor), X, **MASK)


CLIPS = {
    "clip_per_example": clipped_at,
    "clipped_grad": lambda bound, divisor: sums(
        l2_clip_norm=bound, normalize_by=divisor
    ),
    "as_clipped_sum": lambda bound, divisor: dpadambc.as_clipped_sum(
        looked_at(), l2_clip_norm=bound, normalize_by=divisor
    ),
}


@pytest.mark.parametrize("clipped", CLIPS.values(), ids=CLIPS)
@pytest.mark.parametrize("kind", [jnp.float32, np.float32, np.array])
def test_numbers_that_are_arrays_are_read(clipped, kind):
    found = clipped(kind(C), kind(B))["b"]
    assert (found.l2_clip_norm, found.normalize_by) == (C, B)
    assert once(NOISE, clipped(kind(C), kind(B)))["b"].shape == (3,)
    for name, numbers in {"l2": (2 * C, B), "normalize": (C, B / 2)}.items():
        with pytest.raises(ValueError, match=name):
            once(NOISE, clipped(*map(kind, numbers)))


def test_what_numbers_that_pass_unread_did():
    """Negative control: at ten times the clip norm one example moves ten times C."""
    moved = distance(*(looked_at(x, l2_clip_norm=10 * C) for x in (100 * X, X[:0])))
    one = distance(looked_at(100 * X[:1], l2_clip_norm=10 * C), looked_at(X[:0]))
    assert moved > 0 and one > 9.9 * C


# Padding that the clip was not told of.


@jit_or_not
def test_a_sum_that_saw_no_mask_is_refused_where_batches_are_padded(wrap):
    clip = dpadambc.clip_per_example(C, normalize_by=B)
    chain = optax.chain(clip, NOISE)

    def step(noise, **masks):
        return wrap(lambda x: once(noise, clipped_by(clip, x, **masks)))(X)

    with pytest.raises(ValueError, match="is_padding_example"):
        step(NOISE)
    given = dpadambc.per_example_grad(loss)(PARAMS, X, **MASK)
    for passes in (
        lambda: step(NOISE, **MASK),
        lambda: step(NOISES["independent"](1.0)),
        lambda: step(dpadambc.add_dp_noise(mechanism(sampling_prob=1.0), key=KEY)),
        lambda: wrap(functools.partial(once, chain))(given),
    ):
        assert passes()["b"].shape == (3,)


@pytest.mark.parametrize("name", ["correlated", "banded"])
def test_correlated_noise_of_a_mechanism_asks_for_numbers_and_mask(name):
    made, padded = PADDED[name]
    noise = made.add_noise(key=KEY)
    assert padded and once(noise, total())["b"].shape == (3,)
    clip = dpadambc.clip_per_example(C, normalize_by=B)
    for wrong in (sums(l2_clip_norm=2 * C), clipped_by(clip, X)):
        with pytest.raises(ValueError, match="l2_clip_norm|is_padding_example"):
            once(noise, wrong)


def test_sums_are_masked_if_all_their_parts_are():
    masked, other = (
        total()["b"],
        dpadambc.clipped_grad(loss, l2_clip_norm=C, normalize_by=B)(PARAMS, X)["b"],
    )
    assert masked.is_masked and not other.is_masked
    assert masked.plus(masked).is_masked
    for added in (masked.plus(other), other.plus(masked), other.plus(other)):
        assert not added.is_masked
    assert_same(masked.plus(other).value, 2 * masked.value)
    rows = lambda x: sum_over_devices(sums(x))
    assert on_devices(rows)["b"].is_masked


@jit_or_not
def test_noise_whose_level_is_injected(wrap):
    inject = optax.inject_hyperparams(dpadambc.add_dp_noise, static_args=("key",))
    noise = inject(lambda count: 0.0 * count, key=KEY)
    assert_same(wrap(functools.partial(once, noise))(total()))
    with pytest.raises(TypeError, match="gradient"):
        wrap(functools.partial(once, noise))(looked_at())


@jit_or_not
def test_arrays_are_vouched_for(wrap):
    noise = dpadambc.add_dp_noise(mechanism(noise_multiplier=0.0), key=KEY)

    def step(arrays, l2_clip_norm=C):
        numbers = dict(l2_clip_norm=l2_clip_norm, normalize_by=B)
        return once(noise, dpadambc.as_clipped_sum(arrays, **numbers))

    assert_same(wrap(step)(looked_at()))
    for call in (step, jax.jit(step)):  # where it is traced
        with pytest.raises(ValueError, match="l2_clip_norm"):
            call(looked_at(), 2.0)


def test_what_is_no_array_is_not_vouched_for():
    vouch = functools.partial(dpadambc.as_clipped_sum, l2_clip_norm=C, normalize_by=B)
    gradients = dpadambc.per_example_grad(loss)(PARAMS, X)
    for given in (total(), gradients, [1.0], jnp.ones(3, int), jnp.ones(3, complex)):
        with pytest.raises(TypeError, match="gradient"):
            vouch(given)
    for bad in (dict(l2_clip_norm=0.0), dict(normalize_by=-1.0)):
        with pytest.raises(ValueError, match="l2_clip_norm|normalize_by"):
            vouch(PARAMS, **bad)


# Where parameters are of other kinds, and in the optimizers of Flax.


def test_sums_are_in_at_least_single_precision(x64):
    for dtype, wide in (("float16", "float32"), ("float64", "float64")):
        params = jax.tree.map(lambda x, d=dtype: x.astype(d), PARAMS)
        found = jax.jit(sums)(X.astype(dtype), params)
        noised = once(SILENT, found, params)
        assert found["b"].dtype == found["b"].value.dtype == noised["b"].dtype == wide
        chex.assert_trees_all_close(noised, dpadambc.materialize(found), rtol=1e-12)


def test_a_train_state_of_flax_takes_them():
    tx = optax.chain(SILENT, optax.sgd(1.0))
    made = flax.training.train_state.TrainState.create
    params = jax.tree.map(jnp.copy, PARAMS)  # which the compiled step may overwrite
    state = made(apply_fn=None, params=params, tx=tx)
    step = lambda state, x: state.apply_gradients(grads=sums(x, state.params))
    expected = jax.tree.map(lambda g: -g, looked_at())
    assert_same(step(state, X).params, expected)
    assert_same(jax.jit(step, donate_argnums=0)(state, X).params, expected)


class Affine(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.zeros((8, 3)))
        self.b = nnx.Param(jnp.zeros(3))


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["", "jit"])
def test_an_optimizer_of_nnx_takes_them(wrap):
    model = Affine()
    graph, _ = nnx.split(model)
    optimizer = nnx.Optimizer(model, optax.chain(SILENT, optax.sgd(1.0)), wrt=nnx.Param)

    def of_module(params, x):
        merged = nnx.merge(graph, params, copy=True)
        return loss({"w": merged.w[...], "b": merged.b[...]}, x)

    def step(model, optimizer, x):
        optimizer.update(model, sums(x, nnx.state(model, nnx.Param), loss=of_module))

    wrap(step)(model, optimizer, X)
    expected = looked_at()
    assert_same({"w": -model.w[...], "b": -model.b[...]}, expected)


@pytest.mark.skipif(
    os.environ.get("DPADAMBC_OPTIMIZED_TESTS") != "1", reason="of optimized code"
)
def test_a_sum_that_is_closed_and_opened_costs_a_copy():
    """In one program nothing, and no byte more across the border of two."""
    arrays = {"w": jnp.ones((300, 100)), "b": jnp.ones(100)}
    close = lambda x: dpadambc.as_clipped_sum(x, l2_clip_norm=C, normalize_by=B)
    through = lambda x: dpadambc.materialize(close(x))
    copied = lambda x: jax.tree.map(jnp.copy, x)

    def cost(fun):
        compiled = jax.jit(fun).lower(arrays).compile()
        memory = compiled.memory_analysis()
        bytes_accessed = compiled.cost_analysis()["bytes accessed"]
        return bytes_accessed, memory.temp_size_in_bytes, memory.output_size_in_bytes

    plain = cost(copied)
    assert cost(through) == plain
    accessed, temporary, output = cost(close)
    assert temporary == plain[1] and output == plain[2]
    assert accessed <= 1.01 * plain[0]

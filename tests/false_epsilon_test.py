"""What a careless user can put around the core, and once got a false epsilon for.

Each test is named after its row in the changelog. It shows that the use is an error, a
warning or harmless now, and, as a negative control, what it did.
"""

import contextlib
import dataclasses
import functools
import re

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from scipy import optimize, stats

import dpadambc
from dpadambc import optimizers, training, transforms
from dpadambc._core import keys
from dpadambc.gradients import _collectives, preconditioning
from dpadambc.mechanisms import _padding, trials
from dpadambc.training import _rows, checkpoints
from tests import common

pytestmark = pytest.mark.guarantee

C, B, BATCH = 1.0, 1.0, 64
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(BATCH, 8)), jnp.float32)
PARAMS = jnp.zeros(8)
NO_PADDING = jnp.zeros(BATCH, bool)


def mechanism(**changes):
    numbers = dict(
        l2_clip_norm=C,
        noise_multiplier=1.0,
        sampling_prob=0.5,
        iterations=20,
        normalize_by=B,
    )
    return dpadambc.PoissonGaussian(**numbers | changes)


MECHANISM = mechanism()
SILENT = mechanism(noise_multiplier=0.0)


def linear(w, x):
    """Its gradient is the example."""
    return w @ x


def square(w, x):
    return (w @ x - x.sum()) ** 2


def gradients(x=X, method="factored", params=PARAMS):
    fun = dpadambc.per_example_grad(linear, method=method)
    return fun(params, x, is_padding_example=jnp.zeros(len(x), bool))


def distance(a, b):
    gaps = jax.tree.map(lambda a, b: np.sum((np.float64(a) - np.float64(b)) ** 2), a, b)
    return float(np.sqrt(sum(jax.tree.leaves(gaps))))


def one_replaced(by):
    return X.at[0].set(jnp.full(8, by))


def fit(optimizer=None, loss_fn=square, data=(X,), mechanism=MECHANISM, **options):
    options = dict(key=jax.random.key(0), target_delta=1e-5) | options
    optimizer = optimizer or dpadambc.adam_bc(0.1, mechanism.noise_stddev)
    params = options.pop("params", PARAMS)
    return training.fit(loss_fn, params, data, mechanism, optimizer, **options)


# A1: what stands before the clip.

BEFORE = {
    "clip_by_global_norm": optax.clip_by_global_norm(64.0),
    "normalize_by_update_norm": optax.normalize_by_update_norm(),
    "adaptive_grad_clip": optax.adaptive_grad_clip(0.1),
    "clip_by_block_rms": optax.clip_by_block_rms(1.0),
    "clip": optax.clip(1.0),
    "scale": optax.scale(0.5),
    "scale_by_adam": optax.scale_by_adam(),
    "ema": optax.ema(0.9),
    "trace": optax.trace(0.9),
    "add_noise": optax.add_noise(0.1, 0.5, jax.random.key(0)),
    "add_decayed_weights": optax.add_decayed_weights(0.1),
    "sgd": optax.sgd(0.1),
}
both_methods = pytest.mark.parametrize("method", ["factored", "vmap"])


@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
@both_methods
def test_a1_nothing_comes_before_the_clip(method, before):
    tx = optax.chain(before, dpadambc.dp_sgd(0.1, SILENT, key=jax.random.key(0)))
    state = tx.init(PARAMS)
    with pytest.raises((TypeError, ValueError), match="(?i)put clip_per_example first"):
        jax.jit(tx.update)(gradients(method=method), state, PARAMS)
    with pytest.raises((TypeError, ValueError, NotImplementedError)):
        tx.update(gradients(method=method), state, PARAMS)


MAPS = {
    "times": lambda g: g * 2.0,
    "over": lambda g: g / BATCH,
    "minus": lambda g: -g,
    "masked": lambda g: jnp.where(jnp.isfinite(g).all(), g, 0),
    "centered": lambda g: g - g.mean(0),
    "summed": lambda g: g.sum(0, keepdims=True),
    "cast": lambda g: g.astype(jnp.bfloat16),
    "if finite": lambda g: g * jnp.isfinite(X).all(),
}


@pytest.mark.parametrize("change", MAPS.values(), ids=MAPS)
@both_methods
def test_a1_arithmetic_of_tree_map_is_an_error(method, change):
    def step(grads):
        grads = jax.tree.map(change, grads)
        clip = dpadambc.clip_per_example(C, normalize_by=B)
        return clip.update(grads, clip.init(PARAMS), PARAMS)

    with pytest.raises((TypeError, ValueError, AttributeError, NotImplementedError)):
        jax.jit(step)(gradients(method=method))
    with pytest.raises((TypeError, ValueError, AttributeError, NotImplementedError)):
        step(gradients(method=method))


def of_floats(fun):
    """What is done in mixed precision: only to what is a float."""
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    return lambda tree: jax.tree.map(lambda x: fun(x) if is_float(x) else x, tree)


@both_methods
def test_a1_what_picks_floats_finds_none(method):
    grads = gradients(method=method)
    found = of_floats(lambda x: 0 * x)(grads)
    arrays, static = eqx.partition(grads, eqx.is_inexact_array)
    assert not jax.tree.leaves(arrays)
    clip = dpadambc.clip_per_example(C, normalize_by=B)
    for same in (found, eqx.combine(arrays, static)):
        one, two = (clip.update(g, clip.init(PARAMS), PARAMS)[0] for g in (same, grads))
        np.testing.assert_array_equal(one, two)


def test_a1_other_rows_for_another_parameter_are_an_error():
    """The rows of one parameter in another order: nobody's gradients any more."""
    params = {"w": PARAMS, "v": PARAMS}
    loss = lambda p, x: p["w"] @ x + p["v"] @ x**2
    grads = dpadambc.per_example_grad(loss)(params, X)
    mixed = grads | {"v": jax.tree.map(lambda g: g[::-1], grads["v"])}
    clip = dpadambc.clip_per_example(C, normalize_by=B)
    found, _ = clip.update(mixed, clip.init(params), params)
    assert all(np.isnan(x).all() for x in found.values())
    both = jax.tree.map(lambda g: g[::-1], grads)
    assert np.isfinite(clip.update(both, clip.init(params), params)[0]["w"]).all()


def test_a1_a_broken_seal_is_told_from_a_whole_one():
    broken = dataclasses.replace(gradients(), seal=jnp.zeros(BATCH))
    clip = dpadambc.clip_per_example(C, normalize_by=B)
    with pytest.raises(TypeError, match="seal.*is broken.*Put.*clip_per_example first"):
        clip.update(broken, clip.init(PARAMS), PARAMS)


@both_methods
def test_a1_what_examples_may_go_through_leaves_the_seal_whole(method):
    """An order, a selection, jit, scan and cond: nothing that mixes examples."""
    clip = dpadambc.clip_per_example(C, normalize_by=B)
    total = lambda g: clip.update(g, clip.init(PARAMS), PARAMS)[0]
    whole = gradients(method=method)
    expected = total(whole)
    order = RNG.permutation(BATCH)
    shuffled = jax.tree.map(lambda g: g[order], whole)
    np.testing.assert_allclose(total(shuffled), expected, atol=1e-4)
    compiled = jax.jit(functools.partial(gradients, method=method))(X)
    np.testing.assert_allclose(jax.jit(total)(compiled), expected, atol=1e-4)
    stacked = jax.tree.map(lambda g: g[None], whole)
    _, (scanned,) = jax.lax.scan(lambda c, g: (c, total(g)), None, stacked)
    np.testing.assert_allclose(scanned, expected, atol=1e-4)
    chosen = jax.lax.cond(True, lambda g: g, lambda g: shuffled, whole)
    np.testing.assert_allclose(total(chosen), expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [1e6, np.nan])
def test_a1_what_a_clip_of_the_batch_did(bad):
    """Negative control: one of 64 examples moves the sum by far more than 2 C."""

    def total(x, first):
        arrays = dpadambc.materialize(gradients(x))
        arrays, _ = first.update(arrays, first.init(PARAMS), PARAMS)
        tx = dpadambc.dp_sgd(1.0, SILENT, key=jax.random.key(0))
        grads = dpadambc.as_per_example(arrays, is_padding_example=NO_PADDING)
        return tx.update(grads, tx.init(PARAMS), PARAMS)[0]

    # All examples alike, which the first of them can shrink to nothing together.
    alike = jnp.tile(X[:1], (BATCH, 1))
    other = alike.at[0].set(jnp.full(8, bad))
    clipped_first = optax.clip_by_global_norm(64.0)
    moved = distance(total(alike, clipped_first), total(other, clipped_first))
    assert moved > 60
    without = optax.identity()
    assert distance(total(alike, without), total(other, without)) <= 2 * C * 1.0001


# A2: what an optimizer in `fit` may be.

NOISE = MECHANISM.noise_stddev
PLAIN = {
    "sgd": optax.sgd(0.1),
    "adam": optax.adam(0.1),
    "lion": optax.lion(0.1),
    "muon": optax.contrib.muon(0.1),
    "masked": optax.masked(optax.sgd(0.1), {"w": True, "b": False}),
    "multi_transform": optax.multi_transform(
        {"adam": dpadambc.adam_bc(0.1, NOISE), "sgd": optax.sgd(0.1)},
        {"w": "adam", "b": "sgd"},
    ),
    "ema first": optax.chain(optax.ema(0.9), optax.sgd(0.1)),
    "adam first": optax.chain(optax.scale_by_adam(), optax.sgd(0.1)),
    "every_fourth": optax.MultiSteps(optax.adam(0.1), 4),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.1), 3),
    "clipped again": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "schedule_free": optax.contrib.schedule_free_adamw(0.1),
    "injected": optax.inject_hyperparams(dpadambc.adamw_bc)(0.1, NOISE),
    "adam_bc": dpadambc.adam_bc(0.1, NOISE),
    "adamw_bc": dpadambc.adamw_bc(0.1, NOISE),
    "rms_bc": dpadambc.rms_bc(0.1, NOISE),
    "ademamix_bc": optimizers.ademamix_bc(0.1, NOISE),
    "adafactor_bc": optimizers.adafactor_bc(0.1, NOISE),
    "low pass first": optax.chain(
        transforms.low_pass((0.1,), (1.0, -0.9)), optax.sgd(0.1)
    ),
    "lookahead free": optax.chain(optax.trace(0.9), optax.scale(-0.1)),
    "rmsprop": optax.rmsprop(0.1),
    "frozen part": optax.multi_transform(
        {"adam": optax.adam(0.1), "still": optax.set_to_zero()},
        {"w": "adam", "b": "still"},
    ),
}
TWO = {"w": jnp.zeros(8), "b": jnp.zeros(())}


def affine(params, x):
    return (params["w"] @ x + params["b"] - x.sum()) ** 2


def spy():
    """An optimizer that shows what it gets."""
    seen = []

    def update(updates, state, params=None):
        jax.debug.callback(lambda g: seen.append(g), updates)
        return jax.tree.map(jnp.zeros_like, updates), state

    return optax.GradientTransformation(lambda p: optax.EmptyState(), update), seen


# One of each kind; `optax_contract_test` shows the private gradient to all.
KINDS_IN_FIT = {
    "adam",
    "muon",
    "multi_transform",
    "every_fourth",
    "injected",
    "adam_bc",
}


@pytest.mark.parametrize(
    "name", [name if name in KINDS_IN_FIT else common.thorough(name) for name in PLAIN]
)
def test_a2_any_optimizer_of_the_private_gradient_is_safe_in_fit(name):
    """Two data sets whose clipped sums agree end in the same state: no example is
    seen by another way."""
    loud = jnp.tile(jnp.array([[1e4], [1e4], [-1e4], [1e4]]), (BATCH // 4, 8))
    loss = lambda params, x: params["w"] @ x + 0 * params["b"]
    ends = [
        fit(
            PLAIN[name],
            loss,
            (scale * loud,),
            mechanism(iterations=5, sampling_prob=1.0),
            params=TWO,
        )
        for scale in (1.0, 100.0)
    ]
    one, two = (training.releasable(end)[1:] for end in ends)
    chex.assert_trees_all_close(one, two, rtol=2e-3, atol=2e-3)
    # Every trained coordinate that moves has moved by noise of its own.
    if name not in ("every_fourth", "frozen part", "masked"):
        assert np.asarray(one[0]["b"]) != 0


def test_a2_every_coordinate_gets_noise_of_the_mechanisms_level():
    size = 5_000
    tx, seen = spy()
    params = {"w": jnp.zeros(size), "frozen later": jnp.zeros(size)}
    loss = lambda params, x: jnp.sum(params["w"]) * 1e-12 * x[0]
    with pytest.warns(UserWarning, match="gets no gradient"):
        fit(tx, loss, mechanism=mechanism(iterations=4), params=params)
    jax.effects_barrier()
    assert len(seen) == 4
    for leaf in ("w", "frozen later"):
        drawn = np.stack([g[leaf] for g in seen])
        # The standard error of a standard deviation of n draws is 1 / sqrt(2 n).
        assert drawn.std() == pytest.approx(NOISE, rel=5 / np.sqrt(2 * drawn.size))
        correlation = np.corrcoef(drawn)[np.triu_indices(4, 1)]
        assert np.abs(correlation).max() < 5 / np.sqrt(size)


@pytest.mark.parametrize(
    "make",
    [
        lambda key: dpadambc.dp_sgd(0.1, MECHANISM, key=key),
        lambda key: dpadambc.dp_adam_bc(0.1, MECHANISM, key=key),
        lambda key: dpadambc.dp2_rmsprop(
            0.1, MECHANISM, key=key, interval=1, preconditioned_clip_norm=1.0
        ),
        lambda key: dpadambc.add_dp_noise(0.0, key=key),
        lambda key: optax.chain(dpadambc.add_dp_noise(0.001, key=key), optax.sgd(0.1)),
        lambda key: optax.MultiSteps(dpadambc.dp_sgd(0.1, MECHANISM, key=key), 2),
    ],
    ids=["dp_sgd", "dp_adam_bc", "dp2_rmsprop", "no noise", "little noise", "inside"],
)
def test_a2_optimizers_that_add_noise_of_their_own_are_refused(make):
    with pytest.raises(ValueError, match="fit clips and adds the noise itself"):
        fit(make(jax.random.key(0)))


def test_a2_a_factory_is_refused_with_what_to_pass():
    with pytest.raises(TypeError, match=r"adam_bc\(1e-3, mechanism.noise_stddev\)"):
        fit(functools.partial(dpadambc.dp_adam_bc, 0.1))
    with pytest.raises(TypeError, match="private gradient and the parameters alone"):
        fit(optax.contrib.reduce_on_plateau())


# What stands between the noise and the correction.

CHANGED = {
    "MultiSteps": lambda level: optax.MultiSteps(dpadambc.adam_bc(0.1, level), 4),
    "ema": lambda level: optax.chain(optax.ema(0.9), dpadambc.adam_bc(0.1, level)),
    "scale": lambda level: optax.chain(optax.scale(2.0), dpadambc.adam_bc(0.1, level)),
}


@pytest.mark.parametrize("make", CHANGED.values(), ids=CHANGED)
def test_a_stage_before_the_correction_is_refused_at_the_mechanisms_level(make):
    with pytest.raises(ValueError, match="the level of the noise that reaches it"):
        fit(make(NOISE))
    assert fit(make(NOISE / 2)).iterations == 20


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: tx,
        lambda tx: optax.masked(tx, True),
        common.slow(lambda tx: optax.apply_if_finite(tx, 3)),
        common.slow(lambda tx: optax.flatten(tx)),
        common.slow(
            lambda tx: optax.GradientTransformation(tx.init, jax.jit(tx.update))
        ),
        lambda tx: optax.chain(optax.identity(), tx, optax.ema(0.9)),
    ],
    ids=["plain", "masked", "if_finite", "flat", "jitted", "behind"],
)
def test_a_correction_that_gets_the_private_gradient_is_not(wrap):
    assert fit(wrap(dpadambc.adam_bc(0.1, NOISE))).iterations == 20


def test_a_correction_with_another_level_is_warned_of():
    with pytest.warns(UserWarning, match="takes out noise of 0.3, but the mechanism"):
        fit(dpadambc.adam_bc(0.1, 0.3))


def test_a_level_that_cannot_be_seen_is_warned_of_behind_a_stage():
    scheduled = mechanism(noise_multiplier=lambda step: 1.0 + (step > 10))
    level = lambda step: scheduled.noise_stddev(step) / 2
    hidden = optax.inject_hyperparams(dpadambc.adam_bc)(0.1, NOISE)
    with pytest.warns(UserWarning, match="cannot see which level"):
        fit(optax.MultiSteps(hidden, 4))
    assert fit(CHANGED["MultiSteps"](level), mechanism=scheduled).iterations == 20
    with pytest.raises(ValueError, match="that reaches it"):
        same = scheduled.noise_stddev
        fit(CHANGED["MultiSteps"](same), mechanism=scheduled)


@pytest.mark.parametrize(("k", "level"), [(4, 0.5), (4, 1.0)])
def test_behind_multi_steps_the_level_is_that_of_the_mean(k, level):
    """With sigma / sqrt(k) the corrected moment of noise alone is zero; with sigma it
    is off by -0.75 of the variance (the negative control)."""
    tx = optax.MultiSteps(dpadambc.scale_by_adam_bc(level, b2=0.9), k)
    params = jnp.zeros(20_000)
    draws = jax.random.normal(jax.random.key(0), (40 * k, 20_000))
    step = lambda state, g: (tx.update(g, state, params)[1], None)
    state, _ = jax.jit(lambda s: jax.lax.scan(step, s, draws))(tx.init(params))
    adam = state.inner_opt_state
    off = float(adam.nu.mean() - adam.noise_variance)
    assert off == pytest.approx(1 / k - level**2, abs=0.02)


PRIVATIZERS = {
    "one stage": (dpadambc.privatize(MECHANISM, key=jax.random.key(0)),),
    "clip and noise": (
        dpadambc.clip_per_example(C, normalize_by=B),
        dpadambc.add_dp_noise(100.0, key=jax.random.key(0)),
    ),
}


@pytest.mark.parametrize("privatizer", PRIVATIZERS.values(), ids=PRIVATIZERS)
def test_a2_a_loss_that_goes_past_the_noise_is_warned_of(privatizer):
    tx = optax.chain(*privatizer, optax.adam(0.1), optax.contrib.reduce_on_plateau())
    with pytest.warns(UserWarning, match="value, which has no noise"):
        tx.update(gradients(), tx.init(PARAMS), PARAMS, value=1.0)


def ascent(learning_rate):
    """Sharpness-aware: the gradient of a second point is asked for, and not noised."""
    toward = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    return optax.contrib.sam(
        optax.sgd(learning_rate), toward, sync_period=2, opaque_mode=True
    )


@pytest.mark.parametrize(
    "noise",
    [
        transforms.add_dp_noise(1.0, key=jax.random.key(0)),
        transforms.add_correlated_noise(1.0, (1.0, -0.5), key=jax.random.key(1)),
        transforms.add_banded_noise(1.0, (1.0, 0.5), key=jax.random.key(2)),
    ],
    ids=["add_dp_noise", "add_correlated_noise", "add_banded_noise"],
)
def test_a2_a_loss_past_the_noise_alone_is_warned_of(noise):
    """Behind `clipped_value_and_grad`, where no stage of the chain clips."""
    tx = optax.chain(noise, optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1))
    states = []
    for value in (0.0, -1e4):  # of one label that is another
        state = tx.init(PARAMS)
        for step in range(3):
            with pytest.warns(UserWarning, match="value, which has no noise"):
                _, state = tx.update(PARAMS, state, PARAMS, value=value * step)
        states.append(state[-1].scale)
    assert states[0] != states[1]  # what it did: a rate that tells of the label


@pytest.mark.parametrize("privatizer", PRIVATIZERS.values(), ids=PRIVATIZERS)
def test_a2_a_gradient_function_behind_the_noise_is_warned_of(privatizer):
    tx = optax.chain(*privatizer, ascent(1.0))
    total = lambda w: jnp.mean(X @ w)
    with pytest.warns(UserWarning, match="grad_fn, which has no noise"):
        updates, _ = tx.update(
            gradients(),
            tx.init(PARAMS),
            PARAMS,
            grad_fn=lambda w, _: jax.grad(total)(w),
        )
    # What it did: the update is the gradient without noise.
    chex.assert_trees_all_close(updates, -X.mean(0), rtol=1e-5)


# A3: several processes, in training/sharding_test. A4: collectives in the loss.


def through_a_scan(h, axis):
    step = lambda carry, _: (carry - jax.lax.pmean(carry, axis), None)
    return jax.lax.scan(step, h, length=2)[0]


COLLECTIVES = {
    "pmean": lambda h, axis: h - jax.lax.pmean(h, axis),
    "all_gather": lambda h, axis: jax.lax.all_gather(h, axis).sum(0),
    "ppermute": lambda h, axis: h + jax.lax.ppermute(h, axis, [(0, 1), (1, 0)]),
    "psum_scatter": lambda h, axis: jax.lax.psum_scatter(jnp.stack([h, h]), axis),
    "all_to_all": lambda h, axis: jax.lax.all_to_all(jnp.stack([h, h]), axis, 0, 0),
    "inside jit": lambda h, axis: h - jax.jit(lambda h: jax.lax.psum(h, axis))(h),
    "inside scan": through_a_scan,
}


def mixed_by(name, axis):
    return lambda w, x: jnp.sum(COLLECTIVES[name](jnp.tanh(w * x), axis))


def mesh_of(names, shape):
    size = int(np.prod(shape))
    kinds = (AxisType.Auto,) * len(names)
    return jax.make_mesh(shape, names, axis_types=kinds, devices=jax.devices()[:size])


def on_two_devices(fun, mesh, x=X, **options):
    mapped = jax.shard_map(
        lambda w, x: jax.lax.psum(fun(w, x), "data"),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
        **options,
    )
    return jax.jit(mapped)(
        PARAMS + 1, jax.device_put(x, NamedSharding(mesh, P("data")))
    )


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("check_vma", [True, False])
@both_methods
def test_a4_a_collective_over_the_axis_of_the_examples_is_refused(
    method, check_vma, name
):
    loss = mixed_by(name, "data")
    clipped = dpadambc.clipped_grad(loss, l2_clip_norm=C, normalize_by=B, method=method)
    mesh = mesh_of(("data",), (2,))
    with pytest.raises(ValueError, match="a collective in it.*'data'"):
        on_two_devices(clipped, mesh, check_vma=check_vma)


def test_a4_a_collective_under_vmap_is_refused():
    loss = mixed_by("pmean", "parts")
    clipped = dpadambc.clipped_grad(loss, l2_clip_norm=C, normalize_by=B)
    rows = X.reshape(2, BATCH // 2, 8)
    with pytest.raises(ValueError, match="a collective in it.*'parts'"):
        jax.vmap(lambda x: clipped(PARAMS + 1, x), axis_name="parts")(rows)


def test_a4_operations_that_are_given_the_whole_batch_are_refused():
    @jax.custom_batching.custom_vmap
    def centered(h):
        return h

    @centered.def_vmap
    def _(size, batched, h):
        return h - h.mean(0, keepdims=True), True

    def on_host(h):
        shape = jax.ShapeDtypeStruct(h.shape, h.dtype)
        return jax.pure_callback(lambda h: h, shape, h, vmap_method="expand_dims")

    for mixes in (centered, on_host):
        loss = lambda w, x, mixes=mixes: w @ jax.lax.stop_gradient(mixes(x))
        with pytest.raises(ValueError, match="a rule of its own for batches"):
            dpadambc.clipped_grad(loss, l2_clip_norm=C, normalize_by=B)(PARAMS, X)


@pytest.mark.slow
def test_a4_collectives_that_mix_no_examples_are_not():
    """Over an axis of the model, and over one that the loss makes for itself."""
    mesh = mesh_of(("data", "model"), (2, 2))

    def tensor_parallel(w, x):
        part = jax.lax.axis_index("model")
        own = jax.lax.dynamic_slice(w * x, (4 * part,), (4,))
        return jax.lax.psum(jnp.tanh(own).sum(), "model")

    clipped = dpadambc.clipped_grad(tensor_parallel, l2_clip_norm=C, normalize_by=B)
    mapped = jax.shard_map(
        lambda w, x: jax.lax.psum(clipped(w, x), "data"),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=True,
    )
    split = jax.device_put(X, NamedSharding(mesh, P("data")))
    # As on one device: each example is clipped as a whole (up to how JAX splits its
    # gradient over the axis of the model).
    assert np.isfinite(jax.jit(mapped)(PARAMS + 1, split)).all()

    def views(w, x):
        one = lambda x: jnp.tanh(w * x - jax.lax.pmean(w * x, "views")).sum()
        return jax.vmap(one, axis_name="views")(jnp.stack([x, 2 * x])).sum()

    assert np.isfinite(
        dpadambc.clipped_grad(views, l2_clip_norm=C, normalize_by=B)(PARAMS + 1, X)
    ).all()


def test_a4_what_synchronized_statistics_did(monkeypatch):
    """Negative control: one example replaced moves the sum by more than 2 C."""
    monkeypatch.setattr(_collectives, "refuse", lambda jaxpr, allowed: None)
    loss = lambda w, x: jnp.sum(jax.lax.pmean(jnp.tanh(w * x), "data") ** 2)
    clipped = dpadambc.clipped_grad(loss, l2_clip_norm=C, normalize_by=B)
    mesh = mesh_of(("data",), (2,))
    rows = 1 + jnp.abs(X)  # so that all gradients point the same way
    broken = rows.at[0].set(jnp.nan)
    sums = [on_two_devices(clipped, mesh, x) for x in (rows, broken)]
    assert distance(*sums) > 1.2 * C  # where leaving one out moves it by C


# A5: the mask.


@pytest.mark.parametrize("name", ["mask", "pad_mask", "weights", "is_valid", "padding"])
def test_a5_a_mask_by_another_name_is_refused(name):
    tx = dpadambc.dp_sgd(0.1, MECHANISM, key=jax.random.key(0))
    grads = dpadambc.per_example_grad(linear)(PARAMS, X)
    for value in (NO_PADDING, np.ones(BATCH, np.float32)):
        with pytest.raises(TypeError, match=f"is_padding_example, got {name}"):
            tx.update(grads, tx.init(PARAMS), PARAMS, **{name: value})


def forwards_nothing(tx):
    return optax.GradientTransformation(
        tx.init, lambda updates, state, params=None: tx.update(updates, state, params)
    )


@both_methods
def test_a5_a_mask_that_is_forgotten_or_lost_is_an_error(method):
    tx = dpadambc.dp_sgd(0.1, MECHANISM, key=jax.random.key(0))
    grads = dpadambc.per_example_grad(linear, method=method)(PARAMS, X)
    state = tx.init(PARAMS)
    with pytest.raises(ValueError, match="Expected is_padding_example: batches of"):
        tx.update(grads, state, PARAMS)
    lost = forwards_nothing(tx)
    with pytest.raises(TypeError, match="is_padding_example"):
        lost.update(grads, state, PARAMS, is_padding_example=NO_PADDING)
    dropped = optax.with_extra_args_support(lost)
    with pytest.raises(ValueError, match="a wrapper that does not pass it on loses it"):
        dropped.update(grads, state, PARAMS, is_padding_example=NO_PADDING)
    # It is the gradients' own, if they were given it.
    _, state = lost.update(gradients(method=method), state, PARAMS)
    tx.update(grads, state, PARAMS, is_padding_example=NO_PADDING)


PADDED = {
    "poisson": (mechanism(), True),
    "everybody": (mechanism(sampling_prob=1.0), False),
    "truncated": (
        dpadambc.TruncatedPoissonGaussian(
            l2_clip_norm=C,
            noise_multiplier=1.0,
            sampling_prob=0.5,
            truncated_batch_size=40,
            num_examples=BATCH,
            iterations=1,
            normalize_by=B,
        ),
        True,
    ),
    "fixed": (
        dpadambc.FixedSizeGaussian(
            l2_clip_norm=C,
            noise_multiplier=1.0,
            batch_size=8,
            num_examples=BATCH,
            iterations=1,
            normalize_by=B,
        ),
        False,
    ),
}
PADDED["correlated"] = (
    dpadambc.mechanisms.CorrelatedGaussian(
        l2_clip_norm=C,
        noise_multiplier=1.0,
        noising_coefficients=(1.0, -0.5),
        batches_per_epoch=2,
        iterations=2,
        normalize_by=B,
    ),
    True,
)
PADDED["banded"] = (
    dpadambc.mechanisms.BandedGaussian(
        l2_clip_norm=C,
        noise_multiplier=1.0,
        strategy_coefficients=(1.0, 0.5),
        sampling_prob=1.0,
        iterations=2,
        normalize_by=B,
    ),
    True,
)
for size in (8, 10):
    PADDED[f"shuffled by {size}"] = (
        dpadambc.ShuffledGaussian(
            l2_clip_norm=C,
            noise_multiplier=1.0,
            batch_size=size,
            num_examples=BATCH,
            iterations=10,
            normalize_by=B,
        ),
        size == 10,
    )


@pytest.mark.parametrize(("made", "is_padded"), PADDED.values(), ids=PADDED)
def test_a5_masks_are_asked_for_where_batches_are_padded(made, is_padded):
    assert made.pads_batches == is_padded
    tx = dpadambc.privatize(made, key=jax.random.key(0))
    grads = dpadambc.per_example_grad(linear)(PARAMS, X[:8])
    if is_padded:
        with pytest.raises(ValueError, match="Expected is_padding_example"):
            tx.update(grads, tx.init(PARAMS), PARAMS)
    else:
        tx.update(grads, tx.init(PARAMS), PARAMS)
        size = getattr(made, "num_examples", BATCH)
        batches = list(made.batches(np.random.default_rng(0), num_examples=size))
        if not isinstance(made, dpadambc.ShuffledGaussian):
            batches.append(made.sample(jax.random.key(0), num_examples=size))
        assert not any(batch.is_padding_example.any() for batch in batches)


@pytest.mark.slow
def test_a5_what_a_forgotten_mask_did():
    """Negative control: the last example counts as often as there is padding."""
    rare = mechanism(sampling_prob=0.05)
    batch = rare.sample(jax.random.key(1), num_examples=BATCH)
    padding = int(batch.is_padding_example.sum())
    last_took_part = bool((batch.indices == BATCH - 1).any())
    rows = X.at[-1].set(1e6)[batch.indices]
    clipped = dpadambc.clipped_grad(linear, l2_clip_norm=C, normalize_by=B)
    forgotten = clipped(PARAMS, rows)
    without = clipped(PARAMS, jnp.where(batch.is_padding_example[:, None], 0, rows))
    assert not last_took_part and padding > 5
    assert distance(forgotten, without) > 0.99 * padding * C


# A6: excess precision.


def bfloat16_norms(seed):
    """Of clipped gradients, one example at a time, all of them far above C."""
    rng = np.random.default_rng(seed)
    params = {
        "w": jnp.asarray(rng.normal(size=(9, 7)), jnp.bfloat16),
        "v": jnp.asarray(rng.normal(size=(7, 5)), jnp.bfloat16),
    }
    x = jnp.asarray(rng.normal(size=(40, 3, 9)), jnp.bfloat16)

    def loss(params, x):
        return jnp.sum(jnp.tanh(jnp.sin(x * 3) @ params["w"]) @ params["v"] * 7)

    clipped = dpadambc.clipped_grad(loss, l2_clip_norm=1e-2, normalize_by=1.0)
    norm = lambda x: optax.tree.norm(clipped(params, x[None]))
    return jax.jit(jax.vmap(norm))(x), jax.jit(norm), x


@pytest.mark.parametrize("seed", range(3))
def test_a6_clipped_norms_in_bfloat16_do_not_exceed_the_bound_under_jit(seed):
    norms, norm, x = bfloat16_norms(seed)
    alone = [float(norm(row)) for row in x[:10]]
    assert max(float(norms.max()), *alone) <= 1e-2 * (1 + 1e-4)


# A7: rows that are not there.


def test_a7_rows_of_another_data_set_are_refused():
    batch = MECHANISM.sample(jax.random.key(0), num_examples=1000)
    with pytest.raises(ValueError, match="Expected 1000 rows, as they were sampled"):
        batch.gather((X,))
    # What an index does: the last row counts for all that are not there.
    assert int((batch.indices >= BATCH - 1).sum()) > 100


@pytest.mark.parametrize("host", [True, False])
def test_a7_padding_is_zero_rather_than_the_last_example(host):
    if host:
        rng = np.random.default_rng(0)
        batch = next(mechanism(sampling_prob=0.1).batches(rng, num_examples=BATCH))
        data = {"x": np.asarray(X) + 1, "i": np.arange(BATCH) + 1}
    else:
        batch = MECHANISM.sample(jax.random.key(0), num_examples=BATCH)
        data = {"x": X + 1, "i": jnp.arange(BATCH) + 1}
    rows = batch.gather(data)
    padding = np.asarray(batch.is_padding_example)
    assert padding.any() and not padding.all()
    for name, column in rows.items():
        assert not np.asarray(column)[padding].any()
        present = np.asarray(batch.indices)[~padding]
        np.testing.assert_array_equal(
            np.asarray(column)[~padding], np.asarray(data[name])[present]
        )


# A8: undifferentiated calls, complex numbers, keys, callbacks.


def kernel_gradient(x, g):
    convolved = lambda k: jax.lax.conv_general_dilated(
        x, k, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return jax.vjp(convolved, jnp.zeros((3, 2, 4)))[1](g)[0]


def with_own_jvp():
    fun = jax.custom_jvp(kernel_gradient)
    fun.defjvp(lambda primals, tangents: (fun(*primals), fun(*primals)))
    return fun


def with_own_vjp():
    fun = jax.custom_vjp(kernel_gradient)
    fun.defvjp(lambda x, g: (fun(x, g), None), lambda residual, g: (g, g))
    return fun


def in_a_while(x, g):
    step = lambda carry: (carry[0] + 1, carry[1] + kernel_gradient(x, g))
    return jax.lax.while_loop(
        lambda carry: carry[0] < 2, step, (0, jnp.zeros((3, 2, 4)))
    )[1]


@pytest.mark.parametrize(
    "call",
    [with_own_jvp(), *map(common.slow, [with_own_vjp(), in_a_while])],
    ids=["jvp", "vjp", "while"],
)
@both_methods
def test_a8_nan_stays_in_its_example_through_calls_of_ones_own(method, call):
    def loss(w, x, g):
        return jnp.sum(w * jax.lax.stop_gradient(call(x, g)))

    x = jnp.asarray(RNG.normal(size=(4, 1, 8, 2)), jnp.float32)
    g = jnp.asarray(RNG.normal(size=(4, 1, 6, 4)), jnp.float32)
    clipped = dpadambc.clipped_grad(loss, l2_clip_norm=C, normalize_by=B, method=method)
    params = jnp.ones((3, 2, 4))
    broken = clipped(params, x.at[0].set(jnp.nan), g)
    np.testing.assert_allclose(broken, clipped(params, x[1:], g[1:]), atol=1e-6)
    assert jnp.linalg.norm(broken) > 0.1


def test_a8_complex_updates_are_refused():
    params = jnp.zeros(3, jnp.complex64)
    for tx in (
        dpadambc.add_dp_noise(1.0, key=jax.random.key(0)),
        dpadambc.scale_by_adam_bc(1.0),
    ):
        with pytest.raises(TypeError, match="Expected gradients of real numbers"):
            tx.update(params, tx.init(params), params)
    with pytest.raises(TypeError, match="floating, got complex64"):
        dpadambc.per_example_norms(jnp.full((2, 3), 3 + 4j))
    with pytest.raises(TypeError, match="floating, got complex64"):
        dpadambc.as_per_example(jnp.full((2, 3), 3 + 4j))


def test_a8_a_public_draw_with_the_key_shows_nothing_of_the_runs_keys():
    key = jax.random.key(3)
    state = training.init_state(PARAMS, MECHANISM, optax.sgd(0.1), key=key)
    words = lambda key: set(np.asarray(jax.random.key_data(key)).ravel().tolist())
    secret = (
        words(state.noise.rng_key) | words(state.sampling_key) | words(state.loss_key)
    )
    shown = set(np.asarray(jax.random.bits(key, (10_000,))).tolist())
    for split in (jax.random.split(key, 100), jax.random.split(key, 2)):
        shown |= words(split) | words(jax.vmap(lambda k: jax.random.split(k))(split))
    assert len(secret) == 6 and not secret & shown
    # Negative control: keys split from it without a domain are what it draws.
    bare = keys.of_domain(jax.random.split(key)[0], "add_dp_noise")
    assert words(jax.random.split(key)) & shown and not words(bare) & shown


def test_a8_a_loss_that_asks_the_host_is_refused_with_checkpoints(tmp_path):
    def asks(w, x):
        scale = jax.pure_callback(
            lambda: np.float32(2), jax.ShapeDtypeStruct((), jnp.float32)
        )
        return scale * square(w, x)

    with pytest.raises(ValueError, match="a callback to the host in it"):
        fit(loss_fn=asks, checkpoints=checkpoints.Checkpoints(tmp_path))
    assert fit(loss_fn=asks).iterations == 20


# A9: losses from which nothing is learnt.


def contrast(w, x):
    """InfoNCE on a batch of one."""
    row = (x * w)[None]
    scores = row @ row.T
    return -jax.nn.log_softmax(scores).trace()


def batch_normalized(w, x):
    batch = (x * w)[None]
    centered = batch - batch.mean(0, keepdims=True)
    return jnp.sum(centered / jnp.sqrt(centered.var(0, keepdims=True) + 1e-5))


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (lambda w, x: x.sum(), "gets no gradient"),
        common.slow(lambda w, x: jax.lax.stop_gradient(w) @ x, "gets no gradient"),
        common.slow(lambda w, x: jnp.sum(0 * w * x), "No example of the first steps"),
        common.slow(contrast, "No example of the first steps has a gradient"),
        (batch_normalized, "subtracts a mean over an axis of size one"),
        (lambda w, x: jnp.log(-1 - (w @ x) ** 2), "every example.* is NaN"),
        (lambda w, x: jnp.log(w @ x), r"\d+ of \d+ examples of .* is NaN"),
        (
            lambda w, x: jnp.log(w @ x + 5.8),
            r"\d of \d+ examples of .* is NaN: .* public",
        ),
    ],
    ids=["without", "stopped", "zero", "contrast", "batch norm", "nan", "many", "few"],
)
def test_a9_losses_that_teach_nothing_are_warned_of(loss, what):
    with pytest.warns(UserWarning) as caught:
        fit(loss_fn=loss, params=PARAMS + 1, mechanism=mechanism(iterations=3))
    assert any(re.search(what, str(w.message)) for w in caught)


def test_a9_a_loss_that_teaches_is_not():
    """Warnings are errors here. And an empty batch says nothing."""
    fit()
    fit(mechanism=mechanism(sampling_prob=1e-9, iterations=3))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
@pytest.mark.parametrize("use", ["mask", "nothing", "zeros"])
def test_a9_one_mask_of_dropout_for_all_is_warned_of(use, wrap):
    """Warnings are errors here, also of a key of which nothing comes."""
    frozen = {"rngs": jax.random.key(0), "scale": jnp.ones(PARAMS.shape)}

    def loss(w, frozen, x):
        if use == "mask":
            x = jax.random.bernoulli(frozen["rngs"], 0.5, x.shape) * x
        if use == "zeros":  # as the first state of an nnx.RNN
            key = jax.random.fold_in(frozen["rngs"], 1)
            x = x + jax.nn.initializers.zeros(key, x.shape)
        return linear(w, frozen["scale"] * x)

    told = pytest.warns(
        UserWarning, match=r"a key at frozen\['rngs'\]: by itself it gives"
    )
    with told if use == "mask" else contextlib.nullcontext():
        fit(loss_fn=wrap(loss), frozen=frozen)


def test_a9_a_run_that_diverges_is_warned_of():
    """Its first steps are as they should be."""
    with pytest.warns(UserWarning, match="every example of the last steps is NaN"):
        fit(optimizer=optax.sgd(np.nan), mechanism=mechanism(iterations=3))


def test_a9_noise_in_another_unit_is_warned_of():
    """The noise of a mean, in units of the clip norm, hides nobody."""
    with pytest.warns(UserWarning, match="epsilon inf. Is the noise_multiplier, 0.00"):
        fit(mechanism=mechanism(noise_multiplier=1e-3))
    # Without noise nothing else is expected.
    assert fit(mechanism=mechanism(noise_multiplier=0.0)).epsilon == np.inf


# A10: another key for the same folder.


def test_a10_another_key_for_the_same_folder_is_refused(tmp_path):
    saved = lambda: checkpoints.Checkpoints(tmp_path)
    first = fit(checkpoints=saved())
    with pytest.raises(ValueError, match="of another run.*key: another, which would"):
        fit(checkpoints=saved(), key=jax.random.key(1))
    with pytest.raises(ValueError, match="key: another"):
        fit(checkpoints=saved(), key=training.secret_key())
    again = fit(checkpoints=saved())
    np.testing.assert_array_equal(again.state.params, first.state.params)


@pytest.mark.slow
def test_a10_fewer_steps_than_were_planned_are_warned_of(tmp_path):
    """After a stop by what was released, the folder has the steps that were taken."""

    def stop(progress):
        if progress.iterations == 8:
            raise training.Stop

    few = mechanism(iterations=8)
    options = dict(optimizer=optax.adam(0.1), steps_per_call=8)
    saved = lambda: checkpoints.Checkpoints(tmp_path)
    stopped = fit(checkpoints=saved(), callback=stop, **options)
    with pytest.warns(UserWarning, match="to take 20 steps, and is asked for 8 now"):
        again = fit(checkpoints=saved(), mechanism=few, **options)
    assert stopped.iterations == again.iterations == 8
    assert stopped.epsilon == MECHANISM.epsilon(1e-5) > again.epsilon
    whole = fit(checkpoints=saved(), **options)
    assert whole.iterations == 20 and whole.epsilon == stopped.epsilon


def test_a10_a_run_begun_with_entropy_goes_on_with_its_own_key(tmp_path, caplog):
    saved = lambda: checkpoints.Checkpoints(tmp_path)
    first = fit(checkpoints=saved(), key=training.secret_key())
    again = fit(checkpoints=saved(), key=training.secret_key())
    np.testing.assert_array_equal(again.state.params, first.state.params)
    assert first.resumed_from is None and again.resumed_from == 20
    assert "Goes on from step 20 of 20" in caplog.text
    assert (
        "with the keys that are there" in caplog.text and str(tmp_path) in caplog.text
    )
    with pytest.raises(ValueError, match="key: another"):
        fit(checkpoints=saved(), key=jax.random.key(1))


@pytest.mark.slow
def test_a10_a_key_of_entropy_that_was_kept_goes_on_too(tmp_path, monkeypatch):
    saved, key = lambda: checkpoints.Checkpoints(tmp_path), training.secret_key()
    fit(checkpoints=saved(), key=key)
    monkeypatch.setattr(training._keys, "_DRAWN", set())  # as in another process
    assert fit(checkpoints=saved(), key=key).resumed_from == 20


# B1, B2: epsilon that is astronomical.


@pytest.mark.parametrize("z", [0.0, 1e-12, 1e-6, 1e-3])
@pytest.mark.parametrize("made", [made for made, _ in PADDED.values()], ids=PADDED)
def test_b1_b2_epsilon_of_hardly_any_noise_is_infinite_at_once(made, z):
    noisy = dataclasses.replace(made, noise_multiplier=z)
    epsilon = noisy.epsilon(1e-5)
    assert epsilon > 1e4
    if z == 0 or noisy._default_accountant == "pld":
        assert epsilon == np.inf


def test_b1_graphs_too():
    for z in (0.0, 1e-9):
        mechanism = dpadambc.graphs.PoissonGaussian(
            l2_clip_norm=1.0,
            noise_multiplier=z,
            max_terms=3,
            sampling_prob=0.1,
            iterations=10,
            normalize_by=1,
        )
        assert mechanism.epsilon(1e-5) == np.inf


def test_b1_epsilon_is_computed_before_the_first_step(monkeypatch):
    def fails(self, *args, **options):
        raise MemoryError("364 TiB")

    monkeypatch.setattr(dpadambc.PoissonGaussian, "epsilon", fails)
    heard = []
    with pytest.raises(MemoryError):
        fit(callback=heard.append)
    assert not heard


def test_b2_a_run_without_noise_says_that_it_is_not_private():
    fixed, _ = PADDED["fixed"]
    silent = dataclasses.replace(fixed, noise_multiplier=0.0, iterations=3)
    assert fit(mechanism=silent).epsilon == np.inf
    with pytest.warns(UserWarning, match="got epsilon inf"):
        assert fit(mechanism=mechanism(noise_multiplier=1e-9)).epsilon == np.inf


def test_epsilon_below_the_guard_is_what_it_was():
    """The guard is far from what anybody asks for."""
    assert mechanism(noise_multiplier=0.3).epsilon(1e-5) < 1e3
    assert 1e3 < mechanism(noise_multiplier=0.05).epsilon(1e-5) < np.inf


# A11: parts of one gradient, each with an optimizer of its own.


def two_parts(a, b, x):
    return a @ x + b @ x


def test_a11_a_part_of_the_gradients_is_refused():
    """Backbone and head, say: each part alone has a norm of C."""
    both = dpadambc.per_example_grad(two_parts, argnums=(0, 1))
    grads = both(PARAMS, PARAMS, X, is_padding_example=NO_PADDING)
    tx = dpadambc.dp_sgd(0.1, MECHANISM, key=jax.random.key(0))
    with pytest.raises(ValueError, match="all 2 parameters .* got 1 of them"):
        tx.update(grads[0], tx.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="got 1 of them"):
        jax.jit(tx.update)(grads[0], tx.init(PARAMS), PARAMS)
    clip = dpadambc.clip_per_example(C, normalize_by=B)
    with pytest.warns(UserWarning, match="sees a part of the parameters only"):
        clip.update(grads[0], clip.init(PARAMS), PARAMS)
    tx.update(grads, tx.init((PARAMS, PARAMS)), (PARAMS, PARAMS))
    alone = dpadambc.per_example_grad(two_parts, batch_argnums=2)
    grads = alone(PARAMS, PARAMS, X, is_padding_example=NO_PADDING)
    tx.update(grads, tx.init(PARAMS), PARAMS)


@pytest.mark.slow
def test_a11_what_two_parts_did():
    """Negative control: clipped apart, one example moves them by the root of 2 C."""
    rows = jnp.full((1, 8), 1e3)
    parts = [
        dpadambc.clipped_grad(
            two_parts, argnum, batch_argnums=2, l2_clip_norm=C, normalize_by=B
        )(PARAMS, PARAMS, rows)
        for argnum in (0, 1)
    ]
    assert optax.tree.norm(parts) > 1.41 * C
    together = dpadambc.clipped_grad(two_parts, (0, 1), l2_clip_norm=C, normalize_by=B)
    assert optax.tree.norm(together(PARAMS, PARAMS, rows)) <= C * 1.0001


# A12: batches of another size than the mechanism draws.


@pytest.mark.parametrize("name", ["fixed", "shuffled by 8"])
def test_a12_a_batch_of_another_size_than_the_mechanism_draws_is_refused(name):
    made, _ = PADDED[name]
    tx = dpadambc.privatize(made, key=jax.random.key(0))
    state, grad_fn = tx.init(PARAMS), dpadambc.per_example_grad(linear)
    for update in (tx.update, jax.jit(tx.update)):
        for size in (BATCH, 5):  # the last of an epoch of a loader is smaller
            with pytest.raises(ValueError, match=f"Expected 8 examples.*got {size}"):
                update(grad_fn(PARAMS, X[:size]), state, PARAMS)
    _, state = tx.update(grad_fn(PARAMS, X[:8]), state, PARAMS)
    # A loader's own padding, for several devices say, is told of.
    padding, gradients = jnp.arange(16) >= 8, grad_fn(PARAMS, X[:16])
    _, state = tx.update(gradients, state, PARAMS, is_padding_example=padding)
    tx.update(grad_fn(PARAMS, X[:16], is_padding_example=padding), state, PARAMS)


def test_a12_what_a_larger_batch_spends():
    """Negative control: epsilon of batches of 8, and of those of 64 that were given."""
    stated = dataclasses.replace(PADDED["fixed"][0], iterations=20)
    given = dataclasses.replace(stated, batch_size=BATCH)
    assert given.epsilon(1e-5) > 2.5 * stated.epsilon(1e-5)


def test_a12_what_the_epochs_of_a_loader_spend():
    """Negative control: 64 of 600 in each batch but the last of an epoch, with 24."""
    numbers = dict(
        l2_clip_norm=C,
        noise_multiplier=2.0,
        batch_size=64,
        num_examples=600,
        iterations=20,
        normalize_by=64.0,
    )
    stated = dpadambc.FixedSizeGaussian(**numbers).epsilon(1e-5)
    spent = dpadambc.ShuffledGaussian(**numbers).epsilon(1e-5)
    assert (round(stated, 1), round(spent, 1)) == (1.2, 2.9)


# A13: noise for a part of the parameters.


def test_a13_noise_for_a_part_is_warned_of():
    noise = dpadambc.add_dp_noise(1.0, key=jax.random.key(0))
    params = {"w": PARAMS, "b": PARAMS}
    for some in (
        optax.masked(noise, {"w": True, "b": False}),
        optax.multi_transform({"w": noise, "b": noise}, {"w": "w", "b": "b"}),
    ):
        with pytest.warns(UserWarning, match="adds noise to no other"):
            some.init(params)
    noise.init(params)


@pytest.mark.filterwarnings("ignore:add_dp_noise sees a part")
def test_a13_what_is_left_out_has_no_noise():
    """Negative control."""
    noise = dpadambc.add_dp_noise(1.0, key=jax.random.key(0))
    params = {"w": PARAMS, "b": PARAMS}
    some = optax.masked(noise, {"w": True, "b": False})
    noised, _ = some.update(params, some.init(params), params)
    assert noised["w"].all() and not noised["b"].any()


# A14: the data in the loss of every example.


def mixed_up(w, x, key):
    """The mean with another row of the data, closed over."""
    other = X[jax.random.randint(key, (), 0, BATCH)]
    return square(w, (x + other) / 2)


def test_a14_rows_of_the_data_in_the_loss_are_warned_of():
    with pytest.warns(UserWarning, match="64 rows of the data in it, closed over"):
        fit(loss_fn=mixed_up, uses_key=True)
    attends = lambda w, memory, x: square(w, jax.nn.softmax(memory @ x) @ memory)
    with pytest.warns(UserWarning, match="has 32 rows of the data in it"):
        fit(loss_fn=attends, frozen=X[32:])
    public = RNG.normal(size=X.shape).astype(np.float32)
    fit(loss_fn=attends, frozen=public)


@pytest.mark.slow
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a14_rows_of_the_data_in_a_preconditioner_are_warned_of(is_frozen):
    """The row of one person would turn the gradients of all."""

    def run(examples):
        made = preconditioning.kronecker_preconditioner(
            linear, PARAMS, public_examples=(examples,)
        )
        if not is_frozen:
            return fit(loss_fn=preconditioning.preconditioned(linear, made))
        with_it = lambda w, made, x: preconditioning.preconditioned(linear, made)(w, x)
        return fit(loss_fn=with_it, frozen=made)

    with pytest.warns(UserWarning, match="64 rows .*in what a preconditioner is made"):
        run(X)
    with pytest.warns(UserWarning, match="32 rows .*in what a preconditioner is made"):
        run(X[:32])  # an array that nobody else has
    run(RNG.normal(size=X.shape).astype(np.float32))
    gone = X + 0
    with_it = preconditioning.preconditioned(
        linear,
        preconditioning.kronecker_preconditioner(
            linear, PARAMS, public_examples=(gone,)
        ),
    )
    gone.delete()
    fit(loss_fn=with_it)  # what is gone cannot be looked at


def test_a14_rows_of_the_data_in_the_optimizer_are_warned_of():
    polyak = optax.polyak_sgd()
    loss = lambda w: jnp.mean(jax.vmap(square, (None, 0))(w, X))
    told = lambda g, s, p: polyak.update(g, s, p, value=loss(p))
    with pytest.warns(UserWarning, match="64 rows of the data in it, closed over"):
        fit(optimizer=optax.GradientTransformation(polyak.init, told))


def test_a14_labels_in_the_loss_are_warned_of():
    """Such as a weight by how often a class is among all labels."""
    labels = RNG.integers(2, size=BATCH)
    weighted = lambda w, seen, x, y: square(w, x) / (1 + jnp.sum(seen == y))
    closing_over = lambda w, x, y: weighted(w, jnp.asarray(labels), x, y)
    with pytest.warns(UserWarning, match="64 rows of the data in it, closed over"):
        fit(loss_fn=closing_over, data=(X, labels))
    half = labels[:32].astype(np.float32)
    with pytest.warns(UserWarning, match="has 32 rows of the data in it"):
        fit(loss_fn=weighted, data=(X, labels), frozen=half)
    others = RNG.integers(2, size=BATCH), np.arange(BATCH), np.zeros(BATCH)
    for public in others:
        fit(loss_fn=weighted, data=(X, labels), frozen=public.astype(np.float32))


def test_a14_a_part_of_a_column_is_found_wherever_it_is():
    labels = RNG.integers(2, size=20_000)
    found = lambda x: _rows._num_in_a_column([x], (np.zeros((20_000, 3)), labels))
    assert found(labels[15_000:].astype(np.float32)) == 5_000
    assert not found(labels[15_000:][::-1]) and not found(RNG.integers(2, size=5_000))
    rare = (RNG.random(20_000) < 0.05).astype(int)
    one_of_many = (np.arange(150) == 70).astype(int)  # chance has it among rare ones
    assert not _rows._num_in_a_column([one_of_many], (labels, rare))
    hours = np.sin(np.arange(20_000) % 24 * np.pi / 12)
    assert not _rows._num_in_a_column([hours[:24]], (hours,))


def test_a14_rows_of_the_data_in_the_optimizer_of_a_search_are_warned_of():
    def reads(learning_rate):
        scale = lambda updates, _: jnp.tanh(X.sum()) * optax.tree.norm(updates)
        sgd = optax.sgd(learning_rate)
        told = lambda g, s, p: sgd.update(optax.tree.scale(scale(g, p), g), s, p)
        return optax.GradientTransformation(sgd.init, told)

    with pytest.warns(UserWarning, match="64 rows of the data in it, closed over"):
        training.search(
            square,
            PARAMS,
            (X,),
            FEW["mechanism"],
            reads,
            [0.1],
            trials=trials.Fixed(1),
            score=training.PublicScore(square, (jnp.ones((3, 8)),)),
            key=jax.random.key(0),
            target_delta=1e-5,
            spent=(),
        )


@pytest.mark.slow
def test_a14_what_they_did():
    """Negative control: a row that is not in the batch moves all gradients in it."""
    centered = lambda w, rows, x: linear(w, x - rows.mean(0))
    clipped = dpadambc.clipped_grad(
        centered, batch_argnums=2, l2_clip_norm=C, normalize_by=B
    )
    moved = distance(*(clipped(PARAMS, one_replaced(by), X[1:]) for by in (1e3, -1e3)))
    assert moved > 10 * C


# A15: terms of a graph, and the epsilon of examples.


def of_nodes(max_terms):
    numbers = {
        f.name: getattr(MECHANISM, f.name) for f in dataclasses.fields(MECHANISM)
    }
    return dpadambc.graphs.PoissonGaussian(max_terms=max_terms, **numbers)


def test_a15_subgraphs_are_refused_with_a_mechanism_of_examples():
    members = jnp.stack([jnp.arange(BATCH), jnp.zeros(BATCH, int)], 1)
    gathered = lambda w, i: square(w, dpadambc.graphs.gather(X, i).sum(0))
    in_cond = lambda w, i: jax.lax.cond(w[0] > 2, gathered, jax.jit(gathered), w, i)
    turns = lambda i: jax.lax.while_loop(
        lambda n: n < jnp.minimum(jnp.abs(dpadambc.graphs.gather(X, i)).sum(), 3),
        *(lambda n: n + 1, 0),
    )
    in_while = lambda w, i: square(w, turns(i) * jnp.ones(len(w)))
    for loss in (gathered, jax.checkpoint(gathered), in_cond, in_while):
        with pytest.raises(ValueError, match="Expected a mechanism of nodes.*max_term"):
            fit(loss_fn=loss, data=(members,))
    fit(loss_fn=gathered, data=(members,), mechanism=of_nodes(BATCH))
    assert of_nodes(BATCH).sensitivity > 100 * MECHANISM.sensitivity
    # Public features, of which no node is protected: an index, and no gather.
    fit(loss_fn=lambda w, i: square(w, X[i].sum(0)), data=(members,))


class OfRoots:
    """A source of subgraphs, one root each."""

    def __init__(self, subgraphs):
        self.subgraphs = subgraphs

    def __len__(self):
        return len(self.subgraphs.members)

    def __getitem__(self, index):
        return (jax.tree.map(lambda x: x[index], self.subgraphs),)


def bounded(max_memberships):
    """Each root with the next one, or alone."""
    nodes = np.arange(BATCH)
    return dpadambc.graphs.subgraphs(
        *(nodes, (nodes + 1) % BATCH, nodes),
        max_memberships=max_memberships,
        max_degree=2,
    )


def test_a15_subgraphs_of_more_terms_than_are_accounted_for_are_refused():
    """By their type: of arrays and of a source, gathered or not."""
    found = bounded(2)
    gather = lambda w, of: square(w, dpadambc.graphs.gather(X, of.members).sum(0))
    indexed = lambda w, of: square(w, X[of.members].sum(0))
    for data in ((found,), OfRoots(found)):
        with pytest.raises(ValueError, match="at most 2 terms.*, got 3. Give it max_t"):
            fit(loss_fn=gather, data=data, mechanism=of_nodes(2))
        with pytest.raises(
            ValueError, match="at most 1 terms, which this PoissonGauss"
        ):
            fit(loss_fn=indexed, data=data)
    replaced = dataclasses.replace(found, max_terms=5)  # nodes that get another list
    with pytest.raises(ValueError, match="at most 4 terms.*, got 5"):
        fit(loss_fn=gather, data=(replaced,), mechanism=of_nodes(4))


def test_a15_subgraphs_of_as_many_terms_are_not_refused():
    """Nor those of fewer, nor arrays of members, of which the caller knows."""
    found = bounded(2)
    gather = lambda w, of: square(w, dpadambc.graphs.gather(X, of.members).sum(0))
    for data, terms in (((found,), 3), ((found,), 4), (OfRoots(found), 3)):
        fit(loss_fn=gather, data=data, mechanism=of_nodes(terms))
    indexed = lambda w, of: square(w, X[of.members].sum(0))
    fit(loss_fn=indexed, data=(bounded(0),))
    fit(loss_fn=lambda w, i: square(w, X[i].sum(0)), data=(found.members,))


WITH_GAPS = jnp.stack([jnp.arange(BATCH), jnp.full(BATCH, -1)], 1)


@pytest.mark.slow
def test_a15_what_an_index_did():
    """Negative control: the last node is in all terms."""

    def total(take, last):
        features = X.at[-1].set(last)
        loss = lambda w, i: linear(w, take(features, i).sum(0))
        clipped = dpadambc.clipped_grad(loss, l2_clip_norm=C, normalize_by=B)
        return clipped(PARAMS, WITH_GAPS[:-1])

    moved = lambda take: distance(total(take, 1e3), total(take, -1e3))
    assert moved(lambda features, i: features[i]) > 10 * C
    assert moved(dpadambc.graphs.gather) == 0


def test_a15_what_one_node_did():
    """Negative control: node 0 is in all terms."""
    members = jnp.stack([jnp.arange(BATCH), jnp.zeros(BATCH, int)], 1)

    def total(features):
        loss = lambda w, i: linear(w, dpadambc.graphs.gather(features, i).sum(0))
        clipped = dpadambc.clipped_grad(loss, l2_clip_norm=C, normalize_by=B)
        return clipped(PARAMS, members[1:])

    assert distance(total(one_replaced(1e3)), total(one_replaced(-1e3))) > 10 * C


# A16: more steps, in a loop by hand, than epsilon is for.


def test_a16_steps_after_the_last_are_refused():
    made = dataclasses.replace(MECHANISM, iterations=3)
    draw = lambda step: made.sample_step(jax.random.key(0), step, num_examples=BATCH)
    for step in (0, np.int64(2)):
        draw(step)
    for step in (3, np.int64(3)):
        with pytest.raises(ValueError, match="Expected a step below 3.*got 3"):
            draw(step)
    # A step on the device is not waited for, and fit counts its own steps.
    jax.jit(draw)(3)
    draw(jnp.asarray(3))


def test_a16_fractions_of_a_step_are_refused():
    made = dataclasses.replace(MECHANISM, iterations=10)
    draw = lambda step: made.sample_step(jax.random.key(0), step, num_examples=BATCH)
    for step in (0.5, 1.0, np.float64(1), jnp.float32(1), -1, np.arange(2)):
        with pytest.raises(ValueError, match="step to be a whole number >= 0"):
            draw(step)
    with pytest.raises(ValueError, match="step to be a whole number >= 0"):
        jax.jit(draw)(0.5)
    with pytest.raises(ValueError, match="Expected a step below 10"):
        draw(np.array(10))


def test_a16_what_fractions_of_a_step_would_draw():
    """Negative control: JAX rounds them, so that ten of them draw one batch."""
    folded = [jax.random.fold_in(jax.random.key(0), step / 10) for step in range(10)]
    assert len({tuple(jax.random.key_data(key).tolist()) for key in folded}) == 1
    # Ten steps on one batch are one of a tenth of the noise variance: .72 and 13.1.
    made = common.poisson_gaussian(sampling_prob=0.01, iterations=100)
    repeated = common.poisson_gaussian(
        sampling_prob=0.01, iterations=10, noise_multiplier=10**-0.5
    )
    assert made.noise_multiplier == 1.0
    assert repeated.epsilon(1e-5) > 10 * made.epsilon(1e-5)


def test_a16_what_they_spend():
    """Negative control: epsilon of ten times the steps."""
    more = dataclasses.replace(MECHANISM, iterations=10 * MECHANISM.iterations)
    assert more.epsilon(1e-5) > 1.5 * MECHANISM.epsilon(1e-5)


# A17: runs side by side with one key.

NOISES = {
    "independent": dpadambc.add_dp_noise,
    "correlated": lambda stddev, key: transforms.add_correlated_noise(
        stddev, (1.0, -0.5), key=key
    ),
    "banded": lambda stddev, key: transforms.add_banded_noise(
        stddev, (1.0, 0.5), key=key
    ),
}
SEVERAL = jnp.arange(3.0)
CLIPPED = jnp.full(8, 0.1)  # a sum, before the noise


def noised_runs(make, key, scale):
    """The noised sums of two steps of one run."""
    tx = make(1.0, key=key)

    def step(state, _):
        noised, state = tx.update(scale * CLIPPED, state, PARAMS)
        return state, noised

    return jax.lax.scan(step, tx.init(PARAMS), length=2)[1]


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
@pytest.mark.parametrize("make", NOISES.values(), ids=NOISES)
def test_a17_runs_side_by_side_with_one_key_are_refused(make, jit):
    run = functools.partial(noised_runs, make)
    with pytest.raises(ValueError, match="Expected a key for each of 3 runs.*got"):
        jit(jax.vmap(run, (None, 0)))(jax.random.key(0), SEVERAL)
    tx = make(1.0, key=jax.random.key(0))
    with pytest.raises(ValueError, match="Expected a key for each of 3 runs.*got"):
        jit(jax.vmap(tx.init))(jnp.ones((3, 4)))


@pytest.mark.slow
@pytest.mark.parametrize("make", NOISES.values(), ids=NOISES)
def test_a17_with_a_key_each_they_are_what_they_are_alone(make):
    keys_of_runs = jax.random.split(jax.random.key(0), 3)
    run = functools.partial(noised_runs, make)
    together = jax.jit(jax.vmap(run))(keys_of_runs, SEVERAL)
    alone = jnp.stack([run(*each) for each in zip(keys_of_runs, SEVERAL, strict=True)])
    chex.assert_trees_all_close(together, alone, atol=1e-5)
    assert distance(together[0], together[1]) > 0.1
    # Whoever differentiates through a step can go on.
    of_scale = lambda scale: run(keys_of_runs[0], scale).sum()
    assert jax.grad(of_scale)(1.0) == pytest.approx(2 * 8 * 0.1, abs=1e-4)


@pytest.mark.slow
def test_a17_what_one_key_did():
    """Negative control: without the check, two runs differ by their gradients alone."""
    one_key = jax.random.key(0)
    noised = [noised_runs(dpadambc.add_dp_noise, one_key, x) for x in (1.0, 3.0)]
    chex.assert_trees_all_close(
        noised[1] - noised[0], jnp.stack([2 * CLIPPED] * 2), atol=1e-5
    )


# A22: a sum divided by what tells of the batch.


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_a22_a_sum_divided_by_the_size_of_its_batch_is_refused(jit):
    for make in dpadambc.clipped_grad, dpadambc.clipped_value_and_grad:

        def step(mask, make=make):
            fun = make(linear, l2_clip_norm=C, normalize_by=jnp.sum(~mask))
            return fun(PARAMS, X, is_padding_example=mask)

        with pytest.raises(TypeError, match="Expected normalize_by to be a number of"):
            jit(step)(NO_PADDING)


@pytest.mark.slow
def test_a22_what_it_did():
    """Negative control: one example moved B times what is said of a sum over B."""
    pair = jnp.stack([X[0], -X[0]]) * 100  # clipped, they are opposite

    def divided_by_size(x):
        fun = dpadambc.clipped_grad(linear, l2_clip_norm=C, normalize_by=float(len(x)))
        return fun(PARAMS, x)

    moved = distance(divided_by_size(pair), divided_by_size(pair[:1]))
    stated = dpadambc.clipped_grad(linear, l2_clip_norm=C, normalize_by=float(BATCH))
    bound = stated.sensitivity(dpadambc.NeighboringRelation.ADD_OR_REMOVE_ONE)
    assert moved == pytest.approx(BATCH * bound, rel=1e-5)


# A23: one person in several rows.

DISTINCT = RNG.normal(size=(1_000, 8)).astype(np.float32)
FEW = dict(mechanism=mechanism(sampling_prob=0.01, iterations=2))


def repeated(rows, copies):
    """The rows, and copies of the first hundred."""
    return np.concatenate([rows, np.resize(rows[:100], (copies, rows.shape[1]))])


def test_a23_a_minority_that_is_repeated_is_warned_of():
    expected = "got 500 of 1500 rows that are copies of others, one of them 6 times"
    with pytest.warns(UserWarning, match=expected):
        fit(data=(repeated(DISTINCT, 500),), **FEW)
    of_all = repeated(DISTINCT, 500), np.arange(1_500)  # no two are of one person
    fit(data=of_all, loss_fn=lambda w, x, y: square(w, x) * y, **FEW)


MANY = RNG.normal(size=(70_000, 8)).astype(np.float32)
LIKE_OTHERS = {
    "a tenth are equal": repeated(DISTINCT, 110),
    "few rows": np.ones((500, 8), np.float32),
    "yes or no": RNG.integers(2, size=(1_000, 8)),
    "rare events": RNG.uniform(size=(2_000, 50)) < 0.02,
    "one number": np.round(repeated(DISTINCT, 500)[:, :1]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LIKE_OTHERS)
def test_a23_rows_that_are_equal_by_chance_are_not_warned_of(name):
    rows = np.asarray(LIKE_OTHERS[name], np.float32)
    fit(data=(rows,), params=jnp.zeros(rows.shape[1]), **FEW)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "complex64", "bool"])
def test_a23_copies_are_found_wherever_they_are(dtype):
    """Those at the end of many rows too, in several arrays, on the host or not."""
    rows = (10 * MANY).astype(jnp.dtype(dtype))
    numbers = np.arange(len(rows), dtype=np.int32)
    twice = [np.concatenate([x, x]) for x in (rows, numbers)]
    with pytest.warns(UserWarning, match="got 70000 of 140000 rows .* them 2 times"):
        _rows.warn_of_copies(tuple(twice))
    with pytest.warns(UserWarning, match="got 70000 of 140000 rows .* them 2 times"):
        _rows.warn_of_copies(tuple(map(jnp.asarray, twice)))
    _rows.warn_of_copies((twice[0], np.arange(140_000)))
    pair = MANY, MANY[::-1].copy()  # each row is in two pairs, one the other way round
    _rows.warn_of_copies(pair)


def test_a23_a_data_set_that_is_repeated_is_warned_of_by_a_search():
    twice = jnp.concatenate([DISTINCT, DISTINCT])
    with pytest.warns(UserWarning, match="got 1000 of 2000 rows that are copies"):
        training.search(
            square,
            PARAMS,
            (twice,),
            FEW["mechanism"],
            optax.sgd,
            [0.1],
            trials=trials.Fixed(1),
            score=training.PublicScore(square, (X,)),
            key=jax.random.key(0),
            target_delta=1e-5,
        )


@pytest.mark.slow
def test_a23_what_it_did():
    """Negative control: a person in k rows moves the sum k times as far."""
    clipped = dpadambc.clipped_grad(linear, l2_clip_norm=C, normalize_by=B)
    rows = np.resize(100 * X[:1], (6, 8))
    with_them, without = clipped(PARAMS, rows), clipped(PARAMS, 0 * rows)
    assert distance(with_them, without) == pytest.approx(6 * C, rel=1e-5)


# A25. One key, with which all devices draw: row i of each takes part where that of the
# others does, so whoever knows who did on one device knows it of all.


ROWS = jnp.asarray(RNG.normal(size=(2 * BATCH, 8)), jnp.float32)


def drawn_by_devices(
    key_of, axes=("data",), mechanism=MECHANISM, spread=False, **options
):
    """The sum over two devices, and which rows took part, one line for each."""
    clipped = dpadambc.clipped_grad(linear, l2_clip_norm=C, normalize_by=B)

    def step(w, x):
        batch = mechanism.sample(key_of("data"), num_examples=len(x))
        examples, mask = batch.gather(x), batch.is_padding_example
        grads = clipped(w, examples, is_padding_example=mask)
        took_part = jnp.zeros(len(x), bool).at[batch.indices].max(~mask)
        if spread:
            grads, took_part = jax.lax.pcast((grads, took_part), "data", to="varying")
        return jax.lax.psum(grads, "data"), took_part[None]

    mapped = jax.shard_map(
        step,
        mesh=mesh_of(("data",), (2,)),
        in_specs=(P(), P(*axes)),
        out_specs=(P(), P("data")),
        **options,
    )
    return jax.jit(mapped)(PARAMS, ROWS)


def of_all(axis_name):
    return jax.random.key(0)


def of_each(axis_name):
    return jax.random.fold_in(jax.random.key(0), jax.lax.axis_index(axis_name))


@pytest.mark.filterwarnings("ignore:Expected a new key for each batch")
def test_a25_one_key_for_the_rows_of_all_devices_is_refused():
    with pytest.raises(ValueError, match=r"Expected devices along \['data'\] to draw"):
        drawn_by_devices(of_all)


def test_a25_a_key_for_each_device_is_not():
    _, took_part = drawn_by_devices(of_each)
    assert (took_part[0] != took_part[1]).any()


@pytest.mark.filterwarnings("ignore:Expected a new key for each batch")
def test_a25_where_all_devices_have_the_same_rows_they_draw_the_same():
    _, took_part = drawn_by_devices(of_all, axes=(), spread=True)
    np.testing.assert_array_equal(took_part[0], took_part[1])


def test_a25_a_key_for_each_device_and_the_same_rows_are_warned_of():
    """A row may be in both batches, and so twice in the sum: see `test_a30`."""
    with pytest.warns(UserWarning, match="got the same rows on all, and a key") as told:
        _, took_part = drawn_by_devices(of_each, axes=())
    assert {warning.filename for warning in told} == {__file__}
    assert (took_part[0] & took_part[1]).any()


def test_a25_one_batch_that_is_split_over_devices_is_not():
    """Drawn outside: each device takes its part of it, from the same rows."""

    def outside(w, x, batch):
        return jax.lax.psum(clipped_sum(w, x, batch), "data")

    def clipped_sum(w, x, batch):
        clipped = dpadambc.clipped_grad(linear, l2_clip_norm=C, normalize_by=B)
        mask = batch.is_padding_example
        return clipped(w, batch.gather(x), is_padding_example=mask)

    drawn = MECHANISM.sample(jax.random.key(3), num_examples=len(ROWS))
    indices = jnp.pad(drawn.indices, (0, len(drawn.indices) % 2), constant_values=-1)
    batch = dpadambc.Batch(indices, indices < 0, len(ROWS))
    mapped = jax.shard_map(
        outside,
        mesh=mesh_of(("data",), (2,)),
        in_specs=(P(), P(), P("data")),
        out_specs=P(),
    )
    expected = clipped_sum(PARAMS, ROWS, batch)
    chex.assert_trees_all_close(
        jax.jit(mapped)(PARAMS, ROWS, batch), expected, rtol=1e-4, atol=1e-6
    )


@pytest.mark.slow
def test_a25_a_batch_that_leaves_its_devices_is_warned_of():
    """Those of all are put together: an example may be in it several times."""
    key = jax.random.key(3)
    drawn = lambda: MECHANISM.sample(
        jax.random.fold_in(key, jax.lax.axis_index("data")), num_examples=BATCH
    )
    mesh = mesh_of(("data",), (2,))
    batch = jax.shard_map(drawn, mesh=mesh, in_specs=(), out_specs=P("data"))()
    with pytest.warns(UserWarning, match="got the same rows on all, and a key for"):
        batch.gather(X)


def test_a25_a_batch_of_a_device_has_the_structure_of_others():
    def step(x):
        key = jax.random.fold_in(jax.random.key(3), jax.lax.axis_index("data"))
        draw = lambda: MECHANISM.sample(key, num_examples=len(x))
        nobody = jnp.full_like(draw().indices, -1)
        by_hand = lambda: dpadambc.Batch(nobody, nobody < 0, len(x))
        batch = jax.lax.cond(x.sum() > jnp.inf, draw, by_hand)
        return jax.lax.psum(batch.gather(x).sum(), "data")

    mesh = mesh_of(("data",), (2,))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P())
    assert jax.jit(mapped)(ROWS) == 0


def test_a25_batches_of_one_size_are_drawn_from_the_rows_of_each_device():
    fixed = dpadambc.FixedSizeGaussian(
        l2_clip_norm=C,
        noise_multiplier=1.0,
        batch_size=4,
        num_examples=BATCH,
        iterations=10,
        normalize_by=B,
    )
    _, took_part = drawn_by_devices(of_each, mechanism=fixed)
    np.testing.assert_array_equal(took_part.sum(1), 4)


def test_a25_where_all_examples_take_part_there_is_nothing_to_draw():
    _, took_part = drawn_by_devices(of_all, mechanism=mechanism(sampling_prob=1.0))
    assert took_part.all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Expected a new key for each batch")
def test_a25_what_one_key_did():
    """Negative control: with check_vma=False nobody knows whose rows they are."""
    with pytest.warns(UserWarning, match="With check_vma=True it is checked"):
        _, took_part = drawn_by_devices(of_all, check_vma=False)
    assert 0 < took_part[0].sum() < BATCH
    np.testing.assert_array_equal(took_part[0], took_part[1])


def test_a25_what_it_spends():
    """Negative control: with many devices it is known in which steps a row takes part.

    In k of 100 steps, k binomial, the noise is all that hides it.
    """
    delta, q = 1e-5, 0.01
    stated = mechanism(sampling_prob=q, iterations=100).epsilon(delta)
    k = np.arange(1, 101)
    mu = np.sqrt(k)

    def delta_at(epsilon):
        ahead = stats.norm.cdf(mu / 2 - epsilon / mu)
        behind = np.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)
        return np.sum(stats.binom.pmf(k, 100, q) * (ahead - behind))

    spent = optimize.brentq(lambda epsilon: delta_at(epsilon) - delta, 0.1, 30)
    assert spent == pytest.approx(8.6, abs=0.1)
    assert stated == pytest.approx(0.72, abs=0.01)


# A27. The batch itself in the loss of each example, such as the negatives of a
# contrastive loss: each gradient is clipped, and all change with one example.


def contrastive(w, x, all_x):
    return jax.nn.logsumexp(all_x @ (w * x)) - x @ (w * x)


BOTH_MAKE = {
    "per_example_grad": lambda: dpadambc.per_example_grad(contrastive, batch_argnums=1),
    "clipped_grad": lambda: dpadambc.clipped_grad(
        contrastive, batch_argnums=1, l2_clip_norm=C, normalize_by=B
    ),
}


@pytest.mark.parametrize("name", BOTH_MAKE)
@pytest.mark.parametrize("jit", [False, True])
def test_a27_the_batch_in_the_loss_of_each_example_is_warned_of(name, jit):
    grads = lambda w, x: BOTH_MAKE[name]()(w, x, x)
    with pytest.warns(UserWarning, match="to be public, got the batch itself") as told:
        (jax.jit(grads) if jit else grads)(PARAMS, X)
    assert {warning.filename for warning in told} == {__file__}


@pytest.mark.parametrize("name", BOTH_MAKE)
def test_a27_what_is_public_is_not(name):
    BOTH_MAKE[name]()(PARAMS, X, jnp.ones((3, 8)))


@pytest.mark.filterwarnings("ignore:Expected what all examples share")
def test_a27_what_it_did():
    """Negative control: one example in place of another moves the sum by more than 2 C.

    The row is long, so that it is the nearest of all in every other example's loss.
    """
    clipped = BOTH_MAKE["clipped_grad"]()
    sums = [clipped(PARAMS + 1, x, x) for x in (X, X.at[0].set(30 * X[0]))]
    assert distance(*sums) > 4 * C


# A28. A run that stops by what it has released.


def stop_at(step, **options):
    def callback(progress):
        if progress.iterations == step:
            raise training.Stop(**options)

    return callback


def test_a28_a_stop_that_may_depend_on_the_data_costs_all_steps():
    assert MECHANISM.iterations > 1
    everything = fit(callback=stop_at(1))
    taken = fit(callback=stop_at(1, is_public=True))
    assert everything.iterations == taken.iterations == 1
    assert everything.epsilon == MECHANISM.epsilon(1e-5) > taken.epsilon
    assert taken.epsilon == MECHANISM.epsilon(1e-5, iterations=1)
    assert everything.epsilon_of_this_run() == everything.spent.epsilon(1e-5)
    assert everything.spent.runs[0].steps == MECHANISM.iterations
    # With a budget, all steps are those that it affords.
    target = MECHANISM.epsilon(1e-5, iterations=3)
    within = fit(callback=stop_at(1), target_epsilon=target)
    assert within.epsilon == target


@pytest.mark.slow
@pytest.mark.parametrize(("delta", "times"), [(1e-3, 5.5), (1e-5, 8.0)])
def test_a28_what_stopping_at_the_right_moment_did(delta, times):
    """Negative control: delta of the epsilon of the steps that were taken.

    A sum of steps that one example moves by 1, with noise of deviation z, stops where
    the privacy loss exceeds the epsilon of so many steps. Paths are drawn with a drift
    under which they do, and weighted.
    """
    z, steps, paths = 20.0, np.arange(1, 401), 20_000
    mu = np.sqrt(steps) / z
    epsilons = np.array([gaussian_epsilon(m, delta) for m in mu])
    drift = 1 + 4 * z / np.sqrt(len(steps))
    rng = np.random.default_rng(0)
    sums = np.cumsum(rng.normal(drift, z, (paths, len(steps))), axis=1)
    losses = sums / z**2 - steps / 2 / z**2
    likelihoods = (1 - drift) * sums / z**2 + (drift**2 - 1) * steps / 2 / z**2
    is_beyond = losses >= epsilons + 0.15
    first = is_beyond.argmax(axis=1)
    rows = np.arange(paths)
    excess = 1 - np.exp(epsilons[first] - losses[rows, first])
    each = is_beyond.any(axis=1) * np.exp(likelihoods[rows, first]) * excess
    error = each.std() / np.sqrt(paths)
    assert abs(each.mean() - times * delta) < 5 * error < times * delta / 4
    # At the last step alone, it is what is stated.
    at_the_end = np.exp(likelihoods[:, -1]) * np.maximum(
        1 - np.exp(epsilons[-1] - losses[:, -1]), 0
    )
    error = at_the_end.std() / np.sqrt(paths)
    assert abs(at_the_end.mean() - delta) < 5 * error < delta


def gaussian_epsilon(mu, delta):
    """Of a Gaussian whose mean moves by mu, in units of its noise."""
    cdf = stats.norm.cdf
    of = lambda e: cdf(mu / 2 - e / mu) - np.exp(e) * cdf(-mu / 2 - e / mu) - delta
    return optimize.brentq(of, 0, 60) if of(0) > 0 else 0.0


# A29. A state that is set back.


STAGES = {
    "independent": lambda level: dpadambc.add_dp_noise(level, key=jax.random.key(0)),
    "correlated": lambda level: transforms.add_correlated_noise(
        level, (1.0, -0.5), key=jax.random.key(0)
    ),
    "banded": lambda level: transforms.add_banded_noise(
        level, (1.0, 0.5), key=jax.random.key(0)
    ),
}
ZEROS = jnp.zeros(4)


def noise_of_steps(noise, number, state=None):
    """The noise of so many steps, and the state after them."""
    state, drawn = noise.init(ZEROS) if state is None else state, []
    for _ in range(number):
        noised, state = noise.update(ZEROS, state, ZEROS)
        drawn.append(np.asarray(noised))
    return np.stack(drawn), state


@pytest.mark.parametrize("name", STAGES)
def test_a29_a_count_that_is_set_back_is_not_that_of_the_noise(name):
    """As `optax.tree.set` does to all fields of the name, to warm up once more."""
    noise = STAGES[name](0.1)
    chain = optax.chain(noise, optax.adam(optax.linear_schedule(1.0, 0.1, 5)))
    state = chain.init(ZEROS)
    for _ in range(2):
        _, state = chain.update(ZEROS, state, ZEROS)
    restarted = optax.tree.set(state, count=jnp.zeros([], jnp.int32))
    assert restarted[1][0].count == 0 and dpadambc.steps_taken(restarted) == 2
    whole, _ = noise_of_steps(noise, 4)
    rest, _ = noise_of_steps(noise, 2, restarted[0])
    np.testing.assert_array_equal(rest, whole[2:])


@pytest.mark.slow
def test_a29_what_a_count_that_is_set_back_did():
    """Negative control: the noise of the first step once more, and a level too low."""
    back = lambda state: state._replace(noised_steps=jnp.zeros([], jnp.int32))
    first, state = noise_of_steps(STAGES["correlated"](0.1), 1)
    again, _ = noise_of_steps(STAGES["correlated"](0.1), 1, back(state))
    np.testing.assert_array_equal(first, again)
    rising = STAGES["independent"](lambda step: 0.1 * (1 + step))
    _, state = noise_of_steps(rising, 3)
    fourth, _ = noise_of_steps(rising, 1, state)
    lower, _ = noise_of_steps(rising, 1, back(state))
    np.testing.assert_allclose(fourth, 4 * lower, rtol=1e-5)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jitted"])
@pytest.mark.parametrize("name", STAGES)
def test_a29_zeros_for_a_state_are_no_key(name, wrap):
    """As one sets moments back: the noise would be that of a key that all know."""
    noise = STAGES[name](0.1)
    _, state = noise_of_steps(noise, 2)
    update = wrap(noise.update)
    assert np.isfinite(update(ZEROS, state, ZEROS)[0]).all()
    lost = optax.tree.zeros_like(state)
    assert np.isnan(update(ZEROS, lost, ZEROS)[0]).all()


# A30. A key for each device, all of which have the same rows: one is drawn by several
# in a step, as if several batches were added up with the noise of one.


def test_a30_what_several_draws_in_one_step_spend():
    """Negative control: with four, how often a row is in the sum is binomial."""
    q, delta = 0.1, 1e-5
    stated = mechanism(sampling_prob=q, iterations=1).epsilon(delta)
    x = np.linspace(-12.0, 16.0, 100_001)

    def delta_of(num_devices):
        k = np.arange(num_devices + 1)
        density = stats.norm.pdf(x[:, None], k) @ stats.binom.pmf(k, num_devices, q)
        ahead = density - np.exp(stated) * stats.norm.pdf(x)
        return np.sum(np.maximum(ahead, 0)) * (x[1] - x[0])

    assert delta_of(1) == pytest.approx(delta, rel=0.01)
    assert delta_of(4) > 1_000 * delta


# A31. A batch that serves several steps, and a clipped sum that is added up several
# times: both are listed as what nobody sees.


def test_a31_what_a_batch_spends_that_serves_four_steps():
    """Negative control: 50 steps of half the noise, where 200 of full are stated."""
    epsilon = lambda z, steps: mechanism(
        sampling_prob=0.1, noise_multiplier=z, iterations=steps
    ).epsilon(1e-5)
    assert epsilon(1.0, 200) == pytest.approx(10.0, abs=0.05)
    assert epsilon(1 / 4**0.5, 50) == pytest.approx(22.6, abs=0.05)


def test_a31_what_one_batch_on_four_devices_spends():
    """Negative control: an example moves the sum four times as far."""
    epsilon = lambda z: mechanism(
        sampling_prob=0.1, noise_multiplier=z, iterations=50
    ).epsilon(1e-5)
    assert epsilon(1.0) == pytest.approx(5.15, abs=0.05)
    assert epsilon(1 / 4) == pytest.approx(110, abs=1)


# A32: processes of one run with parts of their own. More of it is in `sharding_test`.


def test_a32_what_a_source_of_its_own_in_each_process_did():
    """Negative control: each half of a batch is of another source."""
    first, second = np.eye(2)
    person = -first

    def half_from_each(drawn):
        batch = _padding.padded(np.array(drawn), size=8, num_examples=10)
        one = [person if i == 0 else first for i in batch.indices[:4]]
        other = np.tile(second, (4, 1))
        return np.concatenate([one, other])[~batch.is_padding_example].sum(0)

    without = half_from_each([3, 5, 6, 8, 9])
    assert np.linalg.norm(half_from_each([0, 3, 5, 6, 8, 9]) - without) > 2 * C

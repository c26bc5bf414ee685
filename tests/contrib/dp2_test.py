"""DP² is the published algorithm, and as private in one phase as in the other."""

import dataclasses
import functools

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dpadambc
from dpadambc import contrib, training
from dpadambc.contrib.scaling import scale_examples
from tests import common

C, B = 0.8, 4.0
MECHANISM = common.poisson_gaussian(l2_clip_norm=C, normalize_by=B)
SILENT = dataclasses.replace(MECHANISM, noise_multiplier=0.0)
KEY = jax.random.key(0)
PARAMS = {"w": np.array([[0.5, -1.0, 2.0], [1.0, 0.1, -0.3]]), "b": np.zeros(3)}
BATCH, NO_PADDING = 5, np.zeros(5, bool)


def of_float32(tree):
    return jax.tree.map(np.float32, tree)


def delayed(mechanism=SILENT, c2=1.7, **options):
    return contrib.delayed_preconditioner(
        dpadambc.privatize(mechanism, key=KEY),
        l2_clip_norm=mechanism.l2_clip_norm,
        preconditioned_clip_norm=c2,
        **dict(interval=1) | options,
    )


def sealed(gradients):
    size = len(jax.tree.leaves(gradients)[0])
    arrays = jax.tree.map(jnp.asarray, gradients)
    return dpadambc.as_per_example(arrays, is_padding_example=np.zeros(size, bool))


def random_gradients(seed, size=BATCH, scale=1.0):
    """Norms over two orders of magnitude, coordinates over three."""
    rng = np.random.default_rng(seed)
    sizes = scale * np.exp(rng.normal(0, 1, size))
    of_coordinates = np.random.default_rng(99)

    def draw(p):
        wide = 10.0 ** of_coordinates.uniform(-2, 1, p.shape)
        return (
            rng.normal(size=(size, *p.shape)) * wide * sizes.reshape(-1, *[1] * p.ndim)
        )

    return jax.tree.map(draw, PARAMS)


# The published algorithm.


def flat(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def published(batches, draws, s1, s2, c2, rates, decay, eps, z):
    """Algorithm 1 in plain NumPy, an example at a time; draws are standard normal."""
    theta = flat(PARAMS).astype(float)
    v, total = np.zeros_like(theta), np.zeros_like(theta)
    for t, (batch, draw) in enumerate(zip(batches, draws, strict=True)):
        plain = t % (s1 + s2) < s1
        divisor = np.ones_like(theta) if plain else np.sqrt(v) + eps
        bound = C if plain else c2
        summed = np.zeros_like(theta)
        for i in range(BATCH):
            g = flat(jax.tree.map(lambda x, i=i: x[i], batch)) / divisor
            summed = summed + g / max(1.0, np.linalg.norm(g) / bound)
        private = (summed + z * bound * draw) / B
        if plain:
            total = total + private
        if t % (s1 + s2) == s1 - 1:
            v, total = decay * v + (1 - decay) * (total / s1) ** 2, 0 * total
        theta = theta - (rates[0](t) if plain else rates[1](t)) * private
    return theta, v, total


LINEAR = lambda t: 0.2 - 0.01 * t
ALONE = {
    "one step each": dict(interval=1),
    "three each": dict(interval=3),
    "two and three": dict(interval=2, preconditioned_interval=3),
    "one and four, no memory": dict(
        interval=1, preconditioned_interval=4, decay=0.0, eps=1e-3
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("options", ALONE.values(), ids=ALONE)
@pytest.mark.parametrize("z", [common.slow(0.0), 0.7])
def test_it_is_the_published_algorithm_over_several_intervals(
    options, z, x64, monkeypatch
):
    drawn, steps = common.drawn_later(monkeypatch), 13
    mechanism = dataclasses.replace(MECHANISM, noise_multiplier=z)
    tx = dpadambc.contrib.dp2_rmsprop(
        LINEAR,
        mechanism,
        key=KEY,
        preconditioned_clip_norm=1.7,
        preconditioned_learning_rate=0.03,
        **options,
    )
    params = jax.tree.map(jnp.asarray, PARAMS)
    state, update = tx.init(params), jax.jit(tx.update)
    batches = [random_gradients(seed) for seed in range(steps)]
    for batch in batches:
        updates, state = update(sealed(batch), state, params)
        params = optax.apply_updates(params, updates)
    s1 = options["interval"]
    jax.effects_barrier()
    draws = [flat(jax.tree.unflatten(jax.tree.structure(PARAMS), x)) for x in drawn]
    theta, v, total = published(
        batches,
        draws,
        s1,
        options.get("preconditioned_interval", s1),
        1.7,
        (LINEAR, lambda t: 0.03),
        options.get("decay", 0.9),
        options.get("eps", 1e-8),
        z,
    )
    np.testing.assert_allclose(flat(params), theta, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(flat(state[0].nu), v, rtol=1e-10)
    np.testing.assert_allclose(flat(state[0].accumulator), total, atol=1e-12)
    assert v.min() > 0


def test_a_first_phase_is_dp_sgd():
    mechanism = MECHANISM
    one = dpadambc.contrib.dp2_rmsprop(
        0.1, mechanism, key=KEY, interval=4, preconditioned_clip_norm=1.0
    )
    two = dpadambc.dp_sgd(0.1, mechanism, key=KEY)
    params = of_float32(PARAMS)
    states = [tx.init(params) for tx in (one, two)]
    updates = [jax.jit(tx.update) for tx in (one, two)]
    for seed in range(5):
        grads = sealed(of_float32(random_gradients(seed)))
        a, b = (
            update(grads, state, params)
            for update, state in zip(updates, states, strict=True)
        )
        states = [a[1], b[1]]
        if seed < 4:  # two programs
            chex.assert_trees_all_close(a[0], b[0], rtol=1e-5, atol=1e-7)
    assert np.abs(flat(a[0]) - flat(b[0])).max() > 1e-3  # the next one divides


@pytest.mark.guarantee
def test_noise_is_of_the_level_of_the_clip_norm_of_each_phase():
    """Of nothing, all is noise: its level in each phase, and v from a mean of three."""
    size, c2 = 40_000, 5.0
    tx = delayed(MECHANISM, c2, interval=3, preconditioned_interval=2, decay=0.0)
    params = jnp.zeros(size)
    nothing = dpadambc.as_per_example(
        jnp.zeros((1, size)), is_padding_example=jnp.ones(1, bool)
    )
    state, found, update = tx.init(params), [], jax.jit(tx.update)
    for _ in range(5):
        private, state = update(nothing, state, params)
        found.append(np.asarray(private, float))
    # The standard error of a standard deviation of n draws is 1 / sqrt(2 n).
    error = 5 / np.sqrt(2 * size)
    levels = np.array([x.std() for x in found])
    claimed = np.array([C, C, C, c2, c2]) / B
    assert np.abs(levels / claimed - 1).max() < error
    assert abs(levels[-1] / claimed[0] - 1) > error  # negative control
    correlation = np.corrcoef(found)[np.triu_indices(5, 1)]
    assert np.abs(correlation).max() < 5 / np.sqrt(size)
    # Of squares of normals the standard error of the mean is sqrt(2 / n).
    v = np.asarray(state.nu, float).mean() / (claimed[0] ** 2 / 3)
    assert abs(v - 1) < 5 * np.sqrt(2 / size)


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 1])
def test_factored_gradients_are_scaled_as_arrays_are(count):
    def loss_fn(params, x):
        return jnp.sum(jnp.tanh(x @ params["w"] + params["b"][None]) ** 2)

    params = of_float32(PARAMS)
    x = np.random.default_rng(0).normal(size=(BATCH, 4, 2)).astype(np.float32)
    tx = delayed()
    state = in_phase(tx, count, jax.tree.map(lambda p: jnp.square(p) + 1e-3, params))
    found = []
    for method in ("factored", "vmap"):
        grads = dpadambc.per_example_grad(loss_fn, method=method)(
            params, x, is_padding_example=np.arange(BATCH) == 1
        )
        found.append(jax.jit(tx.update)(grads, state, params)[0])
    chex.assert_trees_all_close(*found, rtol=1e-5, atol=1e-7)


# Privacy.


def in_phase(tx, count, nu):
    """A state of the plain phase for 0, of the other for 1."""
    params = jax.tree.map(jnp.zeros_like, nu)
    return tx.init(params)._replace(count=jnp.int32(count), nu=nu)


@jax.jit
def released(gradients, is_padding_example, count, nu, c2, eps):
    """What a step gives out, without its noise."""
    tx = delayed(c2=c2, eps=eps)
    params = jax.tree.map(lambda g: jnp.zeros(g.shape[1:], g.dtype), gradients)
    grads = dpadambc.as_per_example(gradients)
    return tx.update(
        grads, in_phase(tx, count, nu), params, is_padding_example=is_padding_example
    )[0]


@jax.jit
def divided_after_the_clip(gradients, is_padding_example, count, nu, c2, eps):
    """Broken: the clipped sum is divided, and noise for C2 is added to that."""
    clip = dpadambc.clip_per_example(c2, normalize_by=B)
    params = jax.tree.map(lambda g: jnp.zeros(g.shape[1:], g.dtype), gradients)
    grads = dpadambc.as_per_example(gradients)
    summed, _ = clip.update(
        grads, clip.init(params), params, is_padding_example=is_padding_example
    )
    sums = dpadambc.materialize(summed)
    return jax.tree.map(lambda g, v: g / (jnp.sqrt(v) + eps), sums, nu)


HOSTILE = {
    "ordinary": 1.0,
    "huge": 1e15,
    "tiny": 1e-15,
    "zero": 0.0,
    "nan": np.nan,
    "inf": np.inf,
    "overflows float32 when squared": 1e25,
}


def with_row(gradients, i, row):
    return jax.tree.map(
        lambda g, r: np.concatenate([g[:i], r, g[i + 1 :]]), gradients, row
    )


def moved(release, gradients, row, *numbers):
    """How far the furthest neighbor is, two examples counting as two.

    The last of the gradients takes part in one neighbor only, which has it added.
    """
    size = len(jax.tree.leaves(gradients)[0])
    last, first = np.arange(size) == size - 1, np.arange(size) == 0
    replaced = with_row(gradients, 0, row)
    of = lambda *batch: flat(release(*batch, *numbers)).astype(float)
    start = of(gradients, last)
    ends = {
        "added": (1, of(with_row(gradients, size - 1, row), np.zeros(size, bool))),
        "removed": (1, of(gradients, last | first)),
        "replaced by padding": (1, of(replaced, last | first)),
        "replaced": (2, of(replaced, last)),
    }
    return max(np.linalg.norm(end - start) / n for n, end in ends.values())


@pytest.mark.guarantee
@hypothesis.given(
    seed=st.integers(0, 2**32 - 1),
    count=st.sampled_from([0, 1]),
    hostile=st.sampled_from(sorted(HOSTILE)),
    level=st.sampled_from([0.0, 1e-30, 1e-6, 1.0, 1e12]),
    c2=st.floats(1e-2, 1e2),
    eps=st.sampled_from([1e-8, 1e-3]),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
)
def test_neighbors_differ_by_at_most_the_sensitivity_of_each_phase(
    seed, count, hostile, level, c2, eps, dtype
):
    """Whatever v is: none yet, tiny, so that what is divided by it is huge, or huge."""
    cast = functools.partial(jax.tree.map, lambda g: g.astype(jnp.dtype(dtype)))
    with np.errstate(over="ignore"):
        gradients = cast(random_gradients(seed, BATCH + 1))
        row = cast(
            jax.tree.map(lambda g: HOSTILE[hostile] * g, random_gradients(seed + 1, 1))
        )
    draw = np.random.default_rng(seed).lognormal
    nu = jax.tree.map(lambda p: np.float32(level * draw(0, 3, p.shape)), PARAMS)
    bound = (c2 if count else C) / B
    assert moved(released, gradients, row, count, nu, c2, eps) <= bound * (1 + 1e-4)


@pytest.mark.guarantee
@pytest.mark.parametrize("level", [1e-6, 1e-30])
def test_what_dividing_after_the_clip_does(level):
    """Negative control: the same neighbors, the division in the other order."""
    nu = jax.tree.map(lambda p: np.full(p.shape, level, np.float32), PARAMS)
    gradients, row = (of_float32(random_gradients(i, n)) for i, n in [(0, 6), (1, 1)])
    numbers = 1, nu, 1.7, 1e-8
    bound = 1.7 / B * (1 + 1e-4)
    assert bound / 2 < moved(released, gradients, row, *numbers) <= bound
    assert moved(divided_after_the_clip, gradients, row, *numbers) > 100 * bound


@pytest.mark.guarantee
@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_a_broken_example_contributes_nothing_and_changes_no_other(count, bad):
    nu = jax.tree.map(lambda p: np.full(p.shape, 1e-8, np.float32), PARAMS)
    gradients = of_float32(random_gradients(3))
    row = jax.tree.map(lambda g: np.full_like(g[:1], bad), gradients)
    broken, first = with_row(gradients, 0, row), np.arange(BATCH) == 0
    numbers = count, nu, 1.7, 1e-8
    without = flat(released(gradients, first, *numbers))
    np.testing.assert_array_equal(flat(released(broken, NO_PADDING, *numbers)), without)
    assert np.linalg.norm(without) > 0.1


@pytest.mark.slow
@pytest.mark.guarantee
@pytest.mark.usefixtures("without_nonces")
def test_what_is_kept_is_a_function_of_private_gradients_alone():
    """Two data sets with the same clipped sums in both phases leave the same state."""
    tx = delayed(MECHANISM, interval=1, preconditioned_interval=1, decay=0.5)
    params = of_float32(PARAMS)
    ends = []
    for scale in (1e4, 1e6):
        state = tx.init(params)
        for seed in range(4):
            grads = sealed(of_float32(random_gradients(seed, scale=scale)))
            private, state = tx.update(grads, state, params)
        ends.append(optax.tree.unwrap_random_key_data((private, state)))
    chex.assert_trees_all_close(*ends, rtol=1e-4, atol=1e-7)


@pytest.mark.guarantee
@pytest.mark.parametrize("count", [0, 1])
def test_seal_and_mask_come_out_of_the_scaling_as_they_went_in(count):
    params = of_float32(PARAMS)
    tx = delayed()
    state = in_phase(tx, count, jax.tree.map(jnp.ones_like, params))
    whole = sealed(of_float32(random_gradients(0)))
    unmasked = dpadambc.as_per_example(dpadambc.materialize(whole))
    with pytest.raises(ValueError, match="is_padding_example"):
        tx.update(unmasked, state, params)
    tx.update(unmasked, state, params, is_padding_example=NO_PADDING)
    with pytest.raises(TypeError, match="is_padding_example"):
        tx.update(whole, state, params, padding=NO_PADDING)
    broken = whole | {"b": dataclasses.replace(whole["b"], seal=jnp.zeros(BATCH))}
    with pytest.raises(TypeError, match="gradient"):
        tx.update(broken, state, params)
    mixed = whole | {"b": jax.tree.map(lambda g: g[::-1], whole["b"])}
    found, _ = tx.update(mixed, state, params)
    assert all(np.isnan(x).all() for x in found.values())
    ones = jax.tree.map(jnp.ones_like, params)
    scaled = scale_examples(whole, ones)
    with pytest.raises((TypeError, ValueError)):
        tx.update(jax.tree.map(lambda g: 2 * g, scaled), state, params)
    chex.assert_trees_all_equal(
        dpadambc.materialize(scaled), dpadambc.materialize(whole)
    )


@pytest.mark.slow
@pytest.mark.usefixtures("without_nonces", "each_array_is_drawn_alone")
def test_gradients_of_several_devices_are_summed_between_clip_and_noise():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    params = of_float32(PARAMS)
    x = np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32)
    loss_fn = lambda p, x: jnp.sum(jnp.sin(x @ p["w"] + p["b"]))
    psum = optax.stateless(lambda g, p: common.sum_over(g, "data"))

    def make(*between):
        return contrib.delayed_preconditioner(
            optax.chain(
                dpadambc.clip_per_example(C, normalize_by=B),
                *between,
                dpadambc.add_dp_noise(MECHANISM.noise_stddev, key=KEY),
            ),
            interval=1,
            l2_clip_norm=C,
            preconditioned_clip_norm=1.7,
        )

    def run(tx, params, x):
        state, found = tx.init(params), []
        for _ in range(3):
            own = jax.tree.map(lambda p: p, params)
            if jax.sharding.get_abstract_mesh().manual_axes:
                own = jax.lax.pcast(params, "data", to="varying")
            grads = dpadambc.per_example_grad(loss_fn)(own, x)
            private, state = tx.update(grads, state, params)
            found.append(private)
        return found

    split = jax.shard_map(
        functools.partial(run, make(psum)),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
    )
    expected = jax.jit(functools.partial(run, make()))(params, x)
    chex.assert_trees_all_close(jax.jit(split)(params, x), expected, rtol=1e-4)


# Wrong use.

WRONG = [
    (ValueError, dict(interval=0)),
    (TypeError, dict(interval=1.5)),
    (ValueError, dict(preconditioned_interval=0)),
    (ValueError, dict(preconditioned_clip_norm=0.0)),
    (ValueError, dict(decay=1.0)),
    (ValueError, dict(eps=0.0)),
]


@pytest.mark.parametrize(("error", "wrong"), WRONG)
def test_wrong_numbers_are_refused(error, wrong):
    options = dict(interval=1, preconditioned_clip_norm=1.0)
    with pytest.raises(error, match=next(iter(wrong))):
        contrib.dp2_rmsprop(0.1, MECHANISM, key=KEY, **options | wrong)


def test_intervals_may_be_arrays_of_one_integer():
    for interval in (jnp.int32(2), jnp.asarray(2)):
        delayed(interval=interval)
    with pytest.raises(ValueError, match="interval"):
        delayed(interval=jnp.int32(0))
    with pytest.raises(TypeError, match="interval"):
        delayed(interval=jnp.float32(2))


@pytest.mark.guarantee
def test_a_second_moment_of_gradients_without_noise_is_refused():
    clip = dpadambc.clip_per_example(C, normalize_by=B)
    for inner in (clip, optax.identity(), optax.chain(clip, optax.trace(0.9))):
        tx = contrib.delayed_preconditioner(
            inner, interval=1, l2_clip_norm=C, preconditioned_clip_norm=1.0
        )
        with pytest.raises(ValueError, match="private_gradient"):
            tx.init(of_float32(PARAMS))


@pytest.mark.guarantee
def test_a_sum_is_refused_in_fit_and_elsewhere():
    optimizer = dpadambc.contrib.dp2_rmsprop(
        0.1, MECHANISM, key=KEY, interval=1, preconditioned_clip_norm=1.0
    )
    x, loss_fn = jnp.ones((40, 3)), lambda w, x: w @ x
    options = dict(key=KEY, target_delta=1e-5)
    with pytest.raises(ValueError, match="optimizer"):
        training.fit(loss_fn, jnp.zeros(3), (x,), MECHANISM, optimizer, **options)
    step = training.Step(loss_fn, MECHANISM, optimizer)
    state = step.init(jnp.zeros(3), key=KEY)
    with pytest.raises(TypeError, match="gradient"):
        step(state, (x[:4],), jnp.zeros(4, bool))
    arrays, params = (of_float32(x) for x in (random_gradients(0), PARAMS))
    with pytest.raises(TypeError, match="gradient"):
        optimizer.update(arrays, optimizer.init(params), params)

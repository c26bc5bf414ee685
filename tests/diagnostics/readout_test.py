"""Read-outs against numpy, states in every wrapper, and who may read what."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dpadambc
from benchmarks import theory
from dpadambc import clipping, diagnostics
from dpadambc.diagnostics import not_private, readout

PARAMS = {"w": jnp.zeros((40, 30)), "b": jnp.zeros(30)}
STDDEV = 0.1


def mechanism(**changes):
    numbers = dict(
        l2_clip_norm=1.0,
        noise_multiplier=2.0,
        sampling_prob=0.1,
        iterations=10,
        normalize_by=8,
    )
    return dpadambc.PoissonGaussian(**numbers | changes)


def gradients(steps=30, seed=0, stddev=STDDEV):
    """Noised, some coordinates with much signal, most with none."""
    rng = np.random.default_rng(seed)
    signal = {
        "w": np.where(np.arange(30) < 5, 0.2, 0.0)[None] * np.ones((40, 1)),
        "b": np.full(30, 0.02),
    }
    noised = lambda g: g + stddev * rng.normal(size=(steps, *g.shape))
    return jax.tree.map(lambda g: jnp.asarray(noised(g), jnp.float32), signal)


def run(optimizer, grads, params=PARAMS):
    step = lambda state, g: (optimizer.update(g, state, params)[1], None)
    return jax.jit(lambda: jax.lax.scan(step, optimizer.init(params), grads)[0])()


def moments_of(grads, b1=0.9, b2=0.999):
    """By hand, in float64."""
    m = v = 0.0
    grads = np.asarray(grads, np.float64)
    for g in grads:
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
    return m / (1 - b1 ** len(grads)), v / (1 - b2 ** len(grads))


def expected_readout(grads, name, *, corrected, b2=0.999):
    """What the read-out of one parameter must be, with numpy."""
    m, v = moments_of(grads[name], b2=b2)
    steps = len(grads[name])
    phi = STDDEV**2
    unit = phi * np.sqrt(2 * (1 - b2) / (1 + b2) * (1 + b2**steps) / (1 - b2**steps))
    denominator = np.sqrt(np.maximum(v - phi, unit) if corrected else v)
    quantile = lambda x: np.quantile(x, readout.QUANTILES)
    first_unit = STDDEV * np.sqrt(0.1 / 1.9 * (1 + 0.9**steps) / (1 - 0.9**steps))
    shares = lambda x: np.histogram(x, readout.BIN_EDGES)[0] / x.size
    return {
        "size": m.size,
        "noise_variance": phi,
        "variance_floor": unit,
        "correction": 1.0,
        "first_moment_unit": first_unit,
        "second_moment_unit": unit,
        "mean_second_moment": v.mean(),
        "share_at_floor": np.mean(v - phi <= unit),
        "mu_hat": quantile(m),
        "nu_hat": quantile(v),
        "update": quantile(m / denominator),
        "step_size": quantile(1 / denominator),
        "mu_hat_shares": shares(m / first_unit),
        "excess_shares": shares((v - phi) / unit),
        "update_shares": shares(m / denominator),
    }


OPTIMIZERS = {
    "corrected": dpadambc.scale_by_adam_bc(STDDEV),
    "plain": optax.scale_by_adam(eps=1e-8),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", PARAMS)
def test_readouts_are_those_of_numpy_on_the_whole_state(kind, name):
    grads = gradients()
    state = run(OPTIMIZERS[kind], grads)
    stddev = None if kind == "corrected" else STDDEV
    seen = jax.jit(lambda s: diagnostics.snapshot(s, noise_stddev=stddev))(state)
    assert seen.step == 30
    found = seen.parameters[f"['{name}']"]._asdict()
    expected = expected_readout(grads, name, corrected=kind == "corrected")
    assert found.keys() == expected.keys()
    for field, value in expected.items():
        if field.endswith("shares"):
            # A value within float32 of an edge may fall to its other side.
            moved = np.abs(found[field] - value).sum() * PARAMS[name].size
            assert moved <= 4.01
            assert found[field].sum() == pytest.approx(1, abs=1e-5)
        else:
            np.testing.assert_allclose(found[field], value, 3e-3, 1e-6, err_msg=field)


def cosine(a, b):
    return np.vdot(a, b) / np.linalg.norm(a) / np.linalg.norm(b)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_cosines_and_sizes_are_those_of_all_coordinates_together(kind):
    grads = gradients()
    seen = diagnostics.snapshot(run(OPTIMIZERS[kind], grads), noise_stddev=STDDEV)
    pairs = [moments_of(grads[name]) for name in PARAMS]
    m, v = (np.concatenate([np.ravel(p[i]) for p in pairs]) for i in (0, 1))
    floor = float(seen.parameters["['b']"].variance_floor)
    plain, corrected = m / np.sqrt(v), m / np.sqrt(np.maximum(v - STDDEV**2, floor))
    update = corrected if kind == "corrected" else plain
    expected = {
        "cosine_to_momentum": cosine(update, m),
        "cosine_to_sign": cosine(update, np.sign(m)),
        "cosine_of_correction": cosine(plain, corrected),
        "rms_update": np.sqrt(np.mean(update**2)),
        "rms_plain_update": np.sqrt(np.mean(plain**2)),
        "rms_corrected_update": np.sqrt(np.mean(corrected**2)),
        "share_at_floor": np.mean(v - STDDEV**2 <= floor),
    }
    for field, value in expected.items():
        assert float(getattr(seen, field)) == pytest.approx(value, rel=2e-3), field


ADAM_BC = dpadambc.scale_by_adam_bc(STDDEV)
WRAPPERS = {
    "chain": optax.chain(optax.identity(), ADAM_BC, optax.scale(-0.1)),
    "named_chain": optax.named_chain(("a", optax.identity()), ("b", ADAM_BC)),
    "masked": optax.chain(
        optax.masked(ADAM_BC, {"w": True, "b": False}),
        optax.masked(dpadambc.scale_by_adam_bc(STDDEV), {"w": False, "b": True}),
    ),
    "multi_transform": optax.multi_transform(
        {"x": ADAM_BC, "y": dpadambc.scale_by_adam_bc(STDDEV)},
        {"w": "x", "b": "y"},
    ),
    "inject_hyperparams": optax.inject_hyperparams(dpadambc.scale_by_adam_bc)(
        noise_stddev=STDDEV, b1=0.9
    ),
    "apply_if_finite": optax.apply_if_finite(ADAM_BC, 3),
    "multi_steps": optax.MultiSteps(ADAM_BC, 1).gradient_transformation(),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_state_is_found_in_every_wrapper(wrapper):
    grads = gradients(8)
    plain = diagnostics.snapshot(run(ADAM_BC, grads))
    wrapped = diagnostics.snapshot(run(WRAPPERS[wrapper], grads))
    assert wrapped.parameters.keys() == plain.parameters.keys()
    chex.assert_trees_all_close(wrapped, plain, rtol=1e-4, atol=1e-6)


def test_inside_scan_every_n_steps_without_compiling_again():
    optimizer, grads = OPTIMIZERS["corrected"], gradients(40)
    chunks = jax.tree.map(lambda g: g.reshape(4, 10, *g.shape[1:]), grads)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def train(chunks):
        def step(state, g):
            return optimizer.update(g, state)[1], None

        def chunk(state, gs):
            state, _ = jax.lax.scan(step, state, gs)
            return state, diagnostics.snapshot(state)

        return jax.lax.scan(chunk, optimizer.init(PARAMS), chunks)

    state, record = train(chunks)
    train(chunks)
    assert record.step.tolist() == [10, 20, 30, 40]
    chex.assert_tree_shape_prefix(record, (4,))
    alone, last = diagnostics.snapshot(state), jax.tree.map(lambda x: x[-1], record)
    chex.assert_trees_all_close(last, alone, rtol=1e-4, atol=1e-6)
    # Every second step, by a condition inside one scan.
    blank = jax.tree.map(jnp.zeros_like, alone)

    def step(state, g):
        state = optimizer.update(g, state)[1]
        seen = jax.lax.cond(
            state.count % 2 == 0, diagnostics.snapshot, lambda s: blank, state
        )
        return state, seen

    _, sparse = jax.lax.scan(step, optimizer.init(PARAMS), grads)
    assert sparse.step.tolist() == [i * (i % 2 == 0) for i in range(1, 41)]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_parameters():
    """The temporaries of one parameter at a time, and none of them all together."""
    size, count = 100_000, 8
    params = {str(i): jnp.zeros(size) for i in range(count)}
    state = ADAM_BC.init(params)
    compiled = jax.jit(diagnostics.snapshot).lower(state).compile()
    analysis = compiled.memory_analysis()
    output = analysis.output_size_in_bytes
    assert output < 4_000 * count
    # Of all parameters at once, they would be eight times as much.
    assert analysis.temp_size_in_bytes < 12 * 4 * size


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("x", None), P(None, "x")])
def test_sharded_parameters_are_read_without_gathering_them(kind, spec):
    optimizer = dpadambc.scale_by_adam_bc(0.1)
    gradient = jax.random.normal(jax.random.key(0), (256, 512))
    alone = optimizer.update(gradient, optimizer.init(gradient))[1]
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])
    sharded = jax.device_put(gradient, NamedSharding(mesh, spec))
    state = jax.jit(optimizer.update)(sharded, optimizer.init(sharded))[1]
    look = diagnostics.snapshot
    if kind == AxisType.Explicit:
        look = jax.sharding.auto_axes(look, out_sharding=P())
    with jax.set_mesh(mesh):
        compiled = jax.jit(look).lower(state).compile()
        seen = compiled(state)
    assert not re.search(r"f32.(256,512|131072)\S* all-gather", compiled.as_text())
    expected = diagnostics.snapshot(alone)
    chex.assert_trees_all_close(seen, expected, rtol=1e-4, atol=1e-6)


def test_quantiles_of_large_parameters_are_of_a_sample_with_exact_ends():
    values = jax.random.normal(jax.random.key(0), (300_000,))
    state = optax.ScaleByAdamState(jnp.int32(1), 0.1 * values, 0.001 * values**2)
    seen = diagnostics.snapshot(state, noise_stddev=1.0, sample_size=20_000)
    found = seen.parameters["params"].mu_hat
    assert found[0] == pytest.approx(float(values.min()), rel=1e-4)
    assert found[-1] == pytest.approx(float(values.max()), rel=1e-4)
    ranks = [float(jnp.mean(values <= q)) for q in found[1:-1]]
    # The standard error of a rank is at most 1 / (2 sqrt(20,000)) = 0.0035.
    np.testing.assert_allclose(ranks, readout.QUANTILES[1:-1], atol=0.0175)
    shares = seen.parameters["params"].mu_hat_shares
    unit = float(seen.parameters["params"].first_moment_unit)
    exact = np.histogram(0.1 * values / 0.1 / unit, readout.BIN_EDGES)[0] / values.size
    np.testing.assert_allclose(np.cumsum(shares), np.cumsum(exact), atol=0.0175)


def test_a_schedule_is_followed_by_the_correction_and_refused_for_plain_adam():
    schedule = lambda step: STDDEV * (1 + (step < 15))
    state = run(dpadambc.scale_by_adam_bc(schedule), gradients())
    seen = diagnostics.snapshot(state)
    variances = jnp.array([schedule(i) ** 2 for i in range(30)])
    bias = theory.second_moment_bias(variances, 0.999)[-1]
    assert seen.parameters["['w']"].noise_variance == pytest.approx(float(bias), 1e-3)
    plain = run(OPTIMIZERS["plain"], gradients())
    for missing in (None, schedule):
        with pytest.raises(ValueError, match="noise_stddev"):
            diagnostics.snapshot(plain, noise_stddev=missing)


def test_states_without_a_second_moment_or_with_two_are_refused():
    with pytest.raises(ValueError, match="opt_state"):
        diagnostics.snapshot(optax.sgd(0.1, momentum=0.9).init(PARAMS))
    with pytest.raises(ValueError, match="opt_state"):
        diagnostics.snapshot(dpadambc.scale_by_rms_bc(STDDEV).init(PARAMS))
    both = optax.chain(ADAM_BC, dpadambc.scale_by_adam_bc(STDDEV)).init(PARAMS)
    with pytest.raises(ValueError, match="opt_state"):
        diagnostics.snapshot(both)
    with pytest.raises(ValueError, match="sample_size"):
        diagnostics.snapshot(ADAM_BC.init(PARAMS), sample_size=0)


def test_clean_moments_are_refused_wherever_they_sit():
    clean = not_private.init_clean_moments({"other": jnp.zeros(3)})
    for state in (clean, (ADAM_BC.init(PARAMS), clean)):
        with pytest.raises(ValueError, match="opt_state"):
            diagnostics.snapshot(state, noise_stddev=STDDEV)


def test_parameters_without_coordinates_are_left_out():
    params = PARAMS | {"none": jnp.zeros((0, 3))}
    optimizer = dpadambc.scale_by_adam_bc(STDDEV)
    seen = diagnostics.snapshot(optimizer.init(params))
    assert seen.parameters.keys() == {"['w']", "['b']"}
    with pytest.raises(ValueError, match="opt_state"):
        diagnostics.snapshot(optimizer.init({}))


def test_noise_levels_by_parameter_reach_plain_adam_under_a_mask():
    levels = {"l1": STDDEV, "l2": {"w": 0.3}}
    params = {"l1": {"w": jnp.zeros(5)}, "l2": {"w": jnp.zeros(5)}}
    for mask, expected in [
        ({"l1": True, "l2": False}, {"['l1']['w']": STDDEV}),
        (True, {"['l1']['w']": STDDEV, "['l2']['w']": 0.3}),
    ]:
        state = optax.masked(optax.scale_by_adam(), mask).init(params)
        seen = diagnostics.snapshot(state, noise_stddev=levels)
        found = {name: row.noise_variance for name, row in seen.parameters.items()}
        assert found == pytest.approx({n: s**2 for n, s in expected.items()}, rel=1e-4)
    with pytest.raises(ValueError, match="noise_stddev"):
        diagnostics.snapshot(
            optax.scale_by_adam().init(params), noise_stddev={"l1": STDDEV}
        )


def test_the_state_of_an_nnx_optimizer_can_be_looked_at():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.chain(ADAM_BC), wrt=nnx.Param)
    seen = diagnostics.snapshot(nnx.as_pure(optimizer.opt_state))
    assert sorted(row.size for row in seen.parameters.values()) == [2, 6]


def test_nan_is_in_no_bin():
    values = jnp.where(jnp.arange(100) < 10, jnp.nan, 0.5)
    assert float(readout._shares(values).sum()) == pytest.approx(0.9)


def test_a_constant_square_is_no_signal_in_plain_adam():
    """Whatever rounds in b2: with 0.9999 it is 1.7e-4 of the noise variance."""
    params, optimizer = jnp.zeros(1_000), optax.scale_by_adam(b2=0.9999)
    step = lambda state, _: (optimizer.update(params + STDDEV, state)[1], None)
    state, _ = jax.lax.scan(step, optimizer.init(params), length=500)
    row = diagnostics.snapshot(state, noise_stddev=STDDEV, b2=0.9999)
    row = row.parameters["params"]
    assert abs(float(row.signal)) < 3e-5 * STDDEV**2


def test_a_fresh_state_is_readable():
    seen = diagnostics.snapshot(ADAM_BC.init(PARAMS))
    assert seen.step == 0
    chex.assert_tree_all_finite(seen)


# Who reads what. The clean gradient is NaN, and the noise replaced by a constant: what
# depends on anything but the noised gradient is NaN too.


def tainted_state(stores_clean_gradients):
    def constant_instead(updates, state, params=None):
        if stores_clean_gradients:
            state = optax.tree.update_moment(updates, state, 0.9, 1)
        return jax.tree.map(lambda g: jnp.full_like(g, 0.3), updates), state

    noise = optax.GradientTransformation(optax.tree.zeros_like, constant_instead)
    optimizer = optax.chain(noise, ADAM_BC)
    nans = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), PARAMS)
    return optimizer.update(nans, optimizer.init(PARAMS))[1], nans


def has_nan(tree):
    return any(np.isnan(np.asarray(x)).any() for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("stores_clean_gradients", [False, True])
def test_what_is_private_reads_nothing_before_the_noise(stores_clean_gradients):
    state, nans = tainted_state(stores_clean_gradients)
    # Even of an optimizer that stores what it should not, only the moments are read.
    assert has_nan(state) == stores_clean_gradients
    seen = diagnostics.snapshot(state)
    assert not has_nan(seen)
    # Negative control: what is named not private does read them.
    clean = not_private.update_clean_moments(
        not_private.init_clean_moments(PARAMS), nans
    )
    assert has_nan(not_private.snapshot(clean, noise_stddev=STDDEV))


@pytest.mark.parametrize("factored", [False, True])
def test_gradient_statistics_are_those_of_numpy_without_the_padding(factored):
    rng = np.random.default_rng(0)
    examples = jnp.asarray(rng.normal(size=(10, 6)), jnp.float32)
    params = {"w": jnp.ones((6, 4)), "b": jnp.zeros(4)}
    loss = lambda p, x: jnp.sum(jnp.tanh(x @ p["w"] + p["b"]) ** 2) / 4
    grads = dpadambc.per_example_grad(loss)(params, examples)
    if not factored:
        grads = dpadambc.as_per_example(dpadambc.materialize(grads))
    padding = jnp.arange(10) >= 8
    seen = jax.jit(not_private.gradient_statistics, static_argnums=1)(
        grads, mechanism(), is_padding_example=padding
    )
    arrays = dpadambc.materialize(grads)
    rows = np.concatenate([np.reshape(arrays[k], (10, -1)) for k in "bw"], axis=1)[:8]
    norms = np.linalg.norm(rows, axis=1)
    assert float(seen.clip_fraction) == pytest.approx(np.mean(norms > 1.0))
    np.testing.assert_allclose(
        seen.norm, np.quantile(norms, readout.QUANTILES), rtol=1e-3
    )
    clipped = rows / np.maximum(norms, 1.0)[:, None]
    assert float(seen.signal_norm) == pytest.approx(
        np.linalg.norm(clipped.sum(0) / 8), rel=1e-3
    )
    assert float(seen.noise_norm) == pytest.approx(2.0 / 8 * np.sqrt(28), rel=1e-6)
    assert float(seen.signal_to_noise) == pytest.approx(
        float(seen.signal_norm / seen.noise_norm)
    )


def test_the_clipped_share_counts_groups_with_bounds_of_their_own():
    rule = clipping.PerGroup({"w": "w", "b": "b"}, {"w": 0.6, "b": 0.8})
    rows = {"w": jnp.array([[0.7], [0.5]]), "b": jnp.array([[0.1], [0.7]])}
    seen = not_private.gradient_statistics(
        dpadambc.as_per_example(rows), mechanism(clip_rule=rule)
    )
    # The first is shorter than the bound of both together, and cut in one of them.
    assert float(seen.clip_fraction) == 0.5


def test_noise_of_gradient_statistics_follows_a_schedule():
    scheduled = mechanism(noise_multiplier=lambda step: 1.0 + step)
    seen = not_private.gradient_statistics(
        dpadambc.as_per_example(jnp.ones((3, 4))), scheduled, step=3
    )
    assert float(seen.noise_norm) == pytest.approx(4.0 / 8 * 2)


def test_the_excess_of_the_private_run_estimates_the_clean_second_moment():
    steps, key = 400, jax.random.key(0)
    clean = jax.tree.map(
        lambda g: jnp.tile(g[:1], (steps, *[1] * (g.ndim - 1))),
        gradients(1, stddev=0.05),
    )
    noised = jax.tree.map(lambda g: g + STDDEV * jax.random.normal(key, g.shape), clean)
    private = diagnostics.snapshot(run(ADAM_BC, noised))

    def step(state, g):
        return not_private.update_clean_moments(state, g), None

    state, _ = jax.lax.scan(step, not_private.init_clean_moments(PARAMS), clean)
    seen = not_private.snapshot(state, noise_stddev=STDDEV)
    for name, row in private.parameters.items():
        other = seen.parameters[name]
        assert float(other.second_moment_unit) == pytest.approx(
            float(row.second_moment_unit), rel=1e-4
        )
        assert other.noise_variance == 0
        # Cross terms of signal and noise add to the spread of noise alone.
        error = float(row.signal_stderr) + float(
            2 * STDDEV * np.sqrt(other.signal / steps / row.size)
        )
        assert abs(float(row.signal - other.signal)) < 5 * error
        m, v = moments_of(np.asarray(clean[name[2:-2]]))
        np.testing.assert_allclose(
            other.nu_hat, np.quantile(v, readout.QUANTILES), rtol=1e-3, atol=1e-9
        )
    # Adam without noise is sign descent here.
    assert seen.cosine_to_sign > 0.999


def test_the_share_at_the_floor_is_of_the_correction_that_was_made():
    """Nothing subtracted: none is at the floor but what is below it."""
    noise = jax.random.normal(jax.random.key(0), (100, 1_000))
    for correction, expected in ((1.0, 0.85), (0.0, 0.0)):
        adam_bc = dpadambc.scale_by_adam_bc(1.0, correction=correction)
        state, _ = jax.lax.scan(
            lambda state, g, tx=adam_bc: (tx.update(g, state)[1], None),
            adam_bc.init(noise[0]),
            noise,
        )
        seen = diagnostics.snapshot(state, correction=correction)
        assert float(seen.share_at_floor) == pytest.approx(expected, abs=0.02)

"""A run on many devices is the run on one: the same draws, nothing in the open."""

import collections
import dataclasses
import functools
import math
import os
import re
import socket
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dpadambc
from dpadambc import training
from dpadambc.core import chacha
from dpadambc.core import mesh as engine_mesh
from dpadambc.core import programs as core_programs
from dpadambc.training import checkpoints
from tests import alone_of_several, common

# Sums differ by rounding over devices, and with them the nonces.
pytestmark = pytest.mark.usefixtures("without_nonces")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(203, 16)).astype(np.float32)
DATA = X, np.sin(X.sum(1))
PARAMS = {
    "w1": RNG.normal(0, 0.2, (16, 64)).astype(np.float32),
    "b": np.zeros(64, np.float32),
    "w2": RNG.normal(0, 0.2, 64).astype(np.float32),
    "scale": np.ones((), np.float32),
}
MECHANISM = common.poisson_gaussian(sampling_prob=0.2, iterations=10, normalize_by=40)
# Sums that differ by rounding have noise of their own.
SILENT = dataclasses.replace(MECHANISM, noise_multiplier=0.0)


def loss_fn(params, x, y):
    hidden = jnp.tanh(x @ params["w1"] + params["b"])
    return (params["scale"] * (hidden @ params["w2"]) - y) ** 2


class Source:
    """The same data, an example at a time."""

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return tuple(column[index] for column in DATA)


def mesh_of(devices, kind=AxisType.Auto, names=("data",), shape=None):
    shape = (devices,) if shape is None else shape
    kinds = (kind,) * len(names)
    return jax.make_mesh(
        shape, names, axis_types=kinds, devices=jax.devices()[:devices]
    )


def fit(devices=None, *, split_params=False, kind=AxisType.Auto, key=3, **options):
    params, data = options.pop("params", PARAMS), options.pop("data", DATA)
    mechanism = options.pop("mechanism", SILENT)
    if devices is not None:
        mesh = mesh_of(devices, kind)
        data = training.Sharded(data, NamedSharding(mesh, P("data")))
        if split_params:
            shardings = training.fully_sharded(params, mesh, "data")
            params = jax.device_put(params, shardings)
    options = dict(steps_per_call=5) | options
    return training.fit(
        options.pop("loss_fn", loss_fn),
        params,
        data,
        mechanism,
        common.with_average(dpadambc.adam_bc(0.05, mechanism), 0.9),
        key=jax.random.key(key) if isinstance(key, int) else key,
        target_delta=1e-5,
        **options,
    )


@functools.cache
def on_one_device():
    return fit()


@functools.cache
def from_a_source():
    return fit(data=Source())


def apart(result, other):
    """The greatest difference of two trained models."""
    gaps = jax.tree.map(
        lambda a, b: np.max(np.abs(np.asarray(a) - np.asarray(b))),
        (result.params, result.state.opt_state[1]),
        (other.params, other.state.opt_state[1]),
    )
    return max(jax.tree.leaves(gaps))


WAYS = {
    "one": (1, {}),
    "two": (2, {}),
    "eight": (8, {}),
    "two, split": (2, dict(split_params=True)),
    "eight, split": (8, dict(split_params=True)),
    "explicit": (8, dict(split_params=True, kind=AxisType.Explicit)),
    "microbatches": (8, dict(split_params=True, microbatch_size=16)),
    "one microbatch": (8, dict(microbatch_size=1000)),
    "source": (8, dict(split_params=True, data=Source())),
    "on one device before": (8, dict(data=tuple(map(jnp.asarray, DATA)))),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "options"),
    [
        pytest.param(*row, id=name)
        if name == "explicit"
        else common.slow(*row, id=name)
        for name, row in WAYS.items()
    ],
)
def test_the_number_of_devices_changes_rounding_only(devices, options):
    result = fit(devices, **options)
    is_source = isinstance(options.get("data"), Source)
    expected = from_a_source() if is_source else on_one_device()
    assert apart(result, expected) < 1e-5
    mesh = result.state.params["w1"].sharding.mesh
    assert mesh.size == devices and mesh.axis_names == ("data",)


@pytest.mark.slow
def test_another_key_is_not_mistaken_for_rounding():
    """The negative control of the test above."""
    assert apart(fit(8, key=4), on_one_device()) > 0.01


@pytest.mark.slow
@pytest.mark.guarantee
@pytest.mark.parametrize("split_params", [False, True])
def test_the_noise_is_one_draw_on_any_number_of_devices(split_params):
    """Of sums that are zero to a bit; each device might draw one of its own."""
    nothing = lambda params, x, y: 0 * loss_fn(params, x, y)
    run = functools.partial(fit, loss_fn=nothing, mechanism=MECHANISM)
    alone, many = run(), run(8, split_params=split_params)
    assert apart(alone, many) < 1e-5 < 0.1 < apart(alone, fit(loss_fn=nothing))
    for x in jax.tree.leaves(many.state.params):
        parts = {str(s.index): [] for s in x.addressable_shards}
        for shard in x.addressable_shards:
            parts[str(shard.index)].append(np.asarray(shard.data))
        for first, *others in parts.values():
            for other in others:
                np.testing.assert_array_equal(first, other)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_data_that_are_split_split_their_batches(kind):
    rows = tuple(column[:200] for column in DATA)
    split = jax.device_put(rows, NamedSharding(mesh_of(8, kind), P("data")))
    layout_of = lambda data: engine_mesh.layout_of(
        PARAMS, data, engine_mesh.shardings_of(data)
    )
    layout = layout_of(split)
    assert layout.axes == ("data",) and engine_mesh.num_shards(layout) == 8
    result = fit(data=split)
    assert apart(result, fit(data=rows)) < 1e-5
    assert result.params["w1"].sharding.mesh.size == 8
    # Negative control: of replicated ones nothing is known.
    whole = jax.device_put(rows, NamedSharding(mesh_of(8, kind), P()))
    assert layout_of(whole).axes == ()


def with_dropout(params, x, y, *, key):
    return loss_fn(params, x * jax.random.bernoulli(key, 0.5, x.shape), y)


def with_base(params, frozen, x, y):
    return loss_fn(params | {"w1": frozen}, x, y)


def frozen_base(is_split):
    base, rest = PARAMS["w1"], {n: x for n, x in PARAMS.items() if n != "w1"}
    if is_split:
        base = jax.device_put(base, NamedSharding(mesh_of(8), P(None, "data")))
    return dict(params=rest, loss_fn=with_base, frozen=base)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [lambda is_split: dict(loss_fn=with_dropout), frozen_base]
)
def test_keys_and_frozen_arrays_do_not_depend_on_the_devices(options):
    assert apart(fit(8, **options(True)), fit(**options(False))) < 1e-5


@pytest.mark.slow
def test_features_may_be_split_over_another_axis():
    mesh = mesh_of(8, names=("data", "model"), shape=(4, 2))
    specs = {"w1": P("data", "model"), "b": P("model"), "w2": P("model"), "scale": P()}
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    params = {name: put(PARAMS[name], specs[name]) for name in PARAMS}
    data = training.Sharded(DATA, NamedSharding(mesh, P("data")))
    result = fit(params=params, data=data)
    assert apart(result, on_one_device()) < 1e-5
    assert result.params["w1"].sharding.spec == P("data", "model")


@pytest.mark.slow
@pytest.mark.usefixtures("without_nonces")
def test_a_loss_may_name_the_axes_of_the_mesh(one_identity):
    def constrained(params, x, y):
        hidden = jnp.tanh(x @ params["w1"] + params["b"])
        hidden = jax.lax.with_sharding_constraint(hidden, P("model"))
        return (params["scale"] * (hidden @ params["w2"]) - y) ** 2

    mesh = mesh_of(8, names=("data", "model"), shape=(4, 2))
    data = training.Sharded(DATA, NamedSharding(mesh, P("data")))
    result = fit(loss_fn=constrained, data=data)
    assert apart(result, fit()) < 1e-5


OPTIMIZERS = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.1),
    "adamw_bc": dpadambc.adamw_bc(0.1, MECHANISM.noise_stddev),
}


INJECTED = optax.inject_hyperparams(dpadambc.adam_bc)(0.1, MECHANISM.noise_stddev)
# Only the weights have moments.
IN_PARTS = optax.multi_transform(
    {"adam": dpadambc.adam_bc(0.1, MECHANISM.noise_stddev), "sgd": optax.sgd(0.1)},
    {"w1": "adam", "b": "sgd", "w2": "adam", "scale": "sgd"},
)


def start_of(optimizer, loss_fn, params, mesh):
    """The step with its layout, and its first state."""
    sharding = NamedSharding(mesh, P("data"))
    layout = engine_mesh.layout_of(params, (), [sharding])
    step = training.Step(loss_fn, MECHANISM, optimizer, layout=layout)
    words = np.asarray(jax.random.key_data(jax.random.key(1)))
    params = engine_mesh.placed(params, layout)
    digest = np.zeros(2, np.uint32)
    programs = core_programs.Programs(step, 203)
    return step, programs.start(params, words, digest, "threefry2x32")


def started(optimizer, split_params=True, devices=8):
    mesh = mesh_of(devices)
    params = PARAMS
    if split_params:
        params = jax.device_put(params, training.fully_sharded(params, mesh, "data"))
    step, state = start_of(optimizer, loss_fn, params, mesh)
    return optimizer, step.layout, state


# Which looks into the parameters, and so would not take a stand-in for them.
LABELLED = optax.multi_transform(
    {name: dpadambc.adam_bc(0.1, MECHANISM.noise_stddev) for name in ("w1", "rest")},
    lambda params: {n: n if n == "w1" else "rest" for n in params.keys()},
)


@pytest.mark.parametrize(
    "optimizer",
    [*OPTIMIZERS.values(), INJECTED, IN_PARTS, LABELLED],
    ids=[*OPTIMIZERS, "injected", "in_parts", "labelled"],
)
def test_moments_lie_where_their_parameters_do(optimizer):
    """And a device has an eighth of them."""
    _, _, state = started(optimizer)
    specs = {x.shape: x.sharding.spec for x in state.params.values()}
    assert specs[16, 64] == P(None, "data") and specs[()] == P()
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert moments and all(m.sharding.spec == specs[m.shape] for m in moments)
    assert all(m.addressable_shards[0].data.size == m.size // 8 for m in moments)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_in_a_mesh_of_the_users_own_and_from_its_callback(kind):
    mesh = mesh_of(8, kind)
    batches = NamedSharding(mesh, P("data"))
    heard = []
    with jax.set_mesh(mesh):
        evaluated = jax.device_put(X[:200], batches)

        def callback(progress):
            heard.append(float(jnp.sum(evaluated * 2)))

        data = training.Sharded(DATA, batches)
        result = fit(data=data, key=jax.random.key(3), callbacks=callback)
    assert apart(result, on_one_device()) < 1e-5
    assert heard == pytest.approx([2 * X[:200].sum()] * 2, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["mesh", "device"])
def test_the_key_may_lie_anywhere(where):
    place = jax.devices()[3]
    if where == "mesh":
        place = NamedSharding(mesh_of(8, AxisType.Explicit), P())
    result = fit(8, key=jax.device_put(jax.random.key(3), place))
    assert apart(result, on_one_device()) < 1e-5


COLLECTIVE = re.compile(
    r"= (\S.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)"
    r"(?:-start)?\("
)


def collectives(compiled):
    """The shapes that go between devices, by operation."""
    found = collections.defaultdict(list)
    for shapes, operation in COLLECTIVE.findall(compiled.as_text()):
        for dims in re.findall(r"\w+\[([\d,]*)\]", shapes):
            found[operation].append(tuple(int(n) for n in dims.split(",") if n))
    return found


def compiled_update(tx, layout, state):
    noise = dpadambc.add_dp_noise(MECHANISM.noise_stddev, key=jax.random.key(0))

    def update(gradient, state):
        summed = dpadambc.as_clipped_sum(gradient, l2_clip_norm=1.0, normalize_by=1)
        private, _ = noise.update(summed, state.noise, state.params)
        return tx.update(private, state.opt_state, state.params)

    with engine_mesh.on_mesh(layout):
        gradient = engine_mesh.constrained(state.params, layout, layout.params)
        return jax.jit(update).lower(gradient, state).compile()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_noise_and_update_need_no_other_device(optimizer):
    tx, layout, state = started(optimizer)
    assert not collectives(compiled_update(tx, layout, state))


def test_an_update_that_needs_other_devices_would_be_seen():
    """The negative control: a norm over all parameters."""
    with_norm = optax.chain(optax.sgd(0.1), optax.clip_by_global_norm(1.0))
    tx, layout, state = started(with_norm)
    assert collectives(compiled_update(tx, layout, state))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("impl", ["threefry2x32", chacha.KIND], ids=str)
def test_a_device_draws_its_part_of_the_noise(kind, impl):
    """Not the whole, of which it would keep a part: that would take the memory."""
    mesh, size = mesh_of(8, kind), 1 << 20
    noise = dpadambc.add_dp_noise(1.0, key=jax.random.key(0, impl=impl))

    @jax.jit
    def update(g, state):
        summed = dpadambc.as_clipped_sum(g, l2_clip_norm=1.0, normalize_by=1)
        return noise.update(summed, state, g)[0]

    with jax.set_mesh(mesh):
        zeros = jax.device_put(
            jnp.zeros((size // 64, 64)), NamedSharding(mesh, P("data"))
        )
        memory = update.lower(zeros, noise.init(zeros)).compile().memory_analysis()
        drawn = np.asarray(update(zeros, noise.init(zeros)))
    assert memory.output_size_in_bytes == 4 * size // 8
    # Of a cipher's words, four a number, a few copies are in memory.
    whole = 4 * size if impl == "threefry2x32" else 4 * 16 * size
    assert memory.temp_size_in_bytes < whole / 4
    assert drawn.std() == pytest.approx(1, rel=0.01)
    assert all((part != drawn[: len(part)]).any() for part in np.split(drawn, 8)[1:])


def compiled_step(devices, loss_fn, params, examples, split_params, **options):
    mesh = mesh_of(devices)
    if split_params:
        params = jax.device_put(params, training.fully_sharded(params, mesh, "data"))
    optimizer = dpadambc.adam_bc(0.1, MECHANISM.noise_stddev)
    step, state = start_of(optimizer, loss_fn, params, mesh)
    with engine_mesh.on_mesh(step.layout):
        padding = np.zeros(len(examples[0]), bool)
        placed = engine_mesh.placed((examples, padding), step.layout)
        return jax.jit(step, donate_argnums=0).lower(state, *placed).compile()


WIDE = {
    "tokens": RNG.normal(0, 0.1, (1000, 256)).astype(np.float32),
    "w1": RNG.normal(0, 0.1, (256, 1024)).astype(np.float32),
    "w2": RNG.normal(0, 0.1, (1024, 256)).astype(np.float32),
}
SENTENCES = np.zeros((128, 16), np.int32), np.zeros((128, 256), np.float32)


def of_sentence(params, tokens, target):
    hidden = jnp.tanh(params["tokens"][tokens] @ params["w1"]) @ params["w2"]
    return jnp.sum((hidden.mean(0) - target) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("split_params", [False, True])
def test_a_step_sums_each_gradient_once_and_gathers_none(split_params):
    compiled = compiled_step(8, of_sentence, WIDE, SENTENCES, split_params)
    moved = collectives(compiled)
    large = {
        operation: sorted(
            tuple(n for n in shape if n > 1) for shape in found if math.prod(shape) > 64
        )
        for operation, found in moved.items()
    }
    every = sorted(p.shape for p in WIDE.values())
    # Parameters that are split are gathered where they are used, once. (Of few examples
    # the compiler would gather the factors of the lookup instead of adding its sums.)
    gathered = {"all-gather": every} if split_params else {}
    assert large == {"all-reduce": every} | gathered


@pytest.mark.slow
@pytest.mark.parametrize("split_params", [False, True])
def test_factored_gradients_stay_factored_and_split(split_params):
    """A device has the factors of its examples, and forms none of their gradients."""
    memory = {
        devices: compiled_step(devices, of_sentence, WIDE, SENTENCES, split_params)
        .memory_analysis()
        .temp_size_in_bytes
        for devices in (1, 8)
    }
    formed_on_a_device = 4 * sum(p.size for p in WIDE.values()) * 128 // 8
    assert memory[8] < formed_on_a_device / 3
    factors = 4 * 128 * 16 * (256 + 1024 + 256)
    assert memory[8] < memory[1] - factors / 2


def test_clipping_under_a_jit_of_ones_own():
    """Without `fit`: shardings are given to jit, as for any other function."""
    mesh = mesh_of(8)
    batch, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    examples = tuple(column[:200] for column in DATA)
    clipped = dpadambc.clipped_grad(loss_fn, l2_clip_norm=1.0, normalize_by=40)
    on_many = jax.jit(clipped, in_shardings=(whole, batch, batch), out_shardings=whole)
    on_one = jax.jit(clipped)
    sums = on_many(PARAMS, *examples), on_one(PARAMS, *examples)
    got, expected = map(dpadambc.materialize, sums)
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "options"),
    [(None, {"microbatch_size": 16}), common.thorough(2, {}), (4, {})],
)
def test_a_run_goes_on_with_another_number_of_devices(tmp_path, devices, options):
    """On one device, microbatches of padding alone are left out besides."""

    class Killed(Exception):
        pass

    def kill(progress):
        if progress.iterations == 5:
            raise Killed

    saved = lambda: checkpoints.Checkpoints(tmp_path, every=5)
    with pytest.raises(Killed):
        fit(8, split_params=True, checkpoints=saved(), callbacks=kill, **options)
    iterations = []
    result = fit(
        devices,
        checkpoints=saved(),
        callbacks=lambda progress: iterations.append(progress.iterations),
        **options,
    )
    assert iterations == [10]
    assert apart(result, on_one_device()) < 1e-5
    # Negative control: one on other data is another run.
    with pytest.raises(ValueError, match="data"):
        fit(devices, checkpoints=saved(), data=(X, DATA[1] + 1), **options)


def test_arrays_on_two_meshes_or_split_in_two_ways_are_refused():
    params = jax.device_put(PARAMS, NamedSharding(mesh_of(2), P()))
    with pytest.raises(ValueError, match="mesh"):
        fit(8, params=params)
    mesh = mesh_of(8, names=("a", "b"), shape=(4, 2))
    put = lambda x, name: jax.device_put(x[:200], NamedSharding(mesh, P(name)))
    with pytest.raises(ValueError, match="data"):
        fit(data=(put(DATA[0], "a"), put(DATA[1], "b")))


@pytest.mark.parametrize("spec", [P(), P(None, "data"), P("data", None)])
def test_batches_are_split_by_examples(spec):
    with pytest.raises(ValueError, match="sharding"):
        training.Sharded(DATA, NamedSharding(mesh_of(8), spec))
    with pytest.raises(ValueError, match="sharding"):
        training.Sharded(DATA, spec)
    assert "1." not in repr(
        training.Sharded(DATA, NamedSharding(mesh_of(8), P("data")))
    )


def test_microbatches_have_a_part_for_each_device():
    for wrong, error in ((12, ValueError), (0, ValueError), (8.0, TypeError)):
        with pytest.raises(error, match="microbatch_size"):
            fit(8, microbatch_size=wrong)


def test_each_parameter_is_split_along_its_longest_axis_that_divides():
    shapes = {"a": (16, 64), "b": (7, 8), "c": (7,), "d": (), "e": (0, 8), "f": (8, 8)}
    params = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}
    shardings = training.fully_sharded(params, mesh_of(8), "data")
    assert {n: s.spec for n, s in shardings.items()} == {
        "a": P(None, "data"),
        "b": P(None, "data"),
        "c": P(),
        "d": P(),
        "e": P(None, "data"),
        "f": P("data"),
    }


def run_processes(folder, devices_of_each, *arguments, module="one_of_several"):
    """Two processes that know of each other through the loopback device."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    count = f"--xla_force_host_platform_device_count={devices_of_each}"
    flags = f"{os.environ['XLA_FLAGS']} {count}"  # of two counts, the last is taken
    command = [sys.executable, "-m", f"tests.{module}", address, "2"]
    running = [
        subprocess.Popen(
            [*command, str(process), str(folder), *arguments],
            env={**os.environ, "XLA_FLAGS": flags},
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    for process in running:
        _, stderr = process.communicate(timeout=240)
        assert process.returncode == 0, stderr


@pytest.mark.slow
@pytest.mark.parametrize("devices_of_each", [common.thorough(1), 4])
def test_two_processes_train_as_one_and_go_on(tmp_path, devices_of_each):
    run_processes(tmp_path, devices_of_each, "known")
    assert (tmp_path / "checkpoints" / "5").exists()
    assert not (tmp_path / "0.npz").exists()
    run_processes(tmp_path, devices_of_each, "known")
    first, second = (np.load(tmp_path / f"{process}.npz") for process in range(2))
    for name, expected in from_a_source().state.params.items():
        np.testing.assert_array_equal(first[name], second[name])
        np.testing.assert_allclose(first[name], expected, atol=1e-5)
    np.testing.assert_array_equal(first["checksum"], second["checksum"])
    # Padding comes last in a batch, so the second process has few examples to read.
    assert len(second["fetched"]) < 0.5 * len(first["fetched"])
    # One process goes on from what two saved: it has nothing left to do.
    saved = checkpoints.Checkpoints(tmp_path / "checkpoints", every=5)
    assert apart(fit(data=Source(), checkpoints=saved), from_a_source()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind_of_key", ["secret", common.thorough("own")])
def test_a3_processes_with_keys_of_their_own_train_with_one(tmp_path, kind_of_key):
    """Else each would draw other batches, and an example be in the sum of both."""
    run_processes(tmp_path, 1, kind_of_key)
    run_processes(tmp_path, 1, kind_of_key)
    first, second = (np.load(tmp_path / f"{process}.npz") for process in range(2))
    for name in PARAMS:
        np.testing.assert_array_equal(first[name], second[name])
    # What a process draws outside of `fit` is its own.
    assert first["drawn"] != second["drawn"]
    is_own = kind_of_key == "own"
    expected = fit(key=0, data=Source()) if is_own else from_a_source()
    gap = max(
        np.abs(first[name] - np.asarray(x)).max()
        for name, x in expected.state.params.items()
    )
    # The key of the first process; or none that anybody knows.
    assert gap < 1e-5 if is_own else gap > 0.01


@pytest.mark.slow
def test_a32_processes_of_one_run_with_parts_of_their_own_are_refused(tmp_path):
    """One half of the batch came from each source, so one person pushed out another."""
    run_processes(tmp_path, 1, module="different_of_several")
    first, second = (np.load(tmp_path / f"{process}.npz") for process in range(2))
    np.testing.assert_array_equal(first["same"], second["same"])
    parts = "source", "shorter", "arrays", "mechanism", "target_delta", "loss", "params"
    for told in (first, second):
        for name in parts:
            assert "in all processes of one run" in str(told[name])
    # A run on top of another, which has a random name in each process, is one run.
    np.testing.assert_array_equal(first["again"], second["again"])


@pytest.mark.slow
@pytest.mark.guarantee
def test_a26_processes_that_train_alone_have_noise_of_their_own(tmp_path):
    """All took the key of the first, and the difference of two models had no noise."""
    run_processes(tmp_path, 1, module="alone_of_several")
    first, second = (np.load(tmp_path / f"{process}.npz") for process in range(2))
    step = alone_of_several.MECHANISM.noise_stddev
    alone = np.std(first["own"]), np.std(second["own"])
    apart = np.std(first["own"] - second["own"])
    # Two steps each, of 400 coordinates: to four standard errors, and the gradients.
    assert min(alone) > 2**0.5 * step * (1 - 4 / 800**0.5)
    assert apart > 2 * step * (1 - 4 / 800**0.5)
    np.testing.assert_array_equal(first["same"], second["same"])
    # One trained more often than the other, and waited for nobody.
    assert (first["runs"], second["runs"]) == (1, 3)
    for told in (first, second):
        assert "checkpoints" in str(told["checkpoints"])


def on_explicit_mesh(x, *axes):
    return jax.device_put(x, NamedSharding(mesh_of(8, AxisType.Explicit), P(*axes)))


def test_a_loop_on_an_explicit_mesh_draws_batches_that_its_devices_divide():
    """They are those of one device, with more padding."""
    mechanism = dataclasses.replace(SILENT, sampling_prob=0.2)
    draw = lambda key: mechanism.sample_step(key, 1, num_examples=96)
    key = jax.random.key(0)
    alone, together = draw(key), draw(on_explicit_mesh(key))
    size = len(alone.indices)
    assert size % 8 and len(together.indices) % 8 == 0  # control
    np.testing.assert_array_equal(together.indices[:size], alone.indices)
    assert np.all(together.is_padding_example[size:])
    with jax.set_mesh(mesh_of(8, AxisType.Explicit)):
        assert len(draw(key).indices) == len(jax.jit(draw)(key).indices) == size + 1
        (batch, *_) = mechanism.batches(key, num_examples=96)
        assert len(batch.indices) == size + 1
    # Near misses: on axes of other kinds, and where no batch has padding.
    with jax.set_mesh(mesh_of(8, AxisType.Auto)):
        assert len(draw(key).indices) == size
    numbers = dict(batch_size=20, num_examples=96, l2_clip_norm=1.0, iterations=2)
    fixed = dpadambc.FixedSizeGaussian(noise_multiplier=1.0, normalize_by=9, **numbers)
    key = on_explicit_mesh(key)
    assert len(fixed.sample_step(key, 0, num_examples=96).indices) == 20


def test_a_loop_on_an_explicit_mesh_gathers_from_data_that_are_split():
    w, x = jnp.ones(3), RNG.normal(size=(96, 3)).astype(np.float32)
    mechanism = dataclasses.replace(SILENT, sampling_prob=0.2)
    step = training.Step(lambda w, x: (w @ x - 1) ** 2, mechanism, optax.sgd(0.1))

    def trained(w, x, compiled):
        def take(state):
            batch = training.draw_batch(mechanism, state, len(x))
            return step(state, batch.gather(x), batch.is_padding_example)[0]

        state = step.init(w, key=jax.random.key(0))
        for _ in range(3):
            state = (jax.jit(take) if compiled else take)(state)
        return state.params

    expected = trained(w, x, True)
    place = on_explicit_mesh(w), on_explicit_mesh(x, "data")
    for compiled in (True, False):
        np.testing.assert_allclose(trained(*place, compiled), expected, rtol=1e-4)
    with pytest.raises(ValueError, match="8 shards of data divide"):
        trained(w, place[1], True)


def trained_without_noise(*shape):
    """By the loop of the guide to devices."""
    silent = common.poisson_gaussian(noise_multiplier=0.0, iterations=3)
    rows = np.random.default_rng(0).normal(size=(160, 16)).astype(np.float32)
    mesh = jax.make_mesh(shape, ("data", "model")[: len(shape)])
    place = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, P(*axes)))
    params, rows, key = (
        place(np.zeros(16)),
        place(rows, "data"),
        place(jax.random.key(2)),
    )
    optimizer = optax.chain(dpadambc.privatize(silent, key=key), optax.sgd(0.1))
    grad_fn = dpadambc.per_example_grad(lambda w, x: (w @ x - x[0]) ** 2)
    state = optimizer.init(params)

    @jax.jit
    def take_step(params, state, step):
        batch = silent.sample_step(key, step, num_examples=160)
        masks = {"is_padding_example": batch.is_padding_example}
        grads = grad_fn(params, batch.gather(rows), **masks)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for step in range(silent.iterations):
        params, state = take_step(params, state, step)
    return jax.device_get(params)


def test_a_loop_without_noise_agrees_on_any_mesh():
    one = trained_without_noise(1)
    assert np.abs(one).max() > 1e-3
    for shape in ((8,), (2, 4)):
        np.testing.assert_allclose(trained_without_noise(*shape), one, atol=1e-6)

"""A run that is killed and goes on ends with the same bits, whatever happened."""

import dataclasses
import functools
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.experimental import io_callback
from jax.sharding import NamedSharding, PartitionSpec

import dpadambc
from dpadambc import contrib, training
from dpadambc.training import checkpoints
from tests import common

# Where one of Orbax's concurrent reads or writes fails, the others find their loop
# closed, and say so when they are collected.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(autouse=True, scope="module")
def collected():
    """Here, and not in a test of something else."""
    yield
    gc.collect()


X = jnp.asarray(np.random.default_rng(0).normal(size=(200, 3)), jnp.float32)
Y = X @ jnp.array([1.0, -2.0, 0.5])
MECHANISM = common.poisson_gaussian()
RATE = 0.1


def loss_fn(w, x, y):
    return (w @ x - y) ** 2


class Killed(Exception):
    pass


def killed_after(iterations):
    def callback(progress):
        if progress.iterations >= iterations:
            raise Killed

    return callback


def fit(folder=None, *, every=5, mechanism=MECHANISM, loss_fn=loss_fn, **options):
    options = dict(key=jax.random.key(0), target_delta=1e-5) | options
    rate, params = options.pop("rate", RATE), options.pop("params", jnp.zeros(3))
    data = options.pop("data", (X, Y))
    optimizer = options.pop("optimizer", None) or dpadambc.adam_bc(rate, mechanism)
    saved = checkpoints.Checkpoints(folder, every=every) if folder else None
    return training.fit(
        loss_fn,
        params,
        data,
        mechanism,
        optimizer,
        checkpoints=saved,
        **options,
    )


@functools.cache
def whole():
    """The run without an interruption."""
    return fit()


def assert_same(state, other):
    chex.assert_trees_all_equal_shapes_and_dtypes(state, other)
    chex.assert_trees_all_equal(common.plain(state), common.plain(other))


def interrupted(folder, after=13, **options):
    with pytest.raises(Killed):
        fit(folder, callbacks=killed_after(after), **options)


@pytest.mark.parametrize("steps_per_call", [common.slow(1), 3])
def test_a_run_goes_on_from_its_last_checkpoint_with_the_same_bits(
    tmp_path, steps_per_call
):
    optimizer = common.with_average(dpadambc.adam_bc(RATE, MECHANISM), 0.9)
    options = dict(optimizer=optimizer, steps_per_call=steps_per_call)
    interrupted(tmp_path, **options)
    steps = []
    again = fit(tmp_path, callbacks=lambda p: steps.append(p.iterations), **options)
    # From the last checkpoint, at step 10 or 15.
    assert steps[0] == {1: 11, 3: 18}[steps_per_call] and steps[-1] == 20
    uninterrupted = fit(**options)
    assert_same(again.state, uninterrupted.state)
    assert again.iterations == uninterrupted.iterations == 20
    assert again.epsilon == uninterrupted.epsilon


def test_a_run_that_is_done_is_not_run_again(tmp_path):
    first, heard = fit(tmp_path), []
    again = fit(tmp_path, callbacks=heard.append)
    assert not heard
    assert_same(first.state, again.state)


@pytest.mark.slow
@pytest.mark.guarantee
def test_no_step_is_counted_twice_or_not_at_all(tmp_path):
    """Three interruptions between and at checkpoints; the step counts what is spent."""
    for after in (3, 5, 12):
        interrupted(tmp_path, after)
    taken = []
    result = fit(tmp_path, callbacks=lambda p: taken.append(p.iterations))
    assert taken == list(range(11, 21))
    assert result.epsilon == MECHANISM.epsilon(1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"noise_multiplier": 1.5},
        {"sampling_prob": 0.3},
        {"normalize_by": 40},
        {"neighboring_relation": dpadambc.NeighboringRelation.REPLACE_ONE},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_mechanism_is_refused_and_the_number_named(tmp_path, changes):
    interrupted(tmp_path)
    with pytest.raises(ValueError, match=f"{next(iter(changes))}: .* there, .* here"):
        fit(tmp_path, mechanism=dataclasses.replace(MECHANISM, **changes))
    # The checkpoint is as it was.
    assert_same(fit(tmp_path).state, whole().state)


# A run that goes on for longer than it was to.


@pytest.mark.slow
def test_a_finished_run_is_extended_and_all_its_steps_count(tmp_path):
    fit(tmp_path)
    longer = dataclasses.replace(MECHANISM, iterations=30)
    taken = []
    result = fit(
        tmp_path, mechanism=longer, callbacks=lambda p: taken.append(p.iterations)
    )
    assert taken == list(range(21, 31)) and result.resumed_from == 20
    assert result.epsilon == longer.epsilon(1e-5) > MECHANISM.epsilon(1e-5)
    # It is the run that was to be as long from the start: no noise of another.
    assert_same(result.state, fit(mechanism=longer).state)


@pytest.mark.slow
def test_a_run_with_a_moving_bound_is_extended(tmp_path):
    bounded = lambda iterations: contrib.SlackClipping(
        dataclasses.replace(MECHANISM, iterations=iterations)
    )
    fit(tmp_path, mechanism=bounded(20))
    result = fit(tmp_path, mechanism=bounded(22))
    assert result.resumed_from == 20 and result.iterations == 22


@pytest.mark.slow
def test_an_extended_run_keeps_to_its_budget(tmp_path):
    fit(tmp_path)
    longer = dataclasses.replace(MECHANISM, iterations=40)
    spent = [longer.epsilon(1e-5, iterations=n) for n in (25, 26)]
    result = fit(tmp_path, mechanism=longer, target_epsilon=sum(spent) / 2)
    assert result.iterations == 25 and result.stopped_by == "budget"
    # Steps that were taken cannot be taken back.
    for options in (
        {"mechanism": dataclasses.replace(MECHANISM, iterations=10)},
        {"target_epsilon": MECHANISM.epsilon(1e-5, iterations=12)},
    ):
        with pytest.raises(ValueError, match="iterations or target_epsilon"):
            fit(tmp_path, **options)


@pytest.mark.slow
@pytest.mark.guarantee
def test_a_schedule_of_noise_is_that_of_the_run_when_it_is_extended(tmp_path):
    make = lambda late, n: dataclasses.replace(
        MECHANISM,
        noise_multiplier=lambda step: jnp.where(step < 20, 1.0, late),
        iterations=n,
    )
    fit(tmp_path, mechanism=make(2.0, 20))
    longer = make(2.0, 25)
    assert fit(tmp_path, mechanism=longer).epsilon == longer.epsilon(1e-5)
    # Even where all steps taken were the same.
    with pytest.raises(ValueError, match="program"):
        fit(tmp_path, mechanism=make(0.1, 30))


def preprocessed(constant):
    """With a constant in a compiled part of the loss."""
    prepare = jax.jit(lambda x: x * jnp.full(3, constant))
    return lambda w, x, y: (w @ prepare(x) - y) ** 2


def with_frozen(w, frozen, x, y):
    return (w @ (frozen * x) - y) ** 2


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        ({}, {"rate": 0.2}, "program"),
        common.slow({}, {"loss_fn": lambda w, x, y: jnp.abs(w @ x - y)}, "program"),
        common.slow(
            {"loss_fn": preprocessed(1.0)}, {"loss_fn": preprocessed(2.0)}, "program"
        ),
        ({}, {"data": (X.at[7].set(0), Y)}, "data"),
        common.slow({}, {"params": jnp.ones(3)}, "start"),
        common.slow(
            {"loss_fn": with_frozen, "frozen": jnp.ones(3)},
            {"loss_fn": with_frozen, "frozen": 2 * jnp.ones(3)},
            "frozen",
        ),
    ],
    ids=["rate", "loss", "constant", "data", "start", "frozen"],
)
# Also before the first checkpoint is due.
@pytest.mark.parametrize("after", [2, pytest.param(13, marks=pytest.mark.slow)])
def test_another_run_is_refused(tmp_path, first, second, what, after):
    interrupted(tmp_path, after, **first)
    with pytest.raises(ValueError, match=f"{what}: another"):
        fit(tmp_path, **second)
    if after == 2:
        taken = []
        fit(tmp_path, callbacks=lambda p: taken.append(p.iterations), **first)
        assert taken == list(range(1, 21))


def test_a_run_goes_on_with_its_own_keys(tmp_path):
    interrupted(tmp_path)
    assert_same(fit(tmp_path, key=jax.random.key(1)).state, whole().state)


@pytest.mark.guarantee
def test_a_run_goes_on_with_other_microbatches_and_the_keys_of_its_state(tmp_path):
    """They are in the key of the batches, and no part of the run's identity."""
    interrupted(tmp_path)
    again = fit(tmp_path, microbatch_size=16)
    assert again.resumed_from == 10
    sampling_key = lambda run: jax.random.key_data(run.state.sampling_key).tolist()
    assert sampling_key(again) == sampling_key(whole())


@pytest.mark.parametrize("kind", ["pure_callback", "io_callback"])
def test_a_loss_that_calls_back_to_the_host_is_refused(tmp_path, kind):
    call = {"pure_callback": jax.pure_callback, "io_callback": io_callback}[kind]

    @jax.jit
    def host(x):
        return call(lambda x: x, jax.ShapeDtypeStruct((), jnp.float32), x)

    def calls_back(w, x, y):
        return loss_fn(w, x, y + jax.lax.stop_gradient(host(y)))

    with pytest.raises(ValueError, match=kind):
        fit(tmp_path, loss_fn=calls_back)
    assert not any(path.name.isdigit() for path in tmp_path.iterdir())


def test_a_loss_that_prints_is_not(tmp_path):
    def prints(w, x, y):
        jax.debug.callback(lambda x: None, y)
        return loss_fn(w, x, y)

    assert fit(tmp_path, loss_fn=prints).iterations == 20


def start_of(size):
    step = training.Step(loss_fn, MECHANISM, optax.adam(RATE))
    return step.init(jnp.zeros(size), key=jax.random.key(1))


def test_another_model_is_refused(tmp_path):
    saved = checkpoints.Checkpoints(tmp_path)
    saved.save(start_of(3), {"a": 1}, {"planned": 2})
    with pytest.raises(ValueError, match="model"):
        saved.restore(start_of(4), {"a": 1})
    state, notes = saved.restore(start_of(3), {"a": 1})
    assert_same(state, start_of(3))
    assert notes == {"planned": 2}
    # Of a lone damaged one, that there is none before it.
    shutil.rmtree(tmp_path / "0" / "state")
    with pytest.raises(ValueError, match="spent="):
        saved.restore(start_of(3), {"a": 1})


def arrays_of(folder):
    """The files that hold arrays, of the last checkpoint."""
    last = max(
        (p for p in folder.iterdir() if p.name.isdigit()), key=lambda p: int(p.name)
    )
    files = [p for p in (last / "state").rglob("*") if p.is_file()]
    return last, [p for p in files if "/d/" in p.as_posix() or p.stat().st_size > 200]


@pytest.mark.slow
@pytest.mark.parametrize(
    "harm",
    ["truncated", common.slow("overwritten"), "removed", common.slow("emptied")],
)
def test_a_damaged_checkpoint_is_an_error_and_the_one_before_still_there(
    tmp_path, harm
):
    interrupted(tmp_path)
    last, files = arrays_of(tmp_path)
    assert files
    for path in files:
        content = path.read_bytes()
        if harm == "truncated":
            path.write_bytes(content[: len(content) // 2])
        elif harm == "overwritten":
            path.write_bytes(bytes(255 - b for b in content))
        elif harm == "emptied":
            path.write_bytes(b"")
    if harm == "removed":
        shutil.rmtree(last / "state")
    with pytest.raises(ValueError, match="remove it"):
        fit(tmp_path)
    time.sleep(0.2)
    # As the message says: the run goes on from the one before, with the same bits.
    shutil.rmtree(last)
    taken = []
    again = fit(tmp_path, callbacks=lambda p: taken.append(p.iterations))
    assert taken[0] == 6
    assert_same(again.state, whole().state)


@pytest.mark.slow
def test_a_flipped_bit_in_any_array_is_noticed(tmp_path, monkeypatch):
    """Even where the storage does not notice."""
    interrupted(tmp_path)
    read = checkpoints.Checkpoints._read
    arrays = jax.tree.leaves(checkpoints._nested(checkpoints._leaves(whole().state)))
    assert len(arrays) >= 8
    for i in range(len(arrays)):

        def damaged(self, step, part, arguments, i=i):
            found = read(self, step, part, arguments)
            if part != "state":
                return found
            leaves, structure = jax.tree.flatten(found)
            leaves[i] = np.array(leaves[i])
            leaves[i].reshape(-1).view(np.uint8)[0] ^= 1
            return jax.tree.unflatten(structure, leaves)

        monkeypatch.setattr(checkpoints.Checkpoints, "_read", damaged)
        with pytest.raises(ValueError, match="checksum"):
            fit(tmp_path)


@pytest.mark.slow
def test_plain_orbax_reads_a_checkpoint_by_the_names_of_its_fields(tmp_path):
    params = {"dense": [jnp.zeros(3)], "a.b": {"c%": jnp.zeros(())}}
    loss_fn = lambda p, x, y: (p["dense"][0] @ x + p["a.b"]["c%"] - y) ** 2
    params["empty"] = jnp.zeros(0)
    state = fit(tmp_path, params=params, loss_fn=loss_fn).state
    tree = ocp.StandardCheckpointer().restore(tmp_path / "20" / "state")
    assert "empty" not in tree["params"]
    (moments,) = filter(has_moments, jax.tree.leaves(tree, is_leaf=has_moments))
    words = jax.random.key_data(state.sampling_key)
    for found, expected in [
        (tree["params"]["dense"]["0"], state.params["dense"][0]),
        (tree["params"]["a%2Eb"]["c%25"], state.params["a.b"]["c%"]),
        (moments["nu"]["dense"]["0"], state.opt_state[0].nu["dense"][0]),
        (tree["sampling_key"], words),
    ]:
        np.testing.assert_array_equal(found, expected)


def has_moments(tree):
    return isinstance(tree, dict) and "nu" in tree


@dataclasses.dataclass
class Alike:
    """Two leaves whose keys read alike: a dictionary's and an attribute's."""

    one: Any
    two: Any


jax.tree_util.register_pytree_with_keys(
    Alike,
    lambda x: (
        ((jax.tree_util.DictKey("w"), x.one), (jax.tree_util.GetAttrKey("w"), x.two)),
        None,
    ),
    lambda _, leaves: Alike(*leaves),
)

ALIKE = {
    "dots": {"a.b": 0, "a": {"b": 1}},
    "a slash at the end": {"a/": 0, "a": 1},
    "slashes": {"a/b": 0, "a/b/": 1},
    "quoted already": {"a.b": 0, "a%2Eb": 1},
    "keys of two kinds": Alike(0, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALIKE)
def test_names_that_orbax_would_join_to_one_are_kept_apart(tmp_path, name):
    params = jax.tree.map(lambda i: jnp.full(3, float(i)), ALIKE[name])

    def loss_fn(params, x, y):
        one, two = jax.tree.leaves(params)
        return (one @ x + 2 * two @ x - y) ** 2

    first = fit(tmp_path, params=params, loss_fn=loss_fn).state
    again = fit(tmp_path, params=params, loss_fn=loss_fn).state
    assert_same(first, again)
    one, two = jax.tree.leaves(first.params)
    assert (one != two).all()


def test_a_folder_of_something_else_is_an_error(tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=ocp.args.Composite(about=ocp.args.JsonSave({"a": 1})))
    with pytest.raises(ValueError, match="checkpoint of dpadambc"):
        fit(tmp_path)


def test_a_checkpoint_holds_what_it_should_and_no_more(tmp_path):
    interrupted(tmp_path)
    last, _ = arrays_of(tmp_path)
    about = json.loads((last / "about" / "metadata").read_text())
    assert set(about["identity"]) == {
        *("mechanism", "program", "data", "frozen", "start", "spent_before"),
        "callbacks",
        *(f.name for f in dataclasses.fields(MECHANISM)),
    }
    assert set(about["notes"]) == {"parts", "planned", "least"}
    shapes = [shape for shape, _ in about["arrays"].values()]
    # Step, parameters; of the optimizer: count, two moments and noise variance of Adam;
    # count and key of the noise; the keys of sampling and loss.
    assert sorted(shapes) == sorted([[], [3], [], [3], [3], [], [], [2], [2], [2]])


def masked_by(key):
    return lambda w, x, y: (w @ (x * jax.random.normal(key, (3,))) - y) ** 2


def summed_over(size):
    """Each device adds what all have: more devices, larger inputs."""
    kinds = (jax.sharding.AxisType.Auto,)
    devices = jax.devices()[:size]
    mesh = jax.make_mesh((size,), ("x",), axis_types=kinds, devices=devices)
    add = jax.shard_map(
        lambda x: jax.lax.psum(x, "x"),
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    data = training.Sharded((X, Y), NamedSharding(mesh, PartitionSpec("x")))
    loss = lambda w, x, y: (w @ (x * add(jnp.ones(()))) - y) ** 2
    return dict(loss_fn=loss, data=data)


KEYS = [jax.random.key(seed) for seed in (5, 6)]
CHANGES = {
    "key of the loss": [dict(loss_fn=masked_by(key)) for key in KEYS],
    "frozen key": [
        dict(frozen=key, loss_fn=lambda w, key, x, y: masked_by(key)(w, x, y))
        for key in KEYS
    ],
    "key in the data": [
        dict(
            data=(X, Y, jax.random.split(key, 200)),
            loss_fn=lambda w, x, y, key: masked_by(key)(w, x, y),
        )
        for key in KEYS
    ],
    "devices in the loss": [summed_over(size) for size in (2, 4)],
    "products of the clip": [
        dict(precision=x) for x in (None, jax.lax.Precision.HIGHEST)
    ],
}


@pytest.mark.parametrize("change", common.rest_slow(CHANGES, quick=1))
def test_what_changes_gradients_is_another_run(tmp_path, change):
    before, after = CHANGES[change]
    interrupted(tmp_path, **before)
    with pytest.raises(ValueError, match="another run"):
        fit(tmp_path, **after)
    # Negative control: the same is not.
    assert fit(tmp_path, **before).iterations == 20


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    w: jax.Array
    activation: object = dataclasses.field(metadata=dict(static=True))


@pytest.mark.slow
def test_a_function_in_the_parameters_is_the_same_in_another_process(tmp_path):
    """Its address is not."""

    def options():
        return dict(
            params=Model(jnp.zeros(3), Activation()),
            loss_fn=lambda model, x, y: (model.activation(model.w @ x) - y) ** 2,
        )

    class Activation:
        __call__ = staticmethod(jnp.tanh)

        def __eq__(self, other):
            return type(other) is type(self)

        def __hash__(self):
            return 0

    interrupted(tmp_path, **options())
    assert fit(tmp_path, **options()).iterations == 20


class Recording:
    """A source that says which examples were asked for."""

    def __init__(self, scale=1.0):
        self.scale = scale

    def __len__(self):
        return 200

    def __getitem__(self, index):
        return np.asarray(X[index]) * self.scale, np.asarray(Y[index])


@pytest.mark.slow
def test_a_source_goes_on_and_another_one_is_refused(tmp_path):
    interrupted(tmp_path, data=Recording())
    with pytest.raises(ValueError, match="data: "):
        fit(tmp_path, data=Recording(2.0))
    again = fit(tmp_path, data=Recording())
    assert_same(again.state, fit(data=Recording()).state)


def stop_after(iterations, *, is_public):
    def callback(progress):
        if progress.iterations == iterations:
            raise training.Stop(is_public=is_public)

    return callback


# At a step that is saved anyway, and at one that is not.
@pytest.mark.parametrize("first", [5, common.slow(3)])
@pytest.mark.parametrize("is_public", [common.slow(True), False])
def test_what_stopped_a_run_decides_what_counts_of_it_later(tmp_path, first, is_public):
    fit(tmp_path, callbacks=stop_after(first, is_public=is_public))
    counts = MECHANISM.iterations if not is_public else 8
    budget = MECHANISM.epsilon(1e-5, iterations=8) + 1e-6
    rest = fit(tmp_path, target_epsilon=budget)
    assert rest.iterations == 8
    assert rest.epsilon == MECHANISM.epsilon(1e-5, iterations=counts)
    # Also where what stops it later is public.
    end = fit(tmp_path, callbacks=stop_after(12, is_public=True))
    counts = MECHANISM.iterations if not is_public else 12
    assert end.epsilon == MECHANISM.epsilon(1e-5, iterations=counts)


EMPTY = {"none": jnp.zeros((0, 3)), "w": jnp.zeros(3)}
of_list = lambda w, x, y: (w[0] * x[0] + w[1] * x[1] + w[2] * x[2] - y) ** 2
KINDS = {
    "numpy": dict(params=np.zeros(3)),
    "list": dict(params=[0.0, 0.0, 0.0], loss_fn=of_list),
    "low precision": dict(params=jnp.zeros(3, jnp.bfloat16)),
    "empty": dict(
        params=EMPTY, loss_fn=lambda p, x, y: loss_fn(p["w"], x, y) + p["none"].sum()
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_parameters_of_any_kind_are_found_again(tmp_path, options):
    interrupted(tmp_path, **options)
    assert_same(fit(tmp_path, **options).state, fit(**options).state)


def test_numbers_of_numpy_are_recorded(tmp_path):
    numbers = dict(l2_clip_norm=np.float32(1), iterations=np.int64(20))
    interrupted(tmp_path, mechanism=dataclasses.replace(MECHANISM, **numbers))
    assert fit(tmp_path).iterations == 20


@pytest.mark.slow
@pytest.mark.parametrize("split", ["parameters", common.slow("data")])
def test_a_sharded_run_goes_on(tmp_path, split):
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    put = lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec("x")))
    x, w = jnp.linspace(-1, 1, 2000).reshape(200, 10), jnp.zeros((10, 4))
    options = dict(
        data=(put(x) if split == "data" else x,),
        params=put(w) if split == "parameters" else w,
        loss_fn=lambda w, x: jnp.sum((x @ w - 1) ** 2),
    )
    interrupted(tmp_path, **options)
    again, whole = fit(tmp_path, **options), fit(**options)
    assert_same(again.state, whole.state)
    assert len(whole.state.params.sharding.device_set) == 2
    # Negative control.
    assert np.abs(whole.state.params).max() > 0.01


@pytest.mark.slow
def test_saves_are_kept_as_asked_and_paths_may_be_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    interrupted("run", every=3)
    fit("run", every=3)
    folder = tmp_path / "run"
    kept = sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit())
    assert kept == [18, 20]
    for name in ("every", "keep"):
        with pytest.raises(ValueError, match=name):
            checkpoints.Checkpoints(tmp_path, **{name: 0})


# A process that is killed at any moment, also in the middle of a save.

PROGRAM = """
import pathlib, sys
import jax, jax.numpy as jnp, numpy as np
import dpadambc
from dpadambc import training

folder, output = sys.argv[1:]
size = 200_000  # a save takes a while
mechanism = dpadambc.PoissonGaussian(
    l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.25, iterations=20,
    normalize_by=50)
x = jnp.linspace(-1, 1, 200)
saved = training.Checkpoints(folder, every=1) if folder else None
result = training.fit(
    lambda w, x: jnp.mean((w - x) ** 2), jnp.zeros(size), (x,), mechanism,
    dpadambc.adam_bc(0.1, mechanism.noise_stddev), key=jax.random.key(0),
    target_delta=1e-5, checkpoints=saved,
    callbacks=lambda p: print(p.iterations, flush=True))
np.save(output, result.state.params)
"""


def command(folder, output):
    return [sys.executable, "-c", PROGRAM, str(folder), str(output)]


@pytest.mark.parametrize("times", [common.slow(1), common.thorough(6)])
def test_a_process_killed_at_random_moments_ends_with_the_same_bits(tmp_path, times):
    expected, output = tmp_path / "whole.npy", tmp_path / "resumed.npy"
    subprocess.run(command("", expected), check=True, stdout=subprocess.DEVNULL)
    moments, kills = random.Random(0), 0
    while not output.exists():
        again = command(tmp_path / "folder", output)
        with subprocess.Popen(again, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            if kills < times and process.stdout.readline():
                time.sleep(moments.uniform(0, 0.3))
                process.send_signal(signal.SIGKILL)
                kills += 1
            process.communicate()
    assert kills == times
    np.testing.assert_array_equal(np.load(expected), np.load(output))


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="needs a small file system"
)
def test_a_full_disk_loses_nothing(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount")
    try:
        where = folder / "checkpoints"
        interrupted(where)
        # What is left does not hold another checkpoint.
        free = shutil.disk_usage(folder).free
        (folder / "ballast").write_bytes(bytes(free - 4096))
        with pytest.raises(OSError, match="checkpoint before"):
            fit(where)
        (folder / "ballast").unlink()
        taken = []
        again = fit(where, callbacks=lambda p: taken.append(p.iterations))
        assert taken[0] == 11
        assert_same(again.state, whole().state)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)

"""Microbatches that fit into the memory of a device, where it is stated."""

import dataclasses
import types
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from dpadambc import training
from dpadambc.training import _memory
from tests import common

WIDTH, LENGTH, EXAMPLES = 64, 64, 96
MECHANISM = dpadambc.PoissonGaussian(
    l2_clip_norm=1.0,
    noise_multiplier=1.0,
    sampling_prob=0.5,
    iterations=2,
    normalize_by=48,
)
DATA = (np.random.default_rng(0).normal(size=(EXAMPLES, LENGTH, WIDTH)) / 8).astype("f")
PARAMS = [jnp.eye(WIDTH) for _ in range(4)]
OPTIMIZER = optax.adam(1e-3)


def loss_fn(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.sum(jnp.square(x))


class Source:
    """The same examples, one by one."""

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        return (DATA[index],)


def fit(data=(DATA,), mechanism=MECHANISM, **options):
    return training.fit(
        loss_fn,
        PARAMS,
        data,
        mechanism,
        OPTIMIZER,
        key=jax.random.key(0),
        target_delta=1e-4,
        **options,
    )


@pytest.fixture
def state_memory(monkeypatch):
    """Devices that state so many bytes."""

    def stated(num_bytes):
        monkeypatch.setattr(_memory, "stated_bytes", lambda **_: num_bytes)

    return stated


@pytest.fixture
def microbatches(monkeypatch):
    """The sizes of the microbatches of the runs."""
    found, planned = [], _memory.planned

    def recorded(*args):
        runner = planned(*args)
        found.append(runner._step.microbatch_size)
        return runner

    monkeypatch.setattr(_memory, "planned", recorded)
    return found


def step_bytes(microbatch_size, data=(DATA,)):
    """What the step of a run takes, whatever its plan says."""
    found = []

    def planned(runner, start, size):
        found.append(runner.peak_bytes(start, microbatch_size))
        return runner

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_memory, "planned", planned)
        fit(data)
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "data", [common.thorough((DATA,)), Source()], ids=["arrays", "source"]
)
@pytest.mark.usefixtures("without_nonces")
def test_a_run_takes_as_many_examples_at_a_time_as_fit(
    data, state_memory, microbatches
):
    few, many = step_bytes(4, data), step_bytes(None, data)
    assert few < many / 2
    limit = (few + many) // 2
    state_memory(limit)
    planned = fit(data)
    (size,) = microbatches
    assert size is not None and step_bytes(size, data) <= limit
    # The result is that of all at once, up to rounding.
    state_memory(None)
    whole = fit(data)
    assert microbatches[1:] == [None]
    params = planned.state.params, whole.state.params
    chex.assert_trees_all_close(*params, atol=1e-5)


@pytest.mark.slow
def test_all_at_once_where_they_fit_or_the_memory_is_not_stated(
    state_memory, microbatches
):
    fit()  # a CPU states none
    state_memory(1e12)
    fit()
    state_memory(1.0)
    with pytest.warns(UserWarning, match="microbatch_size='auto' finds"):
        fit(microbatch_size=None)
    assert microbatches == [None, None, None]


@pytest.mark.slow
def test_a_size_that_does_not_fit_is_warned_of_and_one_that_does_is_not(state_memory):
    state_memory(step_bytes(8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(microbatch_size=8)
    with pytest.warns(UserWarning, match="microbatch_size='auto' finds"):
        fit(microbatch_size=64)


@pytest.mark.slow
def test_where_nothing_fits_it_says_so_and_takes_one(state_memory, microbatches):
    state_memory(1.0)
    with pytest.warns(UserWarning, match="No fewer than 1 examples"):
        fit()
    assert microbatches == [1]


@pytest.mark.slow
def test_a_plan_is_made_once_for_equal_runs(state_memory, microbatches, monkeypatch):
    state_memory((step_bytes(4) + step_bytes(None)) // 2)
    fit()
    compiled, peak_bytes = [], _memory.memory.peak_bytes
    count = lambda program: compiled.append(program) or peak_bytes(program)
    monkeypatch.setattr(_memory.memory, "peak_bytes", count)
    fit()
    assert microbatches[0] == microbatches[1] and not compiled


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_call", [common.slow(1), 2])
def test_a_planned_run_is_extended_from_its_checkpoint(
    tmp_path, state_memory, microbatches, steps_per_call
):
    """One of more steps, or of several in a call, has the same microbatches."""
    state_memory((step_bytes(4) + step_bytes(None)) // 2)
    checkpoints = training.Checkpoints(tmp_path)
    fit(checkpoints=checkpoints)
    longer = dataclasses.replace(MECHANISM, iterations=4)
    again = fit(
        mechanism=longer, checkpoints=checkpoints, steps_per_call=steps_per_call
    )
    assert again.resumed_from == 2 and again.iterations == 4
    assert microbatches[0] == microbatches[1] is not None


def test_no_example_at_all_is_planned_for(state_memory):
    state_memory(1e12)
    nobody = dataclasses.replace(MECHANISM, sampling_prob=0.0)
    assert fit(mechanism=nobody).iterations == 2


def test_the_least_memory_of_the_devices_counts(monkeypatch):
    device = lambda stats: types.SimpleNamespace(memory_stats=lambda: stats)
    devices = lambda *stats: monkeypatch.setattr(
        jax, "local_devices", lambda: list(map(device, stats))
    )
    devices({"bytes_limit": 1000}, {"bytes_limit": 500, "bytes_in_use": 400})
    assert _memory.stated_bytes() == pytest.approx(450)
    for silent in (None, {}, {"bytes_in_use": 1}):
        devices({"bytes_limit": 1000}, silent)
        assert _memory.stated_bytes() is None


@pytest.mark.parametrize("size", [0, -1, 2.5, "all"])
def test_a_size_is_a_positive_number_auto_or_none(size):
    with pytest.raises((TypeError, ValueError), match="microbatch_size"):
        fit(microbatch_size=size)

"""Microbatches that fit into the memory of a device, where it is stated."""

import dataclasses
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from dpadambc import training
from dpadambc.clipping import memory
from dpadambc.core import programs
from dpadambc.training import microbatches
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
PARAMS = [jnp.eye(WIDTH) for _ in range(8)]
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
    options = {"key": jax.random.key(0), "target_delta": 1e-4} | options
    return training.fit(loss_fn, PARAMS, data, mechanism, OPTIMIZER, **options)


@pytest.fixture
def state_memory(monkeypatch):
    """Devices that state so many bytes."""
    return lambda num_bytes: monkeypatch.setattr(
        memory, "stated_bytes", lambda **_: num_bytes
    )


@pytest.fixture
def sizes(monkeypatch):
    """The sizes of the microbatches of the runs, as they are planned."""
    found, planned = [], microbatches.with_microbatches

    def recorded(*args):
        step = planned(*args)
        found.append(step.microbatch_size)
        return step

    monkeypatch.setattr(microbatches, "with_microbatches", recorded)
    return found


def step_bytes(microbatch_size, data=(DATA,)):
    """The bytes of a step of a run with microbatches of this size."""
    found = []

    def measured(limit, sizes, needed):
        size = sizes[-1] if microbatch_size is None else microbatch_size
        found.append(needed(size))
        return {sizes[-1]: 0}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "stated_bytes", lambda **_: 1.0)
        patch.setattr(memory, "measured_around", measured)
        fit(data)
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "data", [common.thorough((DATA,)), Source()], ids=["arrays", "source"]
)
@pytest.mark.usefixtures("without_nonces")
def test_a_run_takes_as_many_examples_at_a_time_as_fit(data, state_memory, sizes):
    few, many = step_bytes(4, data), step_bytes(None, data)
    sizes.clear()
    assert few < many / 2
    limit = (few + many) // 2
    state_memory(limit)
    planned = fit(data)
    (size,) = sizes
    assert size is not None and step_bytes(size, data) <= limit
    # The result is that of all at once, up to rounding.
    state_memory(None)
    whole = fit(data)
    assert sizes[-1] is None
    chex.assert_trees_all_close(planned.params, whole.params, atol=1e-5)


@pytest.mark.slow
def test_all_at_once_where_they_fit_or_the_memory_is_not_stated(state_memory, sizes):
    fit()  # a CPU states none
    state_memory(1e12)
    fit()
    nobody = dataclasses.replace(MECHANISM, sampling_prob=0.0)
    assert fit(mechanism=nobody).iterations == 2
    assert sizes == [None, None, None]
    # Where nothing fits it takes one; a size that was asked for is taken as it is.
    state_memory(1.0)
    fit()
    fit(microbatch_size=None)
    fit(microbatch_size=8)
    assert sizes[3:] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_call", [common.slow(1), 2])
def test_a_planned_run_is_extended_from_its_checkpoint(
    tmp_path, state_memory, sizes, steps_per_call
):
    """One of more steps, or of several in a call, has the same microbatches."""
    limit = (step_bytes(4) + step_bytes(None)) // 2
    sizes.clear()
    state_memory(limit)
    checkpoints = training.Checkpoints(tmp_path)
    fit(checkpoints=checkpoints)
    # The plan of an equal run compiles nothing.
    compiled = lambda: programs._compiled_once.cache_info().misses
    before = compiled()
    fit()
    assert compiled() == before
    longer = dataclasses.replace(MECHANISM, iterations=4)
    again = fit(
        mechanism=longer, checkpoints=checkpoints, steps_per_call=steps_per_call
    )
    assert again.resumed_from == 2 and again.iterations == 4
    assert len(set(sizes)) == 1 and sizes[0] is not None


def test_the_least_memory_of_the_devices_counts(monkeypatch):
    device = lambda stats: types.SimpleNamespace(memory_stats=lambda: stats)
    devices = lambda *stats: monkeypatch.setattr(
        jax, "local_devices", lambda: list(map(device, stats))
    )
    devices({"bytes_limit": 1000}, {"bytes_limit": 500, "bytes_in_use": 400})
    assert memory.stated_bytes() == pytest.approx(450)
    for silent in (None, {}, {"bytes_in_use": 1}):
        devices({"bytes_limit": 1000}, silent)
        assert memory.stated_bytes() is None


@pytest.mark.parametrize("size", [0, -1, 2.5, "all"])
def test_a_size_is_a_positive_number_auto_or_none(size):
    with pytest.raises((TypeError, ValueError), match="microbatch_size"):
        fit(microbatch_size=size)

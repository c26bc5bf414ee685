"""What processes tell each other before a run; real ones are in `sharding_test`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dpadambc import training
from dpadambc.training import _keys, _processes
from tests import common

MECHANISM = common.poisson_gaussian(sampling_prob=0.2, iterations=2)
X = np.random.default_rng(0).normal(size=(48, 4)).astype(np.float32)


@pytest.fixture
def two(monkeypatch):
    """The next call meets what the one before it told."""
    told = []

    def gather(own):
        told.append(own)
        return np.stack([told[-2], own] if len(told) % 2 == 0 else [own, own])

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", gather)


def rows_of(x):
    class Source:
        __len__ = lambda self: len(x)
        __getitem__ = lambda self, i: {"x": x[i], "none": ()}

    return Source()


def parts(**changes):
    own = {
        "mechanism": _processes.mechanism(MECHANISM),
        "params": _processes.arrays({"w": jnp.ones(3, jnp.bfloat16), "n": 1.0}),
        "frozen": _processes.arrays((None, jax.random.key(0))),
        "data": _processes.data(rows_of(X)),
    }
    return own | changes


def test_equal_parts_pass(two):
    for _ in range(2):
        _processes.refuse_different(**parts())


@pytest.mark.parametrize(
    ("name", "other"),
    {
        "mechanism": _processes.mechanism(common.poisson_gaussian()),
        "params": _processes.arrays({"w": jnp.zeros(3, jnp.bfloat16), "n": 1.0}),
        "frozen": _processes.arrays((None, jax.random.key(1))),
        "data": _processes.data(rows_of(X[:-1])),
    }.items(),
)
def test_a32_a_part_that_differs_is_refused_by_its_name(two, name, other):
    _processes.refuse_different(**parts())
    with pytest.raises(ValueError, match=f"Expected the same {name} in all processes"):
        _processes.refuse_different(**parts(**{name: other}))


def test_a_run_alone_beside_one_of_all_is_refused(two):
    _processes.refuse_different(**parts())
    with pytest.raises(ValueError, match="Expected all processes to train one model"):
        outline = lambda: {"data": "these"}
        _keys.compared_with_other_processes(jax.random.key(0), outline)


def test_runs_of_others_on_the_same_data_are_known(two):
    told = lambda number, data: _keys.compared_with_other_processes(
        jax.random.key(number), lambda: {"data": data, "seed": number}
    )
    assert not told(0, "these") and len(told(1, "these")) == 1
    assert not told(0, "these") and not told(1, "others")
    assert not told(0, "these")
    with pytest.raises(ValueError, match="Expected a key of its own"):
        told(0, "others")


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_what_is_compared_may_lie_on_one_device_of_a_mesh(axis_type):
    """Vectors of the loss, kernels of the optimizer, under the mesh of a user."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,))
    first = jax.devices()[0]
    vector = jax.device_put(np.sin(np.arange(4.0) * 7).astype(np.float32), first)
    kernel = jax.device_put(np.eye(4, dtype=np.float32), first)

    def run(loss_fn, **options):
        return training.fit(
            loss_fn,
            jnp.zeros(4),
            (X,),
            MECHANISM,
            optax.sgd(0.1),
            key=training.secret_key(),
            target_delta=1e-3,
            **options,
        )

    on_all = {"batch_sharding": NamedSharding(mesh, P("data"))}
    run(lambda w, x: w @ (kernel @ x) + vector @ x, **on_all)
    run(lambda w, frozen, x: w @ x * frozen.sum(), frozen=vector, **on_all)
    with jax.set_mesh(mesh):
        run(lambda w, x: w @ x, **on_all)


def test_keys_and_complex_numbers_are_no_column_of_labels():
    column = np.sin(np.arange(48.0) * 5).astype(np.float32)
    data = (X, jax.random.split(jax.random.key(0), 48), X[:, 0] + 1j * X[:, 1])
    training.fit(
        lambda w, frozen, x, key, z: w @ x * frozen.sum() + jnp.abs(z),
        jnp.zeros(4),
        data,
        MECHANISM,
        optax.sgd(0.1),
        key=training.secret_key(),
        target_delta=1e-3,
        frozen=column,
    )

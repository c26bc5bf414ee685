"""`fit` replayed on neighboring data, in the same batches: what reaches the optimizer.

Without noise, that is the clipped sum, which the sensitivity bounds. The step itself is
audited with each optimizer and each kind of loss in `audit/public_test.py`; here is
what the loop adds.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dpadambc
from dpadambc import training
from tests import common

SIZE, BATCH = 64, 16
RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(SIZE, 8)).astype(np.float32)
TARGETS = FEATURES.sum(1)
PARAMS = {"w": jnp.zeros(8), "b": jnp.zeros(())}
MECHANISM = dpadambc.FixedSizeGaussian(
    l2_clip_norm=0.5,
    noise_multiplier=1.0,
    batch_size=BATCH,
    num_examples=SIZE,
    iterations=1,
    normalize_by=BATCH,
)
POISSON = common.poisson_gaussian(
    l2_clip_norm=0.5,
    sampling_prob=0.9,
    iterations=1,
    normalize_by=BATCH,
    neighboring_relation=dpadambc.NeighboringRelation.REPLACE_ONE,
)
NOISE = MECHANISM.noise_stddev
ADAM_BC = dpadambc.adam_bc(0.1, NOISE)


def loss_fn(params, x, y):
    return jnp.tanh(params["w"] @ x + params["b"] - y) * 3 + params["w"] @ x


# Each data set has batches of its own otherwise.
pytestmark = pytest.mark.usefixtures("one_identity")


def watched(optimizer):
    """The same optimizer, and what it is given."""
    given = []

    def update(updates, state, params=None):
        jax.debug.callback(given.append, updates)
        return optimizer.update(updates, state, params)

    return optax.GradientTransformation(optimizer.init, update), given


class Rows:
    def __init__(self, columns):
        self._columns = columns

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return tuple(column[index] for column in self._columns)


def private_gradient(columns, optimizer=ADAM_BC, mechanism=MECHANISM, **options):
    optimizer, given = watched(optimizer)
    params = options.pop("params", PARAMS)
    training.fit(
        options.pop("loss_fn", loss_fn),
        params,
        options.pop("data", tuple)(columns),
        dataclasses.replace(mechanism, noise_multiplier=0.0),
        optimizer,
        key=jax.random.key(1),
        target_delta=1e-5,
        **options,
    )
    jax.effects_barrier()
    (gradient,) = given
    return gradient


def taken_part(mechanism=MECHANISM):
    """An example that is in the batch of the first step."""
    step = training.Step(loss_fn, mechanism, ADAM_BC)
    state = step.init(PARAMS, key=jax.random.key(1))
    batch = training.draw_batch(mechanism, state, SIZE)
    return int(batch.indices[0])


def replaced(by, mechanism=MECHANISM):
    x, y = FEATURES.copy(), TARGETS.copy()
    i = taken_part(mechanism)
    x[i], y[i] = by * x[i], -y[i]
    return x, y


def apart(one, two):
    gaps = jax.tree.map(lambda a, b: np.float64(a) - np.float64(b), one, two)
    return np.sqrt(sum(np.sum(gap**2) for gap in jax.tree.leaves(gaps)))


def moved(*by, mechanism=MECHANISM, **options):
    """How far the clipped sum moves for each, in units of the sensitivity."""
    of = functools.partial(private_gradient, mechanism=mechanism, **options)
    start = of((FEATURES, TARGETS))
    ends = [of(replaced(factor, mechanism)) for factor in by]
    return [apart(start, end) / mechanism.sensitivity for end in ends]


def test_the_optimizer_sees_no_more_of_an_example_than_the_sensitivity():
    """Replaced by the opposite, an example reaches the bound; by NaN, half of it."""
    opposite, broken = moved(-1.0, np.nan)
    assert 0.95 < opposite <= 1.0001 and 0.45 < broken <= 0.5001


SPLIT = NamedSharding(
    jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)), P("data")
)
KINDS = {
    "source": dict(data=Rows),
    "several steps a call": dict(steps_per_call=10),
    "sharded": dict(data=lambda columns: training.Sharded(tuple(columns), SPLIT)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["source", common.slow("several steps a call"), "sharded"]
)
@pytest.mark.usefixtures("without_nonces")
def test_nor_does_it_with_another_kind_of_data(kind):
    assert max(moved(-1.0, np.nan, **KINDS[kind])) <= 1.0001


@pytest.mark.slow
def test_nor_does_it_where_batches_are_padded():
    assert 0.4 < max(moved(-1.0, np.nan, -1e20, mechanism=POISSON)) <= 1.0001


def test_what_is_not_clipped_moves_further():
    """Negative control."""
    plain = jax.grad(
        lambda params, x, y: (
            jax.vmap(functools.partial(loss_fn, params))(x, y).sum() / BATCH
        )
    )
    one, two = (
        plain(PARAMS, *map(jnp.asarray, columns))
        for columns in ((FEATURES, TARGETS), replaced(-10.0))
    )
    assert optax.tree.norm(optax.tree.sub(one, two)) > 10 * MECHANISM.sensitivity

"""A process without a clip, or without noise, is warned of at a mechanism's level."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import dpadambc
from dpadambc._core import stages
from tests import common

pytestmark = pytest.mark.guarantee

MECHANISM = common.poisson_gaussian()
LEVEL = MECHANISM.noise_stddev
PARAMS, NO_PADDING = jnp.ones(3), jnp.zeros(8, bool)
X = jax.random.normal(jax.random.key(5), (8, 3))
WITHOUT_CLIP = "Expected gradients clipped for each example before noise"
WITHOUT_NOISE = "Expected a gradient with noise of the level that is taken out"


@pytest.fixture(autouse=True)
def nothing_was_traced():
    """As in a process that has just begun."""
    stages._TRACED.clear()
    stages._WARNED.clear()


def loss_fn(w, x):
    return (w @ x) ** 2


def clipped_sum(x):
    gradient = dpadambc.clipped_grad(loss_fn, l2_clip_norm=1.0, normalize_by=50)
    return gradient(PARAMS, x, is_padding_example=NO_PADDING)


def updated(optimizer, gradient):
    return optimizer.update(gradient, optimizer.init(PARAMS), PARAMS)[0]


def noise():
    return dpadambc.add_dp_noise(LEVEL, key=jax.random.key(0))


def test_the_noise_of_a_mechanism_on_a_mean_is_warned_of():
    clip = optax.clip_by_global_norm(1.0)
    mean = lambda x: jax.grad(lambda w: jax.vmap(loss_fn, (None, 0))(w, x).mean())
    by_batch = lambda x: clip.update(mean(x)(PARAMS), clip.init(PARAMS))[0]
    with pytest.warns(UserWarning, match=WITHOUT_CLIP):
        updated(noise(), by_batch(X))
    moved = jnp.linalg.norm(by_batch(X) - by_batch(X.at[0].multiply(-1e4)))
    assert moved > 10 * MECHANISM.sensitivity  # what it did


def test_a_correction_that_is_taken_for_the_noise_is_warned_of():
    with pytest.warns(UserWarning, match=WITHOUT_NOISE):
        updated(dpadambc.adam_bc(0.1, LEVEL), clipped_sum(X))
    gradient = clipped_sum(X)
    of_two = [updated(dpadambc.adam_bc(0.1, LEVEL), gradient) for _ in range(2)]
    assert (of_two[0] == of_two[1]).all()  # what it did: no noise at all


@pytest.mark.parametrize(
    "make",
    [
        lambda level: dpadambc.adam_bc(0.1, level),
        lambda level: dpadambc.adamw_bc(0.1, level, weight_decay=0.1),
        lambda level: dpadambc.rms_bc(0.1, level),
    ],
    ids=["adam_bc", "adamw_bc", "rms_bc"],
)
def test_each_correction_asks_for_noise_as_it_is_warned_of(make):
    with pytest.warns(UserWarning, match=WITHOUT_NOISE):
        jax.jit(lambda g: updated(make(LEVEL), g))(PARAMS)


def by_clipped_grad():
    chain = optax.chain(noise(), dpadambc.adam_bc(0.1, LEVEL))
    return updated(chain, clipped_sum(X))


def by_privatize():
    chain = dpadambc.dp_adam_bc(0.1, MECHANISM, key=jax.random.key(1))
    gradients = dpadambc.per_example_grad(loss_fn)(
        PARAMS, X, is_padding_example=NO_PADDING
    )
    return updated(chain, gradients)


def by_fit():
    return dpadambc.training.fit(
        loss_fn,
        PARAMS,
        (X,),
        common.poisson_gaussian(sampling_prob=0.5, iterations=2, normalize_by=4),
        dpadambc.adam_bc(0.1, 0.25),
        key=jax.random.key(2),
        target_delta=1e-3,
    )


def with_a_level_of_ones_own():
    """On a gradient that is private already, or public."""
    chain = optax.chain(
        dpadambc.add_dp_noise(0.123, key=jax.random.key(3)),
        dpadambc.adam_bc(0.1, 0.123),
    )
    return updated(chain, PARAMS)


@pytest.mark.parametrize(
    "run", [by_clipped_grad, by_privatize, by_fit, with_a_level_of_ones_own]
)
def test_whoever_has_both_or_a_level_of_their_own_is_not(run):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()


def test_it_is_said_once():
    with pytest.warns(UserWarning, match=WITHOUT_CLIP):
        updated(noise(), PARAMS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        updated(dpadambc.add_dp_noise(LEVEL, key=jax.random.key(4)), PARAMS)

"""What tests of several modules share."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from dpadambc import contrib, training
from dpadambc.core import noise


def poisson_gaussian(**changes):
    """A small mechanism: 20 steps on a quarter of some 200 examples."""
    numbers = dict(
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        sampling_prob=0.25,
        iterations=20,
        normalize_by=50,
    )
    return dpadambc.PoissonGaussian(**numbers | changes)


def correlated_gaussian():
    """A small mechanism whose noise takes back a half of that of the step before."""
    return contrib.CorrelatedGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        iterations=4,
        normalize_by=4,
        batches_per_epoch=4,
        noising_coefficients=(1.0, -0.5),
    )


def with_average(optimizer, decay):
    """The optimizer, with a moving average of the parameters as `state[1]`."""

    def update(updates, state, params):
        inner, average = state
        updates, inner = optimizer.update(updates, inner, params)
        params = optax.apply_updates(params, updates)
        return updates, (inner, optax.incremental_update(params, average, 1 - decay))

    init = lambda params: (optimizer.init(params), params)
    return optax.GradientTransformation(init, update)


def slow(*values, id=None):
    """A row of a table that `make test` leaves to `make test-slow`."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def rest_slow(rows, *, quick):
    """The first rows of a table that has one value in each; the others are slow."""
    rows = list(rows)
    return rows[:quick] + [slow(row) for row in rows[quick:]]


def thorough(*values, id=None):
    """A row whose parts are in other rows: `make test-thorough` has it."""
    return pytest.param(*values, marks=pytest.mark.thorough, id=id)


def plain(tree):
    """With keys as numbers, which can be compared."""
    return optax.tree.unwrap_random_key_data(tree)


def assert_jit_changes_nothing(fun, *calls, rtol=1e-5, atol=1e-6):
    """By hand and compiled, once for the arguments of all calls, a function is one."""
    chex.clear_trace_counter()  # which takes the functions of all callers for one
    compiled = jax.jit(chex.assert_max_traces(lambda *args: fun(*args), n=1))
    for args in calls:
        by_hand, shapes = fun(*args), jax.eval_shape(fun, *args)
        chex.assert_trees_all_equal_shapes_and_dtypes(by_hand, shapes)
        got, expected = plain(compiled(*args)), plain(by_hand)
        chex.assert_trees_all_close(got, expected, rtol=rtol, atol=atol)


def assert_fit_goes_on_bit_for_bit(made, folder):
    """With a mechanism of so many iterations, from a checkpoint at half of them."""
    data = (np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32),)
    mechanism = made(iterations=6)
    run = lambda mechanism, **options: training.fit(
        lambda w, x: jnp.sum((w - x) ** 2),
        jnp.zeros(3),
        data,
        mechanism,
        dpadambc.adam_bc(0.1, mechanism.noise_stddev),
        key=jax.random.key(5),
        target_delta=1e-5,
        steps_per_call=3,
        **options,
    )
    whole = run(mechanism)
    assert whole.epsilon == pytest.approx(mechanism.epsilon(1e-5))
    saved = training.Checkpoints(folder)
    half = run(made(iterations=3), checkpoints=saved)
    assert half.epsilon == pytest.approx(mechanism.epsilon(1e-5, iterations=3))
    rest = run(mechanism, checkpoints=saved)
    np.testing.assert_array_equal(whole.state.params, rest.state.params)
    assert rest.epsilon == whole.epsilon
    assert not hasattr(training.releasable(whole), "noise")


def arrays(tree):
    """Sealed leaves as their arrays, which are not private; others as they are."""
    openers = {
        dpadambc.PerExampleGradient: dpadambc.PerExampleGradient.materialize,
        dpadambc.ClippedSum: dpadambc.ClippedSum.value.fget,
    }
    opened = lambda x: openers.get(type(x), lambda x: x)(x)
    return jax.tree.map(opened, tree, is_leaf=lambda x: type(x) in openers)


def summed(tree):
    """Arrays as a clipped sum, such as what `add_dp_noise` takes."""
    return dpadambc.as_clipped_sum(tree, l2_clip_norm=1.0, normalize_by=1.0)


def sum_over(sums, axis_name):
    """Clipped sums over the devices along an axis of a `jax.shard_map`."""
    is_sum = lambda x: isinstance(x, dpadambc.ClippedSum)
    return jax.tree.map(lambda x: x.sum_over(axis_name), sums, is_leaf=is_sum)


def drawn_later(monkeypatch):
    """A list that fills with the noise of each step, over its level, as leaves."""
    drawn, noised = [], noise.noised

    def recorded(key, sums, stddev):
        found = noised(key, sums, stddev)
        share = lambda y, s, level: jnp.where(level > 0, (y - s) / level, 0.0)
        levels = noise.stddev_per_leaf(stddev, sums)
        leaves = jax.tree.leaves(jax.tree.map(share, found, sums, levels))
        jax.debug.callback(lambda *leaves: drawn.append(leaves), *leaves, ordered=True)
        return found

    monkeypatch.setattr(noise, "noised", recorded)
    return drawn

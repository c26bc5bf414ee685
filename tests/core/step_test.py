"""A step of one's own loop is the step of `fit`."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpadambc import graphs, training
from tests import common

X = jnp.asarray(np.random.default_rng(0).normal(size=(200, 3)), jnp.float32)
DATA = {"x": X, "y": X @ jnp.array([1.0, -2.0, 0.5])}
MECHANISM = common.poisson_gaussian(iterations=10)
SILENT = common.poisson_gaussian(iterations=10, noise_multiplier=0.0)
KEY = jax.random.key(0)


def loss_fn(w, example):
    return (w @ example["x"] - example["y"]) ** 2


def fit(loss_fn=loss_fn, data=DATA, optimizer=None, **options):
    optimizer = optimizer or optax.adam(0.1)
    return training.fit(
        loss_fn,
        jnp.zeros(3),
        data,
        SILENT,
        optimizer,
        key=KEY,
        target_delta=1e-5,
        **options,
    )


def by_hand(step, gather, sampling_key, frozen=None):
    state = step.init(jnp.zeros(3), key=KEY)
    state = dataclasses.replace(state, sampling_key=sampling_key.copy())
    traced_once = chex.assert_max_traces(step.__call__, n=1)
    take_step, seen = jax.jit(traced_once, donate_argnums=0), []
    for _ in range(SILENT.iterations):
        batch = training.draw_batch(SILENT, state, num_examples=200)
        padding = jnp.asarray(batch.is_padding_example)
        state, told = take_step(state, gather(batch), padding, frozen)
        seen.append(told)
    return state, seen


def assert_same(state, other):
    state, other = common.plain((state, other))
    chex.assert_trees_all_close(state, other, rtol=1e-5, atol=1e-6)


def test_a_loop_of_steps_is_fit():
    told = []
    result = fit(callbacks=lambda progress: told.append(progress.seen))
    step = training.Step(loss_fn, SILENT, optax.adam(0.1), skip_padding=True)
    gather, key = lambda batch: batch.gather(DATA), result.state.sampling_key
    state, seen = by_hand(step, gather, key)
    assert_same(state, result.state)
    assert_same(seen, told)


@pytest.mark.slow
def test_with_all_its_options(one_identity):
    def noisy(w, frozen, x, y, *, key):
        return (w @ (frozen * x) + 0.1 * jax.random.normal(key) - y) ** 2

    data, frozen = (DATA["x"], DATA["y"]), jnp.ones(3)
    result = fit(noisy, data, frozen=frozen, microbatch_size=16)
    step = training.Step(noisy, SILENT, optax.adam(0.1), microbatch_size=16)
    gather, key = lambda batch: batch.gather(data), result.state.sampling_key
    state, _ = by_hand(step, gather, key, frozen)
    assert_same(state, result.state)


class Rows:
    """A source of dictionaries."""

    def __len__(self):
        return 200

    def __getitem__(self, index):
        return {name: np.asarray(column[index]) for name, column in DATA.items()}


@pytest.mark.slow
def test_an_example_may_be_a_dictionary_from_arrays_or_from_a_source(one_identity):
    of_two = lambda w, x, y: loss_fn(w, {"x": x, "y": y})
    expected = fit(of_two, (DATA["x"], DATA["y"])).state
    assert_same(fit().state, expected)
    assert_same(fit(data=Rows()).state, expected)


def test_a_step_on_padding_alone_is_noise():
    step = training.Step(loss_fn, MECHANISM, optax.sgd(1.0))
    state = step.init(jnp.zeros(3), key=KEY)
    rows = jax.tree.map(lambda x: x[:4], DATA)
    after, seen = step(state, rows, jnp.ones(4, bool))
    assert int(seen.num_examples) == 0
    assert (after.params != 0).all() and int(after.step) == 1


@pytest.mark.slow
def test_runs_under_vmap_are_the_runs_alone(one_identity):
    optimizer = optax.inject_hyperparams(optax.adam)(0.1)
    step = training.Step(loss_fn, SILENT, optimizer)

    def train(key, learning_rate):
        state = step.init(jnp.zeros(3), key=key)
        state = optax.tree.set(state, learning_rate=learning_rate)

        def take_step(state, _):
            batch = training.draw_batch(SILENT, state, num_examples=200)
            padding = batch.is_padding_example
            state, seen = step(state, batch.gather(DATA), padding)
            return state, (seen, batch.indices)

        return jax.lax.scan(take_step, state, length=SILENT.iterations)

    keys, rates = jax.random.split(KEY, 3), jnp.array([0.01, 0.1, 0.1])
    rows = jax.jit(jax.vmap(train))(keys, rates)
    for i, (key, rate) in enumerate(zip(keys, rates, strict=True)):
        alone = jax.jit(train)(key, rate)
        assert_same(jax.tree.map(lambda x, i=i: x[i], rows), alone)
        # And a row is the run of `fit`.
        ours = training.fit(
            *(loss_fn, jnp.zeros(3), DATA, SILENT, optax.adam(float(rate))),
            key=key,
            target_delta=1e-5,
        )
        np.testing.assert_allclose(
            alone[0].params, ours.state.params, rtol=1e-4, atol=1e-5
        )
    indices = rows[1][1]
    assert (indices[1] != indices[2]).any(axis=-1).all()


@jax.jit
def moves_without_examples(keys):
    """What the noise of a step moves each of several runs by."""
    step = training.Step(loss_fn, MECHANISM, optax.sgd(1.0))
    states = jax.vmap(lambda key: step.init(jnp.zeros(3), key=key))(keys)
    rows = jax.tree.map(lambda x: x[:4], DATA)
    states, _ = jax.vmap(lambda state: step(state, rows, jnp.ones(4, bool)))(states)
    return states.params


def test_the_noise_of_runs_under_vmap_differs_if_their_keys_do():
    moves = np.asarray(moves_without_examples(jax.random.split(KEY, 100)))
    assert len(np.unique(moves, axis=0)) == len(moves)
    assert moves.std() == pytest.approx(MECHANISM.noise_stddev, rel=0.2)
    correlation = np.corrcoef(moves[:-1].ravel(), moves[1:].ravel())[0, 1]
    assert abs(correlation) < 5 / np.sqrt(moves.size)
    # Negative control: one key for all.
    same = moves_without_examples(jnp.stack([KEY] * 3))
    assert len(np.unique(same)) == 3


def test_no_step_repeats_the_noise_of_another():
    step = training.Step(loss_fn, MECHANISM, optax.sgd(1.0))
    states = [step.init(jnp.zeros(3), key=KEY)]
    take = jax.jit(step)
    rows = jax.tree.map(lambda x: x[:4], DATA)
    for _ in range(5):
        states.append(take(states[-1], rows, jnp.ones(4, bool))[0])
    moved = np.diff(np.stack([s.params for s in states]), axis=0)
    assert len(np.unique(moved.round(6))) == moved.size


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"microbatch_size": 0}, ValueError),
        ({"mechanism": 1.0}, TypeError),
    ],
)
def test_wrong_numbers_are_refused(options, error):
    arguments = dict(loss_fn=loss_fn, mechanism=MECHANISM, optimizer=optax.sgd(0.1))
    with pytest.raises(error):
        training.Step(**arguments | options)


def test_the_mask_is_checked():
    step = training.Step(loss_fn, MECHANISM, optax.sgd(0.1))
    state = step.init(jnp.zeros(3), key=KEY)
    rows = jax.tree.map(lambda x: x[:4], DATA)
    with pytest.raises(TypeError, match="is_padding_example"):
        step(state, rows, jnp.ones(4))
    with pytest.raises(ValueError, match="is_padding_example"):
        step(state, rows, jnp.ones(3, bool))


# A state of another mechanism.

OTHERS = {
    "noise": common.poisson_gaussian(iterations=10, noise_multiplier=1.1),
    "sampling": common.poisson_gaussian(iterations=10, sampling_prob=0.2),
    "iterations": common.poisson_gaussian(iterations=11),
    "kind": graphs.NodePoissonGaussian(**vars(MECHANISM), max_terms=1),
}


def init(mechanism, key):
    step = training.Step(loss_fn, mechanism, optax.sgd(0.1))
    return step.init(jnp.zeros(3), key=key)


def take_step(mechanism, state):
    step = training.Step(loss_fn, mechanism, optax.sgd(0.1))
    rows = jax.tree.map(lambda x: x[:4], DATA)
    return step(state, rows, jnp.zeros(4, bool))


@pytest.mark.guarantee
@pytest.mark.parametrize("is_jitted", [False, True])
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_state_of_another_mechanism_is_refused(other, is_jitted):
    """One state that went from mechanism to mechanism had 9.54 for a claimed 1.08."""
    take = jax.jit(take_step, static_argnums=0) if is_jitted else take_step
    make = lambda mechanism: init(mechanism, KEY)
    with pytest.raises(TypeError, match="state"):
        take(other, make(MECHANISM))
    # Near misses: its own, and one that was made anew with equal numbers.
    equal = common.poisson_gaussian(iterations=10)
    assert equal is not MECHANISM
    for mechanism, state in ((other, other), (equal, MECHANISM), (MECHANISM, equal)):
        after, _ = take(mechanism, make(state))
        assert int(after.step) == 1


def test_a_state_of_another_mechanism_is_refused_under_scan_and_vmap():
    states = jax.vmap(lambda key: init(OTHERS["noise"], key))(jax.random.split(KEY, 2))
    one = lambda state: take_step(MECHANISM, state)[0]
    with pytest.raises(TypeError, match="state"):
        jax.vmap(one)(states)
    first = jax.tree.map(lambda x: x[0], states)
    with pytest.raises(TypeError, match="state"):
        jax.lax.scan(lambda state, _: (one(state), None), first, length=2)

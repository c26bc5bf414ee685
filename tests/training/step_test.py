"""A step of one's own loop is the step of `fit`."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpadambc import training
from tests import common

X = jnp.asarray(np.random.default_rng(0).normal(size=(200, 3)), jnp.float32)
DATA = {"x": X, "y": X @ jnp.array([1.0, -2.0, 0.5])}
MECHANISM = common.poisson_gaussian(iterations=10)
KEY = jax.random.key(0)


def loss_fn(w, example):
    return (w @ example["x"] - example["y"]) ** 2


def fit(loss_fn=loss_fn, data=DATA, optimizer=None, **options):
    optimizer = optimizer or optax.adam(0.1)
    return training.fit(
        loss_fn,
        jnp.zeros(3),
        data,
        MECHANISM,
        optimizer,
        key=KEY,
        target_delta=1e-5,
        **options,
    )


def by_hand(step, gather, frozen=None):
    state = step.init(jnp.zeros(3), key=KEY)
    traced_once = chex.assert_max_traces(step.__call__, n=1)
    take_step, seen = jax.jit(traced_once, donate_argnums=0), []
    for _ in range(MECHANISM.iterations):
        batch = training.draw_batch(MECHANISM, state, num_examples=200)
        padding = jnp.asarray(batch.is_padding_example)
        state, told = take_step(state, gather(batch), padding, frozen)
        seen.append(told)
    return state, seen


def assert_same(state, other):
    state, other = common.plain((state, other))
    chex.assert_trees_all_close(state, other, rtol=1e-5, atol=1e-6)


def test_a_loop_of_steps_is_fit():
    told = []
    result = fit(callback=lambda progress: told.append(progress.seen))
    step = training.Step(loss_fn, MECHANISM, optax.adam(0.1))
    state, seen = by_hand(step, lambda batch: batch.gather(DATA))
    assert_same(state, result.state)
    assert_same(seen, told)


@pytest.mark.slow
def test_with_all_its_options():
    def noisy(w, frozen, x, y, key):
        return (w @ (frozen * x) + 0.1 * jax.random.normal(key) - y) ** 2

    data, frozen = (DATA["x"], DATA["y"]), jnp.ones(3)
    result = fit(
        noisy,
        data,
        frozen=frozen,
        uses_key=True,
        microbatch_size=16,
        average_decay=0.9,
    )
    step = training.Step(
        noisy,
        MECHANISM,
        optax.adam(0.1),
        has_frozen=True,
        uses_key=True,
        microbatch_size=16,
        average_decay=0.9,
    )
    state, _ = by_hand(step, lambda batch: batch.gather(data), frozen)
    assert_same(state, result.state)


class Rows:
    """A source of dictionaries."""

    def __len__(self):
        return 200

    def __getitem__(self, index):
        return {name: np.asarray(column[index]) for name, column in DATA.items()}


@pytest.mark.slow
def test_an_example_may_be_a_dictionary_from_arrays_or_from_a_source():
    of_two = lambda w, x, y: loss_fn(w, {"x": x, "y": y})
    expected = fit(of_two, (DATA["x"], DATA["y"])).state
    assert_same(fit().state, expected)
    assert_same(fit(data=Rows()).state, expected)


def test_a_step_on_padding_alone_is_noise():
    step = training.Step(loss_fn, MECHANISM, optax.sgd(1.0))
    state = step.init(jnp.zeros(3), key=KEY)
    rows = jax.tree.map(lambda x: x[:4], DATA)
    after, seen = step(state, rows, jnp.ones(4, bool))
    assert int(seen.num_examples) == 0 and not seen.has_gradient
    assert (after.params != 0).all() and int(after.step) == 1


@pytest.mark.slow
def test_runs_under_vmap_are_the_runs_alone():
    optimizer = optax.inject_hyperparams(optax.adam)(0.1)
    step = training.Step(loss_fn, MECHANISM, optimizer, average_decay=0.9)

    def train(key, learning_rate):
        state = step.init(jnp.zeros(3), key=key)
        state = optax.tree.set(state, learning_rate=learning_rate)

        def take_step(state, _):
            batch = training.draw_batch(MECHANISM, state, num_examples=200)
            padding = batch.is_padding_example
            state, seen = step(state, batch.gather(DATA), padding)
            return state, (seen, batch.indices)

        return jax.lax.scan(take_step, state, length=MECHANISM.iterations)

    keys, rates = jax.random.split(KEY, 3), jnp.array([0.01, 0.1, 0.1])
    rows = jax.jit(jax.vmap(train))(keys, rates)
    for i, (key, rate) in enumerate(zip(keys, rates, strict=True)):
        alone = jax.jit(train)(key, rate)
        assert_same(jax.tree.map(lambda x, i=i: x[i], rows), alone)
        # And a row is the run of `fit`.
        ours = training.fit(
            *(loss_fn, jnp.zeros(3), DATA, MECHANISM, optax.adam(float(rate))),
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
    assert len(np.unique(moves)) == moves.size
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
        ({"average_decay": 1.0}, ValueError),
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
    with pytest.raises(TypeError, match="to be a bool array"):
        step(state, rows, jnp.ones(4))
    with pytest.raises(ValueError, match="one entry per"):
        step(state, rows, jnp.ones(3, bool))

"""The loop, its budget, and what it promises of keys and data."""

import dataclasses
import functools
import sys

import chex
import equinox as eqx
import flax.linen as nn
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dpadambc
from dpadambc import accounting, training
from dpadambc.core import data as training_data
from dpadambc.core.step import takes_key
from tests import common

DELTA = 1e-5
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(200, 3)), jnp.float32)
Y = X @ jnp.array([1.0, -2.0, 0.5])
mechanism = functools.partial(common.poisson_gaussian, iterations=30)
MECHANISM, SILENT = mechanism(), mechanism(noise_multiplier=0.0)
ONE_STEP = mechanism(iterations=1)
is_key = lambda x: jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def loss_fn(w, x, y):
    return (w @ x - y) ** 2


def adam_bc(mechanism, learning_rate=0.1):
    return dpadambc.adam_bc(learning_rate, mechanism)


def fit(loss_fn=loss_fn, params=None, data=(X, Y), mechanism=MECHANISM, **options):
    options = dict(key=jax.random.key(0), target_delta=DELTA) | options
    params = jnp.zeros(3) if params is None else params
    optimizer = options.pop("optimizer", None) or adam_bc(mechanism)
    return training.fit(loss_fn, params, data, mechanism, optimizer, **options)


@functools.cache
def plain_run():
    return fit()


def iterates(start, **options):
    """The parameters before the first step and after each."""
    seen = [start]
    fit(params=start, callbacks=lambda p: seen.append(p.params), **options)
    return np.stack(seen)


def by_hand(sampling_key):
    """A run without noise on the same batches, written out."""
    optimizer = dpadambc.dp_adam_bc(0.1, SILENT, key=jax.random.key(0))

    @jax.jit
    def step(w, state, i):
        batch = SILENT.sample_step(sampling_key, i, num_examples=200)
        grads = dpadambc.per_example_grad(loss_fn)(w, *batch.gather((X, Y)))
        updates, state = optimizer.update(
            grads, state, w, is_padding_example=batch.is_padding_example
        )
        return optax.apply_updates(w, updates), state

    w = jnp.zeros(3)
    state = optimizer.init(w)
    for i in range(SILENT.iterations):
        w, state = step(w, state, jnp.int32(i))
    return w


def test_a_run_is_the_chain_written_out(one_identity):
    silent = fit(mechanism=SILENT).state
    np.testing.assert_allclose(silent.params, by_hand(silent.sampling_key), rtol=1e-4)
    result = fit()
    assert result.iterations == int(result.state.step) == 30
    assert result.epsilon == MECHANISM.epsilon(DELTA)
    assert result.stopped_by == "iterations" and result.resumed_from is None
    assert result.mechanism == MECHANISM and result.target_delta == DELTA
    assert result.params is result.state.params
    # The keys of the noise and of the loss are those of a loop by hand.
    step = training.Step(loss_fn, MECHANISM, optax.sgd(0.1))
    start = step.init(jnp.zeros(3), key=jax.random.key(0))
    for name in ("loss_key", "sampling_key"):
        assert (getattr(result.state, name) == getattr(start, name)).all()


class Examples:
    """A source on the host."""

    def __len__(self):
        return 200

    def __getitem__(self, index):
        return np.asarray(X[index]), np.asarray(Y[index])


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_call", [7, 30])
def test_steps_in_one_call_change_nothing(steps_per_call, one_identity):
    together = fit(mechanism=SILENT, steps_per_call=steps_per_call).params
    np.testing.assert_allclose(together, fit(mechanism=SILENT).params, rtol=1e-5)


def test_a_source_changes_nothing(one_identity):
    expected = fit(mechanism=SILENT).params
    rows = grain.MapDataset.range(200).map(lambda i: (np.asarray(X[i]), Y[i]))
    for source in (Examples(), rows):
        found = fit(mechanism=SILENT, data=source).params
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    with pytest.raises(ValueError, match="data"):
        fit(data=rows.repeat())


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("accountant", "steps_per_call"),
    [(accounting.PLD, 1), (accounting.RDP, 1)]
    + [common.slow(accountant, 4) for accountant in (accounting.PLD, accounting.RDP)],
)
def test_the_step_that_would_exceed_the_budget_is_not_taken(
    accountant, steps_per_call, monkeypatch
):
    relations = {MECHANISM.neighboring_relation: (accountant,)}
    monkeypatch.setattr(dpadambc.PoissonGaussian, "relations", relations)
    spent = [MECHANISM.epsilon(DELTA, iterations=n) for n in (10, 11)]
    target = (spent[0] + spent[1]) / 2
    result = fit(target_epsilon=target, steps_per_call=steps_per_call)
    assert result.iterations == 10 and result.stopped_by == "budget"
    assert result.epsilon == spent[0] <= target < spent[1]
    alone = fit(mechanism=mechanism(iterations=10), steps_per_call=steps_per_call)
    np.testing.assert_array_equal(result.params, alone.params)


def test_a_budget_for_all_steps_or_for_none():
    enough = fit(target_epsilon=1e3)
    assert enough.iterations == 30 and enough.stopped_by == "iterations"
    for other, target in ((MECHANISM, 1e-3), (SILENT, 10.0)):
        with pytest.raises(ValueError, match="target_epsilon"):
            fit(mechanism=other, target_epsilon=target)
    assert fit(mechanism=SILENT).epsilon == np.inf


def test_steps_beyond_the_budget_are_refused_whoever_counts_them(monkeypatch):
    enough, too_many = (lambda *_, n=n, **budget: n for n in (10, 11))
    target = MECHANISM.epsilon(DELTA, iterations=10)
    module = sys.modules["dpadambc.training.fit"]
    monkeypatch.setattr(module, "affordable_iterations", too_many)
    with pytest.raises(ValueError, match="at most target_epsilon.* of 11 steps"):
        fit(target_epsilon=target)
    monkeypatch.setattr(module, "affordable_iterations", enough)  # a near miss
    assert fit(target_epsilon=target).iterations == 10


def test_affordable_iterations_are_the_most_that_fit():
    long = mechanism(iterations=10_000)
    budget = dict(target_epsilon=5.0, target_delta=DELTA)
    most = training.affordable_iterations(long, **budget)
    spent = lambda n: long.epsilon(DELTA, iterations=n)
    assert spent(most) <= 5.0 < spent(most + 1)


@pytest.mark.slow
def test_a_schedule_of_noise_is_accounted_for_up_to_the_step_taken():
    scheduled = mechanism(noise_multiplier=lambda step: 1.0 + (step >= 10))
    target = scheduled.epsilon(DELTA, iterations=20) + 1e-6
    assert fit(mechanism=scheduled, target_epsilon=target).iterations == 20


def test_callbacks_hear_of_every_call_and_of_what_is_spent():
    heard, also = [], []
    fit(callbacks=[heard.append, also.append], steps_per_call=12)
    assert [p.iterations for p in heard] == [12, 24, 30] and also == heard
    assert all(p.total_iterations == 30 for p in heard)
    assert heard[0].epsilon() == MECHANISM.epsilon(DELTA, iterations=12)
    assert heard[0].loss > heard[-1].loss > 0


def test_a_callback_may_keep_the_best_model():
    """Its buffers are not given to the next step, and looking changes nothing."""
    error = lambda w: float(jnp.mean((X @ w - Y) ** 2))
    best, steps = [], []

    def keep(progress):
        steps.append(int(progress.state.step))
        found = error(progress.params)
        if not best or found < best[0]:
            best[:] = found, progress.params, progress.state

    result = fit(callbacks=keep)
    assert error(best[1]) == best[0] == error(best[2].params) < error(jnp.zeros(3))
    assert steps == list(range(1, 31))
    np.testing.assert_array_equal(result.params, plain_run().params)


def test_losses_are_a_mean_over_the_examples_that_took_part(one_identity):
    first = []
    fit(mechanism=ONE_STEP, callbacks=first.append)
    batch = ONE_STEP.sample_step(first[0].state.sampling_key, 0, num_examples=200)
    present = batch.indices[~batch.is_padding_example]
    assert first[0].loss == pytest.approx(float(jnp.mean(Y[present] ** 2)), rel=1e-5)


def test_the_parameters_that_came_in_are_still_there():
    params = jnp.ones(3)
    fit(params=params)
    assert params.tolist() == [1.0, 1.0, 1.0]


def test_empty_batches_are_steps_too():
    rare = mechanism(sampling_prob=1e-6, iterations=5)
    for data in ((X, Y), Examples()):
        result = fit(mechanism=rare, data=data)
        assert result.iterations == 5 and np.isfinite(result.params).all()
        assert (result.params != 0).all()  # the noise alone moved them


# Models.


def of_linen():
    model = nn.Dense(1)
    params = model.init(jax.random.key(0), X[0])
    return params, model.apply, lambda params: params["params"]["kernel"][:, 0]


def of_nnx():
    graph, params = nnx.split(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
    model = lambda params: nnx.merge(graph, params)
    call = lambda params, x: model(params)(x)
    return params, call, lambda params: model(params).kernel[...][:, 0]


def of_equinox():
    model = eqx.nn.Linear(3, 1, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    call = lambda params, x: eqx.combine(params, static)(x)
    return params, call, lambda params: params.weight[0]


@pytest.mark.parametrize("make", [of_linen, *map(common.slow, [of_nnx, of_equinox])])
def test_models(make):
    params, call, weight = make()
    result = fit(lambda p, x, y: jnp.squeeze(call(p, x) - y) ** 2, params)
    np.testing.assert_allclose(weight(result.params), [1, -2, 0.5], atol=0.5)


def test_adapters_are_trained_and_what_is_frozen_is_not():
    frozen = {"w": jnp.zeros((3, 3))}
    adapters = {"a": jnp.ones((3, 2)) / 3, "b": jnp.zeros((2, 3))}

    def loss(params, frozen, x, y):
        hidden = x @ frozen["w"] + (x @ params["a"]) @ params["b"]
        return (hidden.sum() - y) ** 2

    result = fit(loss, adapters, frozen=frozen)
    assert result.params.keys() == {"a", "b"}
    assert optax.tree.norm(result.params["b"]) > 0.1


# A key for the loss.


def with_key(w, x, y, *, key):
    return w @ jax.random.normal(key, (3,)) / 10


def test_the_loss_has_a_key_for_each_example_and_step():
    """Where the key is the gradient, and nothing else is in the steps."""
    silent = mechanism(noise_multiplier=0.0, sampling_prob=1.0, iterations=6)
    run = functools.partial(
        iterates, jnp.zeros(3), mechanism=silent, optimizer=optax.sgd(1.0)
    )
    steps = np.diff(run(loss_fn=with_key), axis=0)
    assert len(np.unique(steps.round(7), axis=0)) == 6
    # A sum of 200 independent draws of 0.1, over 50; of one draw, it would be 0.4.
    assert np.std(steps) == pytest.approx(0.1 * 200**0.5 / 50, rel=0.6)
    # Negative control: one key for all.
    same = run(loss_fn=functools.partial(with_key, key=jax.random.key(0)))
    assert np.diff(same, 2, axis=0) == pytest.approx(0, abs=1e-5)


class Module(eqx.Module):
    w: jax.Array

    def __call__(self, w, x, y, *, key=None):
        return loss_fn(w * self.w, x, y)


TAKE_A_KEY = {
    "keyword-only": with_key,
    "optional": lambda w, x, *, key=None: x,
    "partial": functools.partial(with_key, y=1),
    "jitted": jax.jit(with_key),
    "module": Module(jnp.ones(3)),
    "rows": training.with_rows(with_key),
    "low precision": training.with_compute_dtype(with_key, jnp.bfloat16),
    "augmented": training.with_augmentations(loss_fn, lambda key, *x: x, 2),
}
TAKE_NONE = {
    "none": loss_fn,
    "positional": lambda w, x, key: x,
    "bound": functools.partial(with_key, key=jax.random.key(0)),
    "default": lambda w, x, *, key=3: x,
    "any": lambda w, x, **options: x,
    "rows": training.with_rows(loss_fn),
    "low precision": training.with_compute_dtype(loss_fn, jnp.bfloat16),
    "no signature": jnp.add,
}


@pytest.mark.parametrize("loss", TAKE_A_KEY.values(), ids=TAKE_A_KEY)
def test_a_keyword_only_key_is_given(loss):
    assert takes_key(loss)


@pytest.mark.parametrize("loss", TAKE_NONE.values(), ids=TAKE_NONE)
def test_no_other_key_is(loss):
    assert not takes_key(loss)


@pytest.mark.usefixtures("without_nonces")
def test_microbatches_change_rounding_alone(one_identity):
    in_parts, whole = fit(mechanism=SILENT, microbatch_size=16), fit(mechanism=SILENT)
    np.testing.assert_allclose(in_parts.params, whole.params, rtol=1e-4)


# Keys.


def test_batches_differ_from_step_to_step():
    """Where the gradient is who took part."""
    silent = mechanism(noise_multiplier=0.0, iterations=6)
    options = dict(loss_fn=lambda w, x: w @ x, data=(jnp.eye(200),), mechanism=silent)
    seen = iterates(jnp.zeros(200), optimizer=optax.sgd(1.0), **options)
    took_part = np.diff(seen, axis=0) < -1e-3
    assert len(np.unique(took_part, axis=0)) == 6
    # A binomial of 1,200 and 0.25: standard error 15.
    assert took_part.sum() == pytest.approx(300, abs=75)


def test_keys_from_the_system_differ_and_work():
    words = lambda key: tuple(np.asarray(jax.random.key_data(key)))
    assert len({words(training.secret_key()) for _ in range(50)}) == 50
    assert fit(key=training.secret_key()).iterations == 30
    with pytest.raises(TypeError, match="secret_key"):
        jax.jit(lambda: jax.random.normal(training.secret_key()))()
    assert len(words(training.secret_key(bits=256))) == 8
    with pytest.raises(ValueError, match="bits"):
        training.secret_key(bits=128)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dtype", [jnp.float32, common.slow(jnp.bfloat16)])
def test_the_noise_that_reaches_adam_has_the_variance_that_is_subtracted(dtype):
    loss = training.with_compute_dtype(lambda w, x, y: jnp.sum(w) * 1e-9 * y, dtype)
    result = fit(loss, jnp.zeros(20_000), mechanism=mechanism(iterations=20))
    nu = optax.tree.get(result.state.opt_state, "nu")
    ratio = np.mean(nu) / optax.tree.get(result.state.opt_state, "noise_variance")
    # A mean of 20,000 averages of 20 squares: standard error 0.2 %.
    assert ratio == pytest.approx(1, abs=0.011)


def test_a_result_does_not_print_keys_parameters_or_losses():
    result = plain_run()
    noise, *_ = jax.tree.leaves(
        result.state.noise, is_leaf=lambda x: hasattr(x, "noised_steps")
    )
    shown = f"{result!r} {result} {result.state!r} {noise!r} {[noise]}"
    hidden = f"{tuple.__repr__(noise)} {vars(result.state)}"
    for words in (noise.key_data, jax.random.key_data(result.state.sampling_key)):
        for word in np.asarray(words).ravel():
            assert str(word) in hidden and str(word) not in shown
    assert "Array" not in shown and "loss" not in shown
    assert f"epsilon={result.epsilon:.4g}" in shown


# Wrong use.


def test_a_mechanism_for_another_size_of_data_is_refused():
    numbers = dict(l2_clip_norm=1.0, noise_multiplier=1.0, batch_size=50)
    numbers |= dict(num_examples=200, iterations=3, normalize_by=50)
    fixed = dpadambc.FixedSizeGaussian(**numbers)
    with pytest.raises(ValueError, match="num_examples"):
        fit(mechanism=dataclasses.replace(fixed, num_examples=100))
    assert fit(mechanism=fixed).iterations == 3


class Column:
    """A column of a table, as pandas and polars have it."""

    def to_numpy(self):
        return X

    def __repr__(self):
        return "the rows"


SEVERAL = [np.ones(3), np.ones(4)]


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ([X, Y], TypeError),
        ((X, Y[:-1]), ValueError),
        ((X, 1.0), ValueError),
        ((X[:0], Y[:0]), ValueError),
        ((X, np.array(["the rows"] * 200)), TypeError),
        ((X.tolist(), Y.tolist()), ValueError),
        ((SEVERAL,), ValueError),
        (Column(), TypeError),
        ((Column(), Y), TypeError),
        ({"x": Column()}, TypeError),
    ],
)
def test_data_of_another_form_are_refused_in_a_few_words(data, error):
    with pytest.raises(error, match="data") as found:
        fit(data=data)
    assert "the rows" not in str(found.value) and len(str(found.value)) < 400


def test_examples_of_a_source_may_be_in_any_container_and_are_alike():
    @jax.tree_util.register_pytree_node_class
    class Box:
        """A container that is equal to itself alone."""

        def __init__(self, x):
            self.x = x

        def tree_flatten(self):
            return (self.x,), None

        @classmethod
        def tree_unflatten(cls, _, leaves):
            return cls(*leaves)

    class Boxes(Examples):
        def __getitem__(self, index):
            return Box(np.asarray(X[index])), Y[index]

    class Lengths(Examples):
        def __getitem__(self, index):
            return np.asarray(X[index][: 2 + index % 2]), Y[index]

    fit(lambda w, x, y: (w @ x.x - y) ** 2, data=Boxes(), mechanism=ONE_STEP)
    with pytest.raises(ValueError, match="shape"):
        fit(lambda w, x, y: (w[0] * x[0] - y) ** 2, data=Lengths())


def test_a_source_is_told_from_arrays():
    assert training_data.is_source(Examples())
    assert not training_data.is_source((X, Y)) and not training_data.is_source(X)
    assert training_data.num_examples(Examples()) == 200


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"key": jax.random.PRNGKey(0)}, TypeError, "key"),
        ({"steps_per_call": 0}, ValueError, "steps_per_call"),
        ({"target_delta": 2.0}, ValueError, "delta"),
        ({"target_delta": 1 / 200}, ValueError, "delta"),
        ({"target_epsilon": -1.0}, ValueError, "target_epsilon"),
        ({"loss_fn": 3}, TypeError, "loss_fn"),
        ({"callbacks": [3]}, TypeError, "callbacks"),
        ({"mechanism": 1.0, "optimizer": optax.sgd(1.0)}, TypeError, "mechanism"),
        ({"optimizer": "adam"}, TypeError, "optimizer"),
        ({"optimizer": optax.adam}, TypeError, "optimizer"),
        ({"params": {}}, ValueError, "params"),
        ({"params": {"w": jnp.zeros(3), "k": jax.random.key(0)}}, TypeError, "params"),
        ({"params": {"w": jnp.zeros(3), "f": loss_fn}}, TypeError, "params"),
        ({"params": {"w": jnp.zeros(3), "i": jnp.arange(3)}}, TypeError, "params"),
    ],
)
def test_refused_before_the_first_step(options, error, name):
    heard = []
    options = {"mechanism": ONE_STEP, "callbacks": heard.append} | options
    with pytest.raises(error, match=name):
        fit(**options)
    assert not heard


def test_a_delta_just_below_one_over_the_number_of_examples_is_taken():
    assert fit(mechanism=ONE_STEP, target_delta=0.99 / 200).iterations == 1


def test_an_optimizer_whose_updates_would_be_broadcast_is_refused():
    """`optax.contrib.dpsgd` takes the first axis of a parameter for the examples."""
    summed = optax.stateless(lambda grads, _: jax.tree.map(lambda x: x.sum(0), grads))
    column = lambda w, x, y: loss_fn(w[:, 0], x, y)
    with pytest.raises(ValueError, match="optimizer"):
        fit(column, jnp.zeros((3, 1)), optimizer=summed)
    fit(column, jnp.zeros((3, 1)), optimizer=optax.sgd(0.1))


def test_parameters_and_state_keep_their_dtypes():
    state = fit(params=jnp.ones(3, jnp.bfloat16), optimizer=optax.adam(0.1)).state
    assert state.params.dtype == jnp.bfloat16
    chex.assert_trees_all_equal_dtypes(state.opt_state[0].nu, jnp.zeros(3))

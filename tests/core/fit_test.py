"""The loop, its budget, and what it promises of keys and data."""

import dataclasses
import functools

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

DELTA = 1e-5
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(200, 3)), jnp.float32)
Y = X @ jnp.array([1.0, -2.0, 0.5])


def loss_fn(w, x, y):
    return (w @ x - y) ** 2


def mechanism(**changes):
    numbers = dict(
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        sampling_prob=0.25,
        iterations=30,
        normalize_by=50,
    )
    return dpadambc.PoissonGaussian(**numbers | changes)


MECHANISM = mechanism()
SILENT = mechanism(noise_multiplier=0.0)


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


def by_hand(sampling_key):
    """A run without noise on the same batches, written out."""
    optimizer = dpadambc.dp_adam_bc(0.1, SILENT, key=jax.random.key(0))

    @jax.jit
    def step(w, state, step):
        batch = SILENT.sample_step(sampling_key, step, num_examples=200)
        grads = dpadambc.per_example_grad(loss_fn)(w, *batch.gather((X, Y)))
        updates, state = optimizer.update(
            grads, state, w, is_padding_example=batch.is_padding_example
        )
        return optax.apply_updates(w, updates), state

    w = jnp.zeros(3)
    state = optimizer.init(w)
    for i in range(SILENT.iterations):
        w, state = step(w, state, i)
    return w


def test_a_run_is_the_chain_written_out(one_identity):
    silent = fit(mechanism=SILENT).state
    np.testing.assert_allclose(silent.params, by_hand(silent.sampling_key), rtol=1e-4)
    result = fit()
    assert result.iterations == int(result.state.step) == 30
    assert result.epsilon == mechanism().epsilon(DELTA)
    assert result.stopped_by == "iterations"
    # The keys of the noise and of the loss are those of a loop by hand.
    start = training.init_state(
        jnp.zeros(3), MECHANISM, optax.sgd(0.1), key=jax.random.key(0)
    )
    same = lambda key, other: bool((key == other).all())
    assert same(result.state.loss_key, start.loss_key)
    assert same(result.state.sampling_key, start.sampling_key)


class Examples:
    """A source on the host."""

    def __len__(self):
        return 200

    def __getitem__(self, index):
        return np.asarray(X[index]), np.asarray(Y[index])


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_call", [7, 30])
def test_steps_in_one_call_change_nothing(steps_per_call):
    alone = fit(mechanism=SILENT, steps_per_call=steps_per_call).state
    expected = fit(mechanism=SILENT).state
    np.testing.assert_array_equal(alone.params, expected.params)


def test_a_source_changes_nothing(one_identity):
    run = functools.partial(fit, mechanism=SILENT)
    fetched, expected = run(data=Examples()).state, run().state
    np.testing.assert_allclose(fetched.params, expected.params, rtol=1e-5)


def test_datasets_of_grain_are_sources(one_identity):
    rows = grain.MapDataset.range(200).map(lambda i: (np.asarray(X[i]), Y[i]))
    run = functools.partial(fit, mechanism=SILENT)
    fetched, expected = run(data=rows).state, run().state
    np.testing.assert_allclose(fetched.params, expected.params, rtol=1e-5)
    with pytest.raises(ValueError, match="repeated"):
        fit(data=rows.repeat())


def test_one_compilation_for_all_steps():
    counts = []

    def counted(w, x, y):
        counts.append(1)
        return loss_fn(w, x, y)

    fit(counted)
    traced = len(counts)
    fit(counted, mechanism=mechanism(iterations=3))
    assert len(counts) <= 2 * traced


@pytest.mark.parametrize("accountant", [accounting.PLD, accounting.RDP])
def test_the_step_that_would_exceed_the_budget_is_not_taken(accountant, monkeypatch):
    relations = {dpadambc.NeighboringRelation.ADD_OR_REMOVE_ONE: (accountant,)}
    monkeypatch.setattr(dpadambc.PoissonGaussian, "relations", relations)
    spent = [mechanism().epsilon(DELTA, iterations=n) for n in (10, 11)]
    target = (spent[0] + spent[1]) / 2
    result = fit(target_epsilon=target, steps_per_call=4)
    assert result.iterations == 10 and result.stopped_by == "budget"
    assert result.epsilon == spent[0] <= target < spent[1]
    alone = fit(mechanism=mechanism(iterations=10), steps_per_call=4)
    np.testing.assert_array_equal(result.state.params, alone.state.params)


def test_a_budget_for_all_steps_or_for_none():
    enough = fit(target_epsilon=1e3)
    assert enough.iterations == 30 and enough.stopped_by == "iterations"
    with pytest.raises(ValueError, match="at least one step, which costs epsilon"):
        fit(target_epsilon=1e-3)
    silent = mechanism(noise_multiplier=0.0)
    with pytest.raises(ValueError, match="budget"):
        fit(mechanism=silent, target_epsilon=10.0)
    assert fit(mechanism=silent).epsilon == np.inf


def test_affordable_iterations_are_the_most_that_fit():
    most = training.affordable_iterations(
        mechanism(iterations=10_000), target_epsilon=5.0, target_delta=DELTA
    )
    spent = lambda n: mechanism(iterations=10_000).epsilon(DELTA, iterations=n)
    assert spent(most) <= 5.0 < spent(most + 1)


@pytest.mark.slow
def test_a_schedule_of_noise_is_accounted_for_up_to_the_step_taken():
    scheduled = mechanism(noise_multiplier=lambda step: 1.0 + (step >= 10))
    target = scheduled.epsilon(DELTA, iterations=20) + 1e-6
    result = fit(mechanism=scheduled, target_epsilon=target)
    assert result.iterations == 20


def test_the_callback_hears_of_every_call_and_of_what_is_spent():
    heard = []
    fit(callback=heard.append, steps_per_call=12)
    assert [p.iterations for p in heard] == [12, 24, 30]
    assert all(p.iterations_in_all == 30 for p in heard)
    assert heard[0].epsilon() == mechanism().epsilon(DELTA, iterations=12)
    assert heard[0].loss > heard[-1].loss > 0


def test_losses_are_a_mean_over_the_examples_that_took_part(one_identity):
    first = []
    fit(mechanism=mechanism(iterations=1), callback=first.append)
    key = first[0].state.sampling_key
    batch = mechanism().sample_step(key, 0, num_examples=200)
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
        assert result.iterations == 5
        assert np.isfinite(result.state.params).all()
        # The noise alone moved them.
        assert (result.state.params != 0).all()


# Models.


def test_linen():
    model = nn.Dense(1)
    params = model.init(jax.random.key(0), X[0])
    loss = lambda params, x, y: jnp.squeeze(model.apply(params, x) - y) ** 2
    found = fit(loss, params).state.params
    np.testing.assert_allclose(found["params"]["kernel"][:, 0], [1, -2, 0.5], atol=0.5)


def test_nnx():
    graph, params = nnx.split(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
    loss = lambda params, x, y: jnp.squeeze(nnx.merge(graph, params)(x) - y) ** 2
    model = nnx.merge(graph, fit(loss, params).state.params)
    np.testing.assert_allclose(model.kernel[...][:, 0], [1, -2, 0.5], atol=0.5)


def test_equinox():
    model = eqx.nn.Linear(3, 1, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    loss = lambda params, x, y: jnp.squeeze(eqx.combine(params, static)(x) - y) ** 2
    model = eqx.combine(fit(loss, params).state.params, static)
    np.testing.assert_allclose(model.weight[0], [1, -2, 0.5], atol=0.5)


def test_adapters_are_trained_and_what_is_frozen_is_not():
    frozen = {"w": jnp.zeros((3, 3))}
    adapters = {"a": jnp.ones((3, 2)) / 3, "b": jnp.zeros((2, 3))}

    def loss(params, frozen, x, y):
        hidden = x @ frozen["w"] + (x @ params["a"]) @ params["b"]
        return (hidden.sum() - y) ** 2

    result = fit(loss, adapters, frozen=frozen)
    assert result.state.params.keys() == {"a", "b"}
    assert optax.tree.norm(result.state.params["b"]) > 0.1


def test_the_loss_has_a_key_for_each_example_and_step():
    """Where the key is the gradient, and nothing else is in the steps."""
    loss = lambda w, x, y, key: w @ jax.random.normal(key, (3,)) / 10
    silent = mechanism(noise_multiplier=0.0, sampling_prob=1.0, iterations=6)
    seen = [jnp.zeros(3)]
    fit(
        loss,
        mechanism=silent,
        uses_key=True,
        optimizer=optax.sgd(1.0),
        callback=lambda p: seen.append(p.state.params + 0),
    )
    steps = np.diff(np.stack(seen), axis=0)
    assert len(np.unique(steps.round(7), axis=0)) == 6
    # A sum of 200 independent draws of 0.1, over 50; of one draw, it would be 0.4.
    assert np.std(steps) == pytest.approx(0.1 * 200**0.5 / 50, rel=0.6)


def test_the_average_is_that_of_the_parameters():
    seen = []
    result = fit(average_decay=0.9, callback=lambda p: seen.append(p.state.params + 0))
    expected = jnp.zeros(3)
    for params in seen:
        expected = 0.9 * expected + 0.1 * params
    np.testing.assert_allclose(result.state.average, expected, rtol=1e-5)
    assert plain_run().state.average is None


@pytest.mark.usefixtures("without_nonces")
def test_microbatches_change_rounding_alone(one_identity):
    np.testing.assert_allclose(
        fit(mechanism=SILENT, microbatch_size=16).state.params,
        fit(mechanism=SILENT).state.params,
        rtol=1e-4,
    )


@pytest.mark.slow
def test_views_of_an_example_count_as_one_example():
    """The clipped gradient of a mean of views; negative control, views as examples."""
    views = 8
    shift = lambda key, x, y: (x + 5 * jax.random.normal(key, x.shape), y)
    loss = training.with_augmentations(
        lambda w, x, y, key: loss_fn(w, x, y), shift, views
    )
    one = (X[:1], Y[:1], jax.random.key(0))
    clipped = dpadambc.clipped_grad(
        loss, l2_clip_norm=1.0, normalize_by=1.0, prng_argnum=3
    )
    norm = lambda g: float(jnp.linalg.norm(dpadambc.materialize(g)))
    assert norm(clipped(jnp.ones(3), *one)) <= 1.0
    keys = jax.random.split(jax.random.key(1), views)
    rows = jax.vmap(lambda key: shift(key, X[0], Y[0]))(keys)
    separate = dpadambc.clipped_grad(loss_fn, l2_clip_norm=1.0, normalize_by=1.0)
    assert norm(separate(jnp.ones(3), *rows)) > 2.0
    assert fit(loss, uses_key=True).epsilon == plain_run().epsilon


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jitted"])
def test_views_may_be_compiled_and_the_loss_have_frozen_parts(wrap):
    shift = wrap(lambda key, x, y: (x + 0.1 * jax.random.normal(key, x.shape), y))
    loss = lambda w, frozen, x, y, key: (w @ (frozen * x) - y) ** 2
    augmented = training.with_augmentations(loss, shift, 2, has_frozen=True)
    result = fit(augmented, frozen=jnp.ones(3), uses_key=True)
    np.testing.assert_allclose(result.state.params, [1, -2, 0.5], atol=0.5)


@pytest.mark.parametrize(
    ("augment", "got"),
    [
        (lambda key, x, y: x, r"\w*(Array|Tracer)"),
        (lambda key, x, y: {"x": x, "y": y}, "dict"),
    ],
)
def test_a_view_that_is_no_example_is_refused(augment, got):
    """One array of several rows would be taken apart, and a dictionary give names."""
    loss = training.with_augmentations(lambda w, x, y, key: w * x.sum(), augment, 2)
    with pytest.raises(TypeError, match=f"a tuple of the arguments.*got a {got}"):
        loss(1.0, jnp.ones(3), 1, jax.random.key(0))


def test_the_mean_of_views_is_the_mean_of_their_losses():
    shift = lambda key, x: (x * jax.random.normal(key),)
    loss = training.with_augmentations(lambda w, x, key: w * x, shift, 3)
    key = jax.random.key(5)
    views = [jax.random.split(k)[0] for k in jax.random.split(key, 3)]
    expected = np.mean([2.0 * float(jax.random.normal(k)) for k in views])
    assert float(loss(2.0, 1.0, key)) == pytest.approx(expected, rel=1e-5)


# Low precision.


@pytest.mark.slow
@pytest.mark.usefixtures("without_nonces")
def test_masters_keep_the_steps_that_low_precision_would_round_away(one_identity):
    """With steps of 1e-4 on parameters of one, bfloat16 keeps next to nothing."""
    run = functools.partial(fit, mechanism=SILENT, optimizer=adam_bc(SILENT, 1e-4))
    low = training.with_compute_dtype(loss_fn, jnp.bfloat16)
    start = jnp.ones(3)
    masters = run(low, start).state.params
    assert masters.dtype == jnp.float32 and (masters != start).all()
    rounded = run(loss_fn, start.astype(jnp.bfloat16)).state.params
    assert rounded.dtype == jnp.bfloat16 and (rounded == 1).all()
    full = run(loss_fn, start).state.params
    np.testing.assert_allclose(masters - 1, full - 1, rtol=0.2, atol=2e-4)


def test_the_loss_is_computed_in_the_dtype_that_was_asked_for():
    seen = []

    def loss(w, frozen, x, y):
        product = frozen * (w @ x)
        seen.append(product.dtype)
        return product

    low = training.with_compute_dtype(loss, jnp.bfloat16)
    assert low(jnp.ones(3), jnp.ones(()), X[0], 7).dtype == jnp.float32
    assert seen == [jnp.bfloat16]


def test_the_average_of_low_precision_parameters_does_not_stand_still():
    """In bfloat16, 0.999 is one."""
    still = optax.sgd(0.0)
    state = fit(
        params=jnp.ones(3, jnp.bfloat16), average_decay=0.999, optimizer=still
    ).state
    assert state.average.dtype == jnp.float32
    step = training.Step(loss_fn, MECHANISM, still, average_decay=0.999)
    average = jnp.zeros(3)
    for _ in range(3):
        average = step._average(state.params, average)
    np.testing.assert_allclose(average, 1 - 0.999**3, rtol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_noise_that_reaches_adam_has_the_variance_that_is_subtracted(dtype):
    size = 20_000
    loss = training.with_compute_dtype(lambda w, x, y: jnp.sum(w) * 1e-9 * y, dtype)
    result = fit(loss, jnp.zeros(size), mechanism=mechanism(iterations=20))
    (adam,) = [
        s
        for s in jax.tree.leaves(
            result.state.opt_state, is_leaf=lambda s: hasattr(s, "nu")
        )
        if hasattr(s, "nu")
    ]
    ratio = float(jnp.mean(adam.nu) / adam.noise_variance)
    # A mean of 20,000 averages of 20 squares: standard error 0.2 %.
    assert ratio == pytest.approx(1, abs=0.011)


# Keys.


def test_batches_differ_from_step_to_step():
    """Where the gradient is who took part."""
    data = (jnp.eye(200),)
    silent = mechanism(noise_multiplier=0.0, iterations=6)
    seen = [jnp.zeros(200)]
    fit(
        lambda w, x: w @ x,
        params=jnp.zeros(200),
        data=data,
        mechanism=silent,
        optimizer=optax.sgd(1.0),
        callback=lambda p: seen.append(p.state.params + 0),
    )
    took_part = np.diff(np.stack(seen), axis=0) < -1e-3
    assert len(np.unique(took_part, axis=0)) == 6
    # A binomial of 1,200 and 0.25: standard error 15.
    assert took_part.sum() == pytest.approx(300, abs=75)


def test_keys_from_the_system_differ_and_work():
    keys = {
        tuple(np.asarray(jax.random.key_data(training.secret_key()))) for _ in range(50)
    }
    assert len(keys) == 50
    assert fit(key=training.secret_key()).iterations == 30


def test_what_may_be_released_has_no_key():
    state = plain_run().state
    found = training.releasable(state)
    is_key = lambda x: jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
    assert any(map(is_key, jax.tree.leaves(state)))
    assert not any(map(is_key, jax.tree.leaves(found)))
    np.testing.assert_array_equal(found.params, state.params)
    assert optax.tree.get(found.opt_state, "mu") is not None


# Wrong use.


def test_shuffled_epochs_are_dealt_on_the_device_too():
    shuffled = dpadambc.ShuffledGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=50.0,
        batch_size=50,
        num_examples=200,
        iterations=6,
        normalize_by=50,
    )
    result = fit(mechanism=shuffled)
    assert result.epsilon == shuffled.epsilon(DELTA, iterations=8)


def test_a_mechanism_for_another_size_of_data_is_refused():
    fixed = dpadambc.FixedSizeGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        batch_size=50,
        num_examples=100,
        iterations=3,
        normalize_by=50,
    )
    with pytest.raises(ValueError, match="Expected num_examples=100"):
        fit(mechanism=fixed)
    right = dataclasses.replace(fixed, num_examples=200)
    assert fit(mechanism=right).iterations == 3


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([X, Y], TypeError, "tuple of the arguments"),
        ((X, Y[:-1]), ValueError, "all of one length"),
        ((X, 1.0), ValueError, "all of one length"),
    ],
)
def test_data_of_another_form_are_refused(data, error, message):
    with pytest.raises(error, match=message):
        fit(data=data)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"key": jax.random.PRNGKey(0)}, TypeError),
        ({"steps_per_call": 0}, ValueError),
        ({"average_decay": 1.0}, ValueError),
        ({"target_delta": 2.0}, ValueError),
        ({"target_epsilon": -1.0}, ValueError),
    ],
)
def test_numbers_out_of_range_are_refused_before_the_first_step(options, error):
    heard = []
    with pytest.raises(error):
        fit(mechanism=mechanism(iterations=1), callback=heard.append, **options)
    assert not heard


@pytest.mark.parametrize("target_delta", [0.1, 1 / 200])
def test_a_delta_as_large_as_one_example_is_refused(target_delta):
    with pytest.raises(ValueError, match="delta"):
        fit(target_delta=target_delta, mechanism=mechanism(iterations=1))
    fit(target_delta=0.99 / 200, mechanism=mechanism(iterations=1))


def test_a_source_must_return_tuples():
    class Bare(Examples):
        def __getitem__(self, index):
            return np.asarray(X[index])

    with pytest.raises(TypeError, match="as a tuple, or a dictionary, got ndarray"):
        fit(data=Bare())


def test_a_source_is_told_from_arrays():
    assert training_data.is_source(Examples())
    assert not training_data.is_source((X, Y)) and not training_data.is_source(X)
    assert training_data.num_examples(Examples()) == 200


def test_a_result_does_not_print_keys_parameters_or_losses():
    result = plain_run()
    noise, *_ = jax.tree.leaves(
        result.state.noise, is_leaf=lambda x: hasattr(x, "noised_steps")
    )
    shown = f"{result!r} {result} {result.state!r} {noise!r} {[noise]}"
    hidden = f"{tuple.__repr__(noise)} {vars(result.state)}"
    for key in (noise.rng_key, result.state.sampling_key):
        for word in np.asarray(jax.random.key_data(key)).ravel():
            assert str(word) in hidden
            assert str(word) not in shown
    assert "Array" not in shown and "loss" not in shown
    assert f"epsilon={result.epsilon:.4g}" in shown


@pytest.mark.parametrize(
    "data, error, message",
    [
        ((X[:0], Y[:0]), ValueError, "at least one example, got none"),
        ((X, np.array(["a"] * 200)), TypeError, r"got dtype <U1 at data\[1\]"),
    ],
)
def test_data_to_learn_nothing_from_are_refused(data, error, message):
    with pytest.raises(error, match=message):
        fit(data=data)


def test_an_error_in_the_loss_says_what_the_loss_was_called_with():
    def of_a_batch(w, x, y):
        return jax.vmap(lambda x: w @ x)(x).mean() - y

    with pytest.raises(ValueError) as found:
        fit(of_a_batch)
    note = "with one example, without the batch axis: loss_fn(float32[3], float32[3],"
    assert any(note in each for each in found.value.__notes__)
    with pytest.raises(TypeError) as found:
        fit(lambda w, x, y, key: loss_fn(w, x, y))
    note = "It does not take them: missing a required argument: 'key'"
    assert note in found.value.__notes__[0]
    assert "uses_key=True" in found.value.__notes__[0]
    with pytest.raises(ZeroDivisionError) as found:
        fit(lambda model, x, y: 1 / 0, eqx.nn.LayerNorm(3))  # with a shape, no dtype
    assert "LayerNorm of 2 arrays" in found.value.__notes__[0]
    with pytest.raises(KeyError) as found:
        fit(lambda w, example: example["y"], data=({"x": X, "z": Y},))
    assert "{'x': float32[3], 'z': float32[]})" in found.value.__notes__[0]


@pytest.mark.parametrize(
    "init, update, call",
    [
        (lambda params: params.kernel, optax.sgd(0.1).update, "init(params)"),
        (optax.sgd(0.1).init, lambda grad, *_: grad.kernel, "update(private_gradient,"),
    ],
)
def test_an_error_in_the_optimizer_says_what_the_optimizer_was_called_with(
    init, update, call
):
    optimizer = optax.GradientTransformation(init, update)
    with pytest.raises(AttributeError) as found:
        fit(optimizer=optimizer)
    assert f"dpadambc called optimizer.{call}" in found.value.__notes__[0]


@pytest.mark.parametrize("leaf", [jax.random.key(0), loss_fn, jnp.arange(3)])
def test_parameters_that_cannot_be_trained_are_refused(leaf):
    """Keys come with the dropout of an nnx module, functions with Equinox modules."""
    with pytest.raises(TypeError, match="parameters.* got .* at params"):
        fit(params={"w": jnp.zeros(3), "other": leaf})


def test_an_optimizer_whose_updates_would_be_broadcast_is_refused():
    """`optax.contrib.dpsgd` takes the first axis of a parameter for the examples."""
    summed = optax.stateless(lambda grads, _: jax.tree.map(lambda x: x.sum(0), grads))
    column = lambda w, x, y: loss_fn(w[:, 0], x, y)
    with pytest.raises(ValueError, match=r"of the parameters.*\(3, 1\), got \(1,\)"):
        fit(column, jnp.zeros((3, 1)), optimizer=summed)
    fit(column, jnp.zeros((3, 1)), optimizer=optax.sgd(0.1))


def test_lists_are_refused_in_a_few_words():
    with pytest.raises(ValueError, match="turn them into arrays") as found:
        fit(data=(X.tolist(), Y.tolist()))
    assert len(str(found.value)) < 400


def test_what_is_no_function_or_optimizer_is_refused():
    with pytest.raises(TypeError, match="loss_fn to be a function, got 3"):
        fit(3)
    with pytest.raises(TypeError, match="callback to be a function, got 3"):
        fit(callback=3)
    for optimizer in ("adam", optax.adam):
        with pytest.raises(TypeError, match="Expected optimizer to be an Optax"):
            training.Step(loss_fn, MECHANISM, optimizer)


def test_examples_of_several_lengths_are_refused_by_name():
    several = [np.ones(3), np.ones(4)]
    with pytest.raises(ValueError, match=r"\(4,\) at data\[0\]\[1\].*pad to one"):
        fit(data=(several,))

    class Source:
        def __len__(self):
            return len(X)

        def __getitem__(self, index):
            return X[index][: 2 + index % 2], Y[index]

    with pytest.raises(ValueError, match=r"got shapes .*2,.* under.*Pad"):
        fit(lambda w, x, y: (w[0] * x[0] - y) ** 2, data=Source())


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


def test_examples_of_a_source_may_be_in_any_container():
    class Source:
        def __len__(self):
            return len(X)

        def __getitem__(self, index):
            return Box(np.asarray(X[index])), Y[index]

    fit(
        lambda w, x, y: (w @ x.x - y) ** 2,
        data=Source(),
        mechanism=mechanism(iterations=1),
    )


class Column:
    """A column of a table, as pandas and polars have it."""

    def to_numpy(self):
        return X

    def __repr__(self):
        return "the rows"


@pytest.mark.parametrize("data", [Column(), (Column(), Y), {"x": Column()}])
def test_tables_are_refused_without_showing_them(data):
    with pytest.raises(TypeError, match="got Column at data.*to_numpy") as found:
        fit(data=data)
    assert "the rows" not in str(found.value)


def test_a_folder_in_place_of_checkpoints_is_refused():
    with pytest.raises(TypeError, match=r"Give training.Checkpoints\('run'\)"):
        fit(checkpoints="run")


def test_a_secret_key_is_drawn_outside_of_what_is_compiled():
    """Inside it would be one key for all calls."""
    with pytest.raises(TypeError, match="Expected secret_key outside jax.jit"):
        jax.jit(lambda: jax.random.normal(training.secret_key()))()

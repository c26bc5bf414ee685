"""Right programs as people write them, in one process: no error, and no warning.

Each is named for what somebody does. Some of them look like a mistake, such as one key
for two runs on public data; none is one that breaks what epsilon says. They run one
after another, in two orders, since nothing may depend on what a process did before.
"""

import concurrent.futures
import copy
import dataclasses
import functools
import pathlib
import pickle
import tempfile
import traceback
import warnings

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pandas as pd
import pytest
from flax import nnx
from flax.training import train_state
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn import model_selection

import dpadambc
from dpadambc import accounting, training
from tests import common

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3)).astype(np.float32)
Y = X @ np.float32([1, -2, 3])
DATA = X, Y
OTHER_DATA = RNG.normal(size=(40, 3)).astype(np.float32), Y[::-1].copy()
PUBLIC_X, PUBLIC_Y = X[:8] + np.float32(0.1), Y[:8]
ZEROS = jnp.zeros(3)
MECHANISM = common.poisson_gaussian(iterations=2, normalize_by=10)
LEVEL = MECHANISM.noise_stddev
ADAM = optax.adam(0.1)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels

PROGRAMS, SLOW = {}, []


def program(fun):
    """A row of the table, by its name."""
    PROGRAMS[fun.__name__] = fun
    return fun


def slow_program(fun):
    """A row whose parts are in other rows, so that `make test` leaves it out."""
    SLOW.append(fun.__name__)
    return program(fun)


def squared_error(w, x, y):
    return (w @ x - y) ** 2


def public_loss(w):
    return jnp.mean(jax.vmap(squared_error, (None, 0, 0))(w, PUBLIC_X, PUBLIC_Y))


def fit(
    loss_fn=squared_error,
    params=ZEROS,
    data=DATA,
    mechanism=MECHANISM,
    optimizer=ADAM,
    seed=0,
    **options,
):
    """Two steps, as in a cell of a notebook that begins with a seed."""
    key = jax.random.key(seed)
    return training.fit(
        loss_fn,
        params,
        data,
        mechanism,
        optimizer,
        key=key,
        target_delta=1e-5,
        **options,
    )


def drawn_rows(step, data=DATA, seed=1):
    """The rows of a batch, and its mask."""
    batch = MECHANISM.sample_step(jax.random.key(seed), step, num_examples=40)
    return batch.gather(data), batch.is_padding_example


def gradients(params, step=0, loss_fn=squared_error, data=DATA):
    """Per-example gradients of a batch that the mechanism draws."""
    rows, mask = drawn_rows(step, data)
    grad_fn = dpadambc.per_example_grad(loss_fn)
    return grad_fn(params, *rows, is_padding_example=mask)


def two_steps(tx, params=ZEROS, state=None, **extra_args):
    """A loop of one's own, of parameters and their state."""
    state = tx.init(params) if state is None else state
    for step in range(MECHANISM.iterations):
        grads = gradients(params, step)
        updates, state = tx.update(grads, state, params, **extra_args)
        params = optax.apply_updates(params, updates)
    return params, state


def privatize(seed=0):
    return dpadambc.privatize(MECHANISM, key=jax.random.key(seed))


def dp_adam(seed=0, rate=0.1):
    return dpadambc.dp_adam(rate, MECHANISM, key=jax.random.key(seed))


# Notebooks, and tests of one's own code: one key again and again


@program
def run_a_cell_again():
    first, second = fit(), fit()
    np.testing.assert_array_equal(first.state.params, second.state.params)


@program
def change_the_rate_in_a_cell_and_run_it_again():
    for rate in (0.1, 0.01):
        fit(optimizer=optax.adam(rate))


@program
def write_the_loss_again_in_a_cell():
    for _ in range(2):
        fit(lambda w, x, y: (w @ x - y) ** 2)
    fit(lambda w, x, y: jnp.abs(w @ x - y))


@slow_program
def compare_two_levels_of_noise_with_one_seed_on_public_data():
    for z in (0.5, 2.0):
        fit(mechanism=dataclasses.replace(MECHANISM, noise_multiplier=z))


@slow_program
def compare_two_models_with_one_seed_on_public_data():
    fit()
    loss_fn = lambda p, x, y: (jnp.tanh(x @ p["body"]) @ p["head"] - y) ** 2
    fit(loss_fn, {"body": jnp.eye(3), "head": jnp.ones(3)})


@slow_program
def compare_optimizers_with_one_seed_on_public_data():
    key = jax.random.key(0)
    for make in (dpadambc.dp_sgd, dpadambc.dp_adam, dpadambc.dp_adam_bc):
        two_steps(make(0.1, MECHANISM, key=key))


@program
def take_two_steps_from_one_state():
    step = training.Step(squared_error, MECHANISM, ADAM)
    state = step.init(ZEROS, key=jax.random.key(0))
    rows, mask = drawn_rows(0)
    (first, _), (second, _) = (step(state, rows, mask) for _ in range(2))
    np.testing.assert_array_equal(first.params, second.params)


@program
def call_update_twice_to_test_that_it_is_pure():
    tx, grads = dp_adam(), gradients(ZEROS)
    state = tx.init(ZEROS)
    first, second = (tx.update(grads, state, ZEROS)[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)


@program
def check_that_compiled_and_eager_updates_agree():
    tx = dp_adam()
    state = tx.init(ZEROS)
    update = lambda state: tx.update(gradients(ZEROS), state, ZEROS)[0]
    np.testing.assert_allclose(update(state), jax.jit(update)(state), rtol=1e-5)


@program
def check_that_a_seed_decides_the_noise():
    grads, private = gradients(ZEROS), []
    for seed in (0, 0, 1):
        tx = privatize(seed)
        private.append(tx.update(grads, tx.init(ZEROS), ZEROS)[0])
    assert (private[0] == private[1]).all() and (private[0] != private[2]).all()


@program
def go_back_to_the_best_state_by_a_public_loss():
    tx = dp_adam()
    params, state = two_steps(tx)
    best = copy.copy((params, state))
    worse, _ = two_steps(tx, *best)
    if public_loss(worse) > public_loss(params):
        two_steps(tx, *best)


# States: made, copied, saved, restored


@program
def make_a_state_as_a_template_for_restoring():
    tx = dp_adam()
    params, state = two_steps(tx)
    stored = pickle.dumps(jax.tree.leaves((params, state)))
    template = ZEROS, tx.init(ZEROS)
    leaves = pickle.loads(stored)
    restored = jax.tree.unflatten(jax.tree.structure(template), leaves)
    tx.init(restored[0])  # as some training code does in any case
    two_steps(tx, *restored)


@program
def pickle_a_whole_state():
    tx = dp_adam()
    params, state = two_steps(tx)
    two_steps(tx, *pickle.loads(pickle.dumps((params, state))))


@program
def compile_init():
    tx = dp_adam()
    state = jax.jit(tx.init)(ZEROS)
    two_steps(tx, state=state)


@program
def ask_for_the_shapes_of_a_state():
    tx = dp_adam()
    shapes = jax.eval_shape(tx.init, ZEROS)
    state = tx.init(ZEROS)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, shapes)
    two_steps(tx, state=state)


@program
def resume_from_a_checkpoint():
    with tempfile.TemporaryDirectory() as folder:
        saved = training.Checkpoints(pathlib.Path(folder) / "run")
        fit(checkpoints=saved)
        more = dataclasses.replace(MECHANISM, iterations=4)
        result = fit(mechanism=more, checkpoints=saved)
    assert result.epsilon == pytest.approx(more.epsilon(1e-5))


@program
def ask_for_a_run_that_is_done():
    with tempfile.TemporaryDirectory() as folder:
        saved = training.Checkpoints(pathlib.Path(folder) / "run")
        first, again = (fit(checkpoints=saved) for _ in range(2))
    assert first.epsilon == again.epsilon


@program
def set_the_rate_of_a_state():
    inner = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
    tx = optax.chain(privatize(), inner)
    params, state = two_steps(tx)
    two_steps(tx, params, optax.tree.set(state, learning_rate=0.01))


@program
def donate_a_state():
    take = training.Step(squared_error, MECHANISM, ADAM)
    state = take.init(ZEROS, key=jax.random.key(0))
    step = jax.jit(take, donate_argnums=0)
    for i in range(2):
        state, _ = step(state, *drawn_rows(i))


@program
def copy_a_mechanism_by_pickle():
    copied = pickle.loads(pickle.dumps(MECHANISM))
    assert copied == MECHANISM
    fit(mechanism=copied)


# Several runs: sweeps, ensembles, folds, clients


@slow_program
def sweep_rates_on_public_data_with_one_key():
    losses = {
        rate: public_loss(fit(optimizer=optax.sgd(rate)).state.params)
        for rate in (0.01, 0.1, 1.0)
    }
    fit(data=OTHER_DATA, optimizer=optax.sgd(min(losses, key=losses.get)), seed=1)


@program
def train_an_ensemble():
    runs = [fit(seed=seed) for seed in range(3)]
    mean = jnp.mean(jnp.stack([run.state.params for run in runs]), axis=0)
    spending = accounting.compose(runs)
    assert mean.shape == (3,) and spending.epsilon(1e-5) > runs[0].epsilon


@slow_program
def validate_on_folds():
    folds = model_selection.KFold(4)
    for train, held_out in folds.split(X):
        params = fit(data=(X[train], Y[train])).state.params
        np.mean((X[held_out] @ np.asarray(params) - Y[held_out]) ** 2)


@program
def train_rates_side_by_side_with_keys_split():
    optimizer = optax.inject_hyperparams(optax.adam)(0.1)
    step = training.Step(squared_error, MECHANISM, optimizer)

    def train(key, rate):
        state = optax.tree.set(step.init(ZEROS, key=key), learning_rate=rate)
        for _ in range(2):
            batch = training.draw_batch(MECHANISM, state, num_examples=40)
            state, _ = step(state, batch.gather(DATA), batch.is_padding_example)
        return state.params

    keys = jax.random.split(jax.random.key(0), 2)
    assert jax.jit(jax.vmap(train))(keys, jnp.array([0.1, 1.0])).shape == (2, 3)


@program
def update_several_clients_by_one_compiled_function():
    @jax.jit
    def client_update(params, key, data):
        tx = dpadambc.dp_sgd(0.1, MECHANISM, key=key)
        grads = gradients(params, data=data)
        return tx.update(grads, tx.init(params), params)[0]

    keys = jax.random.split(jax.random.key(0), 2)
    clients = DATA, OTHER_DATA
    updates = [client_update(ZEROS, *of) for of in zip(keys, clients, strict=True)]
    assert (updates[0] != updates[1]).all()


@program
def train_on_two_groups_of_people_with_equal_labels():
    with tempfile.TemporaryDirectory() as folder:
        for seed, x in enumerate((X, OTHER_DATA[0])):
            path = pathlib.Path(folder) / f"group{seed}.npz"
            training.save_release(path, fit(data=(x, Y), seed=seed))


@program
def train_a_model_for_each_target_and_publish_all():
    models = [fit(data=(X, y), seed=seed) for seed, y in enumerate((Y, -Y))]
    with tempfile.TemporaryDirectory() as folder:
        for number, result in enumerate(models):
            training.save_release(pathlib.Path(folder) / f"{number}.npz", result)
    assert accounting.compose(models).epsilon(1e-5) > models[0].epsilon


@program
def search_rates_by_a_public_score():
    score = lambda w, x, y: -squared_error(w, x, y)
    found = training.search(
        squared_error,
        ZEROS,
        DATA,
        MECHANISM,
        optax.adam,
        [0.1, 1.0],
        trials=accounting.FixedTrials(2),
        score=training.PublicScore(score, (PUBLIC_X, PUBLIC_Y)),
        key=jax.random.key(0),
        target_delta=1e-5,
    )
    assert found.epsilon > MECHANISM.epsilon(1e-5)


@program
def train_in_two_threads():
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda seed: fit(seed=seed), (0, 1)))
    assert (results[0].state.params != results[1].state.params).any()


@program
def add_up_what_a_project_has_spent():
    project = [(MECHANISM, 1), (dataclasses.replace(MECHANISM, sampling_prob=0.5), 2)]
    spending = accounting.compose(project)
    result = fit(spent=project)
    assert result.epsilon > spending.epsilon(1e-5)


# Data as they are


@slow_program
def train_on_rows_that_occur_twice():
    fit(data=(np.concatenate([X, X]), np.concatenate([Y, Y])))


@program
def train_on_constant_rows():
    fit(data=(np.ones((40, 3), np.float32), np.ones(40, np.float32)))


@program
def train_on_a_column_of_ones_for_the_intercept():
    x = np.column_stack([X[:, :2], np.ones(40, np.float32)])
    fit(data=(x, Y))


@slow_program
def train_on_one_hot_columns_of_a_census():
    table = pd.DataFrame({"sex": ["f", "m"] * 20, "area": ["a", "b", "c", "d"] * 10})
    x = pd.get_dummies(table, dtype="float32").to_numpy()
    fit(params=jnp.zeros(x.shape[1]), data=(x, Y))


@program
def train_on_default_answers_of_a_survey():
    answers = np.full((40, 3), 3.0, np.float32)
    answers[::10] = [[1, 2, 5], [4, 4, 4], [2, 3, 1], [5, 1, 3]]
    fit(data=(answers, (answers.sum(1) > 9).astype(np.float32)))


@slow_program
def train_on_features_in_buckets():
    age, income = np.random.default_rng(1).integers(5, size=(2, 200))
    x = np.stack([age, income, age * income], axis=1).astype(np.float32)
    fit(data=(x, age.astype(np.float32)), mechanism=MECHANISM)


@program
def train_on_labels_of_one_class():
    fit(data=(X, np.zeros(40, np.float32)))


@program
def train_on_bags_of_words_of_which_some_are_empty():
    counts = (np.random.default_rng(1).poisson(0.1, size=(40, 3))).astype(np.float32)
    fit(data=(counts, np.zeros(40, np.float32)))


@program
def train_on_data_that_are_all_zero_to_test_the_noise():
    fit(data=(np.zeros_like(X), np.zeros_like(Y)))


@slow_program
def train_on_gaps_that_the_loss_fills():
    x = np.where(np.random.default_rng(1).random(X.shape) < 0.3, np.nan, X).astype(
        np.float32
    )
    fit(lambda w, x, y: squared_error(w, jnp.nan_to_num(x), y), data=(x, Y))


@slow_program
def train_on_word_vectors_that_the_loss_reads_too():
    table = np.random.default_rng(1).normal(size=(60, 3)).astype(np.float32)
    words = np.random.default_rng(2).integers(60, size=40)  # of which these are private
    loss_fn = lambda w, x, y: (w @ x - jnp.max(table @ x) * y) ** 2
    fit(loss_fn, data=(table[words], Y))


@slow_program
def train_on_word_ids_with_a_frozen_table():
    words = np.random.default_rng(1).integers(40, size=(40, 4))
    loss_fn = lambda w, table, ids, y: (table[ids].mean(0) @ w - y) ** 2
    fit(loss_fn, data=(words, Y), frozen=jnp.asarray(X))


@slow_program
def close_over_public_constants():
    mean, spread = PUBLIC_X.mean(0), PUBLIC_X.std(0)
    fit(lambda w, x, y: squared_error(w, (x - mean) / spread, y))


@slow_program
def weigh_classes_by_public_frequencies():
    weights = jnp.array([0.25, 0.75])
    loss_fn = lambda w, x, y: weights[y] * cross_entropy(x @ w, y)
    fit(loss_fn, jnp.zeros((3, 2)), (X, (Y > 0).astype(int)))


@program
def train_on_a_dictionary():
    loss_fn = lambda w, example: squared_error(w, example["x"], example["y"])
    fit(loss_fn, data={"x": X, "y": Y})


@program
def train_on_a_source():
    class Rows:
        def __len__(self):
            return len(X)

        def __getitem__(self, i):
            return X[i], Y[i]

    fit(data=Rows())


@program
def shuffle_and_standardize_before_training():
    order = np.random.default_rng(0).permutation(40)
    fit()
    fit(data=((X[order] - PUBLIC_X.mean(0)) / PUBLIC_X.std(0), Y[order]))


@slow_program
def train_with_the_sum_and_a_small_rate():
    fit(
        mechanism=dataclasses.replace(MECHANISM, normalize_by=1),
        optimizer=optax.sgd(0.001),
    )


# Users


@program
def group_rows_of_namibians():
    ids = np.array(["NA", "DE", "None", "ZA"] * 10, object)
    x, y, is_padding_row = training.group_by_user(DATA, ids, max_rows=4)
    assert x.shape == (4, 4, 3) and is_padding_row.shape == (4, 4)


@program
def group_rows_by_numbers_below_zero():
    ids = np.arange(40) % 5 - 2
    assert training.group_by_user(DATA, ids, max_rows=8)[0].shape == (5, 8, 3)


@program
def group_rows_by_ids_that_differ_in_case():
    ids = ["Ab1x", "aB1x", "AB1X", "ab1x"] * 10
    assert training.group_by_user(DATA, ids, max_rows=8)[0].shape == (4, 8, 3)


@program
def group_rows_of_a_table_and_train():
    table = pd.DataFrame(X, columns=list("abc")).assign(y=Y, user=np.arange(40) // 2)
    data = table[["a", "b", "c"]].to_numpy(), table["y"].to_numpy()
    users = training.group_by_user(data, table["user"].to_numpy(), max_rows=2)
    fit(training.with_rows(squared_error), data=users)


@program
def train_on_rows_and_then_on_users_of_other_people():
    fit()
    users = training.group_by_user(OTHER_DATA, np.arange(40) // 2, max_rows=2)
    fit(training.with_rows(squared_error), data=users, seed=1)


# Stages behind the noise


@slow_program
def zero_nans_behind_the_noise():
    optimizer = optax.chain(optax.zero_nans(), dpadambc.adam_bc(0.1, LEVEL))
    fit(optimizer=optimizer)
    two_steps(optax.chain(privatize(), optimizer))


@slow_program
def apply_finite_updates_alone():
    fit(optimizer=optax.apply_if_finite(dpadambc.adam_bc(0.1, LEVEL), 3))


@slow_program
def clip_by_value_behind_the_noise():
    optimizer = optax.chain(optax.clip(1e6), dpadambc.adam_bc(0.1, LEVEL))
    fit(optimizer=optimizer)
    two_steps(optax.chain(privatize(), optax.clip(1.0), ADAM))


@program
def clip_by_norm_behind_the_noise():
    fit(optimizer=optax.chain(optax.clip_by_global_norm(1.0), ADAM))
    optimizer = optax.chain(optax.clip_by_block_rms(1e3), dpadambc.adam_bc(0.1, LEVEL))
    two_steps(optax.chain(privatize(), optimizer))


@program
def lower_the_rate_on_a_plateau_of_a_public_loss():
    tx = optax.chain(dp_adam(), optax.contrib.reduce_on_plateau(patience=1))
    two_steps(tx, value=public_loss(ZEROS))


@program
def take_polyak_steps_by_a_public_loss():
    tx = optax.chain(privatize(), optax.polyak_sgd(0.1))
    two_steps(tx, value=public_loss(ZEROS))


@program
def give_a_stage_of_one_s_own_arguments_as_long_as_the_batch():
    def update_fn(updates, state, params=None, *, row_ids, **extra_args):
        return updates, state + len(row_ids)

    count = optax.GradientTransformationExtraArgs(lambda _: 0, update_fn)
    tx, (_, mask) = optax.chain(dp_adam(), count), drawn_rows(0)
    _, (_, seen) = two_steps(tx, row_ids=jnp.arange(len(mask)))
    assert seen == 2 * len(mask)


@program
def collect_gradients_of_two_batches_behind_the_noise():
    optimizer = dpadambc.adam_bc(0.1, LEVEL / 2**0.5)  # of a mean of two
    several = optax.MultiSteps(optimizer, 2)
    fit(optimizer=several.gradient_transformation())
    two_steps(optax.chain(privatize(), several.gradient_transformation()))


@slow_program
def decay_the_weights_of_matrices_alone():
    params = {"w": jnp.ones((3, 1)), "b": jnp.zeros(1)}
    loss_fn = lambda p, x, y: jnp.sum((x @ p["w"] + p["b"] - y) ** 2)
    is_matrix = functools.partial(jax.tree.map, lambda p: p.ndim > 1)
    decay = optax.masked(optax.add_decayed_weights(0.1), is_matrix)
    fit(loss_fn, params, optimizer=optax.chain(decay, optax.adam(0.1)))


@program
def train_two_parts_by_two_optimizers():
    params = {"body": jnp.eye(3), "head": jnp.ones(3)}
    loss_fn = lambda p, x, y: (jnp.tanh(x @ p["body"]) @ p["head"] - y) ** 2
    parts = {"fast": dpadambc.adam_bc(0.1, LEVEL), "slow": optax.sgd(0.01)}
    optimizer = optax.multi_transform(parts, {"body": "slow", "head": "fast"})
    fit(loss_fn, params, optimizer=optimizer)


@slow_program
def hold_a_part_still_behind_the_noise():
    loss_fn = lambda p, x, y: (x @ p["w"] + p["b"] - y) ** 2
    parts = {"train": ADAM, "hold": optax.set_to_zero()}
    optimizer = optax.multi_transform(parts, {"w": "train", "b": "hold"})
    fit(loss_fn, {"w": ZEROS, "b": jnp.zeros(())}, optimizer=optimizer)


@slow_program
def warm_up_and_decay_the_rate():
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.1, 1, 2)
    fit(optimizer=dpadambc.adamw_bc(rate, LEVEL, weight_decay=0.01))


@slow_program
def accept_any_optimizer_of_optax():
    for optimizer in (optax.lion(0.1), optax.contrib.schedule_free_sgd(0.1)):
        fit(optimizer=optimizer)


@slow_program
def keep_a_moving_average():
    result = fit(optimizer=common.with_average(ADAM, 0.9))
    assert result.state.opt_state[1].shape == (3,)


@program
def give_the_mechanism_in_place_of_its_level():
    fit(optimizer=dpadambc.adamw_bc(0.1, MECHANISM, weight_decay=0.1))
    two_steps(optax.chain(privatize(), dpadambc.rms_bc(0.1, MECHANISM)))


@program
def inject_rates_into_a_corrected_optimizer():
    make = optax.inject_hyperparams(dpadambc.adam_bc)
    fit(optimizer=make(0.1, LEVEL))


@program
def chain_the_four_stages():
    two_steps(
        optax.chain(
            dpadambc.clip_per_example(1.0, normalize_by=10),
            dpadambc.add_dp_noise(MECHANISM, key=jax.random.key(0)),
            dpadambc.scale_by_adam_bc(MECHANISM),
            dpadambc.add_decoupled_weight_decay(0.1),
            optax.scale_by_learning_rate(0.1),
        )
    )


# Other clips and other noise


@program
def vouch_for_a_clip_of_one_s_own():
    def clipped(w, x, y):
        grad = jax.grad(squared_error)(w, x, y)
        return grad / jnp.maximum(1.0, jnp.linalg.norm(grad))

    (x, y), mask = drawn_rows(0)
    each = jnp.where(mask[:, None], 0, jax.vmap(clipped, (None, 0, 0))(ZEROS, x, y))
    summed = dpadambc.as_clipped_sum(
        each.sum(0) / 10, l2_clip_norm=1.0, normalize_by=10
    )
    noise = dpadambc.add_dp_noise(MECHANISM, key=jax.random.key(0))
    noise.update(summed, noise.init(ZEROS), ZEROS)


@program
def correct_for_noise_of_optax():
    clip_and_noise = optax.contrib.differentially_private_aggregate(
        1.0, 1.0, key=jax.random.key(0)
    )
    tx = optax.chain(clip_and_noise, dpadambc.adam_bc(0.1, 1.0 / 10))
    each = jax.vmap(jax.grad(squared_error), (None, 0, 0))(ZEROS, X[:10], Y[:10])
    tx.update(each, tx.init(ZEROS), ZEROS)


@program
def correct_for_noise_that_is_added_by_hand():
    tx = dpadambc.adam_bc(0.1, 0.5)
    noised = ZEROS + 0.5 * jax.random.normal(jax.random.key(0), 3)
    tx.update(noised, tx.init(ZEROS), ZEROS)


@slow_program
def sum_microbatches_by_hand():
    grad_fn = dpadambc.clipped_grad(squared_error, l2_clip_norm=1.0, normalize_by=10)
    rows, mask = drawn_rows(0)
    halves = [
        grad_fn(ZEROS, *(r[part] for r in rows), is_padding_example=mask[part])
        for part in (slice(0, 8), slice(8, None))
    ]
    noise = dpadambc.add_dp_noise(MECHANISM, key=jax.random.key(0))
    noise.update(halves[0].plus(halves[1]), noise.init(ZEROS), ZEROS)


@program
def sum_microbatches_inside_scan():
    grad_fn = dpadambc.clipped_grad(squared_error, l2_clip_norm=1.0, normalize_by=10)

    @jax.jit
    def summed(params, x, y):
        no_padding = jnp.zeros(x.shape[1], bool)
        summed = lambda *rows: grad_fn(params, *rows, is_padding_example=no_padding)
        add = lambda total, rows: (total.plus(summed(*rows)), None)
        return jax.lax.scan(add, summed(x[0], y[0]), (x[1:], y[1:]))[0]

    noise = dpadambc.add_dp_noise(MECHANISM, key=jax.random.key(0))
    total = summed(ZEROS, X[:12].reshape(3, 4, 3), Y[:12].reshape(3, 4))
    noise.update(total, noise.init(ZEROS), ZEROS)


@program
def clip_by_arrays_before_the_noise_of_a_mechanism():
    (x, y), mask = drawn_rows(0)
    grads = dpadambc.per_example_grad(squared_error)(ZEROS, x, y)
    noise = dpadambc.add_dp_noise(MECHANISM, key=jax.random.key(0))
    for clip in (
        dpadambc.clip_per_example(jnp.float32(1), normalize_by=jnp.asarray(10)),
        optax.inject_hyperparams(dpadambc.clip_per_example)(1.0, normalize_by=10.0),
    ):
        tx = optax.chain(clip, noise)
        tx.update(grads, tx.init(ZEROS), ZEROS, is_padding_example=mask)


@program
def divide_by_a_traced_number_under_noise_of_one_s_own():
    def step(grads, size):
        tx = optax.chain(
            dpadambc.clip_per_example(1.0, normalize_by=size),
            dpadambc.add_dp_noise(LEVEL, key=jax.random.key(0)),
        )
        return tx.update(grads, tx.init(ZEROS), ZEROS)

    jax.jit(step)(gradients(ZEROS), 10.0)


@program
def take_some_rows_of_the_gradients_of_examples():
    order, is_first = jnp.arange(10)[::-1], np.arange(10) < 5
    grads = dpadambc.per_example_grad(squared_error)(ZEROS, X[:10], Y[:10])
    clip = dpadambc.clip_per_example(1.0, normalize_by=10)
    for rows in (order, is_first, slice(2, 7)):
        taken = jax.tree.map(lambda g, rows=rows: g[rows], grads)
        assert np.isfinite(clip.update(taken, clip.init(ZEROS), ZEROS)[0].value).all()


@program
def return_a_clipped_sum_from_a_compiled_function():
    grad_fn = dpadambc.clipped_grad(squared_error, l2_clip_norm=1.0, normalize_by=10)
    summed = jax.block_until_ready(jax.jit(grad_fn)(ZEROS, X[:10], Y[:10]))
    assert str(summed)
    noise = dpadambc.add_dp_noise(LEVEL, key=jax.random.key(0))
    jax.jit(noise.update)(summed, jax.jit(noise.init)(ZEROS), ZEROS)


@program
def sum_over_devices_inside_shard_map():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    grad_fn = dpadambc.clipped_grad(squared_error, l2_clip_norm=1.0, normalize_by=10)
    of_device = lambda w, x, y, mask: grad_fn(w, x, y, is_padding_example=mask)
    summed_over = lambda *args: of_device(*args).sum_over("data")
    specs = P(), P("data"), P("data"), P("data")
    summed = jax.shard_map(summed_over, mesh=mesh, in_specs=specs, out_specs=P())
    noise = dpadambc.add_dp_noise(MECHANISM, key=jax.random.key(0))
    total = jax.jit(summed)(ZEROS, X[:10], Y[:10], jnp.zeros(10, bool))
    noise.update(total, noise.init(ZEROS), ZEROS)


@program
def look_at_a_clipped_sum():
    clip = dpadambc.clip_per_example(1.0, normalize_by=10)
    summed, _ = clip.update(gradients(ZEROS), clip.init(ZEROS), ZEROS)
    assert jnp.linalg.norm(summed.value) < 4
    noise = dpadambc.add_dp_noise(LEVEL, key=jax.random.key(0))
    noise.update(summed, noise.init(ZEROS), ZEROS)


@program
def train_with_correlated_noise():
    mechanism = common.correlated_gaussian()
    fit(data=(X[:16], Y[:16]), mechanism=mechanism, optimizer=optax.sgd(0.1))


# One model after another


@program
def go_on_on_other_people_s_data():
    result = fit()
    after = fit(params=result.state.params, data=OTHER_DATA, seed=1)
    assert after.epsilon == pytest.approx(MECHANISM.epsilon(1e-5))


@program
def go_on_from_a_result():
    result = fit()
    after = fit(params=result, seed=1)
    four = dataclasses.replace(MECHANISM, iterations=4)
    assert after.epsilon == pytest.approx(four.epsilon(1e-5), rel=1e-3)


@program
def go_on_from_a_release():
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.npz"
        training.save_release(path, fit())
        release = training.load_release(path, like=ZEROS)
    assert release.params.shape == (3,)
    assert fit(params=release, seed=1).epsilon > release.spent.epsilon(1e-5)


@program
def evaluate_between_two_runs():
    first = fit()
    public_loss(first.state.params)
    second = fit(params=first.state.params, spent=first, seed=1)
    assert second.epsilon > first.epsilon


@slow_program
def average_two_models_and_go_on():
    models = [
        fit(seed=seed, data=d).state.params for seed, d in enumerate((DATA, OTHER_DATA))
    ]
    fit(params=sum(models) / 2, data=(PUBLIC_X, PUBLIC_Y), seed=2)


@program
def pretrain_on_public_data_and_tune_privately():
    grad_fn, params = jax.grad(public_loss), ZEROS
    state = ADAM.init(params)
    for _ in range(2):
        updates, state = ADAM.update(grad_fn(params), state, params)
        params = optax.apply_updates(params, updates)
    fit(params=params, optimizer=ADAM)


@slow_program
def train_a_head_on_a_model_of_other_people():
    body = fit(data=OTHER_DATA).state.params
    loss_fn = lambda head, body, x, y: (jnp.tanh(x * body) @ head - y) ** 2
    fit(loss_fn, frozen=body, seed=1)


@program
def train_one_model_by_two_optimizers_in_turn():
    params, _ = two_steps(dp_adam(0))
    sgd = dpadambc.dp_sgd(0.1, MECHANISM, key=jax.random.key(1))
    two_steps(sgd, params)


# Looking on


@program
def stop_early_by_a_public_loss():
    def callback(progress):
        if public_loss(progress.params) < 1e9:
            raise training.Stop

    result = fit(callbacks=callback)
    assert result.epsilon == MECHANISM.epsilon(1e-5)


@program
def evaluate_in_a_callback():
    seen = []
    fit(callbacks=lambda p: seen.append((p.loss, public_loss(p.params), p.epsilon())))
    assert len(seen) == 2


@program
def evaluate_each_step_by_a_function():
    evaluate = training.Evaluate(public_loss, every=1)
    fit(callbacks=evaluate)
    assert [record["iterations"] for record in evaluate.history] == [1, 2]


@program
def keep_snapshots_and_go_on_from_one_on_other_data():
    snapshots = []
    fit(callbacks=lambda progress: snapshots.append(progress.params))
    fit(params=snapshots[0], data=OTHER_DATA, seed=1)


@slow_program
def look_at_norms_of_gradients_to_choose_a_clip_on_public_data():
    grads = dpadambc.per_example_grad(squared_error)(ZEROS, PUBLIC_X, PUBLIC_Y)
    norm = float(np.median(dpadambc.per_example_norms(grads)))
    fit(mechanism=dataclasses.replace(MECHANISM, l2_clip_norm=norm))


@program
def log_losses_of_a_batch():
    fun = dpadambc.clipped_grad(
        squared_error,
        l2_clip_norm=1.0,
        normalize_by=10,
        microbatch_size=4,
        return_values=True,
    )
    rows, mask = drawn_rows(0)
    losses, summed = fun(ZEROS, *rows, is_padding_example=mask)
    assert jnp.mean(losses, where=~mask) > 0
    noise = dpadambc.add_dp_noise(LEVEL, key=jax.random.key(0))
    noise.update(summed, noise.init(ZEROS), ZEROS)


@program
def draw_a_batch_for_explain_and_again_in_training():
    (x, y), mask = drawn_rows(0)
    dpadambc.explain(squared_error, ZEROS, x[0], y[0], batch_size=len(mask))
    two_steps(dp_adam())


@program
def explain_an_example_as_long_as_the_batch():
    series = jnp.ones(16)
    loss_fn = lambda w, x: jnp.mean((x[1:] - w * x[:-1]) ** 2)
    dpadambc.explain(loss_fn, jnp.ones(()), series, batch_size=16)


@program
def plot_epsilon_over_steps():
    spent = [MECHANISM.epsilon(1e-5, iterations=t) for t in (1, 2)]
    assert spent == sorted(spent)


@slow_program
def tabulate_noise_over_budgets():
    for epsilon in (1.0, 8.0):
        mechanism = dpadambc.PoissonGaussian.calibrate(
            target_epsilon=epsilon,
            target_delta=1e-3,
            sampling_prob=0.25,
            iterations=2,
            l2_clip_norm=1.0,
            normalize_by=10,
        )
        fit(mechanism=mechanism)


# Without noise, and how batches are drawn


@program
def train_a_baseline_without_noise():
    mechanism = dataclasses.replace(MECHANISM, noise_multiplier=0)
    assert fit(mechanism=mechanism).epsilon == np.inf
    fit(mechanism=mechanism, optimizer=dpadambc.adam_bc(0.1, mechanism.noise_stddev))


@program
def train_a_baseline_without_clip_and_noise():
    mechanism = dataclasses.replace(MECHANISM, noise_multiplier=0, l2_clip_norm=1e6)
    tx = dpadambc.dp_adam(0.1, mechanism, key=jax.random.key(0))
    two_steps(tx)


@slow_program
def train_with_hardly_any_noise_to_see_the_limit():
    fit(mechanism=dataclasses.replace(MECHANISM, noise_multiplier=0.01))


@program
def train_with_a_mechanism_of_one_s_own():
    @dataclasses.dataclass(frozen=True)
    class OfAProject(dpadambc.PoissonGaussian):
        project: str = "cohort"

    numbers = {
        f.name: getattr(MECHANISM, f.name) for f in dataclasses.fields(MECHANISM)
    }
    fit(mechanism=OfAProject(**numbers))


@program
def loop_over_batches_of_the_host():
    take = training.Step(squared_error, MECHANISM, ADAM)
    step, state = jax.jit(take), take.init(ZEROS, key=jax.random.key(0))
    for batch in MECHANISM.batches(jax.random.key(0), num_examples=40):
        state, _ = step(state, batch.gather(DATA), batch.is_padding_example)


@program
def count_batches_before_training():
    sizes = [
        int((~batch.is_padding_example).sum())
        for batch in MECHANISM.batches(jax.random.key(0), num_examples=40)
    ]
    assert len(sizes) == 2
    loop_over_batches_of_the_host()


@slow_program
def draw_steps_inside_scan():
    step = training.Step(squared_error, MECHANISM, ADAM)

    @jax.jit
    def train(key, data):
        def take_step(state, i):
            batch = MECHANISM.sample_step(key, i, num_examples=40)
            return step(state, batch.gather(data), batch.is_padding_example)

        state = step.init(ZEROS, key=jax.random.fold_in(key, 1))
        return jax.lax.scan(take_step, state, jnp.arange(2))[0].params

    assert train(jax.random.key(0), DATA).shape == (3,)


@program
def take_several_steps_in_a_call():
    for steps in (1, 2):
        fit(steps_per_call=steps)


@program
def shuffle_into_batches_of_one_size():
    mechanism = dpadambc.ShuffledGaussian.calibrate(
        target_epsilon=8.0,
        target_delta=1e-3,
        epochs=1,
        batch_size=20,
        num_examples=40,
        l2_clip_norm=1.0,
    )
    tx, params = dpadambc.dp_adam(0.1, mechanism, key=jax.random.key(0)), ZEROS
    state, grad_fn = tx.init(params), dpadambc.per_example_grad(squared_error)
    for batch in mechanism.batches(jax.random.key(0), num_examples=40):
        grads = grad_fn(params, *batch.gather(DATA))
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)


# Frameworks


@program
def train_a_module_of_nnx():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, dp_adam(), wrt=nnx.Param)
    grad_fn = dpadambc.per_example_grad(lambda m, x, y: cross_entropy(m(x), y))
    for step in range(2):
        (x, y), mask = drawn_rows(step)
        grads = grad_fn(model, x, (y > 0).astype(int))
        optimizer.update(model, grads, is_padding_example=mask)


@program
def split_a_module_of_nnx_for_fit():
    graph, params = nnx.split(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    loss_fn = lambda p, x, y: cross_entropy(nnx.merge(graph, p)(x), y)
    result = fit(loss_fn, params, (X, (Y > 0).astype(int)))
    nnx.merge(graph, result.state.params)(X)


@program
def train_a_module_of_linen():
    model = nn.Dense(2)
    params = model.init(jax.random.key(0), X[0])
    state = train_state.TrainState.create(
        apply_fn=model.apply, params=params, tx=dp_adam()
    )
    loss_fn = lambda p, x, y: cross_entropy(model.apply(p, x), y)
    data = X, (Y > 0).astype(int)
    for step in range(2):
        grads = gradients(state.params, step, loss_fn, data)
        state = state.apply_gradients(grads=grads)


@slow_program
def train_a_module_of_equinox():
    model = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    loss_fn = lambda p, x, y: cross_entropy(eqx.combine(p, static)(x), y)
    result = fit(loss_fn, params, (X, (Y > 0).astype(int)))
    eqx.combine(result.state.params, static)(X[0])


@program
def train_with_dropout():
    def loss_fn(w, x, y, *, key):
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        return squared_error(w, jnp.where(kept, 2 * x, 0), y)

    fit(loss_fn)


@program
def train_adapters_of_a_frozen_matrix():
    adapters = {"a": jnp.ones((3, 1)), "b": jnp.zeros((1, 2))}
    logits = lambda p, w, x: x @ (w + p["a"] @ p["b"])
    loss_fn = lambda p, w, x, y: cross_entropy(logits(p, w, x), y)
    fit(loss_fn, adapters, (X, (Y > 0).astype(int)), frozen=jnp.eye(3, 2))


@slow_program
def train_with_layer_norm_and_rematerialization():
    @jax.checkpoint
    def hidden(w, x):
        return jnp.tanh((x - x.mean()) / (x.std() + 1e-3) * w)

    fit(lambda w, x, y: (hidden(w, x).sum() - y) ** 2)


@slow_program
def train_in_bfloat16():
    fit(params=jnp.zeros(3, jnp.bfloat16))


@slow_program
def train_on_several_devices():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    fit(data=training.Sharded((X, Y), NamedSharding(mesh, P("data"))))


# Settings of JAX


@program
def check_that_keys_are_not_reused():
    with jax.debug_key_reuse(True):
        fit()
        two_steps(dp_adam())


@program
def stop_at_nans():
    with jax.debug_nans(True):
        fit()
        fit(data=(np.zeros_like(X), np.zeros_like(Y)))


@program
def compute_in_double_precision():
    with jax.enable_x64(True):
        result = fit(params=jnp.zeros(3), data=(np.float64(X), np.float64(Y)))
        assert result.state.params.dtype == jnp.float64


@program
def promote_no_types():
    with jax.numpy_dtype_promotion("strict"):
        fit(optimizer=optax.sgd(0.1))
        two_steps(dpadambc.dp_sgd(0.1, MECHANISM, key=jax.random.key(0)))


@program
def promote_no_ranks():
    with jax.numpy_rank_promotion("raise"):
        fit(optimizer=dpadambc.adam_bc(0.1, LEVEL))
        two_steps(dp_adam())


@program
def draw_with_keys_of_another_generator():
    tx = dpadambc.dp_adam(0.1, MECHANISM, key=jax.random.key(0, impl="rbg"))
    two_steps(tx)


@slow_program
def take_the_generator_of_a_setting():
    with jax.default_prng_impl("unsafe_rbg"):
        fit()


@program
def look_for_leaked_tracers():
    with jax.checking_leaks():
        fit(steps_per_call=2)


@slow_program
def debug_without_compiling():
    with jax.disable_jit():
        grads, tx = gradients(ZEROS), dp_adam()
        tx.update(grads, tx.init(ZEROS), ZEROS)


def refusal(fun):
    """What a program raises or warns of, or none."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Two processes may meet in the cache of compiled programs.
        warnings.filterwarnings("ignore", "Error (reading|writing) persistent")
        try:
            fun()
        except Exception as error:
            return "".join(traceback.format_exception_only(error)).strip()
    return None


def test_a_warning_counts_as_a_refusal():
    assert refusal(lambda: warnings.warn("no", stacklevel=1)) == "UserWarning: no"
    assert refusal(lambda: fit(params=jnp.arange(3))).startswith("TypeError: Expected")


QUICK = [name for name in PROGRAMS if name not in SLOW]
HALF = len(QUICK) // 2  # both at once take 1.7 GB
ORDERS = {
    "first_half": QUICK[:HALF],
    "second_half": QUICK[HALF:],
    "all_in_order": list(PROGRAMS),
    "in_reverse_order": list(PROGRAMS)[::-1],
}


@pytest.mark.parametrize("order", common.rest_slow(ORDERS, quick=2))
def test_right_programs_pass_in_one_process(order):
    found = {name: refusal(PROGRAMS[name]) for name in ORDERS[order]}
    refused = [f"{name}: {what}" for name, what in found.items() if what]
    assert not refused, f"{len(refused)} of {len(found)}:\n" + "\n".join(refused)


@pytest.mark.thorough
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_right_program_passes_alone(name):
    assert refusal(PROGRAMS[name]) is None

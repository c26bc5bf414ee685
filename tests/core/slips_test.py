"""Data and losses of another form than `fit` takes: the error says what to do."""

import functools

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from dpadambc import training
from dpadambc.core import identity
from dpadambc.core.data import is_source, num_examples
from tests import common

RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 3)).astype(np.float32)
Y = RNG.normal(size=200).astype(np.float32)
MECHANISM = common.poisson_gaussian(iterations=1)


def loss_fn(w, x, y):
    return (w @ x - y) ** 2


def fit(loss_fn=loss_fn, data=(X, Y), **options):
    return training.fit(
        *(loss_fn, jnp.zeros(3), data, MECHANISM, optax.sgd(0.1)),
        key=jax.random.key(0),
        target_delta=1e-5,
        **options,
    )


class Rows:
    """A source; a part of another one if it has a `dataset`."""

    def __len__(self):
        return 200

    def __getitem__(self, index):
        return X[index], Y[index]


class Loader:
    """As PyTorch's: it iterates over batches."""

    dataset = Rows()

    def __len__(self):
        return 20

    def __iter__(self):
        return (self.dataset[10 * i : 10 * i + 10] for i in range(20))


@pytest.mark.parametrize(
    ("data", "advice"),
    [
        (Loader(), "got Loader. Give the dataset of the loader, data=loader.dataset"),
        ([X, Y], r"got list. Give a list of arrays as tuple\(data\)"),
        ([*zip(X, Y, strict=True)], r"tuple\(map\(np.stack, zip\(\*data\)\)\)"),
        (X, r"got ndarray. Give one array as the tuple \(data,\)"),
        (iter([(X, Y)]), "got list_iterator. Give tables"),
    ],
    ids=["loader", "arrays", "examples", "array", "iterator"],
)
def test_data_of_another_form_are_refused_with_advice(data, advice):
    with pytest.raises(TypeError, match=advice):
        fit(data=data)


GRAIN = grain.MapDataset.source([*zip(X, Y, strict=True)])
OF_GRAIN = {"map": GRAIN.batch(10), "iter": GRAIN.to_iter_dataset().batch(10)}


@pytest.mark.parametrize("name", OF_GRAIN)
def test_batches_of_grain_are_refused_and_its_examples_train(name):
    loss = lambda w, x, y: jnp.mean((x @ w - y) ** 2)
    with pytest.raises(
        TypeError, match=r"got Batch.*Give the data set without \.batch"
    ):
        fit(loss, OF_GRAIN[name])
    assert fit(loss, GRAIN).iterations == 1


@pytest.mark.parametrize(
    ("data", "lengths"),
    [((X, Y[1:]), "199, 200"), ({"x": X, "y": Y[1:]}, "199, 200"), ((X, 1), "none, 2")],
)
def test_arrays_of_several_lengths_are_refused_with_these(data, lengths):
    with pytest.raises(ValueError, match=f"got lengths {lengths}.*Give each array one"):
        fit(data=data)


@pytest.mark.parametrize("size", [(1_000,), 1e3])
def test_a_number_of_examples_that_is_none_is_refused(size):
    given = dict(epochs=1, batch_size=10, l2_clip_norm=1.0, noise_multiplier=1.0)
    calls = [
        lambda size: MECHANISM.epsilon(1e-5, num_examples=size),
        lambda size: dpadambc.PoissonGaussian.of_epochs(num_examples=size, **given),
        lambda size: next(MECHANISM.batches(jax.random.key(0), num_examples=size)),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="num_examples to be an int.*whole number"):
            call(size)
        assert call(1_000) is not None


def test_the_advice_about_data_works():
    part = Rows()
    part.dataset = Rows()  # as PyTorch's Subset has one
    stacked = tuple(map(np.stack, zip(*zip(X, Y, strict=True), strict=True)))
    for data in (Loader.dataset, part, tuple([X, Y]), stacked, (X,)):
        assert num_examples(data) == 200
    assert is_source(Loader.dataset) and is_source(part)
    for data in (part, stacked):
        assert fit(data=data).iterations == 1


@pytest.mark.parametrize(
    ("loss", "data", "frozen", "types"),
    [
        (loss_fn, (X,), None, "loss_fn(float32[3], float32[3]"),
        (loss_fn, (X, Y, Y), None, "float32[3], float32[3], float32[], float32[]"),
        (loss_fn, {"x": X, "y": Y}, None, "float32[3], dict of float32[3], float32[]"),
        (lambda w, x: x @ w, Rows(), None, "float32[3], float32[3], float32[]"),
        (loss_fn, (X, Y), jnp.ones(3), "float32[3], float32[3], float32[3], float32[]"),
        (lambda w, x, *, key: w @ x, (X, Y), None, "float32[], key<fry>[]"),
    ],
)
def test_a_loss_of_other_arguments_than_data_is_refused(loss, data, frozen, types):
    with pytest.raises(TypeError, match="argument") as caught:
        fit(loss, data, frozen=frozen)
    (note,) = [x for x in caught.value.__notes__ if x.startswith("Expected")]
    assert f"{types}). Write the loss of one example" in note
    assert "an argument for each array of data" in note


class Called:
    def __call__(self, w, x, y):
        return w @ x - y


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x, y=0: w @ x,
        lambda w, x, y, z=0: w @ x,
        lambda w, *example: w @ example[0],
        lambda *arguments: arguments[0] @ arguments[1],
        lambda w, x, y, *, key: w @ x,
        lambda w, x, y, *, key=None, scale=2: scale * w @ x,
        functools.wraps(lambda w, both: 0)(lambda w, x, y: loss_fn(w, x, y)),
        functools.partial(lambda w, x, y, scale: scale * w @ x, scale=2),
        functools.partial(lambda scale, w, x, y: scale * w @ x, 2),
        jax.jit(loss_fn),
        Called(),
    ],
)
def test_a_loss_that_takes_its_arguments_is_not(loss):
    step = training.Step(loss, MECHANISM, optax.sgd(0.1))
    assert identity.traced_programs(step, jnp.zeros(3), None, (X, Y))


BATCHED = {
    "axis": lambda w, x, y: jnp.mean(jnp.sum(x * w, axis=1) - y),
    "einsum": lambda w, x, y: jnp.mean(jnp.einsum("bi,i->b", x, w) - y),
    "index": lambda w, x, y: jnp.mean(x[:, 0] * w[0]),
    "length": lambda w, x, y: jnp.sum(x @ w - y) / len(y),
}


@pytest.mark.parametrize("name", BATCHED)
def test_an_error_in_a_loss_of_batches_says_that_it_gets_one_example(name):
    clipped = dpadambc.clipped_grad(BATCHED[name], l2_clip_norm=1.0, normalize_by=1)
    for call in (
        lambda: fit(BATCHED[name]),
        lambda: clipped(jnp.zeros(3), X, Y),
        lambda: dpadambc.per_example_grad(BATCHED[name])(jnp.zeros(3), X, Y),
    ):
        with pytest.raises((ValueError, TypeError, IndexError)) as caught:
            call()
        (note,) = [x for x in caught.value.__notes__ if x.startswith("Expected")]
        assert "one example without a batch axis" in note
        assert "loss_fn(float32[3], float32[3], float32[])" in note


def test_the_note_shows_no_number_of_a_row():
    def fails(w, row):
        raise KeyError("x")

    with pytest.raises(KeyError) as caught:
        fit(fails, {name: Y for name in "abcdef"})
    (note,) = [x for x in caught.value.__notes__ if x.startswith("Expected")]
    assert "dict of float32[], float32[], float32[], float32[], ...)" in note


def test_a_loss_that_returns_an_array_is_refused():
    for loss in (lambda w, x, y: w * x, lambda w, x, y: (w @ x - y)[None]):
        with pytest.raises(ValueError, match="loss of one example without a batch"):
            fit(loss)
    mean = lambda w, x, y: jnp.mean((w @ x - y) ** 2)  # near miss: of one number
    assert fit(mean).iterations == 1


RUN = dict(key=jax.random.key(0), target_delta=1e-5)
TARGET = dict(target_epsilon=1.0, target_delta=1e-5)
SIZES = dict(num_examples=1_000, batch_size=10, epochs=1)
CALIBRATE = dpadambc.PoissonGaussian.calibrate
ARGUMENTS = loss_fn, jnp.zeros(3), (X, Y), MECHANISM, optax.sgd(0.1)
SLIPS = {
    "compiled": (
        lambda: jax.jit(lambda w: training.fit(loss_fn, w, *ARGUMENTS[2:], **RUN))(
            X[0]
        ),
        "outside of jax.jit",
    ),
    "no key": (
        lambda: training.fit(*ARGUMENTS, target_delta=1e-5),
        r"key=, got none. Take training.secret_key\(\)",
    ),
    "no delta": (
        lambda: training.fit(*ARGUMENTS, key=jax.random.key(0)),
        "target_delta=, got none",
    ),
    "words for a key": (
        lambda: training.fit(*ARGUMENTS, **RUN | {"key": jax.random.PRNGKey(0)}),
        r"key of training.secret_key\(\)",
    ),
    "whole numbers": (
        lambda: training.fit(loss_fn, jnp.zeros(3, int), *ARGUMENTS[2:], **RUN),
        r"by astype\(float\)",
    ),
    "the multiplier of the noise": (
        lambda: dpadambc.add_dp_noise(noise_multiplier=1.0, key=jax.random.key(0)),
        "Give the mechanism",
    ),
    "lr": (
        lambda: dpadambc.recipe(lr=0.1, **TARGET, **SIZES),
        "learning_rate=, got lr=",
    ),
    "epsilon": (
        lambda: CALIBRATE(epsilon=1.0, target_delta=1e-5, l2_clip_norm=1.0, **SIZES),
        "target_epsilon=, got epsilon=",
    ),
    "a callback that returns": (
        lambda: fit(callbacks=lambda progress: True),
        "raise training.Stop",
    ),
}


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_is_answered_with_what_to_do(name):
    call, message = SLIPS[name]
    with pytest.raises(TypeError, match=message):
        call()


def test_right_calls_beside_these_slips_are_taken():
    jitted = jax.jit(lambda w: w + 1)
    seen = []
    result = training.fit(
        *(loss_fn, jitted(jnp.zeros(3)), *ARGUMENTS[2:]), callbacks=seen.append, **RUN
    )
    assert len(seen) == result.iterations
    assert dpadambc.recipe(learning_rate=0.0, **TARGET, **SIZES).mechanism == CALIBRATE(
        **TARGET, **SIZES, l2_clip_norm=1.0, clip_rule=dpadambc.clipping.Automatic()
    )


@pytest.mark.parametrize("rate", [-0.1, np.float32(-1e-3), float("nan")])
def test_a_learning_rate_that_climbs_is_refused(rate):
    for make in (
        lambda: dpadambc.recipe(rate, **TARGET, **SIZES),
        lambda: dpadambc.adam_bc(rate, MECHANISM),
        lambda: dpadambc.dp_sgd(rate, MECHANISM, key=jax.random.key(0)),
    ):
        with pytest.raises(ValueError, match="learning_rate"):
            make()
    dpadambc.adam_bc(lambda step: rate, MECHANISM)  # near miss: a schedule


def test_a_pair_of_loss_and_auxiliary_output_is_for_the_gradient_alone():
    pair = lambda w, x, y: (loss_fn(w, x, y), x)
    with pytest.raises(ValueError, match="fit takes no"):
        fit(pair)
    grad_fn = dpadambc.per_example_grad(pair, has_aux=True)
    np.testing.assert_array_equal(grad_fn(jnp.zeros(3), X, Y)[1], X)


def test_a_gradient_of_one_example_without_a_batch_says_where_examples_are():
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the note is of interest
        dpadambc.per_example_grad(lambda w, x: w @ x)(jnp.zeros(3), X[0])
    assert any("along axis 0" in note for note in caught.value.__notes__)

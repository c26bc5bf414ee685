"""Two runs with one key add the same noise: the second is warned of."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpadambc import training
from dpadambc._core import key_uses
from dpadambc.mechanisms import trials
from dpadambc.training import checkpoints
from tests import common

pytestmark = pytest.mark.filterwarnings(
    "error:Expected a key of its own for each run:UserWarning"
)

X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
WARNED = "Expected a key of its own for each run"


def mechanism(**changes):
    """One step on all examples, its sums divided by 50, unless told otherwise."""
    return common.poisson_gaussian(
        **{"noise_multiplier": 5.0, "sampling_prob": 1.0, "iterations": 1} | changes
    )


def squared(w, x):
    return jnp.sum((w - x) ** 2)


SGD = optax.sgd(1.0)


def fit(loss_fn=squared, start=None, data=X, made=None, optimizer=SGD, **options):
    numbers = {"key": jax.random.key(7), "target_delta": 1e-5, "spent": ()} | options
    start = jnp.ones(3) if start is None else start
    made = mechanism() if made is None else made
    return training.fit(loss_fn, start, (data,), made, optimizer, **numbers)


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer": optax.sgd(0.5)}, r"step_size: -1\.0 there, -0\.5 here"),
        ({"made": mechanism(l2_clip_norm=2.0)}, r"l2_clip_norm: 1\.0 there, 2\.0 here"),
        ({"start": jnp.arange(3.0)}, "start: another, with other parameters"),
        ({"data": X + 1}, "data: another, with other examples"),
        ({"data": X[1:]}, "num_examples: 40 there, 39 here"),
    ],
    ids=["optimizer", "mechanism", "start", "data", "one example fewer"],
)
def test_another_run_with_the_key_of_an_earlier_one_is_warned_of(changes, said):
    fit()
    with pytest.warns(UserWarning, match=f"(?s){WARNED}.*{said}") as caught:
        fit(**changes)
    assert {warning.filename for warning in caught} == {__file__}
    fit(**changes, key=jax.random.key(8))


class Rows:
    """The rows of an array, one by one."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return (self.rows[index],)


@pytest.mark.guarantee
def test_one_key_for_two_sources_is_warned_of():
    run = lambda rows: training.fit(
        squared,
        jnp.ones(3),
        Rows(rows),
        mechanism(),
        SGD,
        key=jax.random.key(7),
        target_delta=1e-5,
        spent=(),
    )
    run(X)
    run(X.copy())
    with pytest.warns(UserWarning, match=f"(?s){WARNED}.*data: another, with other ex"):
        run(X + 1)


OTHER_LABEL = X.copy()
OTHER_LABEL[17, 0] += 1


def with_gradient_of(backward):
    """The program of its loss is the same for all of them."""
    scaled = jax.custom_vjp(lambda w: w)
    scaled.defvjp(lambda w: (w, None), lambda _, g: (backward(g),))
    return lambda w, x: squared(scaled(w), x)


OWN_DERIVATIVE = {"loss_fn": with_gradient_of(lambda g: g)}
ANOTHER_DERIVATIVE = {"loss_fn": with_gradient_of(lambda g: -g)}


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (
            {},
            {"loss_fn": lambda w, x: jnp.sum(jnp.abs(w - x))},
            "loss_and_optimizer: another",
        ),
        (OWN_DERIVATIVE, ANOTHER_DERIVATIVE, "derivatives: another"),
        (
            {"loss_fn": lambda w, x: squared(w, x) + 0.1 * w @ w},
            {"loss_fn": lambda w, x: squared(w, x) + 0.2 * w @ w},
            "loss_and_optimizer: another",
        ),
        (
            {"optimizer": optax.sgd(lambda step: 1 / (1 + step))},
            {"optimizer": optax.sgd(lambda step: 2 / (1 + step))},
            "loss_and_optimizer: another",
        ),
        common.slow(
            {"loss_fn": lambda w, scale, x: squared(w * scale, x), "frozen": X[0]},
            {"loss_fn": lambda w, scale, x: squared(w * scale, x), "frozen": X[1]},
            "frozen: another",
        ),
        ({}, {"data": OTHER_LABEL}, "data: another"),
        common.slow(
            {"made": mechanism(noise_multiplier=lambda t: jnp.where(t < 1, 5.0, 5.0))},
            {"made": mechanism(noise_multiplier=lambda t: jnp.where(t < 1, 5.0, 9.0))},
            "noise: another",
        ),
    ],
    ids=[
        "loss",
        "derivative",
        "literal in the loss",
        "schedule",
        "frozen",
        "one number of the data",
        "schedule of the noise",
    ],
)
@pytest.mark.filterwarnings("ignore:The loss of every example:UserWarning")
def test_another_program_with_the_key_of_an_earlier_one_is_warned_of(
    first, second, said
):
    fit(**first)
    fit(**first)
    with pytest.warns(UserWarning, match=f"(?s){WARNED}.*{said}"):
        fit(**second)


def negative(w, x):
    return -squared(w, x)


def noisy(fn=negative, noise_multiplier=9.0, normalize_by=40):
    return training.NoisyScore(fn, (X,), noise_multiplier, normalize_by)


def search(
    candidates=(0.1, 0.2), data=X, key=None, loss_fn=squared, score=None, made=None
):
    return training.search(
        loss_fn,
        jnp.ones(3),
        (data,),
        mechanism() if made is None else made,
        optax.sgd,
        list(candidates),
        trials=trials.Geometric(2),
        score=score or training.PublicScore(negative, (X[:5] + 1,)),
        key=jax.random.key(7) if key is None else key,
        target_delta=1e-5,
    )


@pytest.mark.slow
@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("first", "changes", "said"),
    [
        common.slow(
            {}, {"candidates": (0.1, 0.3)}, r"candidates: \(0\.1, 0\.2\) there"
        ),
        common.slow({}, {"data": OTHER_LABEL}, "data: another"),
        (OWN_DERIVATIVE, ANOTHER_DERIVATIVE, "derivatives: another"),
        ({"score": noisy()}, {"score": noisy(squared)}, "score: another"),
        common.slow(
            {"score": noisy()}, {"score": noisy(noise_multiplier=3.0)}, "9.0 40.0 there"
        ),
        common.slow(
            {"score": noisy()}, {}, "scored_by: NoisyScore.* there, PublicScore here"
        ),
        common.slow({}, {"made": mechanism(iterations=2)}, "steps: 1 there, 2 here"),
        (
            {"made": mechanism(noise_multiplier=lambda t: jnp.where(t < 1, 5.0, 5.0))},
            {"made": mechanism(noise_multiplier=lambda t: jnp.where(t < 1, 5.0, 9.0))},
            "noise: another",
        ),
    ],
    ids=[
        *("candidates", "data", "derivative", "score", "noise of the score"),
        *("kind of score", "steps", "schedule"),
    ],
)
def test_another_search_with_the_key_of_an_earlier_one_is_warned_of(
    first, changes, said
):
    search(**first)
    search(**first)
    search(**changes, key=jax.random.key(8))
    with pytest.warns(UserWarning, match=f"(?s){WARNED}.*{said}") as caught:
        search(**changes)
    assert {warning.filename for warning in caught} == {__file__}


def test_a_search_that_was_refused_has_not_used_its_key():
    with pytest.raises(ValueError, match="among the training data"):
        search(score=training.PublicScore(negative, (X[:5],)))
    search()  # its rows taken out, as it was told


def test_a_number_in_the_loss_is_named():
    made = lambda scale: lambda w, x: scale * squared(w, x)
    fit(made(1.0))
    with pytest.warns(UserWarning, match=r"loss_fn\.scale: 1\.0 there, 2\.0 here"):
        fit(made(2.0))


@pytest.mark.guarantee
def test_what_it_warns_of_the_noise_is_gone_from_the_difference():
    """One example fewer, and the difference of two models is its clipped gradient."""
    both = fit()
    with pytest.warns(UserWarning, match=WARNED):
        without_first = fit(data=X[1:])
    models = [np.asarray(x.state.params) for x in (both, without_first)]
    difference = models[1] - models[0]
    gradient = 2 * (np.ones(3) - X[0])
    clipped = gradient / max(1, np.linalg.norm(gradient)) / 50
    np.testing.assert_allclose(difference, clipped, atol=1e-5)
    own_key = fit(data=X[1:], key=jax.random.key(8))
    apart = np.asarray(own_key.state.params) - models[0]
    assert np.linalg.norm(apart - clipped) > 0.05  # noise of 0.1 by coordinate


def test_the_same_run_again_or_for_longer_is_not_warned_of(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, again = fit(), fit(optimizer=optax.sgd(1.0))
        np.testing.assert_array_equal(first.state.params, again.state.params)
        fit(made=mechanism(iterations=3))
        fit(made=mechanism(iterations=2), checkpoints=checkpoints.Checkpoints(tmp_path))
        fit(made=mechanism(iterations=4), checkpoints=checkpoints.Checkpoints(tmp_path))


def begin(key, loss_fn=squared, optimizer=SGD, start=(1.0, 1.0)):
    step = training.Step(loss_fn, mechanism(), optimizer)
    return step.init(jnp.array(start), key=key)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer": optax.sgd(0.5)}, r"step_size: -1\.0 there, -0\.5 here"),
        ({"start": (1.0, 2.0)}, "start: another, with other parameters"),
        ({"loss_fn": lambda w, x: jnp.sum(w - x)}, "functions: another"),
    ],
    ids=["optimizer", "start", "loss"],
)
def test_a_loop_of_ones_own_is_warned_of_too(changes, said):
    key = jax.random.key(7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            begin(key)
        begin(jax.random.key(8), **changes)
        jax.jit(lambda key: begin(key, **changes))(key)  # as in a program for many keys
        jax.vmap(lambda key: begin(key, **changes))(jax.random.split(key, 2))
    with pytest.warns(UserWarning, match=f"(?s){WARNED}.*{said}") as caught:
        begin(key, **changes)
    assert {warning.filename for warning in caught} == {__file__}


def test_a_loop_of_ones_own_after_fit_is_warned_of_where_it_is_seen_to_differ():
    fit(start=jnp.ones(2), data=X[:, :2])
    begin(jax.random.key(7))
    with pytest.warns(UserWarning, match="functions: another"):
        begin(jax.random.key(7), loss_fn=lambda w, x: jnp.sum(w - x))


def test_the_latest_keys_are_known(monkeypatch):
    monkeypatch.setattr(key_uses, "_MOST_KNOWN", 2)
    for seed in range(3):
        fit(key=jax.random.key(seed))
    assert len(key_uses._BEGAN) == 2
    fit(key=jax.random.key(0), optimizer=optax.sgd(0.5))  # forgotten
    with pytest.warns(UserWarning, match=WARNED):
        fit(key=jax.random.key(2), optimizer=optax.sgd(0.5))

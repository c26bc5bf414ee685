"""A run on top of others states what all of them have spent, each of them once."""

import dataclasses
import functools
import itertools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from dpadambc import accounting, training
from dpadambc.training import checkpoints
from tests import common

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)

DELTA = 1e-5
X = jnp.asarray(np.random.default_rng(0).normal(size=(200, 3)), jnp.float32)
MECHANISM = common.poisson_gaussian(noise_multiplier=2.0, iterations=10)
OTHER = common.poisson_gaussian(noise_multiplier=3.0, sampling_prob=0.5, iterations=6)


def loss_fn(params, x):
    return (params["w"] @ x + params["b"] - 1) ** 2


START = {"w": jnp.zeros(3), "b": jnp.zeros(())}


def fit(params=None, mechanism=MECHANISM, *, key=None, folder=None, **options):
    key = training.secret_key() if key is None else key
    saved = checkpoints.Checkpoints(folder, every=4) if folder else None
    return training.fit(
        options.pop("loss_fn", loss_fn),
        START if params is None else params,
        (X,),
        mechanism,
        optax.adam(options.pop("learning_rate", 0.1)),
        key=key,
        target_delta=DELTA,
        checkpoints=saved,
        **options,
    )


@functools.cache
def first():
    return fit(key=jax.random.key(0))


def stop_after(iterations):
    def callback(progress):
        if progress.iterations >= iterations:
            raise training.Stop(is_public=True)

    return callback


def unnamed(spent):
    """As somebody would give it who knows the mechanisms alone."""
    return accounting.compose([(run.mechanism, run.steps) for run in spent.runs])


def names(spent):
    return [run.parts[0][0] for run in spent.runs]


# What is stated.


def test_all_runs_count_and_not_the_last_alone():
    heard = []
    second = fit(first(), OTHER, callbacks=heard.append)
    both = accounting.compose([MECHANISM, OTHER])
    assert unnamed(second.spent) == both and second.epsilon == both.epsilon(DELTA)
    assert second.epsilon_of_this_run() == OTHER.epsilon(DELTA)
    halfway = accounting.compose([MECHANISM, (OTHER, 3)])
    assert heard[2].epsilon() == halfway.epsilon(DELTA)
    third = fit(second, callbacks=stop_after(4))
    assert unnamed(third.spent) == accounting.compose([both, (MECHANISM, 4)])
    assert third.epsilon == third.spent.epsilon(DELTA)
    # It begins with what the run before returned.
    none = fit(first(), common.poisson_gaussian(iterations=1), learning_rate=0.0)
    none = none.state.params
    np.testing.assert_array_equal(none["w"], first().state.params["w"])


def test_a_run_alone_states_what_its_mechanism_does():
    assert first().epsilon == MECHANISM.epsilon(DELTA)
    assert unnamed(first().spent) == accounting.compose([MECHANISM])


def test_plain_parameters_are_the_users_word():
    """Whether their copies are on the same people's data, only the user knows."""
    trained = first().state.params
    copies = [trained, jax.tree.map(np.array, trained)]
    for params in copies:
        again = fit(params, OTHER)
        assert unnamed(again.spent) == accounting.compose([OTHER])
        assert again.epsilon == OTHER.epsilon(DELTA)
        told = fit(params, OTHER, spent=first())
        assert told.epsilon == accounting.compose([MECHANISM, OTHER]).epsilon(DELTA)
    with_frozen = lambda params, frozen, x: loss_fn(params, frozen["w"] * x)
    frozen = fit(mechanism=OTHER, frozen=trained, loss_fn=with_frozen)
    assert frozen.epsilon == OTHER.epsilon(DELTA)


def test_earlier_runs_are_given_in_any_form(tmp_path):
    training.save_release(tmp_path / "x", first())
    release = training.load_release(tmp_path / "x", like=START)
    both = accounting.compose([MECHANISM, OTHER])
    none = common.poisson_gaussian(iterations=1)
    spent_by = lambda spent: fit(mechanism=none, spent=spent).spent
    for spent in (
        [(MECHANISM, 10), OTHER],
        both,
        [first(), (OTHER, None)],
        [release, None, OTHER],
        (accounting.compose([MECHANISM]), OTHER),
    ):
        assert unnamed(spent_by(spent)) == accounting.compose([both, none])
    assert spent_by(first()).runs[0] == spent_by(release).runs[0]
    for nothing in (None, (), []):
        assert unnamed(spent_by(nothing)) == accounting.compose([none])


# Each run counts once.


@pytest.mark.guarantee
def test_a_release_carries_what_it_cost_through_a_file(tmp_path):
    second = fit(first(), OTHER)
    about = training.save_release(tmp_path / "x", second)
    assert about["epsilon"] == second.epsilon
    release = training.load_release(tmp_path / "x", like=START)
    assert release.about == about and release.spent == second.spent
    third = fit(release, callbacks=stop_after(1))
    assert unnamed(third.spent) == accounting.compose(
        [MECHANISM, OTHER, (MECHANISM, 1)]
    )
    assert names(third.spent)[:2] == names(second.spent)
    # The file and the result are of the same runs.
    for spent in (second, [first(), second, release], release):
        told = fit(release, spent=spent, callbacks=stop_after(1))
        assert told.epsilon == third.epsilon
    # A file of before this was written names no runs.
    del release.about["spent"]
    with pytest.raises(ValueError, match="spent="):
        fit(release)
    # Negative control: its parameters alone say nothing.
    assert fit(release.params, callbacks=stop_after(1)).epsilon < 0.6 * third.epsilon


@pytest.mark.guarantee
def test_results_that_were_told_of_each_other_count_once():
    """Four runs of 2.00 were 4.22, as seven, and are 3.32."""
    mechanism = common.poisson_gaussian(noise_multiplier=1.35, iterations=2)
    run = functools.partial(fit, mechanism=mechanism)
    one = run()
    two = run(one)
    three = run(spent=[one, two])
    four = run(three, spent=[one, two, three])
    epsilon = lambda n: accounting.compose(n * [mechanism]).epsilon(DELTA)
    assert four.epsilon == epsilon(4) < 0.8 * epsilon(7)
    assert names(four.spent)[:3] == names(three.spent)
    for several in itertools.permutations([one, two, three, four]):
        together = accounting.compose(several)
        assert len(together.runs) == 4
        assert together.epsilon(DELTA) == pytest.approx(four.epsilon)


def test_what_has_no_name_counts_as_often_as_it_is_given():
    pair = (MECHANISM, 10)
    twice = fit(mechanism=OTHER, spent=[pair, pair])
    assert twice.epsilon == accounting.compose([pair, pair, OTHER]).epsilon(DELTA)
    assert unnamed(twice.spent) == accounting.compose([pair, pair, OTHER])
    # So do two runs with equal numbers, be it with one key.
    key = jax.random.key(3)
    together = accounting.compose([fit(key=key), fit(key=key)])
    assert unnamed(together) == accounting.compose([pair, pair])


@pytest.mark.guarantee
def test_a_run_that_goes_on_keeps_its_name_and_counts_once(tmp_path):
    key = jax.random.key(4)
    part = fit(key=key, folder=tmp_path, callbacks=stop_after(3))
    whole = fit(key=key, folder=tmp_path)
    assert whole.resumed_from == 3 and names(part.spent) == names(whole.spent)
    for several in ([part, whole], [whole, part], [part, whole, part]):
        assert accounting.compose(several) == whole.spent
    assert unnamed(part.spent) == accounting.compose([(MECHANISM, 3)])
    # Found done, nothing is taken anew, and nothing counts.
    assert fit(key=key, folder=tmp_path).spent == whole.spent
    # Negative control: a run in another folder is another.
    other = fit(key=key, callbacks=stop_after(3))
    assert len(accounting.compose([other, whole]).runs) == 2


@pytest.mark.guarantee
def test_two_ways_on_from_one_checkpoint_count_as_two_runs(tmp_path):
    """Where they round otherwise, their steps have noise of their own."""
    key = jax.random.key(5)
    part = fit(key=key, folder=tmp_path / "one", callbacks=stop_after(3))
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    one, other = (fit(key=key, folder=tmp_path / name) for name in ("one", "other"))
    assert one.resumed_from == other.resumed_from == 3
    together = accounting.compose([part, one, other])
    assert unnamed(together) == accounting.compose([MECHANISM, MECHANISM])
    assert accounting.compose([one, part]) == one.spent


def test_a_run_keeps_to_the_budget_of_all():
    total = lambda n: accounting.compose([OTHER, (MECHANISM, n)]).epsilon(DELTA)
    result = fit(spent=[OTHER], target_epsilon=(total(3) + total(4)) / 2)
    assert result.iterations == 3 and result.stopped_by == "budget"
    assert result.epsilon == total(3)
    # Negative control.
    alone = training.affordable_iterations(
        MECHANISM, target_epsilon=(total(3) + total(4)) / 2, target_delta=DELTA
    )
    assert alone == 10
    with pytest.raises(ValueError, match=f"target_epsilon.* {total(1):.4g}"):
        fit(spent=[OTHER], target_epsilon=OTHER.epsilon(DELTA))


def test_what_cannot_be_composed_is_refused_before_anything_is_run():
    relation = dpadambc.NeighboringRelation.REPLACE_ONE
    other = dataclasses.replace(OTHER, neighboring_relation=relation)
    with pytest.raises(ValueError, match="neighboring_relation"):
        fit(spent=[other])
    with pytest.raises(TypeError, match="runs"):
        fit(spent=1.5)


def search(distribution, **options):
    score = training.NoisyScore(lambda *_: 0.5, (X,), 3.0, 200)
    step = common.poisson_gaussian(noise_multiplier=2.0, iterations=2)
    return training.search(
        *(loss_fn, START, (X,), step, optax.sgd, [0.1, 0.2]),
        score=score,
        target_delta=DELTA,
        trials=distribution,
        key=jax.random.key(0),
        **options,
    )


@pytest.mark.slow
def test_a_search_has_spent_too():
    fixed = search(accounting.FixedTrials(2))
    # The whole search counts: each of its trials, with its score.
    assert fixed.spent.epsilon(DELTA) == pytest.approx(fixed.epsilon, rel=1e-3)
    total = fit(fixed.best.params, spent=fixed, callbacks=stop_after(1))
    expected = accounting.compose([unnamed(fixed.spent), (MECHANISM, 1)])
    assert unnamed(total.spent) == expected
    # A random number of trials is no composition of runs.
    found = search(accounting.GeometricTrials(1))
    with pytest.raises(ValueError, match="add"):
        fit(found.best.params, spent=found)


# Checkpoints, and going on with a run.


def killed(progress):
    if progress.iterations == 6:
        raise RuntimeError


def test_a_checkpoint_holds_what_was_spent_before(tmp_path):
    key = jax.random.key(1)
    before = fit(mechanism=OTHER)
    with pytest.raises(RuntimeError):
        fit(key=key, folder=tmp_path, spent=before, callbacks=killed)
    for spent in (None, [(OTHER, 5)], ()):
        with pytest.raises(ValueError, match="spent="):
            fit(key=key, folder=tmp_path, spent=spent)
    # A script that is run again makes the run before again, with another name.
    again = fit(mechanism=OTHER)
    result = fit(key=key, folder=tmp_path, spent=again)
    assert result.resumed_from == 4
    assert unnamed(result.spent) == accounting.compose([OTHER, MECHANISM])
    assert names(result.spent)[0] == names(again.spent)[0]


@pytest.mark.slow
def test_the_steps_of_a_checkpoint_are_not_given_once_more(tmp_path):
    key = jax.random.key(2)
    done = fit(key=key, folder=tmp_path)
    longer = dataclasses.replace(MECHANISM, iterations=15)
    with pytest.raises(ValueError, match="spent="):
        fit(mechanism=longer, key=key, folder=tmp_path, spent=done)
    result = fit(mechanism=longer, key=key, folder=tmp_path)
    assert result.resumed_from == 10 and result.epsilon == longer.epsilon(DELTA)
    assert names(result.spent) == names(done.spent)
    (about,) = [
        json.loads(path.read_text())
        for path in (tmp_path / "15").rglob("*")
        if path.is_file()
        and path.parent.name == "about"
        and b'"identity"' in (path.read_bytes())
    ]
    assert about["identity"]["spent_before"] is None


@pytest.mark.slow
@pytest.mark.parametrize("how", ["budget", "callback"])
def test_a_run_that_ended_early_goes_on_and_counts_once(tmp_path, how):
    key = jax.random.key(3)
    total = lambda n: accounting.compose([OTHER, (MECHANISM, n)])
    end = {"callbacks": stop_after(5)}
    if how == "budget":
        end = {"target_epsilon": total(5).epsilon(DELTA) + 1e-6}
    options = dict(key=key, spent=[OTHER])
    part = fit(folder=tmp_path, **options, **end)
    assert (part.iterations, part.stopped_by) == (5, how)
    assert part.epsilon == total(5).epsilon(DELTA)
    rest = fit(
        folder=tmp_path, **options, target_epsilon=total(8).epsilon(DELTA) + 1e-6
    )
    assert (rest.resumed_from, rest.iterations) == (5, 8)
    assert unnamed(rest.spent) == total(8)
    whole = fit(callbacks=stop_after(8), **options)
    np.testing.assert_array_equal(rest.state.params["w"], whole.state.params["w"])


@pytest.mark.slow
def test_a_schedule_that_is_stretched_over_more_steps_is_refused(tmp_path):
    key = jax.random.key(4)
    scheduled = lambda n: dataclasses.replace(
        MECHANISM, noise_multiplier=optax.linear_schedule(3.0, 2.0, n), iterations=n
    )
    fit(mechanism=scheduled(6), key=key, folder=tmp_path)
    with pytest.raises(ValueError, match="another run"):
        fit(mechanism=scheduled(8), key=key, folder=tmp_path)
    same = dataclasses.replace(scheduled(6), iterations=8)
    assert fit(mechanism=same, key=key, folder=tmp_path).epsilon == same.epsilon(DELTA)

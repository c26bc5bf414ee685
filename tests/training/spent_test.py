"""A run on top of others states what all of them have spent, and none is forgotten."""

import dataclasses
import functools
import gc
import json
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import dpadambc
from dpadambc import graphs, training
from dpadambc._core import origins
from dpadambc.mechanisms import accounting, trials
from dpadambc.training import _account, _origins, checkpoints, tuning
from tests import common

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)

DELTA = 1e-5
X = jnp.asarray(np.random.default_rng(0).normal(size=(200, 3)), jnp.float32)
MECHANISM = common.poisson_gaussian(noise_multiplier=2.0, iterations=10)
OTHER = common.poisson_gaussian(noise_multiplier=3.0, sampling_prob=0.5, iterations=6)
ADAM = optax.adam(0.1)


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
        options.pop("optimizer", ADAM),
        key=key,
        target_delta=DELTA,
        checkpoints=saved,
        **options,
    )


@functools.cache
def first():
    return fit(key=jax.random.key(0), average_decay=0.9)


def stop_after(iterations):
    def callback(progress):
        if progress.iterations >= iterations:
            raise training.Stop(is_public=True)

    return callback


# What is stated.


@pytest.mark.slow
def test_all_runs_count_and_not_the_last_alone():
    told = []
    second = fit(
        first().state.params,
        OTHER,
        spent=first(),
        callback=lambda p: told.append((p.iterations, p)),
    )
    both = accounting.compose([MECHANISM, OTHER])
    assert second.spent == both and second.epsilon == both.epsilon(DELTA)
    assert second.epsilon_of_this_run() == OTHER.epsilon(DELTA)
    halfway = accounting.compose([MECHANISM, (OTHER, 3)])
    assert told[2][1].epsilon() == halfway.epsilon(DELTA)
    third = fit(second.state.params, spent=second, callback=stop_after(4))
    assert third.spent == both + accounting.compose([(MECHANISM, 4)])
    assert third.epsilon == third.spent.epsilon(DELTA)
    # Negative control: on the data of other people, what each states is its own.
    alone = fit(first().state.params, OTHER, spent=())
    assert alone.epsilon == OTHER.epsilon(DELTA) < 0.8 * second.epsilon


def test_a_run_alone_states_what_its_mechanism_does():
    assert first().epsilon == MECHANISM.epsilon(DELTA)
    assert first().spent == accounting.compose([MECHANISM])


def test_earlier_runs_are_given_in_any_form():
    both = accounting.compose([MECHANISM, OTHER])
    for spent in (
        [(MECHANISM, 10), OTHER],
        both,
        [first(), (OTHER, None)],
        (accounting.compose([MECHANISM]), OTHER),
    ):
        assert _account.earlier(spent) == both
    assert _account.earlier(first()) == _account.earlier(MECHANISM) == first().spent
    assert (
        _account.earlier(None) is _account.earlier(()) is _account.earlier([]) is None
    )


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
    with pytest.raises(ValueError, match=rf"{total(1):.4g} with what was spent before"):
        fit(spent=[OTHER], target_epsilon=OTHER.epsilon(DELTA))


@pytest.mark.filterwarnings("ignore:The key of this run")
def test_a_release_says_what_all_runs_spent(tmp_path):
    second = fit(first().state.params, OTHER, spent=first())
    about = training.save_release(tmp_path / "x", second)
    assert about["epsilon"] == second.epsilon
    params, read = training.load_release(tmp_path / "x", like=START)
    third = fit(params, spent=read, callback=stop_after(1))
    assert third.spent == second.spent + accounting.compose([(MECHANISM, 1)])
    # A file of before this was written has no runs.
    del read["spent"]
    with pytest.raises(ValueError, match=r"Give a list of \(mechanism, steps\)"):
        fit(params, spent=read)


@pytest.mark.slow
def test_a_file_may_name_what_nobody_has_imported_yet():
    mechanism = graphs.PoissonGaussian(**vars(MECHANISM), max_terms=2)
    text = json.dumps({"spent": accounting.compose([mechanism]).to_json()})
    program = (
        "import json, sys\n"
        "from dpadambc.mechanisms import accounting\n"
        f"about = json.loads({text!r})\n"
        "try: accounting.Spending.from_json(about['spent'])\n"
        "except ValueError:\n"
        "    from dpadambc.training import _account\n"
        "    print('unknown, then', _account.earlier(about))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "unknown, then Spending(ADD_OR_REMOVE_ONE:" in done.stdout
    assert "max_terms=2" in done.stdout


def test_what_cannot_be_composed_is_refused_before_anything_is_run():
    relation = dpadambc.NeighboringRelation.REPLACE_ONE
    other = dataclasses.replace(OTHER, neighboring_relation=relation)
    with pytest.raises(ValueError, match=r"REPLACE_ONE .* and ADD_OR_REMOVE_ONE"):
        fit(spent=[other])
    with pytest.raises(TypeError, match="for each run, got 1.5"):
        fit(spent=1.5)


# Parameters that a run has trained.


def copies(params):
    on_host = jax.tree.map(lambda x: np.array(x), params)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), on_host)
    return [params, on_host, wide, {**START, "w": params["w"] + 0}]


@pytest.mark.filterwarnings("ignore:The key of this run")
def test_a_warm_start_must_say_what_was_spent(tmp_path):
    given = copies(first().state.params) + copies(first().state.average)
    training.save_release(tmp_path / "x", first())
    for params in given:
        with pytest.raises(ValueError, match=r"got none for params\['w'\].*10 steps"):
            fit(params)
    assert fit(given[0], spent=first()).spent.runs[0].steps == 10
    # Read from a file, where this process has not run it.
    origins._KNOWN.clear()
    assert fit(given[0]).spent.runs[0].steps == 10  # negative control
    params, _ = training.load_release(tmp_path / "x", like=START)
    with pytest.raises(ValueError, match="released by a private run"):
        fit(params)
    first.cache_clear()


@pytest.mark.slow
def test_so_must_one_that_begins_in_the_middle_of_another_or_freezes_it():
    kept = []
    result = fit(callback=lambda p: kept.append(p.params))
    with pytest.raises(ValueError, match="3 steps of PoissonGaussian has trained"):
        fit(kept[2])
    # All of that run is more than its first steps.
    assert fit(kept[2], spent=result).spent.runs[0].steps == 10
    with_frozen = lambda params, frozen, x: loss_fn(params, frozen["w"] * x)
    frozen = result.state.params
    with pytest.raises(ValueError, match=r"got none for frozen\['w'\]"):
        fit(frozen=frozen, loss_fn=with_frozen)
    assert fit(frozen=frozen, loss_fn=with_frozen, spent=result).epsilon > (
        result.epsilon
    )


def test_so_must_one_whose_loss_or_optimizer_closes_over_it():
    result = fit()
    body = result.state.params["w"]
    closes_over = lambda params, x: loss_fn(params, body * x)
    told = "got none for an array that the loss or the optimizer closes over"
    with pytest.raises(ValueError, match=told):
        fit(loss_fn=closes_over)
    assert fit(loss_fn=closes_over, spent=result).epsilon > result.epsilon
    tree = lambda g, params: g | {"w": g["w"] + (params["w"] - body)}
    towards = optax.stateless(tree)
    with pytest.raises(ValueError, match=told):
        fit(optimizer=optax.chain(towards, optax.sgd(0.1)))
    other = jnp.asarray(body) * 0.5
    fit(loss_fn=lambda params, x: loss_fn(params, other * x))


STARTS = {
    "Step": lambda params, key: training.Step(loss_fn, MECHANISM, ADAM).init(
        params, key=key
    ),
    "init_state": lambda params, key: training.init_state(
        params, MECHANISM, ADAM, key=key
    ),
    "privatize": lambda params, key: dpadambc.privatize(MECHANISM, key=key).init(
        params
    ),
    "dp_adam": lambda params, key: dpadambc.dp_adam(0.1, MECHANISM, key=key).init(
        params
    ),
    "add_dp_noise": lambda params, key: dpadambc.add_dp_noise(0.1, key=key).init(
        params
    ),
}


@pytest.mark.guarantee
@pytest.mark.parametrize("name", STARTS)
def test_a_loop_of_ones_own_is_warned_of_a_start_that_was_trained(name):
    start = lambda params: STARTS[name](params, training.secret_key())
    trained = fit().state.params
    told = r"params\['w'\] is what a run of 10 steps of PoissonGaussian"
    with pytest.warns(UserWarning, match=told) as caught:
        start(trained)
    assert caught[0].filename == __file__
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start(START)
        start({"w": [0.0, 1.0, 2.0], "b": 0.5})
        start(jax.tree.map(lambda x: 0.5 * x, trained))
        jax.eval_shape(
            functools.partial(STARTS[name], key=training.secret_key()), trained
        )


def search(distribution, **options):
    arguments = dict(
        score=training.NoisyScore(lambda *_: 0.5, (X,), 3.0, 200), target_delta=DELTA
    )
    rates = [0.1, 0.2]
    params = options.pop("params", START)
    step = common.poisson_gaussian(noise_multiplier=2.0, iterations=2)
    return training.search(
        *(loss_fn, params, (X,), step, optax.sgd, rates),
        **arguments | dict(trials=distribution, key=jax.random.key(0)) | options,
    )


@pytest.mark.slow
def test_a_search_has_trained_too():
    fixed = search(trials.Fixed(2))
    for trial in fixed.told:
        with pytest.raises(ValueError, match=r"params\['w'\], which a search"):
            fit(trial.params)
    # The whole search counts: each of its trials, with its score.
    assert fixed.spent.epsilon(DELTA) == pytest.approx(fixed.epsilon, rel=1e-3)
    total = fit(fixed.best.params, spent=fixed, callback=stop_after(1))
    assert total.spent == fixed.spent + accounting.compose([(MECHANISM, 1)])
    with pytest.warns(UserWarning, match="does not have all of that"):
        fit(fixed.best.params, spent=[total.mechanism], callback=stop_after(1))
    # A random number of trials is no composition of runs.
    options = dict(params=fixed.best.params, spent=(), key=jax.random.key(1))
    found = search(trials.Geometric(1), **options)
    for spent in (found, [MECHANISM]):
        with pytest.raises(ValueError, match="epsilons of the two add"):
            fit(found.best.params, spent=spent)
    assert fit(found.best.params, spent=(), callback=stop_after(1)).iterations == 1


def test_a_search_does_not_begin_with_what_a_run_has_made(monkeypatch):
    made = first().state.params
    monkeypatch.setattr(tuning, "Trainer", None)  # nothing is trained
    with pytest.raises(ValueError, match="10 steps of .*epsilons of the two add"):
        search(trials.Fixed(2), params=made)
    with pytest.raises(TypeError, match=r"Expected spent=\(\) or none for a search"):
        search(trials.Fixed(2), params=made, spent=first())
    with pytest.raises(TypeError, match="NoneType"):  # negative control: it would be
        search(trials.Fixed(2), params=made, spent=())


def test_one_that_says_less_than_was_spent_is_warned_of():
    second = fit(first().state.params, OTHER, spent=first())
    with pytest.warns(UserWarning, match="spent= does not have all of that") as found:
        fit(second.state.params, spent=first())
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(second.state.params, spent=[(OTHER, 6), (MECHANISM, 10)])


@pytest.mark.guarantee
def test_the_steps_before_a_stop_are_too_few_and_warned_of():
    """As the epsilon of that run is of all steps that it might have taken."""

    def stop(progress):
        if progress.iterations == 4:
            raise training.Stop

    stopped = fit(callback=stop)
    with pytest.warns(UserWarning, match="spent= does not have all of that"):
        fit(stopped.state.params, spent=[(MECHANISM, stopped.iterations)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        told = fit(stopped.state.params, spent=stopped)
        public = fit(callback=stop_after(4))
        fit(public.state.params, spent=[(MECHANISM, 4)])
    # Results compose as they are.
    both = accounting.compose([stopped, public])
    assert both == accounting.compose([(MECHANISM, 10), (MECHANISM, 4)])
    assert told.spent == accounting.compose([stopped, (MECHANISM, 10)])


def test_the_key_of_the_run_before_would_repeat_its_noise():
    key = jax.random.key(7)
    result = fit(key=key)
    for spent in (result, ()):
        with pytest.raises(ValueError, match="Expected a key of its own"):
            fit(result.state.params, key=key, spent=spent)
    with pytest.raises(ValueError, match="got that of a run in spent="):
        fit(key=key, spent=[OTHER, result])
    # Of the run before the last, too; and the last may be made again.
    second = fit(result.state.params, key=jax.random.key(8), spent=result)
    with pytest.raises(ValueError, match="got that of a run in spent="):
        fit(second.state.params, key=key, spent=[OTHER, second])
    again = fit(result.state.params, key=jax.random.key(8), spent=result)
    assert again.spent == second.spent
    assert fit(key=key, spent=[OTHER]).iterations == 10


def test_there_are_no_false_alarms():
    rng = np.random.default_rng(1)
    start = {"w": jnp.asarray(rng.normal(size=3)), "b": jnp.ones(())}
    none = fit(start, common.poisson_gaussian(iterations=0))
    assert none.iterations == 0
    fit(none.state.params)  # which is the start
    fit(start)
    # Nor of what a run was given and left as it was.
    partly = optax.multi_transform(
        {"train": ADAM, "leave": optax.set_to_zero()}, {"w": "leave", "b": "train"}
    )
    left = fit(start, optimizer=partly).state.params
    np.testing.assert_array_equal(left["w"], start["w"])
    fit({**left, "b": START["b"]})
    # A constant, or a single number, may be anybody's.
    anybodys = {"w": jnp.ones(50), "n": jnp.arange(9), "b": jnp.asarray(0.1)}
    assert not list(origins.marks_in(anybodys))


def test_what_is_known_does_not_grow_without_end(monkeypatch):
    monkeypatch.setattr(origins, "_MOST_KNOWN", 3)
    # The first step of Adam has one length: its results may be anybody's.
    once, sgd = common.poisson_gaussian(iterations=1), optax.sgd(0.1)
    results = [fit(mechanism=once, optimizer=sgd) for _ in range(5)]
    assert len(origins._KNOWN) == 3
    with pytest.raises(ValueError, match="got none"):
        fit(results[-1].state.params)


def test_an_array_is_known_wherever_it_is():
    values = np.random.default_rng(2).normal(size=(40, 32)).astype(np.float32)
    mesh = jax.make_mesh(
        (2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    mark_of = lambda values: origins.marks_of(jnp.asarray(values))[0]
    mark = mark_of(values)
    for spec in [(), ("a",), ("b", "a"), (None, ("a", "b"))]:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        assert mark_of(jax.device_put(values, sharding)) == mark
    assert mark_of(values.reshape(32, 2, 20)) == mark
    assert mark_of(values * 1.0001) != mark
    assert mark_of(values.T) != mark


@pytest.mark.parametrize("kind", [jnp.bfloat16, jnp.float16])
def test_so_is_one_that_was_rounded(kind):
    start, end, other = np.random.default_rng(3).normal(size=(3, 40))
    known = lambda x: {mark for _, mark in origins.marks_in(jnp.asarray(x))}
    account = _account.Account(MECHANISM, DELTA)
    begins = _origins.Start(account, is_told=False)
    origin = begins.checked(jnp.asarray(start), None, [], "a key")
    # Its start is not known, nor what rounds to it.
    origin.remember(jnp.asarray(end), 10)
    origin.remember(jnp.asarray(start * (1 + 1e-7)), 10)
    for rounded in (end.astype(kind), end.astype(kind).astype(np.float32)):
        with pytest.raises(ValueError, match="10 steps .* has trained"):
            begins.checked(jnp.asarray(rounded), None, [], "another")
    for free in (start, start.astype(kind), other.astype(kind), end[:30], end + 0.1):
        assert not known(free) & set(origins._KNOWN)
        begins.checked(jnp.asarray(free), None, [], "another")


# Checkpoints, and going on with a run.


@pytest.mark.slow
def test_a_checkpoint_holds_what_was_spent_before(tmp_path):
    key = jax.random.key(1)
    with pytest.raises(RuntimeError):
        fit(key=key, folder=tmp_path, spent=[OTHER], callback=_raise)
    text = r"began with, Spending.*6 steps of [^\n]*, got {}"
    for spent, got in ((None, "nothing"), ([(OTHER, 5)], "Spending"), ((), "nothing")):
        with pytest.raises(ValueError, match="(?s)" + text.format(got)):
            fit(key=key, folder=tmp_path, spent=spent)
    result = fit(key=key, folder=tmp_path, spent=[OTHER])
    assert result.resumed_from == 4
    assert result.spent == accounting.compose([OTHER, MECHANISM])


def _raise(progress):
    if progress.iterations == 6:
        raise RuntimeError


@pytest.mark.slow
def test_the_steps_of_a_checkpoint_are_not_given_once_more(tmp_path):
    key = jax.random.key(2)
    done = fit(key=key, folder=tmp_path)
    longer = dataclasses.replace(MECHANISM, iterations=15)
    with pytest.raises(ValueError, match="began with, nothing, got Spending"):
        fit(mechanism=longer, key=key, folder=tmp_path, spent=done)
    result = fit(mechanism=longer, key=key, folder=tmp_path)
    assert result.resumed_from == 10 and result.epsilon == longer.epsilon(DELTA)
    (about,) = [
        json.loads(path.read_text())
        for path in (tmp_path / "15").rglob("*")
        if path.is_file()
        and path.parent.name == "about"
        and b'"identity"' in (path.read_bytes())
    ]
    # So a checkpoint of before there was `spent` reads as one without.
    assert "spent_before" not in about["identity"]
    gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["budget", "callback"])
def test_a_run_that_ended_early_goes_on_and_counts_once(tmp_path, how):
    key = jax.random.key(3)
    total = lambda n: accounting.compose([OTHER, (MECHANISM, n)])
    end = {"callback": stop_after(5)}
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
    assert rest.spent == total(8)
    whole = fit(callback=stop_after(8), **options)
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

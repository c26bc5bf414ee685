"""The comparison of methods: equal trials, ranks, and a whole run of a small part."""

import argparse
import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from benchmarks import experiment, records
from benchmarks.experiment import Data
from benchmarks.methods import clip_norms, methods, recipe, run, tasks
from benchmarks.methods.methods import METHODS, NUM_TRIALS


@pytest.mark.parametrize("name", METHODS)
def test_trials_are_as_many_for_each_and_spread_over_the_ranges(name):
    rows = METHODS[name].candidates()
    assert len(rows) == NUM_TRIALS
    for key in rows[0]:
        quantiles = np.sort(np.log([row[key] for row in rows]))
        low, high = quantiles[[0, -1]]
        # One in each sixteenth of the range.
        steps = np.diff(quantiles) / ((high - low) / (NUM_TRIALS - 1))
        assert np.all(steps < 2.3), key


def test_methods_draw_the_same_quantiles_of_what_they_share():
    first, second = METHODS["DP-Adam"].candidates(), METHODS["DP-AdamBC"].candidates()
    for one, other in zip(first, second, strict=True):
        assert one.items() <= other.items()


def test_training_equals_a_loop_over_steps_and_examples():
    """Two runs without noise, on the batches of the first."""
    rng = np.random.default_rng(0)
    data = Data(jnp.asarray(rng.normal(size=(20, 4)), jnp.float32), jnp.arange(20) % 3)
    mechanism = dpadambc.PoissonGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=0.0,
        sampling_prob=0.3,
        iterations=4,
        normalize_by=6,
    )
    task = tasks.Task("made up", (4, 5, 3), 6, 4, 1e-4)
    keys = jax.random.split(jax.random.key(1), 2)
    rates, clip_norms = [0.7, 0.3], [0.5, 0.2]
    pairs = zip(rates, clip_norms, strict=True)
    candidates = [{"learning_rate": x, "l2_clip_norm": c} for x, c in pairs]
    make = methods.behind_noise(lambda c, _: optax.sgd(c["learning_rate"]))
    found = methods.train(
        make, mechanism, tasks.model(task, False), keys, candidates, data, data
    )
    grad_fn = jax.jit(jax.grad(experiment.loss_fn))
    sampling_key = jax.random.fold_in(keys[0], 1)
    sample = jax.jit(functools.partial(mechanism.sample_step, num_examples=20))
    for i, (rate, clip_norm) in enumerate(zip(rates, clip_norms, strict=True)):
        init_key, _ = jax.random.split(jax.random.fold_in(keys[i], 0))
        params, num_clipped = task.init(init_key), 0
        for step in range(mechanism.iterations):
            batch = sample(sampling_key, step)
            total = optax.tree.zeros_like(params)
            for j in np.asarray(batch.indices)[~np.asarray(batch.is_padding_example)]:
                gradient = grad_fn(params, data.features[j], data.labels[j])
                norm = float(optax.tree.norm(gradient))
                num_clipped += norm > clip_norm
                weight = min(1, clip_norm / norm) / clip_norm  # in units of C
                total = optax.tree.add_scale(total, weight, gradient)
            params = optax.tree.add_scale(params, -rate / mechanism.normalize_by, total)
        assert num_clipped > 0
        own = jax.tree.map(lambda x, i=i: x[i], found.params)
        chex.assert_trees_all_close(own, params, rtol=1e-4, atol=1e-6)


def test_the_critical_difference_is_the_published_one():
    """Demsar, 2006, section 3.2.2: four classifiers, 14 data sets."""
    assert run.critical_difference(4, 14) == pytest.approx(1.25, abs=0.005)


def _rows(task, method, accuracies, epsilon=3.0):
    common = {"task": task, "method": method, "target_epsilon": epsilon}
    trials = {"what": "search", "candidates": [1, 2], "accuracies": [0.2, 0.1]}
    tests = [
        {"what": f"seed {i}", "candidates": [1], "accuracies": [x], **common}
        for i, x in enumerate(accuracies)
    ]
    return [trials | common, *tests]


def test_the_mean_over_seeds_of_the_trials_chooses():
    rows = _rows("digits", "DP-SGD", [0.8])
    assert run.scores(rows) == {("digits", 3.0): {"DP-SGD": [0.8]}}
    more = rows[0] | {"what": "search 1001", "accuracies": [0.1, 0.4]}
    other = rows[1] | {"candidates": [2], "accuracies": [0.9]}
    assert run.scores([*rows, more, other]) == {("digits", 3.0): {"DP-SGD": [0.9]}}
    assert run.scores([*rows, more]) == {}  # not tested yet


def test_ranks_are_means_over_the_blocks_that_have_all_methods():
    rows = [
        *_rows("digits", "DP-SGD", [0.8, 0.9]),
        *_rows("digits", "DP-Adam", [0.7, 0.7]),
        *_rows("Adult", "DP-SGD", [0.5]),
        *_rows("Adult", "DP-Adam", [0.6]),
        *_rows("Adult", "Muon", [0.9]),  # not compared
    ]
    found = run.scores(rows)
    assert run.ranks(found) == {"DP-SGD": 1.5, "DP-Adam": 1.5}
    points = run.differences(found, "DP-Adam", "DP-SGD")
    assert points == pytest.approx({("digits", 3.0): -15, ("Adult", 3.0): 10})


def test_tuned_once_loses_what_the_best_at_each_epsilon_has_more():
    of = lambda epsilon: ("digits", "DP-SGD", epsilon)
    found = {of(3.0): np.array([0.5, 0.9]), of(1.0): np.array([0.8, 0.6])}
    assert run.tune_once(found).splitlines()[-1] == "| DP-SGD | 20.0 |"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A study with few steps on few examples, as its command makes it."""
    folder = tmp_path_factory.mktemp("methods")
    task = dataclasses.replace(tasks.TASKS["digits"], iterations=2, batch_size=40)
    few = lambda data: data.take(slice(100))
    train, test, *_ = tasks.load("digits", folder, folder)
    train = few(train)
    sides = experiment.Sides(train, few(test), *experiment.split_validation(train))
    arguments = argparse.Namespace(
        **{"data_dir": folder, "cache_dir": folder, "task": ["digits"]},
        **{"method": ["DP-AdamBC"], "epsilon": [3.0], "seed": None},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tasks.TASKS, "digits", task)
        patch.setattr(tasks, "load", lambda *_: sides)
        yield folder, arguments


def test_a_run_has_equal_trials_then_the_seeds_of_the_best_and_is_not_made_again(small):
    folder, arguments = small
    path = folder / "results.jsonl"
    run.STUDY.make(arguments, records.Records(path))
    search, *tested = records.read(path)
    assert len(search["accuracies"]) == NUM_TRIALS
    best = search["candidates"][int(np.argmax(search["accuracies"]))]
    assert [row["candidates"] for row in tested] == [[best]] * run.NUM_SEEDS
    assert "| DP-AdamBC |" in run.tables(records.read(path))["digits"]
    before = path.read_text()
    run.STUDY.make(arguments, records.Records(path))
    assert path.read_text() == before


def test_a_wrong_clip_norm_is_tabled_at_the_learning_rate_that_is_best_of_all(
    small, monkeypatch
):
    folder, arguments = small
    path = folder / "clip_norms.jsonl"
    monkeypatch.setattr(clip_norms, "CLIP_NORMS", (0.1, 1.0))
    monkeypatch.setattr(clip_norms, "LEARNING_RATES", (0.1, 1.0))
    arguments = argparse.Namespace(
        **vars(arguments) | {"method": ["slack"], "seed": [0]}
    )
    clip_norms.STUDY.make(arguments, records.Records(path))
    (row,) = records.read(path)
    assert np.shape(row["accuracies"]) == (2, 2)
    rows = [
        {"task": "digits", "rule": "flat", "accuracies": [[0.5, 0.2], [x, 0.9]]}
        for x in (0.7, 0.9)
    ]
    line = clip_norms.tables(rows)["clip norms"].splitlines()[-1]
    assert line == "| digits | flat | 20.0 | 90.0 | 70.0 |"


def _reaches(task, method, scores, epsilon=3.0):
    accuracies = [0.1] * (len(recipe.REACHES) - len(scores)) + scores
    common = {"task": task, "method": method, "target_epsilon": epsilon}
    rest = {"accuracies": accuracies, "reaches": list(recipe.REACHES), "seed": 1_000}
    return {"what": "reaches", **common, **rest}


def test_the_reach_is_that_of_the_output_of_the_first_layer():
    task = dataclasses.replace(tasks.TASKS["digits"], iterations=100)
    examples = Data(jnp.array([[1.0, -1.0], [2.0, 0.0]]), jnp.zeros(2, int))
    assert recipe.learning_rate(40.0, task, examples) == pytest.approx(0.2)


def test_a_reach_is_chosen_on_the_other_tasks():
    rows = [
        _reaches("digits", "DP-Adam", [0.9, 0.2, 0.2]),
        _reaches("Adult", "DP-Adam", [0.2, 0.9, 0.8]),
        _reaches("Cora, words alone", "DP-Adam", [0.2, 0.8, 0.9]),
    ]
    # Adult and Cora lose a tenth together at each of the last two, the first is first.
    assert recipe.chosen(rows, "digits", "DP-Adam") == recipe.REACHES[-2]
    assert recipe.chosen(rows[1:], "Adult", "DP-Adam") is None  # one other task
    assert recipe.chosen(rows, "digits", "DP-AdamBC") is None


def test_a_recipe_is_tested_beside_what_searches_found(small, monkeypatch):
    folder, arguments = small
    monkeypatch.setattr(run, "NUM_SEEDS", 2)
    seen = []

    def train(make, mechanism, model, keys, candidates, data, held_out):
        assert len(keys) == len(candidates)
        seen.append(held_out.num_examples)
        return argparse.Namespace(accuracies=[0.8] * len(keys))

    monkeypatch.setattr(run, "train", train)
    arguments.method = ["DP-Adam"]
    found = records.Records(folder / "recipe.jsonl")
    others = [_reaches(x, "DP-Adam", [0.9]) for x in ("Adult", "Cora, words alone")]
    found.rows += others
    recipe.STUDY.make(arguments, found)
    # Validation examples for each seed of the trials, then the test examples.
    assert seen == [20, 20, 100, 100]
    tuned = run.scores(
        [*_rows("digits", "DP-Adam", [0.85]), *_rows("digits", "Muon", [0.9])]
    )
    tables = recipe.tables(found.rows, tuned)
    line = "| digits | 3 | 80.00 ± 0.00 | 85.00 | - | - | - | - | Muon: 90.00 |"
    assert line in tables["tests"]
    line = "| DP-Adam | 1 | 5.0 | 5.0 | 10.0 | 10.0 |"
    assert tables["summary"].splitlines()[-1] == line
    assert len(records.read(folder / "recipe.jsonl")) == 4

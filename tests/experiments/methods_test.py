"""The comparison of methods: equal trials, ranks, and a whole run of a small part."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import records
from benchmarks.methods import clip_norms, recipe, run, table, tasks
from benchmarks.methods.methods import METHODS, NUM_TRIALS


@pytest.mark.parametrize("name", METHODS)
def test_trials_are_as_many_for_each_and_spread_over_the_ranges(name):
    for key, values in METHODS[name].candidates().items():
        quantiles = np.sort(np.log(values))
        low, high = quantiles[[0, -1]]
        assert len(values) == NUM_TRIALS, key
        # One in each sixteenth of the range.
        steps = np.diff(quantiles) / ((high - low) / (NUM_TRIALS - 1))
        assert np.all(steps < 2.3), key


def test_methods_draw_the_same_quantiles_of_what_they_share():
    first, second = METHODS["DP-Adam"].candidates(), METHODS["DP-AdamBC"].candidates()
    for name in set(first) & set(second):
        np.testing.assert_array_equal(first[name], second[name])


def test_the_critical_difference_is_the_published_one():
    """Demsar, 2006, section 3.2.2: four classifiers, 14 data sets."""
    assert table.critical_difference(4, 14) == pytest.approx(1.25, abs=0.005)


def _rows(task, method, accuracies, epsilon=3.0):
    common = {"task": task, "method": method, "target_epsilon": epsilon}
    return [
        {"what": f"seed {i}", "accuracies": [x], **common}
        for i, x in enumerate(accuracies)
    ]


def test_ranks_are_means_over_the_blocks_that_have_all_methods():
    rows = [
        *_rows("digits", "DP-SGD", [0.8, 0.9]),
        *_rows("digits", "DP-Adam", [0.7, 0.7]),
        *_rows("Adult", "DP-SGD", [0.5]),
        *_rows("Adult", "DP-Adam", [0.6]),
        *_rows("Adult", "Muon", [0.9]),  # not compared
    ]
    assert table.ranks(table.scores(rows)) == {"DP-SGD": 1.5, "DP-Adam": 1.5}
    found = table.scores(rows)
    points = table.differences(found, "DP-Adam", "DP-SGD")
    assert points == pytest.approx({("digits", 3.0): -15, ("Adult", 3.0): 10})


def test_ranks_are_drawn_with_the_critical_difference():
    rows = [
        row
        for task in ("digits", "Adult")
        for method, x in (("DP-SGD", 0.5), ("DP-Adam", 0.6))
        for row in _rows(task, method, [x])
    ]
    (axes,) = table.ranks_picture(rows).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "DP-Adam",
        "DP-SGD",
    ]


def test_tuned_once_loses_what_the_best_at_each_epsilon_has_more():
    common = {"what": "search", "task": "digits", "method": "DP-SGD"}
    rows = [
        {"target_epsilon": 3.0, "accuracies": [0.5, 0.9], **common},
        {"target_epsilon": 1.0, "accuracies": [0.8, 0.6], **common},
    ]
    assert table.tune_once(rows).splitlines()[-1] == "| DP-SGD | 20.0 |"


def test_a_recipe_is_chosen_on_the_other_tasks():
    """The second candidate is best on each of two tasks but the one it is scored on."""
    common = {"what": "search", "method": "DP-SGD", "target_epsilon": 3.0}
    rows = [
        {"task": "digits", "accuracies": [0.9, 0.8, 0.0], **common},
        {"task": "Adult", "accuracies": [0.6, 0.7, 0.0], **common},
        {"task": "Cora", "accuracies": [0.5, 0.6, 0.0], **common},
    ]
    # digits loses 10; Adult: the others prefer neither, so the first, and loses 10.
    assert table.recipes(rows).splitlines()[-1] == "| DP-SGD | 10.0 | 10.0 | 10.0 |"


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A run of few steps on few examples."""
    path = tmp_path_factory.mktemp("methods") / "results.jsonl"
    parts = tasks.load("digits", path.parent, path.parent)
    take = lambda data: tasks.Data(*(x[:100] for x in data))
    parts = tasks.Parts(*map(take, parts))
    task = dataclasses.replace(tasks.TASKS["digits"], iterations=2, batch_size=40)
    found = records.Records(path)
    run.Laboratory(task, parts, found).compare("DP-AdamBC", 3.0)
    return path, task, parts


def test_a_run_has_equal_trials_then_the_seeds_of_the_best_and_is_not_made_again(
    compared,
):
    path, task, parts = compared
    rows = records.read(path)
    (search,) = (row for row in rows if row["what"] == "search")
    assert len(search["accuracies"]) == NUM_TRIALS
    best = search["candidates"][int(np.argmax(search["accuracies"]))]
    tested = [row["candidates"] for row in rows if row["what"] != "search"]
    assert tested == [[best]] * run.NUM_SEEDS
    assert "mean rank" in table.render(rows)
    before = path.read_text()
    run.Laboratory(task, parts, records.Records(path)).compare("DP-AdamBC", 3.0)
    assert path.read_text() == before


def test_a_wrong_clip_norm_is_tabled_at_the_learning_rate_that_is_best_of_all(
    compared, monkeypatch
):
    path, task, parts = compared
    path = path.with_name("clip_norms.jsonl")
    monkeypatch.setattr(clip_norms, "CLIP_NORMS", (0.1, 1.0))
    monkeypatch.setattr(clip_norms, "LEARNING_RATES", (0.1, 1.0))
    monkeypatch.setattr(clip_norms, "NUM_SEEDS", 1)
    found = records.Records(path)
    clip_norms.measure("digits", "slack", parts, task, found)
    (row,) = records.read(path)
    assert np.shape(row["accuracies"]) == (2, 2)
    rows = [
        {"task": "digits", "rule": "flat", "accuracies": [[0.5, 0.2], [x, 0.9]]}
        for x in (0.7, 0.9)
    ]
    line = clip_norms.render(rows).splitlines()[-1]
    assert line == "| digits | flat | 20.0 | 90.0 | 70.0 |"
    assert len(clip_norms.picture(rows).axes) == 1


def _reaches(task, method, scores, epsilon=3.0):
    accuracies = [0.1] * (len(recipe.REACHES) - len(scores)) + scores
    common = {"task": task, "method": method, "target_epsilon": epsilon}
    return {"what": "reaches", "accuracies": accuracies, **common}


def test_the_reach_is_that_of_the_output_of_the_first_layer():
    task = dataclasses.replace(tasks.TASKS["digits"], iterations=100)
    examples = tasks.Data(jnp.array([[1.0, -1.0], [2.0, 0.0]]), jnp.zeros(2, int))
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


def test_a_recipe_is_tested_beside_what_searches_found(compared, monkeypatch):
    path, task, parts = compared
    path = path.with_name("recipe.jsonl")
    monkeypatch.setattr(recipe, "SEEDS_OF_TRIALS", (0,))
    monkeypatch.setattr(run, "NUM_SEEDS", 2)
    seen = []

    def accuracies(method, task, mechanism, keys, columns, examples, held_out):
        assert keys.shape == columns["learning_rate"].shape
        seen.append(held_out.num_examples)
        return np.full(len(keys), 0.8)

    monkeypatch.setattr(recipe.train, "accuracies", accuracies)
    laboratory = recipe.Laboratory(task, parts, records.Records(path))
    laboratory.try_reaches("DP-Adam", 3.0)
    laboratory.test("DP-Adam", 3.0, recipe.REACHES[-1])
    assert seen == [20, 100, 100]  # validation, then the test examples
    rows = records.read(path)
    rows += [_reaches(x, "DP-Adam", [0.9]) for x in ("Adult", "Cora, words alone")]
    tuned = table.scores(
        [*_rows("digits", "DP-Adam", [0.85]), *_rows("digits", "Muon", [0.9])]
    )
    text = recipe.render(rows, tuned)
    assert "| digits | 3 | 80.00 ± 0.00 | 85.00 | - | - | - | - | Muon: 90.00 |" in text
    assert text.splitlines()[-1] == "| DP-Adam | 1 | 5.0 | 5.0 | 10.0 | 10.0 |"
    before = path.read_text()
    again = recipe.Laboratory(task, parts, records.Records(path))
    again.try_reaches("DP-Adam", 3.0)
    assert path.read_text() == before

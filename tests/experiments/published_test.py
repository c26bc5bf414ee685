"""What the papers published beside what was found: the rule, and the table it makes."""

import argparse
import copy
import json
import math

import numpy as np
import pytest

from benchmarks import records, theory
from benchmarks.published import computed, run, verdict
from benchmarks.published.verdict import Estimate


@pytest.fixture(scope="module")
def published():
    return json.loads(run.NUMBERS.read_text())


@pytest.fixture(scope="module")
def found():
    return run.numbers(records.read(run.RESULTS)), run.accuracies()


@pytest.mark.parametrize(
    ("text", "mean", "slack"),
    [
        ("2.436e-8", 2.436e-8, 5e-12),
        ("45.4", 45.4, 0.05),
        ("-2e-5", -2e-5, 5e-6),
        ("3", 3.0, 0.5),
        ("8.73 to 8.75", 8.74, 0.015),
        ("-0.00152 to -0.00148", -0.0015, 2.5e-5),
    ],
)
def test_a_printed_number_leaves_half_a_unit_of_its_last_digit_open(text, mean, slack):
    estimate = verdict.printed(text)
    assert estimate.mean == pytest.approx(mean)
    assert estimate.reach == pytest.approx(slack)
    above = verdict.printed(text, over=1.0)
    assert above.mean + above.reach == pytest.approx(mean + slack)
    assert above.mean - above.reach == pytest.approx(mean - slack - 1)


def test_a_value_held_if_it_is_within_rounding_and_the_interval():
    value = lambda text, numbers: verdict.value(
        verdict.printed(text), verdict.measured(numbers)
    )
    assert value("0.645", 0.6449) == "held"
    assert value("0.645", 0.64) == "not held"
    assert value("0.645", [0.63, 0.64, 0.65]) == "held"
    assert value("0.645", [0.639, 0.640, 0.641]) == "not held"
    # Two seeds say next to nothing of their error.
    assert value("0.645", [0.639, 0.640]) == "open"


def test_a_bound_held_if_ours_is_no_larger():
    assert verdict.bound(3.0, verdict.measured(3.0)) == "held"
    assert verdict.bound(3.0, verdict.measured([3.0, 3.1])) == "not held"
    assert verdict.bound(3.0, verdict.measured([math.inf, 1.0])) == "not held"


def test_an_order_held_is_open_or_not_held():
    ahead, level = Estimate(2.0, 0.3, 8), Estimate(0.1, 0.3, 8)
    assert verdict.order(ahead, Estimate(0.9, 0.1, 8)) == "held"
    assert verdict.order(level, Estimate(-0.1, 0.1, 8)) == "held"
    assert verdict.order(ahead, Estimate(-0.9, 0.1, 8)) == "not held"
    assert verdict.order(level, Estimate(0.9, 0.1, 8)) == "not held"
    # No difference, and the published one is excluded, or not.
    assert verdict.order(ahead, Estimate(0.0, 0.1, 8)) == "not held"
    assert verdict.order(ahead, Estimate(1.0, 0.9, 8)) == "open"
    assert verdict.order(level, verdict.measured([0.1, 0.1])) == "open"


def judged(shift, runs, rng):
    """Whether a value of runs with other means is said to hold."""
    theirs, mine = rng.normal(size=(2, runs))
    mine = mine + shift
    printed = f"{theirs.mean():.12f}", f"{theirs.std():.12f}"
    first = verdict.of_runs(printed, runs)
    return verdict.value(first, verdict.measured(mine.tolist())) == "held"


@pytest.mark.parametrize("runs", [3, 5, 20])
def test_equal_means_hold_as_often_as_stated(runs):
    """Welch's interval, within 4 standard errors and what it is known to be off."""
    rng, trials = np.random.default_rng(0), 2_000
    share = np.mean([judged(0.0, runs, rng) for _ in range(trials)])
    error = math.sqrt(0.95 * 0.05 / trials)
    assert (
        verdict.CONFIDENCE - 4 * error < share < verdict.CONFIDENCE + 4 * error + 0.02
    )
    # Negative control: means that differ by six standard errors.
    shift = 6 * math.sqrt(2 / runs)
    assert np.mean([judged(shift, runs, rng) for _ in range(200)]) < 0.2


def words_of(published, found):
    rows = run.lines(published, *found)
    return [[pair.verdict for pair in row.pairs] for row in rows]


def test_every_published_number_is_in_the_table(published, found):
    text = run.render(published, *found)
    for row in published["numbers"]:
        line = f"{', '.join(row['values'].values())} |"
        assert f"| {row['place']} | {row['what']}" in text and line in text
    for row in published["accuracies"]:
        for method, numbers in row["methods"].items():
            assert f"| {numbers['place']} | {row['what']}, {method}: " in text
    counted = [row for row in run.lines(published, *found) if not row.is_what_if]
    every = [pair.verdict for row in counted for pair in row.pairs]
    assert {"held", "not held", "not comparable"} <= set(every)
    assert text.startswith(f"{len(every)} published numbers")
    assert f"{every.count('not held')} not held" in text.splitlines()[0]
    # Each line has as many cells as the header.
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {len(run.HEADER) + 1}


def test_a_published_number_that_is_changed_is_not_held(published, found):
    before = words_of(published, found)
    changed = copy.deepcopy(published)
    row = changed["numbers"][0]
    first = next(iter(row["values"]))
    row["values"][first] = "0.9170438"
    after = words_of(changed, found)
    assert before[0][0] == "held" and after[0][0] == "not held"
    assert after[0][1:] == before[0][1:] and after[1:] == before[1:]


def small_row():
    values = {"ε 3": ["50.0", "0.5"], "ε 6": ["54.0", "0.5"]}
    lower = {"ε 3": ["45.0", "0.5"], "ε 6": ["54.1", "0.5"]}
    methods = {
        "A": {"place": "Table 1", "values": values},
        "B": {"place": "Table 1", "values": lower},
    }
    row = {"what": "data", "ours": "here", "runs": 5, "differs": "seeds"}
    return row | {"methods": methods, "orders": [["A", "B"]]}


def accuracies(mean_of_a, data="the same", seeds=5):
    around = lambda mean: [mean / 100 + 0.001 * i for i in range(seeds)]
    means = {("A", "ε 3"): mean_of_a, ("A", "ε 6"): 54.0, ("B", "ε 3"): 45.0}
    return run.Accuracies(data, {key: around(mean) for key, mean in means.items()})


def test_accuracies_are_judged_by_their_values_and_differences():
    judge = lambda found: [
        [pair.verdict for pair in line.pairs]
        for line in run.of_accuracies(small_row(), found)
    ]
    lacking = "not comparable"
    assert judge(accuracies(50.0)) == [["held"] * 2, ["held", lacking]] + [
        ["held", lacking]
    ]
    assert judge(accuracies(40.0))[0] == ["not held", "held"]
    assert judge(accuracies(40.0))[2] == ["not held", lacking]
    # Of other features only the order counts, and of two seeds not even that.
    of_others = judge(accuracies(60.0, "substitute features"))
    assert of_others == [[lacking] * 2, [lacking] * 2, ["held", lacking]]
    assert judge(accuracies(60.0, seeds=2))[2] == ["open", lacking]
    lines = run.of_accuracies(small_row(), accuracies(60.0, "substitute features"))
    assert "substitute features" in lines[0].differs
    assert "–" in lines[1].cells[3] and "(5 seeds)" in lines[1].cells[3]


def test_what_is_recorded_is_what_the_code_computes():
    """Of what takes no time; the rest is accounting of long runs, and simulation."""
    recorded = records.read(run.RESULTS)
    cells = run.STUDY.cells(lambda cell: None, argparse.Namespace())
    assert [row["seed"] for row in recorded] == [cell.seed for cell in cells]
    for name, row in (computed.of_formulas() | computed.of_graph()).items():
        assert recorded[0]["numbers"][name] == pytest.approx(row, rel=1e-4), name


def test_a_walk_has_the_spreads_of_the_theory():
    """Each within 5 standard errors; a decay rate that is wrong would show."""
    size = 4_000
    for step, (m, v) in computed.walk(0, 0.99, (11, 60), size).items():
        first = float(theory.first_moment_spread(1.0, 0.9, step))
        second = float(theory.second_moment_spread(1.0, 0.99, step))
        assert abs(m.mean()) < 5 * first / size**0.5
        assert abs(v.mean() - 1) < 5 * second / size**0.5
        assert m.std() == pytest.approx(first, rel=5 / (2 * size) ** 0.5)
        assert v.std() == pytest.approx(second, rel=5 * (14 / 4 / size) ** 0.5)


def test_statistics_of_moments_that_are_known():
    """Of coordinates whose second moments are the noise variance itself."""
    ones = np.ones(4), np.ones(4)
    rows = computed.moments_of_snli(dict.fromkeys((5_000, 10_000, 20_000), ones))
    added, subtracted = (0.04 / 255) ** 2, (0.04 / 256) ** 2
    assert rows["v"]["median"] == pytest.approx(added)
    assert rows["corrected"]["mean"] == computed.SNLI_FLOOR > added - subtracted
    assert rows["update"]["upper quartile"] == pytest.approx(1)
    step = added**0.5 / computed.SNLI_FLOOR**0.5
    assert rows["corrected update"]["upper quartile"] == pytest.approx(step)
    shares = computed.moments_of_qnli(dict.fromkeys((11, 241), ones))
    assert shares["shares"]["Φ at step 11"] == 1
    assert shares["shares, stated batch"]["Φ at step 11"] == 0

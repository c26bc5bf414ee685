"""All methods on all tasks at four epsilons, with equal trials, in one fair table.

    python -m benchmarks.methods.run --data-dir DIR [--task NAME ...]
    python -m benchmarks.methods.run                                 # the tables

All methods draw the same quantiles of the numbers that they have in common, and see the
same batches, unless their sampling is another.

A block is a task at an epsilon; methods are ranked within it by their mean accuracy on
test examples. Blocks of one task are not independent, so Nemenyi's critical difference
of ranks is too small rather than too large.

References:
  Demsar, `Statistical Comparisons of Classifiers over Multiple Data Sets
  <https://www.jmlr.org/papers/v7/demsar06a.html>`_, 2006
"""

import argparse
import collections
import itertools
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import scipy.stats

from benchmarks.experiment import Data, Sides
from benchmarks.methods import tasks
from benchmarks.methods.methods import CONTROL, METHODS, Candidate, train
from benchmarks.records import Row
from benchmarks.study import Cell, Find, Study
from benchmarks.tables import by_epsilon, markdown, spread

EPSILONS = (3.0, 1.0, 8.0, 0.5)
NUM_SEEDS = 5
SEED_OF_TRIALS = 1_000
# Where the trials of one seed chose badly, the mean of several chooses.
SEEDS_OF_TRIALS = {("digits", 0.5): range(1_000, 1_005)}

mean = statistics.fmean
Block = tuple[str, float]  # a task and an epsilon
Line = tuple[str, str, float]  # a task, a method and an epsilon
Scores = dict[Block, dict[str, list[float]]]  # of all seeds, by method


def cell(line: Line, rows: Sequence[Candidate], seed: int, is_test: bool) -> Cell:
    """All trials of a method by a seed, or the test of the best.

    Seed by seed, since runs side by side have the same batches.
    """
    of_trials = "search" if seed == SEED_OF_TRIALS else f"search {seed}"
    what, (task, method, epsilon) = f"seed {seed}" if is_test else of_trials, line
    identity = {"what": what, "task": task, "method": method, "target_epsilon": epsilon}
    identity |= {"candidates": list(rows)}
    return Cell(method, epsilon, seed if is_test else None, identity, seed)


def cells(find: Find, arguments: argparse.Namespace) -> Iterator[Cell]:
    """Epsilons before methods, so that what is cut off leaves whole columns."""
    for task, epsilon, method in itertools.product(arguments.task, EPSILONS, METHODS):
        line, drawn = (task, method, epsilon), METHODS[method].candidates()
        seeds = SEEDS_OF_TRIALS.get((task, epsilon), [SEED_OF_TRIALS])
        trials = [cell(line, drawn, seed, is_test=False) for seed in seeds]
        yield from trials
        rows = [row for each in trials if (row := find(each))]
        if len(rows) == len(trials):
            # Beside it, to compare, what the first seed alone would choose.
            for chosen in dict.fromkeys((best(rows), best(rows[:1]))):
                for seed in range(NUM_SEEDS):
                    yield cell(line, [drawn[chosen]], seed, is_test=True)


def side_by_side(
    task: tasks.Task,
    cell: Cell,
    method: str,
    candidates: Sequence[Candidate],
    seed: int,
    sides: tuple[Data, Data],
) -> Row:
    """Trains all candidates in one program, and scores them."""
    start, how = time.perf_counter(), METHODS[method]
    mechanism: Any = how.mechanism(task, cell.epsilon, sides[0].num_examples)
    model = tasks.model(task, how.is_preconditioned)
    keys = jax.random.split(jax.random.key(seed), len(candidates))
    found = train(how.make, mechanism, model, keys, candidates, *sides)
    return {
        "accuracies": found.accuracies,
        "noise_multiplier": mechanism.noise_multiplier,
        "seconds": round(time.perf_counter() - start, 1),
    }


def make(task: tasks.Task, sides: Sides, cell: Cell) -> Row:
    """The trials, or the test of one seed."""
    candidates, sides_of = cell.identity["candidates"], sides.of(cell)
    return side_by_side(task, cell, cell.method, candidates, cell.setting, sides_of)


def prepare(
    make: Callable[[tasks.Task, Sides, Cell], Row],
) -> Callable[[argparse.Namespace], Callable[[Cell], Row]]:
    """Gives each cell the data of its task, which are loaded once."""

    def of_arguments(arguments):
        folders = arguments.data_dir, arguments.cache_dir
        load = lambda name: (tasks.TASKS[name], tasks.load(name, *folders))
        return lambda cell: make(*load(cell.identity["task"]), cell)

    return of_arguments


def by_line(rows: Sequence[Row], what: str) -> dict[Line, list[Row]]:
    """The trials ("search") or the tests ("seed") of each line."""
    found = collections.defaultdict(list)
    for row in rows:
        if row["what"].startswith(what):
            found[row["task"], row["method"], row["target_epsilon"]].append(row)
    return found


def accuracies(rows: Sequence[Row]) -> np.ndarray:
    """On validation examples, of each candidate, the mean over the seeds."""
    return np.mean([row["accuracies"] for row in rows], axis=0)


def best(rows: Sequence[Row]) -> int:
    """The number of the candidate that trials choose."""
    return int(np.argmax(accuracies(rows)))


def scores(rows: Sequence[Row]) -> Scores:
    """Accuracies on test examples of the candidates that the trials choose."""
    found: Scores = {}
    tests = by_line(rows, "seed")
    for line, trials in by_line(rows, "search").items():
        chosen = [trials[0]["candidates"][best(trials)]]
        of_line = [x for x in tests.get(line, []) if x["candidates"] == chosen]
        if of_line:
            task, method, epsilon = line
            values = [x for row in of_line for x in row["accuracies"]]
            found.setdefault((task, epsilon), {})[method] = values
    return found


def compared(found: Scores) -> tuple[list[str], list[Block]]:
    """The methods that are in the most blocks, and the blocks that have all of them."""
    counts = {name: sum(name in x for x in found.values()) for name in METHODS}
    methods = [name for name in METHODS if counts[name] == max(counts.values()) > 0]
    return methods, [block for block in found if set(methods) <= set(found[block])]


def ranks(found: Scores) -> dict[str, float]:
    """The mean over blocks, the best first; one is best."""
    methods, blocks = compared(found)
    means = [[-mean(found[block][name]) for name in methods] for block in blocks]
    mean_ranks = scipy.stats.rankdata(means, axis=1).mean(0)
    of_methods = zip(methods, map(float, mean_ranks), strict=True)
    return dict(sorted(of_methods, key=lambda pair: pair[1]))


def critical_difference(num_methods: int, num_blocks: int) -> float:
    """The least significant difference of mean ranks, by Nemenyi's test at 5 %."""
    q = scipy.stats.studentized_range.ppf(0.95, num_methods, np.inf) / math.sqrt(2)
    return float(q * math.sqrt(num_methods * (num_methods + 1) / (6 * num_blocks)))


def _accuracies(found: Scores, task: str) -> str:
    """In percent, mean and standard deviation over seeds; a column for each epsilon."""
    of_task = {e: of_block for (name, e), of_block in found.items() if name == task}
    pairs = itertools.product(METHODS, of_task)
    cells = {(m, e): spread(of_task[e][m]) for m, e in pairs if m in of_task[e]}
    return by_epsilon(task, cells)


def _ranks(found: Scores) -> str:
    """Mean ranks, the significant difference, and a test of whether any differ."""
    methods, blocks = compared(found)
    columns = [[mean(found[block][name]) for block in blocks] for name in methods]
    test: Any = scipy.stats.friedmanchisquare(*columns)
    difference = critical_difference(len(methods), len(blocks))
    body = [[name, f"{rank:.1f}"] for name, rank in ranks(found).items()]
    return (
        f"Mean ranks over {len(blocks)} blocks. Two methods differ significantly if"
        f" their ranks differ by {difference:.1f} or more. Friedman's test, of whether"
        f" any methods differ, has p = {test.pvalue:.2g}:\n\n"
        f"{markdown(['method', 'mean rank'], body)}"
    )


def differences(found: Scores, method: str, other: str) -> dict[Block, float]:
    """Differences of mean accuracy in points, in each block that has both methods."""
    both = {block: x for block, x in found.items() if method in x and other in x}
    return {b: 100 * (mean(x[method]) - mean(x[other])) for b, x in both.items()}


def compared_by_task(found: Scores, method: str, other: str) -> tuple[Any, Any]:
    """The differences of all blocks, and a test of their means over each task.

    Blocks of a task are no independent samples.
    """
    points, of_tasks = differences(found, method, other), collections.defaultdict(list)
    for (task, _), x in points.items():
        of_tasks[task].append(x)
    test = scipy.stats.ttest_1samp([mean(x) for x in of_tasks.values()], 0)
    return points.values(), test


def _pairs(found: Scores) -> str:
    """What the correction changes, and the recipe, against Adam and the floor alone."""
    body = []
    corrected = itertools.product(["DP-AdamBC"], ["DP-Adam", CONTROL, "DP-SGD"])
    for method, other in [*corrected, ("AUTO-S, DP-Adam", "DP-Adam")]:
        if not differences(found, method, other):
            continue
        points, test = compared_by_task(found, method, other)
        won = f"{sum(x > 0 for x in points)} of {len(points)}"
        cells = f"{mean(points):+.2f}", won, f"{test.pvalue:.2f}"
        body.append([f"{method} minus {other}", *cells])
    return markdown(["", "points, mean", "blocks better", "p, by task"], body)


def tune_once(found: Mapping[Line, np.ndarray], tuned_at: float = 3.0) -> str:
    """Points lost by using the best trial at one epsilon at the other epsilons.

    On validation examples, where all trials have been at every epsilon: the best of a
    few trials is too good there by chance, so a part of the loss is that.
    """
    others = sorted({epsilon for *_, epsilon in found} - {tuned_at})
    lost = collections.defaultdict(list)
    for (task, method, epsilon), x in found.items():
        if (there := found.get((task, method, tuned_at))) is not None:
            lost[method, epsilon].append(100 * (x.max() - x[np.argmax(there)]))
    points = lambda *key: f"{mean(lost[key]):.1f}" if key in lost else "-"
    methods = [m for m in METHODS if any(name == m for _, name, _ in found)]
    body = [[method, *(points(method, e) for e in others)] for method in methods]
    return markdown(["points lost", *(f"at ε = {e:g}" for e in others)], body)


def tables(rows: Sequence[Row]) -> dict[str, str]:
    found = scores(rows)
    made = {task: _accuracies(found, task) for task, _ in found}
    methods, blocks = compared(found)
    if len(methods) > 2 and len(blocks) > 1:
        made |= {"ranks": _ranks(found), "pairs": _pairs(found)}
    trials = {line: accuracies(x) for line, x in by_line(rows, "search").items()}
    return made | {"tuned once": tune_once(trials)}


def of_tasks(default: Sequence[str]) -> Callable[[argparse.ArgumentParser], Any]:
    """The option that these studies have in common."""
    return lambda parser: parser.add_argument(
        "--task", choices=tasks.TASKS, nargs="+", default=default
    )


STUDY = Study(
    results=pathlib.Path(__file__).with_name("results.jsonl"),
    cells=cells,
    prepare=prepare(make),
    tables=tables,
    options=of_tasks(tuple(tasks.TASKS)),
)

if __name__ == "__main__":
    STUDY.main(__doc__)

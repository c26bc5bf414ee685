"""A learning rate without a search, from the number of steps and the size of an input.

    python -m benchmarks.methods.recipe --data-dir DIR [--task NAME ...]
    python -m benchmarks.methods.recipe                              # the tables

In T steps of Adam, few of which are longer than the learning rate η, a weight moves by
η T at most, and an output of the first layer on an example x by η T |x|_1. The recipe
has one such reach for all tasks and all epsilons.

The mean of |x|_1 is that of the training part. A user takes it from public data or from
how features are scaled: 0.8 times their number, where they are standardized.
"""

import argparse
import itertools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks import records
from benchmarks.experiment import Data, Sides
from benchmarks.methods import run, tasks
from benchmarks.records import Row
from benchmarks.study import Cell, Find, Study
from benchmarks.tables import markdown, spread

REACHES = (5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
METHODS = ("DP-Adam", "AUTO-S, DP-Adam", "DP-AdamBC")
SEEDS_OF_TRIALS = (1_000, 1_001)
EPSILONS = sorted(run.EPSILONS)


def learning_rate(reach: float, task: tasks.Task, examples: Data) -> float:
    """The rate with which all steps together move a first-layer output by the reach."""
    size = float(jnp.mean(jnp.sum(jnp.abs(examples.features), axis=1)))
    return reach / (task.iterations * size)


def cell(what: str, block: Row, reaches: Sequence[float], seed: int) -> Cell:
    """All reaches side by side on validation examples, or the test of one of them."""
    identity = {"what": what, **block, "reaches": list(reaches), "seed": seed}
    shown = seed if what == "test" else None
    return Cell(block["method"], block["target_epsilon"], shown, identity)


def cells(find: Find, arguments: argparse.Namespace) -> Iterator[Cell]:
    """The trials of all tasks, and then the tests."""
    blocks = [
        {"task": task, "method": method, "target_epsilon": epsilon}
        for task in tasks.TASKS
        for epsilon in run.EPSILONS
        for method in METHODS
    ]
    pairs = itertools.product(blocks, SEEDS_OF_TRIALS)
    trials = [cell("reaches", block, REACHES, seed) for block, seed in pairs]
    yield from (each for each in trials if each.identity["task"] in arguments.task)
    rows = [row for each in trials if (row := find(each))]
    for block in blocks:
        task, method, _ = block.values()
        if task in arguments.task and (reach := chosen(rows, task, method)):
            for seed in range(run.NUM_SEEDS):
                yield cell("test", block, [reach], seed)


def make(task: tasks.Task, sides: Sides, cell: Cell) -> Row:
    """Trains with all reaches of a cell, and scores them."""
    parts, known = sides.of(cell), cell.identity
    rates = [learning_rate(x, task, parts[0]) for x in known["reaches"]]
    others = {"l2_clip_norm": 1.0, "floor": 1.0}
    candidates = [{"learning_rate": rate, **others} for rate in rates]
    own = {"learning_rates": [float(f"{rate:.4g}") for rate in rates]}
    how = cell.method, candidates, known["seed"], parts
    return own | run.side_by_side(task, cell, *how)


def _of(rows: Sequence[Row], **identity: Any) -> list[list[float]]:
    """The accuracies of these rows."""
    return [row["accuracies"] for row in rows if identity.items() <= row.items()]


def grid(rows: Sequence[Row], task: str, method: str) -> np.ndarray:
    """Means over seeds on validation examples, shape=(epsilons, reaches)."""
    known = {"what": "reaches", "task": task, "method": method}
    found = [_of(rows, **known, target_epsilon=epsilon) for epsilon in EPSILONS]
    means = [np.mean(x, axis=0) for x in found if x]
    return np.array(means).reshape(-1, len(REACHES))


def chosen(rows: Sequence[Row], task: str, method: str) -> float | None:
    """The reach that loses least on the other tasks; none before there are two."""
    others = [grid(rows, other, method) for other in tasks.TASKS if other != task]
    lost = [(x - x.max(axis=1, keepdims=True)).mean(axis=0) for x in others if x.size]
    return REACHES[int(np.argmax(np.mean(lost, axis=0)))] if len(lost) > 1 else None


def tests(rows: Sequence[Row], task: str, method: str, epsilon: float) -> list[float]:
    """Accuracies on test examples of the reach that was chosen."""
    known = {"task": task, "method": method, "target_epsilon": epsilon}
    reaches = [chosen(rows, task, method)]
    return [x for (x,) in _of(rows, what="test", **known, reaches=reaches)]


def _reaches(rows: Sequence[Row]) -> str:
    """Points below the best reach of a task, the mean over epsilons."""
    body = []
    for method, task in itertools.product(METHODS, tasks.TASKS):
        found = grid(rows, task, method)
        if found.size:
            lost = 100 * (found.max(axis=1, keepdims=True) - found).mean(axis=0)
            body.append([method, task, *(f"{x:.1f}" for x in lost)])
    return markdown(["points lost", "", *(f"reach {x:g}" for x in REACHES)], body)


def _tests(rows: Sequence[Row], tuned: run.Scores) -> str:
    """The recipe on test examples, beside what searches found."""
    shown = lambda x: spread(x) if x else "-"
    body = []
    for task, epsilon in itertools.product(tasks.TASKS, EPSILONS):
        of_all = tuned.get((task, epsilon), {})
        found = {name: tests(rows, task, name, epsilon) for name in METHODS}
        if any(found.values()):
            best = max(of_all, key=lambda name: run.mean(of_all[name]), default="-")
            last = f"{best}: {spread(of_all[best]).split()[0]}" if of_all else "-"
            pairs = [(shown(found[x]), shown(of_all.get(x))) for x in METHODS]
            body.append([task, f"{epsilon:g}", *itertools.chain(*pairs), last])
    head = [cell for method in METHODS for cell in (method, "tuned")]
    return markdown(["task", "ε", *head, "best of all, tuned"], body)


def _summary(rows: Sequence[Row], tuned: run.Scores) -> str:
    """Points lost to the same method with 16 trials, and to the best of all methods."""
    body = []
    for method in METHODS:
        lost = []
        for (task, epsilon), of_all in tuned.items():
            found = tests(rows, task, method, epsilon)
            if found and method in of_all:
                means = {name: run.mean(x) for name, x in of_all.items()}
                highest = np.array([means[method], max(means.values())])
                lost.append(100 * (highest - run.mean(found)))
        if lost:
            cells = [
                f"{y:.1f}" for x in np.transpose(lost) for y in (x.mean(), x.max())
            ]
            body.append([method, f"{len(lost)}", *cells])
    head = ["blocks", "to 16 trials", "at most", "to the best of all", "at most"]
    return markdown(["points lost", *head], body)


def tables(rows: Sequence[Row], tuned: run.Scores | None = None) -> dict[str, str]:
    """Beside the scores of the searches, those on record unless others are given."""
    tuned = run.scores(records.read(run.STUDY.results)) if tuned is None else tuned
    return {
        "reaches": _reaches(rows),
        "tests": _tests(rows, tuned),
        "summary": _summary(rows, tuned),
    }


STUDY = Study(
    results=pathlib.Path(__file__).with_suffix(".jsonl"),
    cells=cells,
    prepare=run.prepare(make),
    tables=tables,
    options=run.of_tasks(tuple(tasks.TASKS)),
)

if __name__ == "__main__":
    STUDY.main(__doc__)

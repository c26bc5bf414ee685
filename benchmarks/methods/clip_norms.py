"""Which rule of clipping loses least where the clip norm is wrong.

    python -m benchmarks.methods.clip_norms --data-dir DIR [--task NAME ...]
    python -m benchmarks.methods.clip_norms                          # the table

DP-SGD with momentum, scored on the validation part. Gradients are in units of the clip
norm, so a learning rate means the same at all of them.
"""

import argparse
import itertools
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.experiment import Sides
from benchmarks.methods import run, tasks
from benchmarks.records import Row
from benchmarks.study import Cell, Find, Study
from benchmarks.tables import markdown

EPSILON, NUM_SEEDS = 3.0, 3
RULES = ("flat", "AUTO-S", "DP-PSAC", "quantile", "slack")
CLIP_NORMS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
LEARNING_RATES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


def cells(find: Find, arguments: argparse.Namespace) -> Iterator[Cell]:
    """All clip norms and learning rates of a rule, side by side, for each seed."""
    for task, rule, seed in itertools.product(arguments.task, RULES, range(NUM_SEEDS)):
        identity = {"task": task, "rule": rule, "seed": seed}
        yield Cell(rule, EPSILON, seed, identity)


def make(task: tasks.Task, sides: Sides, cell: Cell) -> Row:
    grid = itertools.product(CLIP_NORMS, LEARNING_RATES)
    candidates = [{"l2_clip_norm": c, "learning_rate": rate} for c, rate in grid]
    method = "DP-SGD" if cell.method == "flat" else f"{cell.method}, DP-SGD"
    how = candidates, cell.identity["seed"], (sides.fit, sides.validation)
    found = run.side_by_side(task, cell, method, *how)
    shape = len(CLIP_NORMS), len(LEARNING_RATES)
    return found | {"accuracies": np.reshape(found["accuracies"], shape).tolist()}


def lines(rows: Sequence[Row]) -> dict[tuple[str, str], np.ndarray]:
    """Accuracy in percent at each clip norm, by task and rule, shape=(clip norms,).

    The learning rate is the one that is best of all, the same for all clip norms.
    """
    several: dict[tuple[str, str], list[np.ndarray]] = {}
    for row in rows:
        accuracies = 100 * np.array(row["accuracies"])
        several.setdefault((row["task"], row["rule"]), []).append(accuracies)
    means = {key: np.mean(found, axis=0) for key, found in several.items()}
    return {key: x[:, x.max(axis=0).argmax()] for key, x in means.items()}


def tables(rows: Sequence[Row]) -> dict[str, str]:
    header = ["task", "rule", *(f"C = {c:g}" for c in CLIP_NORMS), "best minus worst"]
    body = [
        [*names, *(f"{x:.1f}" for x in (*line, line.max() - line.min()))]
        for names, line in lines(rows).items()
    ]
    return {"clip norms": markdown(header, body)}


STUDY = Study(
    results=pathlib.Path(__file__).with_suffix(".jsonl"),
    cells=cells,
    prepare=run.prepare(make),
    tables=tables,
    options=run.of_tasks(("digits", "Adult")),
)

if __name__ == "__main__":
    STUDY.main(__doc__)

"""Accuracies, ranks, and whether ranks differ by more than chance.

A block is a task at an epsilon; methods are ranked within it by their mean accuracy on
test examples. Two methods differ where their mean ranks are further apart than
Nemenyi's critical difference, q sqrt(k (k + 1) / (6 n)) for k methods and n blocks.
Blocks of one task are not independent, so the difference is too small rather than too
large.

References:
  Demsar, `Statistical Comparisons of Classifiers over Multiple Data Sets
  <https://www.jmlr.org/papers/v7/demsar06a.html>`_, 2006
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.stats
from matplotlib.figure import Figure

from benchmarks.methods.methods import CONTROL, METHODS
from benchmarks.records import Row
from benchmarks.tables import markdown, spread

LEVEL = 0.05

Block = tuple[str, float]  # a task and an epsilon
Scores = dict[Block, dict[str, list[float]]]  # of all seeds, by method


def scores(rows: Sequence[Row]) -> Scores:
    """Accuracies on test examples."""
    found: Scores = {}
    for row in rows:
        if row["what"].startswith("seed"):
            of_block = found.setdefault((row["task"], row["target_epsilon"]), {})
            of_block.setdefault(row["method"], []).extend(row["accuracies"])
    return found


def compared(found: Scores) -> tuple[list[str], list[Block]]:
    """The methods that are in the most blocks, and the blocks that have all of them."""
    counts = {name: sum(name in x for x in found.values()) for name in METHODS}
    methods = [name for name in METHODS if counts[name] == max(counts.values()) > 0]
    blocks = [block for block in found if set(methods) <= set(found[block])]
    return methods, blocks


def ranks(found: Scores) -> dict[str, float]:
    """The mean over blocks; one is best."""
    methods, blocks = compared(found)
    means = [[-statistics.fmean(found[b][name]) for name in methods] for b in blocks]
    if not means:
        return {}
    mean_ranks = scipy.stats.rankdata(means, axis=1).mean(0)
    return dict(zip(methods, map(float, mean_ranks), strict=True))


def equal_ranks(found: Scores) -> float:
    """The p value of Friedman's test that all methods are alike."""
    methods, blocks = compared(found)
    columns = [[statistics.fmean(found[b][name]) for b in blocks] for name in methods]
    test: Any = scipy.stats.friedmanchisquare(*columns)
    return float(test.pvalue)


def critical_difference(num_methods: int, num_blocks: int) -> float:
    """Of mean ranks, by Nemenyi's test at the level of five percent."""
    q = scipy.stats.studentized_range.ppf(1 - LEVEL, num_methods, np.inf) / math.sqrt(2)
    return float(q * math.sqrt(num_methods * (num_methods + 1) / (6 * num_blocks)))


def accuracies(found: Scores, task: str) -> str:
    """In percent, mean and standard deviation over seeds; a column for each epsilon."""
    epsilons = sorted(epsilon for name, epsilon in found if name == task)
    body = []
    for method in METHODS:
        cells = [found[task, epsilon].get(method, []) for epsilon in epsilons]
        if any(cells):
            body.append([method, *(spread(x) if x else "-" for x in cells)])
    return markdown([task, *(f"ε = {epsilon:g}" for epsilon in epsilons)], body)


def differences(found: Scores, method: str, other: str) -> dict[Block, float]:
    """Of the mean accuracy in each block that has both, in points."""
    both = {block: x for block, x in found.items() if method in x and other in x}
    mean = statistics.fmean
    return {b: 100 * (mean(x[method]) - mean(x[other])) for b, x in both.items()}


def pairs(found: Scores) -> str:
    """What the correction changes, against Adam and against its floor alone.

    Blocks of a task are no independent samples, so the test is of the tasks' means.
    """
    body = []
    for other in ("DP-Adam", CONTROL, "DP-SGD"):
        points = differences(found, "DP-AdamBC", other)
        if not points:
            continue
        tasks = {task for task, _ in points}
        of_tasks = [
            statistics.fmean(x for (name, _), x in points.items() if name == task)
            for task in sorted(tasks)
        ]
        test: Any = scipy.stats.ttest_1samp(of_tasks, 0) if len(tasks) > 1 else None
        won = sum(x > 0 for x in points.values())
        cells = [f"{statistics.fmean(points.values()):+.2f}", f"{won} of {len(points)}"]
        body.append(
            [f"DP-AdamBC less {other}", *cells, f"{test.pvalue:.2f}" if test else "-"]
        )
    return markdown(["", "points, mean", "blocks better", "p, by task"], body)


def _searches(rows: Sequence[Row]) -> dict[tuple[str, str, float], np.ndarray]:
    """The validation accuracies of all trials, by task, method and epsilon."""
    return {
        (row["task"], row["method"], row["target_epsilon"]): np.array(row["accuracies"])
        for row in rows
        if row["what"] == "search"
    }


def recipes(rows: Sequence[Row]) -> str:
    """What a candidate loses on a task that it was not chosen on.

    All tasks have the same candidates at every epsilon, so the one that does best on
    the *other* tasks is a recipe for this one: a single learning rate, clip norm and
    floor for all epsilons. It is set beside the best trial of the same method, and the
    best of all methods, at each epsilon of the task.
    """
    found = _searches(rows)
    names = list(dict.fromkeys(task for task, *_ in found))
    body = []
    for method in METHODS:
        own, best = [], []
        for task in names:
            others = [x for (t, m, _), x in found.items() if m == method and t != task]
            here = {e: x for (t, m, e), x in found.items() if (t, m) == (task, method)}
            if not (others and here):
                continue
            chosen = int(np.argmax(np.mean([x - x.max() for x in others], axis=0)))
            for epsilon, x in here.items():
                of_all = [
                    y for (t, _, e), y in found.items() if (t, e) == (task, epsilon)
                ]
                own.append(100 * (x.max() - x[chosen]))
                best.append(100 * (np.max(of_all) - x[chosen]))
        if own:
            cells = (statistics.fmean(own), max(own), statistics.fmean(best))
            body.append([method, *(f"{x:.1f}" for x in cells)])
    head = ["points lost", "to its best trial", "at most", "to the best of all"]
    return markdown(head, body)


def tune_once(rows: Sequence[Row], tuned_at: float = 3.0) -> str:
    """What is lost where the best trial at one epsilon is taken at the others.

    On validation examples, where all trials have been at every epsilon: the best of a
    few trials is too good there by chance, so a part of the loss is that.
    """
    found = _searches(rows)
    others = sorted({epsilon for *_, epsilon in found} - {tuned_at})
    body = []
    for method in METHODS:
        cells = [method]
        for epsilon in others:
            lost = []
            for task in dict.fromkeys(task for task, *_ in found):
                here = found.get((task, method, epsilon))
                there = found.get((task, method, tuned_at))
                if here is not None and there is not None:
                    lost.append(100 * (max(here) - here[int(np.argmax(there))]))
            cells.append(f"{statistics.fmean(lost):.1f}" if lost else "-")
        if any(cell != "-" for cell in cells[1:]):
            body.append(cells)
    return markdown(["points lost", *(f"at ε = {e:g}" for e in others)], body)


def render(rows: Sequence[Row]) -> str:
    """All tables of what is on record."""
    found = scores(rows)
    parts = [accuracies(found, task) for task in dict.fromkeys(b[0] for b in found)]
    by_rank = ranks(found)
    if by_rank:
        methods, blocks = compared(found)
        in_order = sorted(by_rank, key=lambda name: by_rank[name])
        body = [[name, f"{by_rank[name]:.1f}"] for name in in_order]
        difference = critical_difference(len(methods), len(blocks))
        parts += [
            f"Mean ranks over {len(blocks)} blocks; two methods are told apart by a"
            f" difference of {difference:.1f}{_together(found)}:",
            markdown(["method", "mean rank"], body),
            pairs(found),
            "Candidates tuned at ε = 3 alone, against those tuned at each ε:",
            tune_once(rows),
            "One candidate for all epsilons, chosen on the other tasks:",
            recipes(rows),
        ]
    return "\n\n".join(parts)


def _together(found: Scores) -> str:
    """Whether methods differ at all, of at least three in two blocks."""
    methods, blocks = compared(found)
    if len(methods) < 3 or len(blocks) < 2:
        return ""
    return f" (that any differ: p = {equal_ranks(found):.2g}, Friedman's test)"


def ranks_picture(rows: Sequence[Row]) -> Figure:
    """Mean ranks, and a bar as long as the critical difference from the best."""
    found = scores(rows)
    by_rank = ranks(found)
    names = sorted(by_rank, key=lambda name: by_rank[name])
    _, blocks = compared(found)
    difference = critical_difference(len(names), len(blocks))
    figure = Figure(figsize=(7, 0.9 + 0.28 * len(names)), layout="constrained")
    axes = figure.subplots()
    best = by_rank[names[0]]
    axes.axvspan(best, best + difference, color="0.9", label="not told from the best")
    values = [by_rank[name] for name in names]
    axes.plot(values, range(len(names)), "o", color="black")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(f"mean rank over {len(blocks)} blocks (1 is best)")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower left")
    return figure

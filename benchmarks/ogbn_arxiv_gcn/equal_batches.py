"""AUTO-S and DP-AdamBC, each with the batches that the search chose for the other.

    python -m benchmarks.ogbn_arxiv_gcn.equal_batches [--data-dir DIR]

Each takes the batches, steps and clip norm of the other, and its own learning rate.
Four rates are tried once, and the best three once more with other noise. The rate with
the best mean validation accuracy is trained with five seeds.
"""

import dataclasses
import itertools
import math
import pathlib
import statistics
from collections.abc import Iterator, Sequence

from benchmarks import experiment
from benchmarks.ogbn_arxiv_gcn import laboratory, run, settings
from benchmarks.records import Row
from benchmarks.study import Cell, Find
from benchmarks.tables import markdown

RESULTS = pathlib.Path(__file__).with_name("equal_batches.jsonl")
METHODS = (experiment.AUTOMATIC, "DP-AdamBC")
LEARNING_RATES = {
    experiment.AUTOMATIC: (0.0052, 0.01, 0.021, 0.042),
    "DP-AdamBC": (0.003, 0.006, 0.012, 0.024),
}
FLOOR = 1.0  # what the search chose for DP-AdamBC, at every epsilon


def trials(rows: Sequence[Row]) -> Iterator[list[settings.Setting]]:
    """The trials of each method and epsilon whose own batches are not the other's."""
    pairs = METHODS, METHODS[::-1]
    for pair, epsilon in itertools.product(pairs, settings.TARGET_EPSILONS):
        own, other = (laboratory.chosen(rows, name, epsilon) for name in pair)
        method = own.method
        if own.expected_batch_size != other.expected_batch_size:
            taken = dataclasses.replace(other, method=method, floor=FLOOR)
            yield [
                dataclasses.replace(taken, learning_rate=rate)
                for rate in LEARNING_RATES[method]
            ]


def cells(find: Find, graph: str) -> Iterator[Cell]:
    return laboratory.search(find, trials(run.searched(graph)), graph)


def difference(rows: Sequence[Row], others: Sequence[Row], which: str) -> str:
    """Of two means over seeds, with its standard error, in percentage points."""
    several = [
        [100 * row[which]["inductive"]["test"] for row in each]
        for each in (rows, others)
    ]
    mean = statistics.fmean(several[0]) - statistics.fmean(several[1])
    error = math.hypot(*(statistics.stdev(x) / math.sqrt(len(x)) for x in several))
    return f"{mean:+.2f} ({error:.2f})"


def tables(rows: Sequence[Row]) -> dict[str, str]:
    known = run.searched(rows[0]["graph"])
    found = laboratory.lines(rows), laboratory.lines(known)
    body = []
    for epsilon in sorted(settings.TARGET_EPSILONS):
        by_batches: dict[int, dict[str, list[Row]]] = {}
        for lines, method in itertools.product(found, METHODS):
            if several := lines.get((method, epsilon, False)):
                size = several[0]["setting"]["expected_batch_size"]
                by_batches.setdefault(size, {})[method] = several
        for size, of in sorted(by_batches.items()):
            automatic, corrected = (of[method] for method in METHODS)
            line = [f"{epsilon:g}", f"{size:,}"]
            for which in ("accuracy", "averaged_accuracy"):
                line += [laboratory.test(of[x], "inductive", which) for x in METHODS]
                line.append(difference(corrected, automatic, which))
            rates = (of[name][0]["setting"]["learning_rate"] for name in METHODS)
            body.append([*line, " and ".join(f"{rate:g}" for rate in rates)])
    names = ["AUTO-S", "DP-AdamBC", "difference"]
    means = [f"{name}, mean" for name in names]
    return {"equal": markdown(["ε", "batch", *names, *means, "η"], body, num_left=0)}


STUDY = laboratory.make_study(RESULTS, cells, tables)

if __name__ == "__main__":
    STUDY.main(__doc__)

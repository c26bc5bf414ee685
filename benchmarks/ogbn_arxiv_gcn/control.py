"""The control of DP-AdamBC: its floor, and nothing subtracted.

    python -m benchmarks.ogbn_arxiv_gcn.control [--data-dir DIR]

The settings are those that the search chose for DP-AdamBC, but for the learning rate,
which is searched for anew on validation nodes with the first seed of the trials. The
winner is trained with the seeds of the results: the batches and the noise are those of
DP-AdamBC.
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

from benchmarks.ogbn_arxiv_gcn import laboratory, run
from benchmarks.ogbn_arxiv_gcn.settings import Setting
from benchmarks.records import Row
from benchmarks.study import Cell, Find
from benchmarks.tables import markdown

RESULTS = pathlib.Path(__file__).with_name("control.jsonl")

EPSILONS = (3.0, 12.0)
# Times that of DP-AdamBC, whose steps are larger at the same rate.
FACTORS = (1.0, 2.0, 4.0)


def lines(searched: Sequence[Row]) -> Iterator[tuple[Setting, list[Setting]]]:
    """The choice of the search, and the same without the subtraction."""
    for target in EPSILONS:
        corrected = laboratory.chosen(searched, "DP-AdamBC", target)
        control = dataclasses.replace(corrected, correction=0.0)
        rates = (factor * corrected.learning_rate for factor in FACTORS)
        yield corrected, [dataclasses.replace(control, learning_rate=x) for x in rates]


def cells(find: Find, graph: str) -> Iterator[Cell]:
    """All trials once."""
    controls = [line for _, line in lines(run.searched(graph))]
    return laboratory.search(find, controls, graph, 0, short_epsilons=())


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """On test nodes, both."""
    searched = run.searched(rows[0]["graph"])
    found = laboratory.by_setting([*searched, *rows])
    first, _ = laboratory.TUNING_SEEDS
    ways = ("accuracy", "averaged_accuracy")
    body = []
    for corrected, controls in lines(searched):
        scores = {
            s: laboratory.score(found[s][first])
            for s in controls
            if first in found.get(s, {})
        }
        if not scores:
            continue
        chosen = max(scores, key=lambda s: scores[s])
        seeds = [seed for seed in laboratory.SEEDS if seed in found[chosen]]
        both = [[found[x][seed] for seed in seeds] for x in (corrected, chosen)]
        if seeds:
            cells = (laboratory.test(x, "inductive", way) for way in ways for x in both)
            epsilon, rate = corrected.target_epsilon, chosen.learning_rate
            body.append([f"{epsilon:g}", f"{rate:.2g}", *cells])
    names = ("DP-AdamBC", "floor alone")
    head = ["ε", "η of the control", *names, *(f"{name}, mean" for name in names)]
    return {"control": markdown(head, body)}


STUDY = laboratory.make_study(RESULTS, cells, tables)

if __name__ == "__main__":
    STUDY.main(__doc__)

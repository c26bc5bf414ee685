"""Decoupled weight decay, from almost none to almost all of the weights.

    python -m benchmarks.ogbn_arxiv_gcn.decay [--data-dir DIR]

The settings are those that the search chose for DP-Adam and DP-AdamBC; the weight decay
alone is searched for, on validation nodes with the seeds of the trials. Its winner is
trained with the seeds of the results, and compared with no decay seed by seed: both
draw the same batches and the same noise.
"""

import dataclasses
import pathlib
import statistics
from collections.abc import Iterator, Mapping, Sequence

from benchmarks import theory
from benchmarks.ogbn_arxiv_gcn import laboratory, run
from benchmarks.ogbn_arxiv_gcn.laboratory import TUNING_SEEDS
from benchmarks.ogbn_arxiv_gcn.settings import Setting
from benchmarks.records import Row
from benchmarks.study import Cell, Find
from benchmarks.tables import markdown, spread

RESULTS = pathlib.Path(__file__).with_name("decay.jsonl")

WITHOUT_DECAY = {"DP-AdamW": "DP-Adam", "DP-AdamW-BC": "DP-AdamBC"}
# Lambda, by optimizer; the corrected one takes six times as long.
WEIGHT_DECAYS = {
    "DP-AdamW": (0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
    "DP-AdamW-BC": (0.1, 0.3, 1.0, 3.0),
}
LINES = (
    ("DP-AdamW", 1.0),
    ("DP-AdamW", 3.0),
    ("DP-AdamW", 6.0),
    ("DP-AdamW-BC", 3.0),
    ("DP-AdamW", 12.0),
    ("DP-AdamW-BC", 12.0),
)


def lines(searched: Sequence[Row]) -> Iterator[tuple[Setting, list[Setting]]]:
    """The choice of the search without decay, and the same with each decay."""
    for method, target in LINES:
        without = laboratory.chosen(searched, WITHOUT_DECAY[method], target)
        decays = ({"method": method, "weight_decay": x} for x in WEIGHT_DECAYS[method])
        yield without, [dataclasses.replace(without, **numbers) for numbers in decays]


def cells(find: Find, graph: str) -> Iterator[Cell]:
    """All trials twice."""
    decayed = [line for _, line in lines(run.searched(graph))]
    longest = max(map(len, decayed))
    return laboratory.search(find, decayed, graph, longest, short_epsilons=())


def shrinkage(setting: Setting) -> float:
    """The share of the initial weights that all steps together take away."""
    numbers = setting.learning_rate, setting.weight_decay, setting.iterations
    return theory.decay_shrinkage(*numbers)


def validation(rows: Mapping[int, Row]) -> float:
    """The mean accuracy with the seeds of the trials."""
    return statistics.fmean(laboratory.score(rows[seed]) for seed in TUNING_SEEDS)


def _gain(pair: tuple[Row, Row], which: str) -> float:
    decayed, without = (row[which]["inductive"]["test"] for row in pair)
    return decayed - without


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """On validation nodes every decay; on test nodes the best against none."""
    searched = run.searched(rows[0]["graph"])
    found = laboratory.by_setting([*searched, *rows])
    columns = sorted({row["setting"]["weight_decay"] for row in rows})
    tried, tested = [], []
    for without, decayed in lines(searched):
        tests = {
            s: validation(found[s])
            for s in decayed
            if set(TUNING_SEEDS) <= found.get(s, {}).keys()
        }
        if not tests:
            continue
        name = [decayed[0].method, f"{without.target_epsilon:g}"]
        by_decay = {
            s.weight_decay: f"{100 * x:.2f} ({shrinkage(s):.1%})"
            for s, x in tests.items()
        }
        none = f"{100 * validation(found[without]):.2f}"
        tried.append([*name, none, *(by_decay.get(x, "-") for x in columns)])
        best = max(tests, key=lambda s: tests[s])
        seeds = sorted(found[best].keys() - set(TUNING_SEEDS))
        pairs = [(found[best][s], found[without][s]) for s in seeds]
        if len(pairs) > 1:
            ways = ("accuracy", "averaged_accuracy")
            share = f"{best.weight_decay:g} ({shrinkage(best):.0%})"
            of = [laboratory.test(x, "inductive") for x in zip(*pairs, strict=True)]
            gains = [spread([_gain(pair, way) for pair in pairs]) for way in ways]
            tested.append([*name, share, *reversed(of), *gains])
    head = ["optimizer", "ε"]
    of_test = ["λ", "none", "with λ", "gain", "gain, mean of iterates"]
    return {
        "validation": markdown(
            [*head, "none", *(f"λ = {x:g}" for x in columns)], tried
        ),
        "test": markdown([*head, *of_test], tested),
    }


STUDY = laboratory.make_study(RESULTS, cells, tables)

if __name__ == "__main__":
    STUDY.main(__doc__)

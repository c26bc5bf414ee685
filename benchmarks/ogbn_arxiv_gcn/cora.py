"""Node-level privacy on Cora, a small citation graph, in under a minute.

    python -m benchmarks.ogbn_arxiv_gcn.cora [--data-dir DIR] [--seed 0]

With 1,208 training nodes privacy is dear: this shows that everything works, on real
data, and not which optimizer is better. Nothing was tuned but the learning rates, by
hand, and epsilon does not account for that.
"""

import argparse
import collections
import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from benchmarks import experiment
from benchmarks.ogbn_arxiv_gcn import data, laboratory, settings
from benchmarks.records import Row
from benchmarks.study import Cell, Find, Study
from benchmarks.tables import markdown, spread

RESULTS = pathlib.Path(__file__).with_name("cora.jsonl")
SEEDS = range(3)
TARGET_EPSILON = 8.0
LEARNING_RATES = {"DP-Adam": 0.01, "DP-AdamBC": 0.005, experiment.NON_PRIVATE: 0.01}


@dataclasses.dataclass(frozen=True)
class Setting(settings.Setting):
    """One training, with all nodes in every step."""

    target_delta: ClassVar[float] = 1e-4

    def sampling_prob(self, num_roots: int) -> float:
        return 1.0


def setting(method: str, max_memberships: int) -> Setting:
    return Setting(
        method=method,
        target_epsilon=TARGET_EPSILON if method in experiment.PRIVATE else None,
        max_memberships=max_memberships,
        # A constant: the number of nodes may be private.
        expected_batch_size=1_200,
        iterations=100,
        l2_clip_norm=1.0,
        learning_rate=LEARNING_RATES[method],
    )


def cells(find: Find, arguments: argparse.Namespace) -> Iterator[Cell]:
    for seed, method, k in itertools.product(SEEDS, LEARNING_RATES, (1, 0)):
        made = setting(method, k)
        identity = {"method": method, "max_memberships": k, "seed": seed}
        yield Cell(method, made.target_epsilon, seed, identity, made)


def prepare(arguments: argparse.Namespace) -> Callable[[Cell], Row]:
    graph = data.load_cora(arguments.data_dir / "planetoid")
    made = laboratory.Laboratory(graph)

    def measure(cell: Cell) -> Row:
        params = made.fit(cell.setting, cell.identity["seed"]).params
        return {
            "epsilon": cell.epsilon,
            "delta": Setting.target_delta,
            "majority_class_test_accuracy": graph.majority_share,
            **made.evaluators["inductive"].accuracies(params, "test"),
        }

    return measure


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Test accuracy with neighbors, trained with them (K = 1) or not."""
    found = collections.defaultdict(list)
    for row in rows:
        found[row["method"], row["max_memberships"]].append(row["test"])
    shown = lambda key: spread(found[key]) if key in found else "-"
    body = [
        [method, shown((method, 1)), shown((method, 0))] for method in LEARNING_RATES
    ]
    return {"cora": markdown(["optimizer", "trained with neighbors", "alone"], body)}


STUDY = Study(RESULTS, cells, prepare, tables)

if __name__ == "__main__":
    STUDY.main(__doc__)

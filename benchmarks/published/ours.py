"""What was found here, read from the results of the benchmarks."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks import records
from benchmarks.cifar10 import published as cifar10
from benchmarks.ogbn_arxiv_gcn import published as protocol
from benchmarks.ogbn_arxiv_gcn import table as graph_table
from benchmarks.published import run

Values = float | Sequence[float]  # one number, or one for each seed
Numbers = Mapping[str, Mapping[str, Values]]  # by what it is of, then by label
Row = dict[str, Any]


class Accuracies(NamedTuple):
    """On test data in percent, one for each seed."""

    data: str
    methods: dict[str, dict[str, list[float]]]  # by optimizer, then by label

    @property
    def are_of_other_data(self) -> bool:
        return "substitute" in self.data

    def of(self, method: str, label: str) -> list[float]:
        """Of all seeds; empty if it was not trained."""
        return self.methods.get(method, {}).get(label, [])


def _label(epsilon: float) -> str:
    return f"ε {epsilon:g}"


def searched(rows: Sequence[Row]) -> Accuracies:
    """The settings that a search chose, by the last iterate."""
    methods: dict[str, dict[str, list[float]]] = {}
    for (method, epsilon, is_alone), found in graph_table.lines(rows).items():
        if epsilon is not None and not is_alone:
            accuracies = [100 * row["accuracy"]["inductive"]["test"] for row in found]
            methods.setdefault(method, {})[_label(epsilon)] = accuracies
    return Accuracies(rows[0]["graph"], methods)


def by_the_protocol(report: Row) -> Accuracies:
    """The published settings, trained as their code does."""
    methods: dict[str, dict[str, list[float]]] = {}
    for row in report["rows"]:
        of_method = methods.setdefault(row["method"], {})
        of_label = of_method.setdefault(_label(row["stated_epsilon"]), [])
        of_label.append(100 * row["accuracy"]["test"])
    return Accuracies(report["graph"], methods)


def on_cifar10(rows: Sequence[Row]) -> Accuracies:
    """The published settings of CNN5, without their controls."""
    methods: dict[str, dict[str, list[float]]] = {}
    for setting in cifar10.SETTINGS:
        accuracies = [100 * row["accuracy"] for row in cifar10.trained(rows, setting)]
        if accuracies and setting.name in cifar10.PUBLISHED:
            methods[setting.name] = {_label(setting.target_epsilon): accuracies}
    return Accuracies("CIFAR-10", methods)


def real_epsilons(report: Row) -> Numbers:
    """What those runs spend; the graphs of a seed are the same for all optimizers."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for row in report["rows"]:
        for nodes, spent in row["real_epsilon_of_nodes"].items():
            label = _label(row["stated_epsilon"])
            of_label = found.setdefault(nodes, {}).setdefault(label, {})
            of_label[row["seed"]] = spent["epsilon"]
    return {
        f"{nodes}, as run": {label: list(x.values()) for label, x in of_label.items()}
        for nodes, of_label in found.items()
    }


def load() -> tuple[Numbers, dict[str, Accuracies]]:
    """All numbers, and the accuracies by how they were trained."""
    computed = json.loads(run.RESULTS.read_text())["numbers"]
    report = json.loads(protocol.RESULTS.read_text())
    lines = graph_table.RESULTS.read_text().splitlines()
    return computed | real_epsilons(report), {
        "search": searched([json.loads(line) for line in lines]),
        "published protocol": by_the_protocol(report),
        "CNN5": on_cifar10(records.read(cifar10.RESULTS)),
    }

"""The graph and all that is trained on it; what the studies of this folder share."""

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import experiment
from benchmarks.ogbn_arxiv_gcn import data, model
from benchmarks.ogbn_arxiv_gcn.settings import OTHER_DELTA, Setting
from benchmarks.records import Row
from benchmarks.study import Cell, Find, Study
from benchmarks.tables import spread
from dpadambc import diagnostics, training

FOLDER = "ogbn_arxiv"  # of the directory of all data
SEEDS = range(5)
# Of the first and of the second trial; none of those of the results.
TUNING_SEEDS = (1_000, 1_001)
# The best of the trials are tried once more.
NUM_FINALISTS = 3
# Here, as many as did best for the optimizer at the first epsilon.
SHORT_EPSILONS = (6.0, 1.0)
NUM_SHORT_TRIALS = 5

PARTS = ("valid", "test")
NUM_CALLS = 10  # of `fit`, each followed by a look at validation nodes
AVERAGED = 5  # of the last looks

Line = tuple[str, float | None, bool]  # optimizer, target epsilon, sees nodes alone


class Laboratory:
    """The graph and what is made of it, once."""

    def __init__(self, graph: data.Graph):
        self.graph = data.same_part(graph)
        self.model = model.GCN(graph.num_classes)
        none = np.array([], np.int64)
        graphs_of = {
            "inductive": self.graph,
            "transductive": graph,
            "alone": graph._replace(senders=none, receivers=none),
        }
        self.evaluators = {
            name: model.Evaluator(self.model, seen) for name, seen in graphs_of.items()
        }
        self.subgraphs = functools.cache(functools.partial(model.subgraphs, self.graph))

    def examples(self, setting: Any) -> tuple[Callable[..., Any], Any, Any]:
        """The loss, the arguments of each example, and the features of all nodes.

        A node that sees itself alone has its features among its own arguments.
        """
        nodes, roots = self.graph.features, self.graph.splits["train"]
        labels = self.graph.labels[roots]
        if not setting.max_memberships:
            return model.loss_alone, (nodes[roots], labels), None
        subgraphs = self.subgraphs(setting.max_memberships)
        return model.loss_of_root, (subgraphs, labels), nodes

    def fit(self, setting: Any, seed: int, num_calls: int = 1, callbacks: Any = ()):
        """One training."""
        init_key, key = jax.random.split(jax.random.key(seed))
        loss_fn, examples, nodes = self.examples(setting)
        mechanism = setting.mechanism(len(self.graph.splits["train"]))
        return training.fit(
            functools.partial(loss_fn, self.model),
            self.model.init(init_key, self.graph.features[0]),
            examples,
            mechanism,
            setting.optimizer(mechanism.noise_stddev),
            key=key,
            target_delta=setting.target_delta,
            frozen=nodes,
            steps_per_call=max(setting.iterations // num_calls, 1),
            callbacks=callbacks,
        )

    def accuracies(self, params: Any) -> dict[str, dict[str, float]]:
        """On validation and test nodes, with neighbors and without."""
        return {
            name: evaluator.accuracies(params, *PARTS)
            for name, evaluator in self.evaluators.items()
        }

    def measure(self, setting: Any, seed: int) -> Row:
        """What is recorded; with a seed of the trials, of validation nodes alone."""
        looks: list[tuple[int, float, Any]] = []

        def look(progress: training.Progress) -> None:
            params = jax.block_until_ready(progress.params)
            looks.append((progress.iterations, time.perf_counter(), params))

        is_trial = seed in TUNING_SEEDS
        watched: Any = {} if is_trial else {"num_calls": NUM_CALLS, "callbacks": look}
        result = self.fit(setting, seed, **watched)
        mechanism: Any = result.mechanism
        is_private = setting.target_epsilon is not None
        spent = lambda delta: mechanism.epsilon(delta) if is_private else None
        row = {
            "noise_multiplier": mechanism.noise_multiplier,
            "noise_stddev": mechanism.noise_stddev,
            "epsilon": spent(setting.target_delta),
            "epsilon_at_other_delta": spent(OTHER_DELTA),
        }
        if is_trial:
            of = lambda way: self.evaluators[way].accuracies(result.params, "valid")
            return row | {"accuracy": {way: of(way) for way in ("inductive", "alone")}}
        steps, seconds, params = zip(*looks, strict=True)
        # Post-processing of what is private, and free.
        last = params[-AVERAGED:]
        averaged = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *last)
        valid = [
            self.evaluators["inductive"].accuracies(each, "valid")["valid"]
            for each in params
        ]
        return row | {
            "accuracy": self.accuracies(result.params),
            "averaged_accuracy": self.accuracies(averaged),
            "steps": steps,
            "validation_curve": valid,
            "share_at_floor": _share_at_floor(setting, result.state.opt_state),
            # From the first look on, which compiling comes before.
            "seconds_per_step": (seconds[-1] - seconds[0]) / (steps[-1] - steps[0]),
        }


def _share_at_floor(setting: Any, opt_state: Any) -> float | None:
    if not setting.of_bc:
        return None
    found = diagnostics.snapshot(opt_state, b2=experiment.B2, **setting.of_bc)
    return float(found.share_at_floor)


def make_cell(setting: Any, seed: int, graph: str) -> Cell:
    """Of a setting and a seed; its row may be older than a field of the setting."""
    identity = {"setting": dataclasses.asdict(setting), "seed": seed, "graph": graph}
    shown = None if seed in TUNING_SEEDS else seed
    return Cell(setting.method, setting.target_epsilon, shown, identity, setting)


def score(row: Row) -> float:
    """What settings are chosen by: with the neighbors that were trained with."""
    alone = row["setting"]["max_memberships"] == 0
    return row["accuracy"]["alone" if alone else "inductive"]["valid"]


def _scores(find: Find, cells: Mapping[int, Cell]) -> dict[int, float]:
    """Of all of them; of none while one is not there."""
    rows = {i: find(cell) for i, cell in cells.items()}
    found = {i: score(row) for i, row in rows.items() if row}
    return found if len(found) == len(rows) else {}


def search(find: Find, lines: Iterable[Sequence[Any]], graph: str) -> Iterator[Cell]:
    """The trials of each line, a second one of the best, and the winner's seeds."""
    first, second = TUNING_SEEDS
    rankings: dict[tuple[str, bool], list[int]] = {}
    for line in lines:
        known = line[0].method, line[0].max_memberships == 0
        tried: Sequence[int] = range(len(line))
        if line[0].target_epsilon in SHORT_EPSILONS:
            tried = rankings.get(known, [])[:NUM_SHORT_TRIALS]
        trials = {i: make_cell(line[i], first, graph) for i in tried}
        yield from trials.values()
        if scores := _scores(find, trials):
            ranking = sorted(scores, key=lambda i: scores[i], reverse=True)
            rankings.setdefault(known, ranking)
            again = ranking[:NUM_FINALISTS]
            finals = {i: make_cell(line[i], second, graph) for i in again}
            yield from finals.values()
            if sums := {i: scores[i] + x for i, x in _scores(find, finals).items()}:
                best = max(sums, key=lambda i: sums[i])
                yield from (make_cell(line[best], seed, graph) for seed in SEEDS)


def line_of(row: Row) -> Line:
    setting = row["setting"]
    is_alone = setting["max_memberships"] == 0
    return setting["method"], setting["target_epsilon"], is_alone


def lines(rows: Sequence[Row]) -> dict[Line, list[Row]]:
    """The trainings with the seeds of the results, by the line of a table.

    Of several settings that were trained with all seeds, it is the one that does best
    on validation nodes.
    """
    found: dict[Line, dict[str, list[Row]]] = {}
    for row in rows:
        if row["seed"] not in TUNING_SEEDS:
            by_setting = found.setdefault(line_of(row), {})
            by_setting.setdefault(json.dumps(row["setting"]), []).append(row)
    mean_score = lambda rows: (len(rows), statistics.fmean(map(score, rows)))
    return {line: max(x.values(), key=mean_score) for line, x in found.items()}


def chosen(
    rows: Sequence[Row], method: str, target_epsilon: float, alone: bool = False
) -> Setting:
    """The choice of the search."""
    return Setting(**lines(rows)[method, target_epsilon, alone][0]["setting"])


def test(rows: Sequence[Row], how: str, which: str = "accuracy") -> str:
    """The accuracy on test nodes."""
    return spread([row[which][how]["test"] for row in rows])


def of_graph(rows: Sequence[Row], graph: str) -> list[Row]:
    return [row for row in rows if row["graph"] == graph]


def of_each_graph(
    make: Callable[[Sequence[Row]], Mapping[str, str]],
) -> Callable[[Sequence[Row]], dict[str, str]]:
    """The tables of all graphs on record, each under its name.

    Those of a second one, such as OGB's own, have the name in theirs.
    """

    def tables(rows: Sequence[Row]) -> dict[str, str]:
        found: dict[str, str] = {}
        for graph in dict.fromkeys(row["graph"] for row in rows):
            own = f", {graph}" if found else ""
            found[graph] = f"**{graph}**:"
            made = make(of_graph(rows, graph))
            found |= {f"{name}{own}": table for name, table in made.items()}
        return found

    return tables


def make_study(
    results: pathlib.Path,
    cells: Callable[[Find, str], Iterable[Cell]],
    tables: Callable[[Sequence[Row]], Mapping[str, str]],
    laboratory: Callable[[data.Graph], Laboratory] = Laboratory,
    setting: Callable[..., Any] = Setting,
    **others: Any,
) -> Study:
    """A study of ogbn-arxiv, whose cells depend on the name of the graph."""

    def prepare(arguments: argparse.Namespace) -> Callable[[Cell], Row]:
        made = laboratory(data.load(arguments.data_dir / FOLDER))
        return lambda cell: made.measure(cell.setting, cell.identity["seed"])

    def complete(row: Row) -> Row:
        return row | {"setting": dataclasses.asdict(setting(**row["setting"]))}

    return Study(
        results=results,
        cells=lambda find, x: cells(find, data.name(x.data_dir / FOLDER)),
        prepare=prepare,
        tables=of_each_graph(tables),
        complete=complete,
        **others,
    )

"""Node-level private training on ogbn-arxiv, with every optimizer.

    python -m benchmarks.ogbn_arxiv_gcn.run --data-dir DIR [--method DP-Adam ...]
    python -m benchmarks.ogbn_arxiv_gcn.run                 # the tables

For every optimizer and epsilon ten settings are drawn and tried, the best three of them
once more with other noise, and the one with the best mean validation accuracy is
trained again with each of five seeds. At epsilon 6 and 1 only the five settings are
tried that did best for the optimizer at epsilon 3. Epsilon is that of *one* such
training; it does not account for the search.

The settings that an earlier record chose, with the noise of a looser bound, are trained
with the noise of the exact bound too.
"""

import itertools
import pathlib
import statistics
from collections.abc import Callable, Iterator, Sequence

from benchmarks import experiment, records
from benchmarks.ogbn_arxiv_gcn import laboratory, settings
from benchmarks.ogbn_arxiv_gcn.laboratory import Line, lines, test
from benchmarks.records import Row
from benchmarks.study import Cell, Find
from benchmarks.tables import by_epsilon, markdown

RESULTS = pathlib.Path(__file__).with_name("results.jsonl")
EARLIER = pathlib.Path(__file__).with_name("results_by_joint_convexity.jsonl")

Found = dict[Line, list[Row]]


def searched(graph: str) -> list[Row]:
    """The record of this study."""
    return laboratory.of_graph(records.read(RESULTS), graph)


def trials() -> Iterator[list[settings.Setting]]:
    """The trials of each line of the table: every limit, and every optimizer."""
    for alone in (False, True):
        yield settings.trials(experiment.NON_PRIVATE, None, alone)
    for target in settings.TARGET_EPSILONS:
        yield settings.trials("DP-Adam", target, alone=True)
        for method in settings.PRIVATE:
            yield settings.trials(method, target)


def cells(find: Find, graph: str) -> Iterator[Cell]:
    """The settings of the earlier record, and the search."""
    earlier = lines(laboratory.of_graph(records.read(EARLIER), graph))
    for seed, rows in itertools.product(laboratory.SEEDS, earlier.values()):
        setting = settings.Setting(**rows[0]["setting"])
        yield laboratory.make_cell(setting, seed, graph)
    yield from laboratory.search(find, trials(), graph)


def of_lines(found: Found, is_alone: bool, cell: Callable[[list[Row]], str]) -> str:
    """The private lines, trained on nodes alone or with neighbors."""
    cells = {
        (method, epsilon): cell(rows)
        for method in settings.PRIVATE
        for epsilon in settings.TARGET_EPSILONS
        if (rows := found.get((method, epsilon, is_alone)))
    }
    return by_epsilon("optimizer", cells)


def _setting(rows: list[Row]) -> str:
    s = rows[0]["setting"]
    shares = [r["share_at_floor"] for r in rows if r["share_at_floor"] is not None]
    floor = f", floor {s['floor']:g} ({statistics.fmean(shares):.0%})" if shares else ""
    return (
        f"K {s['max_memberships']}, B {s['expected_batch_size']:,},"
        f" T {s['iterations']}, C {s['l2_clip_norm']:g},"
        f" η {s['learning_rate']:g}{floor}"
    )


def without_privacy(found: Found) -> str:
    """The lines without privacy, for comparison."""
    names = {False: "with neighbors", True: "nodes alone"}
    ways = ("inductive", "transductive", "alone")
    body = [
        [f"not private, {name}", *(test(rows, way) for way in ways)]
        for is_alone, name in names.items()
        if (rows := found.get((experiment.NON_PRIVATE, None, is_alone)))
    ]
    return markdown(["trained", *ways], body)


def tested(how: str, which: str = "accuracy") -> Callable[[list[Row]], str]:
    return lambda rows: test(rows, how, which)


INDUCTIVE, AVERAGED = tested("inductive"), tested("inductive", "averaged_accuracy")
# By title: whether training is on nodes alone, and a function that makes a cell.
TABLES: dict[str, tuple[bool, Callable[[list[Row]], str]]] = {
    "Private, trained and tested with neighbors (inductive):": (False, INDUCTIVE),
    "The same, by the mean of the last iterates:": (False, AVERAGED),
    "The same, tested with the edges to training nodes (transductive):": (
        False,
        tested("transductive"),
    ),
    "Settings:": (False, _setting),
    f"Epsilon at δ = {settings.OTHER_DELTA:g}:": (
        False,
        lambda rows: f"{rows[0]['epsilon_at_other_delta']:.2f}",
    ),
    "Private, trained on nodes alone and tested without neighbors:": (
        True,
        tested("alone"),
    ),
    "Trained on nodes alone and tested with neighbors (inductive):": (True, INDUCTIVE),
    "Trained on nodes alone, by the mean of the last iterates:": (True, AVERAGED),
    "Settings of training on nodes alone:": (True, _setting),
}


def tables(rows: Sequence[Row]) -> dict[str, str]:
    found = lines(rows)
    private = (
        f"{title}\n\n{of_lines(found, is_alone, cell)}"
        for title, (is_alone, cell) in TABLES.items()
    )
    return {
        "not private": f"Without privacy:\n\n{without_privacy(found)}",
        "private": "\n\n".join(private),
    }


STUDY = laboratory.make_study(RESULTS, cells, tables)

if __name__ == "__main__":
    STUDY.main(__doc__)

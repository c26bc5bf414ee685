"""A study: the trainings there are, what is on record, and the tables of it.

The module of a study has one value, `STUDY`, and ends with `STUDY.main(__doc__)`:

    python -m benchmarks.NAME --data-dir DIR [--method NAME ...] [--epsilon 3 ...]
    python -m benchmarks.NAME [--pictures]      # the tables of what is on record

What was trained is written down as it ends, and a later call finds it there.
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from benchmarks import records
from benchmarks.records import Row

NOT_PRIVATE = "not private"


class Cell(NamedTuple):
    """One training, or several in one program."""

    method: str  # the optimizer, and what else tells lines of a table apart
    epsilon: float | None  # the target; None without privacy
    seed: int | None  # None for a trial, which is made for any seed that is asked for
    identity: Row  # what its row is told from others by
    setting: Any = None  # what else the training takes


Find = Callable[[Cell], Row | None]


@dataclasses.dataclass(frozen=True)
class Study:
    """A set of trainings, with its tables and pictures.

    Attributes:
      results: the file with a line for each cell.
      cells: the cells, in the order in which they are made. Its first argument finds
        the row of a cell, since later cells may depend on earlier rows.
      prepare: loads the data once; returns a function that trains a cell.
      tables: makes tables of all rows, by name, which `benchmarks.pages` puts into
        the page.
      pictures: draws all rows, by the name of a file next to the results.
      options: adds the options of this study.
      complete: adds to a row the fields that identities have gained since.
      needs_data: whether it trains with --data-dir, or else with --run.
    """

    results: pathlib.Path
    cells: Callable[[Find, argparse.Namespace], Iterable[Cell]]
    prepare: Callable[[argparse.Namespace], Callable[[Cell], Row]]
    tables: Callable[[Sequence[Row]], Mapping[str, str]]
    pictures: Callable[[Sequence[Row]], Mapping[str, Figure]] = lambda rows: {}
    options: Callable[[argparse.ArgumentParser], Any] = lambda parser: None
    complete: Callable[[Row], Row] = dict
    needs_data: bool = True

    def parser(self, doc: str | None) -> argparse.ArgumentParser:
        made = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
        if self.needs_data:
            told = "trains, if given"
            made.add_argument("--data-dir", type=pathlib.Path, help=told)
        else:
            told = "makes every row that is not on record"
            made.add_argument("--run", dest="data_dir", action="store_true", help=told)
        made.add_argument(
            "--cache-dir",
            type=pathlib.Path,
            default=pathlib.Path("~/.cache/dpadambc").expanduser(),
            help="for features and for states to resume from",
        )
        made.add_argument("--output", type=pathlib.Path, default=self.results)
        made.add_argument("--method", nargs="+", help="only these")
        only = "only these; none is without privacy"
        made.add_argument("--epsilon", nargs="+", type=_epsilon, help=only)
        made.add_argument("--seed", nargs="+", type=int, help="only these")
        made.add_argument("--pictures", action="store_true", help="draws the pictures")
        self.options(made)
        return made

    def make(self, arguments: argparse.Namespace, found: records.Records) -> None:
        """The cells that are asked for and are not on record."""
        train = self.prepare(arguments)
        for cell in self.cells(lambda cell: found.find(cell.identity), arguments):
            if is_asked_for(cell, arguments):
                found.get(cell.identity, lambda cell=cell: train(cell))
                at = "" if cell.epsilon is None else f" at epsilon {cell.epsilon:g}"
                print(f"{cell.method}{at} is there.", file=sys.stderr, flush=True)

    def main(self, doc: str | None) -> None:
        """The command."""
        arguments = self.parser(doc).parse_args()
        found = records.Records(arguments.output, self.complete)
        if arguments.data_dir:
            self.make(arguments, found)
        print("\n\n".join(self.tables(found.rows).values()))
        if arguments.pictures:
            for name, figure in self.pictures(found.rows).items():
                figure.savefig(arguments.output.with_name(name), dpi=150)


def _epsilon(word: str) -> float | None:
    return None if word == "none" else float(word)


def is_asked_for(cell: Cell, arguments: argparse.Namespace) -> bool:
    """By each option that is given."""
    pairs = (
        (cell.method, arguments.method),
        (cell.epsilon, arguments.epsilon),
        (cell.seed, arguments.seed),
    )
    return all(not asked or x is None or x in asked for x, asked in pairs)


def best_then_seeds(
    find: Find,
    trials: Sequence[Cell],
    tests: Callable[[Row], Iterable[Cell]],
) -> Iterator[Cell]:
    """The trials, and once all are there the tests of the best."""
    yield from trials
    rows = [row for cell in trials if (row := find(cell))]
    if len(rows) == len(trials):
        yield from tests(max(rows, key=lambda row: row["accuracy"]))

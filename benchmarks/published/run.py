"""Compares the numbers of the papers with the numbers found here.

    python -m benchmarks.published.run [--run]

The published numbers are in numbers.json, ours in the records of the studies. --run
computes what no other study measures, in two minutes.
"""

import collections
import json
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks import records
from benchmarks.ogbn_arxiv_gcn import laboratory
from benchmarks.ogbn_arxiv_gcn import published as protocol
from benchmarks.ogbn_arxiv_gcn import run as graph
from benchmarks.published import computed, verdict
from benchmarks.published.verdict import Estimate, Verdict
from benchmarks.records import Row
from benchmarks.study import Cell, Study
from benchmarks.tables import markdown, spread

FOLDER = pathlib.Path(__file__).parent
RESULTS = FOLDER / "results.jsonl"
NUMBERS = FOLDER / "numbers.json"
CIFAR10 = FOLDER.parent / "cifar10" / "published.jsonl"
HEADER = ("published in", "quantity", "published", "ours", "differs in", "verdict")
SEEDS = range(10)
NUM_COORDINATES = 10_000

Values = float | Sequence[float]  # one number, or one for each seed
Numbers = Mapping[str, Mapping[str, Values]]  # by what it is of, then by label


class Accuracies(NamedTuple):
    """On test data, one for each seed, by optimizer and epsilon."""

    data: str
    of: Mapping[tuple[str, str], Sequence[float]]

    @property
    def are_of_other_data(self) -> bool:
        return "substitute" in self.data


def accuracies() -> dict[str, Accuracies]:
    """By how they were trained: by a search, or with the published settings."""
    searched, trained, cnn5 = (collections.defaultdict(list) for _ in range(3))
    rows = records.read(protocol.RESULTS)
    name = rows[0]["graph"]
    lines = laboratory.lines(graph.searched(name))
    for (method, epsilon, alone), found in lines.items():
        if epsilon is not None and not alone:
            tested = [row["accuracy"]["inductive"]["test"] for row in found]
            searched[method, f"ε {epsilon:g}"] = tested
    for row in rows:
        key = row["method"], f"ε {row['stated_epsilon']:g}"
        trained[key].append(row["accuracy"]["test"])
    for row in records.read(CIFAR10):
        setting = row["setting"]
        if "correction" not in setting["options"]:  # those are controls
            key = setting["method"], f"ε {setting['target_epsilon']:g}"
            cnn5[key].append(row["accuracy"])
    return {
        "search": Accuracies(name, searched),
        "published protocol": Accuracies(name, trained),
        "CNN5": Accuracies("CIFAR-10", cnn5),
    }


def numbers(rows: Sequence[Row]) -> Numbers:
    """What is computed, and the cost of the runs by the published protocol."""
    found: dict[str, Any] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    for row in rows:
        for name, values in row["numbers"].items():
            for label, value in values.items():
                if row["seed"] is None:  # no chance is in it
                    found[name][label] = value
                else:
                    found[name][label].append(value)
    for row in records.read(protocol.RESULTS):
        for nodes, spent in row["real_epsilon_of_nodes"].items():
            if row["method"] == "DP-AdamW":  # the graphs are the same for all
                label = f"ε {row['stated_epsilon']:g}"
                found[f"{nodes}, as run"][label].append(spent["epsilon"])
    return found


class Pair(NamedTuple):
    """A published number and ours."""

    published: str
    ours: str
    verdict: Verdict
    num_seeds: int = 0


class Line(NamedTuple):
    """One line of the table, of one number or several."""

    place: str
    what: str
    labels: Sequence[str]
    pairs: list[Pair]
    differs: str
    is_what_if: bool = False  # of a published number that has its own line

    @property
    def cells(self) -> tuple[str, ...]:
        labels = ", ".join(filter(None, self.labels))
        words = [pair.verdict for pair in self.pairs]
        counts = sorted({pair.num_seeds for pair in self.pairs} - {0})
        seeds = " to ".join(map(str, counts[:1] + counts[1:][-1:]))
        return (
            self.place,
            f"{self.what}: {labels}" if labels else self.what,
            ", ".join(pair.published for pair in self.pairs),
            ", ".join(pair.ours for pair in self.pairs)
            + (f" ({seeds} seed{'s' * (seeds != '1')})" if seeds else ""),
            self.differs,
            ", ".join(words if len(set(words)) > 1 else words[:1]),
        )


def _rounded(x: float, digits: int = 3) -> str:
    return f"{x:,.0f}" if 1e3 <= abs(x) < 1e9 else f"{x:#.{digits}g}"


def _spread(values: Values, digits: int) -> str:
    if not isinstance(values, Sequence):
        return _rounded(values, digits)
    mean = _rounded(statistics.fmean(values), digits)
    if len(set(values)) == 1:
        return mean
    stdev = statistics.stdev(values)
    return f"{mean} ± {stdev:,.0f}" if stdev > 1 else f"{mean} ± {stdev:.1g}"


def _number(row: Row, label: str, found: Values) -> Pair:
    text = row["values"][label]
    if row.get("bound"):
        word = verdict.bound(float(text), verdict.measured(found))
    else:
        published = verdict.printed(text, row.get("over", 0.0))
        word = verdict.value(published, verdict.measured(found))
    mantissa = text.partition(" to ")[0].partition("e")[0].lstrip("-0.")
    digits = min(max(3, len(mantissa.replace(".", ""))), 5)
    num_seeds = len(found) if isinstance(found, Sequence) else 0
    return Pair(text, _spread(found, digits), word, num_seeds)


def of_numbers(row: Row, found: Numbers) -> Line:
    labels = list(row["values"])
    pairs = [_number(row, label, found[row["ours"]][label]) for label in labels]
    is_what_if = row.get("what_if", False)
    return Line(row["place"], row["what"], labels, pairs, row["differs"], is_what_if)


def _signed(difference: Estimate) -> str:
    error = "" if math.isinf(difference.error) else f" ± {difference.error:.2f}"
    return f"{difference.mean:+.2f}{error}"


def of_accuracies(row: Row, found: Accuracies) -> list[Line]:
    """A line for each optimizer, and for each difference that is claimed."""
    other = "substitute features; " if found.are_of_other_data else ""
    differs, methods, lacking = other + row["differs"], row["methods"], "not comparable"
    seeds = lambda *key: [100 * x for x in found.of.get(key, [])]
    printed = lambda method, label: methods[method]["values"][label]
    published = lambda *key: verdict.of_runs(printed(*key), row["runs"])

    def accuracy(method: str, label: str) -> Pair:
        key = method, label
        text, ours = " ± ".join(printed(*key)), seeds(*key)
        if not ours:
            return Pair(text, "–", lacking)
        word = verdict.value(published(*key), verdict.measured(ours))
        word = lacking if found.are_of_other_data else word
        return Pair(text, spread(found.of[key]), word, len(ours))

    def difference(first: str, second: str, label: str) -> Pair:
        theirs = published(first, label) - published(second, label)
        columns = seeds(first, label), seeds(second, label)
        if not all(columns):
            return Pair(_signed(theirs), "–", lacking)
        ours = verdict.measured(columns[0]) - verdict.measured(columns[1])
        word, num_seeds = verdict.order(theirs, ours), min(map(len, columns))
        return Pair(_signed(theirs), _signed(ours), word, num_seeds)

    lines = []
    for names in [*([method] for method in methods), *row["orders"]]:
        pair: Any = accuracy if len(names) == 1 else difference
        place, labels = methods[names[0]]["place"], list(methods[names[0]]["values"])
        pairs = [pair(*names, label) for label in labels]
        what = f"{row['what']}, {' over '.join(names)}"
        lines.append(Line(place, what, labels, pairs, differs))
    return lines


def lines(published: Row, found: Numbers, trained: Mapping[str, Accuracies]):
    """All lines of the table."""
    made = [of_numbers(row, found) for row in published["numbers"]]
    for row in published["accuracies"]:
        made += of_accuracies(row, trained[row["ours"]])
    return made


def render(published: Row, found: Numbers, trained: Mapping[str, Accuracies]) -> str:
    """The table, with the number of each verdict above it and what it lacks below."""
    rows = lines(published, found, trained)
    counted = [row.pairs for row in rows if not row.is_what_if]
    counts = collections.Counter(pair.verdict for pairs in counted for pair in pairs)
    total = f"{sum(counts.values())} published numbers and differences: "
    total += ", ".join(f"{n} {word}" for word, n in counts.most_common())
    decays = [f"{share:.1e} ({name})" for name, share in found["decay"].items()]
    papers = [f"[{name}]({link})" for name, link in published["papers"].items()]
    return "\n\n".join(
        [
            f"{total}. The papers: {', '.join(papers)}.",
            markdown(HEADER, [row.cells for row in rows], num_left=len(HEADER)),
            "The weight decay of DP-AdamW takes this share of a parameter in a"
            " published run, up to its last evaluation, at the weight decay that the"
            f" paper states: {', '.join(decays)}.",
            f"Own protocol: {published['own_protocol']}.",
            f"No counterpart yet: {'; '.join(published['without_counterpart'])}.",
        ]
    )


def make(cell: Cell) -> Row:
    if cell.seed is None:
        return {"numbers": computed.exact()}
    return {"numbers": computed.simulated(cell.seed, NUM_COORDINATES)}


STUDY = Study(
    RESULTS,
    cells=lambda find, arguments: [
        Cell("computed", None, seed, {"seed": seed}) for seed in (None, *SEEDS)
    ],
    prepare=lambda arguments: make,
    tables=lambda rows: {
        "verdicts": render(json.loads(NUMBERS.read_text()), numbers(rows), accuracies())
    },
    needs_data=False,
)

if __name__ == "__main__":
    STUDY.main(__doc__)

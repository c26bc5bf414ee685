"""What the papers published, beside what was found here, as a table in Markdown.

    python -m benchmarks.published.table

The published numbers are in numbers.json, ours in the results of the benchmarks; the
verdicts follow from both, by the rule in `verdict`.
"""

import collections
import json
import math
import pathlib
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.published import ours, verdict
from benchmarks.published.ours import Accuracies, Numbers, Row, Values
from benchmarks.published.verdict import Estimate, Verdict

NUMBERS = pathlib.Path(__file__).with_name("numbers.json")
HEADER = ("published in", "what", "published", "ours", "differs in", "verdict")


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


def _accuracy(
    published: Sequence[str], runs: int, found: Accuracies, seeds: list[float]
) -> Pair:
    text = " ± ".join(published)
    if not seeds:
        return Pair(text, "–", "not comparable")
    word = verdict.value(verdict.of_runs(published, runs), verdict.measured(seeds))
    if found.are_of_other_data:
        word = "not comparable"
    spread = f" ± {statistics.stdev(seeds):.2f}" if len(seeds) > 1 else ""
    return Pair(text, f"{statistics.fmean(seeds):.2f}{spread}", word, len(seeds))


def _signed(difference: Estimate) -> str:
    error = "" if math.isinf(difference.error) else f" ± {difference.error:.2f}"
    return f"{difference.mean:+.2f}{error}"


def _difference(published: Estimate, columns: Sequence[Sequence[float]]) -> Pair:
    if not all(columns):
        return Pair(_signed(published), "–", "not comparable")
    first, second = map(verdict.measured, columns)
    word = verdict.order(published, first - second)
    num_seeds = min(map(len, columns))
    return Pair(_signed(published), _signed(first - second), word, num_seeds)


def of_accuracies(row: Row, found: Accuracies) -> list[Line]:
    """A line for each optimizer, and for each difference that is claimed."""
    other = "substitute features; " if found.are_of_other_data else ""
    differs, runs, methods = other + row["differs"], row["runs"], row["methods"]
    lines = []
    for method, numbers in methods.items():
        labels = list(numbers["values"])
        pairs = [
            _accuracy(numbers["values"][label], runs, found, found.of(method, label))
            for label in labels
        ]
        what = f"{row['what']}, {method}"
        lines.append(Line(numbers["place"], what, labels, pairs, differs))
    for order in row["orders"]:
        first, second = (methods[method]["values"] for method in order)
        pairs = []
        for label in first:
            one, two = (verdict.of_runs(x[label], runs) for x in (first, second))
            columns = [found.of(method, label) for method in order]
            pairs.append(_difference(one - two, columns))
        what = f"{row['what']}, {order[0]} over {order[1]}"
        place = methods[order[0]]["place"]
        lines.append(Line(place, what, list(first), pairs, differs))
    return lines


def lines(published: Row, found: Numbers, trained: dict[str, Accuracies]) -> list[Line]:
    """All lines of the table."""
    return [
        *(of_numbers(row, found) for row in published["numbers"]),
        *(
            line
            for row in published["accuracies"]
            for line in of_accuracies(row, trained[row["ours"]])
        ),
    ]


def render(published: Row, found: Numbers, trained: dict[str, Accuracies]) -> str:
    """The table, with the number of each verdict above it and what it lacks below."""
    rows = lines(published, found, trained)
    counted = [row.pairs for row in rows if not row.is_what_if]
    counts = collections.Counter(pair.verdict for pairs in counted for pair in pairs)
    total = f"{sum(counts.values())} published numbers and differences: "
    total += ", ".join(f"{n} {word}" for word, n in counts.most_common())
    table = [HEADER, ("---",) * len(HEADER), *(row.cells for row in rows)]
    decays = [f"{share:.1e} ({name})" for name, share in found["decay"].items()]
    papers = [f"[{name}]({link})" for name, link in published["papers"].items()]
    return "\n\n".join(
        [
            f"{total}. The papers: {', '.join(papers)}.",
            "\n".join(f"| {' | '.join(cells)} |" for cells in table),
            "The weight decay of DP-AdamW takes this share of a parameter in a"
            " published run, up to its last evaluation, at the weight decay that the"
            f" paper states: {', '.join(decays)}.",
            f"Own protocol: {published['own_protocol']}.",
            f"No counterpart yet: {'; '.join(published['without_counterpart'])}.",
        ]
    )


def main() -> None:
    print(render(json.loads(NUMBERS.read_text()), *ours.load()))


if __name__ == "__main__":
    main()

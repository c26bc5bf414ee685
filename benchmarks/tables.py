"""Tables in Markdown."""

import statistics
from collections.abc import Mapping, Sequence


def markdown(
    header: Sequence[str], body: Sequence[Sequence[str]], num_left: int = 1
) -> str:
    """A table, its first columns to the left."""
    sides = ["---" if i < num_left else "---:" for i in range(len(header))]
    rows = [header, sides, *body]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def by_epsilon(first: str, cells: Mapping[tuple[str, float], str]) -> str:
    """A line for each name, a column for each epsilon, "-" where there is no cell."""
    names, columns = dict.fromkeys(n for n, _ in cells), sorted({e for _, e in cells})
    body = [[name, *(cells.get((name, e), "-") for e in columns)] for name in names]
    return markdown([first, *(f"ε = {e:g}" for e in columns)], body)


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation, in percent."""
    percents = [100 * x for x in values]
    mean = f"{statistics.fmean(percents):.2f}"
    return f"{mean} ± {statistics.stdev(percents):.2f}" if values[1:] else mean

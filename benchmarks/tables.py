"""Tables in Markdown."""

import statistics
from collections.abc import Sequence


def markdown(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table, its first column to the left."""
    rows = [header, ["---", *("---:" for _ in header[1:])], *body]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation, in percent."""
    mean = f"{100 * statistics.fmean(values):.2f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {100 * statistics.stdev(values):.2f}"

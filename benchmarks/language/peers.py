"""What private fine-tuning of MiniLM costs here, by Opacus and by Opake, as a table.

    python -m benchmarks.language.peers

On record are steps of PyTorch, with the same weights, head and trained parameters, and
without dropout. *Agreement*: the norms of the examples' gradients, and of their clipped
sum, relative to ours, of a few texts, half of them padded. *Memory*: ours is what the
compiler says of the step; theirs are the parameters, and the most that tensors take at
once up to the end of a second step. Batches were doubled until one took a GiB; larger
ones are on the line through the last two. *Time*: all steps in turns in one process,
warm, on one thread, in seconds of the processor.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import records
from benchmarks.language import cost
from benchmarks.tables import markdown

RESULTS = pathlib.Path(__file__).with_suffix(".json")
GIBIBYTES = 8

KIND = {"JAX": "ordinary", "dpadambc": "private"}  # as `cost` calls them

Row = dict[str, Any]
Bytes = Mapping[int, float]  # by the batch size


def _slope(measured: Bytes) -> tuple[int, float]:
    """The largest batch that was measured, and the bytes of one more example."""
    below, last = sorted(measured)[-2:]
    return last, (measured[last] - measured[below]) / (last - below)


def bytes_at(measured: Bytes, batch_size: int) -> float:
    """As measured, or on the line through the two largest batches."""
    if batch_size in measured:
        return measured[batch_size]
    last, slope = _slope(measured)
    return measured[last] + (batch_size - last) * slope


def largest_batch(measured: Bytes, memory: float) -> int:
    """On the line through the two largest batches, in the steps of `cost.SIZES`."""
    last, slope = _slope(measured)
    step = cost.SIZES.step
    return int((last + (memory - measured[last]) / slope) // step * step)


def _largest(row: Row, name: str, ours: Sequence[Row]) -> str:
    """A dash where memory was measured at one batch size alone."""
    if name in KIND:
        asked = {"way": row["way"], "length": row["length"], "gibibytes": GIBIBYTES}
        (found,) = (x for x in ours if asked.items() <= x.items())
        return f"{found['largest_batch'][KIND[name]]:,}"
    known = _measured(row["programs"][name])
    return "-" if len(known) == 1 else f"{largest_batch(known, GIBIBYTES * 2**30):,}"


def _measured(program: Row) -> dict[int, float]:
    return {int(size): found for size, found in program["bytes"].items()}


def _line(row: Row, name: str, ours: Sequence[Row]) -> list[str]:
    program = row["programs"][name]
    base = "JAX" if name in KIND else "PyTorch"  # the ordinary step in that language
    of = lambda name: bytes_at(_measured(row["programs"][name]), row["batch_size"])
    seconds = ratio = "-"
    if "seconds" in program:
        seconds, found = f"{program['seconds']['median']:.2f}", program["ratio"]
        ratio = f"{found['median']:.2f} ({found['q1']:.2f} to {found['q3']:.2f})"
    ratios = ratio, f"{of(name) / of(base):.2f}"
    of_time, of_memory = ("", "") if name == base else ratios
    first = [row["way"], str(row["length"]), name, seconds, of_time]
    return [*first, f"{of(name) / 1e6:,.0f}", of_memory, _largest(row, name, ours)]


def table(rows: Sequence[Row], ours: Sequence[Row]) -> str:
    """One line for each program.

    Args:
      rows: what was measured, for each way and length.
      ours: the rows of `cost`, with the largest batches.
    """
    body = [_line(row, name, ours) for row in rows for name in row["programs"]]
    head = ["way", "tokens", "step", "s", "ratio", "MB", "ratio"]
    return markdown([*head, f"largest batch in {GIBIBYTES} GiB"], body)


def agreement(rows: Sequence[Row]) -> str:
    """How far their gradients are from ours."""
    body = [
        [row["way"], row["step"], f"{row['norms']:.0e}", f"{row['clipped']:.0e}"]
        for row in rows
    ]
    return markdown(["way", "step", "norms", "norm of the clipped sum"], body)


if __name__ == "__main__":
    record = json.loads(RESULTS.read_text())
    print(table(record["rows"], records.read(cost.RESULTS)))
    print("\nThe largest relative difference from our gradients:\n")
    print(agreement(record["agreement"]))

"""What private fine-tuning of MiniLM costs here, by Opacus and by Opake, as a table.

python -m benchmarks.language.peers          # of what is on record
python -m benchmarks.language.peers_run      # measures; see there
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.language import largest
from benchmarks.tables import markdown

RESULTS = pathlib.Path(__file__).with_suffix(".json")

JAX, OURS, PYTORCH = "JAX", "dpadambc", "PyTorch"
KIND = {JAX: "ordinary", OURS: "private"}  # as `cost` calls them

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
    """On the line through the two largest batches, in the steps of `largest`."""
    last, slope = _slope(measured)
    step = largest.SIZES.step
    return int((last + (memory - measured[last]) / slope) // step * step)


def baseline(name: str) -> str:
    """The ordinary step in the same language."""
    return JAX if name in KIND else PYTORCH


def _largest(row: Row, name: str, ours: Mapping[str, Any]) -> int | None:
    """None where memory was measured at one batch size alone."""
    if name in KIND:
        rows = ours["rows"]
        same = (x for x in rows if all(x[k] == row[k] for k in ("way", "length")))
        return next(same)["largest_batch"][KIND[name]]
    measured = _measured(row["programs"][name])
    return (
        largest_batch(measured, ours["gibibytes"] * 2**30)
        if len(measured) > 1
        else None
    )


def _measured(program: Row) -> dict[int, float]:
    return {int(size): found for size, found in program["bytes"].items()}


def _line(row: Row, name: str, ours: Mapping[str, Any]) -> list[str]:
    program, is_ordinary = row["programs"][name], name == baseline(name)
    of = lambda name: bytes_at(_measured(row["programs"][name]), row["batch_size"])
    seconds = ratio = "-"
    if "seconds" in program:
        seconds, found = f"{program['seconds']['median']:.2f}", program["ratio"]
        ratio = f"{found['median']:.2f} ({found['q1']:.2f} to {found['q3']:.2f})"
    fits = _largest(row, name, ours)
    return [
        row["way"],
        str(row["length"]),
        name,
        seconds,
        "" if is_ordinary else ratio,
        f"{of(name) / 1e6:,.0f}",
        "" if is_ordinary else f"{of(name) / of(baseline(name)):.2f}",
        "-" if fits is None else f"{fits:,}",
    ]


def table(rows: Sequence[Row], ours: Mapping[str, Any]) -> str:
    """One line for each program.

    Args:
      rows: what was measured, for each way and length.
      ours: the record of `largest`.
    """
    body = [_line(row, name, ours) for row in rows for name in row["programs"]]
    head = ["way", "tokens", "step", "s", "ratio", "MB", "ratio"]
    return markdown([*head, f"largest batch in {ours['gibibytes']:g} GiB"], body)


def agreement(rows: Sequence[Row]) -> str:
    """How far their gradients are from ours."""
    body = [
        [row["way"], row["step"], f"{row['norms']:.0e}", f"{row['clipped']:.0e}"]
        for row in rows
    ]
    head = ["way", "step", "norms", "norm of the clipped sum"]
    return markdown(head, body)


def main() -> None:
    record = json.loads(RESULTS.read_text())
    ours = json.loads(largest.RESULTS.read_text())
    print(table(record["rows"], ours))
    print("\nThe largest relative difference from our gradients:\n")
    print(agreement(record["agreement"]))


if __name__ == "__main__":
    main()

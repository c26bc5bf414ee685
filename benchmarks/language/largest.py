"""The largest batch whose step of MiniLM fits in memory, private and ordinary.

    python -m benchmarks.language.largest [--memory GIB] [--output FILE]
    python -m benchmarks.language.largest --table        # of what is on record

By the compiler's own analysis (arguments, outputs and temporaries) of the steps that
`cost` measures, without microbatches. Nothing is run. Found by bisection among the
multiples of 8.
"""

import argparse
import bisect
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks import environment
from benchmarks.language import cost
from benchmarks.speed import timing
from benchmarks.tables import markdown

RESULTS = pathlib.Path(__file__).with_suffix(".json")
GIBIBYTES = 8
SIZES = range(8, 8192 + 1, 8)


def step_bytes(way: str, length: int, kind: str, batch_size: int) -> int:
    """Of the compiled step, "ordinary" or "private"."""
    fun, args = cost.cases_of(way, length, batch_size)[f"{kind} step"]
    return timing.peak_bytes(jax.jit(fun).lower(*args).compile())


def largest_batch(bytes_of: Callable[[int], int], memory: float) -> int:
    """The largest of `SIZES` that fits, where all below it do; 0 if none does."""
    index = bisect.bisect_right(SIZES, memory, key=bytes_of)
    return SIZES[index - 1] if index else 0


def find(way: str, length: int, gibibytes: float) -> dict[str, Any]:
    batches = {
        kind: largest_batch(
            lambda batch_size, kind=kind: step_bytes(way, length, kind, batch_size),
            gibibytes * 2**30,
        )
        for kind in cost.KINDS
    }
    return {"way": way, "length": length, "largest_batch": batches}


def table(record: dict[str, Any]) -> str:
    """One line for each way and length."""
    body = []
    for row in record["rows"]:
        ordinary, private = (row["largest_batch"][kind] for kind in cost.KINDS)
        sizes = f"{ordinary:,}", f"{private:,}", f"{private / ordinary:.2f}"
        body.append([row["way"], str(row["length"]), *sizes])
    head = ["way", "tokens", f"largest batch in {record['gibibytes']:g} GiB"]
    return markdown([*head, "private", "ratio"], body)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--memory", type=float, default=GIBIBYTES, help="in GiB")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="compiles nothing")
    options = parser.parse_args(arguments)
    if options.table:
        print(table(json.loads(options.output.read_text())))
        return
    record: dict[str, Any] = {
        "environment": environment.environment(),
        "gibibytes": options.memory,
        "rows": [],
    }
    for length in cost.LENGTHS:
        for way in cost.WAYS:
            record["rows"].append(find(way, length, options.memory))
            print(json.dumps(record["rows"][-1]), flush=True)
            options.output.write_text(json.dumps(record, indent=1) + "\n")
    print(table(record))


if __name__ == "__main__":
    main()

"""The largest batch whose gradient fits in memory, by the compiler's own analysis.

    python -m benchmarks.speed.largest [--memory GIB] [--output FILE]

Nothing is run. Batch sizes are powers of 1.25, rounded.
"""

import argparse
import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from benchmarks.environment import environment
from benchmarks.speed import contenders, sizes, table, timing
from benchmarks.speed.models import Problem

RESULTS = pathlib.Path(__file__).with_name("largest.json")
FACTOR = 1.25
MODELS = ("transformer-64", "mlp-256")


def with_batch_size(problem: Problem, batch_size: int) -> Problem:
    """The problem with a batch that has shapes only."""
    resize = lambda x: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype)
    return problem._replace(batch=jax.tree.map(resize, problem.batch))


def peak_bytes(problem: Problem, contender: str, batch_size: int) -> int:
    problem = with_batch_size(problem, batch_size)
    grad_fn = contenders.CONTENDERS[contender](problem)
    args = (problem.params, *problem.batch)
    return timing.peak_bytes(jax.jit(grad_fn).lower(*args).compile())


def largest_exponent(fits: Callable[[int], bool]) -> int | None:
    """The largest number that fits, where all below it do; None if not even 0 does."""
    if not fits(0):
        return None
    low, high = 0, 8
    while fits(high):
        low, high = high, high + 8
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_batch(problem: Problem, contender: str, memory: float) -> int | None:
    """The largest power of 1.25, rounded, whose gradient fits in so many bytes."""
    size = lambda exponent: round(FACTOR**exponent)
    fits = lambda exponent: peak_bytes(problem, contender, size(exponent)) <= memory
    exponent = largest_exponent(fits)
    return None if exponent is None else size(exponent)


def largest_batches(problem: Problem, memory: float) -> dict[str, Any]:
    """The largest batch of every contender."""
    grad_fns, left_out = contenders.build(problem)
    find = functools.partial(largest_batch, problem, memory=memory)
    return {
        "model": problem.name,
        "left_out": left_out,
        "batch_sizes": {contender: find(contender) for contender in grad_fns},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--memory", type=float, default=8, help="in GiB")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    args = parser.parse_args()
    results = {
        "environment": environment(),
        "gibibytes": args.memory,
        "models": {
            name: largest_batches(sizes.CPU[name](), args.memory * 2**30)
            for name in MODELS
        },
    }
    args.output.write_text(json.dumps(results, indent=1) + "\n")
    print(table.largest(results))


if __name__ == "__main__":
    main()

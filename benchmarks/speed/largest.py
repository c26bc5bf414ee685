"""The largest batch whose gradient fits in memory, by the compiler's own analysis.

    python -m benchmarks.speed.largest [--memory GIB] [--models NAME ...]
        [--contenders NAME ...] [--output FILE]

Nothing is run. A GPU compiles for itself, 10 to 30 s for each of some nine sizes. Batch
sizes are powers of 1.25, rounded. The planned gradient is in microbatches of the size
that `dpadambc.explain` finds for this memory.
"""

import argparse
import json
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks.environment import environment
from benchmarks.speed import contenders, sizes, table, timing
from benchmarks.speed.models import Problem

RESULTS = pathlib.Path(__file__).with_name("largest.json")
FACTOR = 1.25
MOST = 63  # the exponent: a batch of 1.3 million
ALL = sizes.by_name()
MODELS = ("transformer-64", "decoder-64", "mlp-256")
PLANNED = "dpadambc, planned"
CONTENDERS = (*contenders.CONTENDERS, PLANNED)


def with_batch_size(problem: Problem, batch_size: int) -> Problem:
    """The problem with a batch that has shapes only."""
    resize = lambda x: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype)
    return problem._replace(batch=jax.tree.map(resize, problem.batch))


def _grad_fn(problem: Problem, contender: str, memory: float) -> contenders.Grad:
    """The gradient; the planned one is in microbatches that the plan says fit."""
    if contender != PLANNED:
        return contenders.CONTENDERS[contender](problem)
    size = contenders.planned_microbatch_size(problem, memory)
    return contenders.private(problem, size)


def peak_bytes(
    problem: Problem, contender: str, batch_size: int, memory: float = math.inf
) -> int:
    """Bytes of the compiled gradient; of the planned one, if so many are allowed."""
    problem = with_batch_size(problem, batch_size)
    args = (problem.params, *problem.batch)
    grad_fn = _grad_fn(problem, contender, memory)
    return timing.peak_bytes(jax.jit(grad_fn).lower(*args).compile())


def largest_exponent(fits: Callable[[int], bool]) -> int | None:
    """The largest number that fits, where all below it do; None if not even 0 does.

    None above `MOST` is tried.
    """
    if not fits(0):
        return None
    low, high = 0, 8
    while fits(high):
        if high == MOST:
            return MOST
        low, high = high, min(high + 8, MOST)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def fits(problem: Problem, contender: str, batch_size: int, memory: float) -> bool:
    """Whether the gradient fits in so many bytes."""
    try:
        return peak_bytes(problem, contender, batch_size, memory) <= memory
    except ValueError:
        if contender == PLANNED:  # not even one example at a time
            return False
        raise


def largest_batch(problem: Problem, contender: str, memory: float) -> int | None:
    """The largest power of 1.25, rounded, whose gradient fits in so many bytes."""
    size = lambda exponent: round(FACTOR**exponent)
    exponent = largest_exponent(
        lambda exponent: fits(problem, contender, size(exponent), memory)
    )
    return None if exponent is None else size(exponent)


def largest_batches(
    problem: Problem, memory: float, names: Sequence[str] = CONTENDERS
) -> dict[str, Any]:
    """The largest batch of every contender, and the microbatches of the planned one."""
    batch_sizes, left_out = {}, {}
    for name in names:
        try:
            batch_sizes[name] = largest_batch(problem, name, memory)
        except ImportError as error:
            left_out[name] = str(error)
    row = {"model": problem.name, "left_out": left_out, "batch_sizes": batch_sizes}
    if planned := batch_sizes.get(PLANNED):
        largest = with_batch_size(problem, planned)
        microbatch_size = contenders.planned_microbatch_size(largest, memory)
        row["planned_microbatch_size"] = microbatch_size
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--memory", type=float, default=8, help="in GiB")
    parser.add_argument("--models", nargs="+", choices=ALL, default=[*MODELS])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS)
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    args = parser.parse_args()
    names = args.contenders or CONTENDERS
    # What is measured again replaces what was recorded.
    results: dict[str, Any] = {"gibibytes": args.memory, "models": {}}
    if args.output.exists():
        recorded = json.loads(args.output.read_text())
        if recorded["gibibytes"] == args.memory:
            results = recorded
    for model in args.models:
        found = largest_batches(ALL[model](), args.memory * 2**30, names)
        results["models"][model] = found | {"environment": environment()}
    args.output.write_text(json.dumps(results, indent=1) + "\n")
    print(table.largest(results))


if __name__ == "__main__":
    main()

"""The peak memory of a process that does nothing but one gradient, in megabytes.

python -m benchmarks.speed.process MODEL CONTENDER [--gpu-sizes]
"""

import argparse
import pathlib
import subprocess
import sys

import jax

from benchmarks.speed import contenders, sizes
from benchmarks.speed.models import Problem

ROOT = pathlib.Path(__file__).parents[2]
CALLS = 3


def peak_megabytes() -> float:
    """The most memory that this process has had.

    `ru_maxrss` would not do: a process inherits it from the one that started it.
    """
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in status if line.startswith("VmHWM:"))
    return float(line.split()[1]) * 1024 / 1e6


def call(problem: Problem, contender: str) -> None:
    """Computes the gradient, over and over."""
    grad_fn = jax.jit(contenders.ALL[contender](problem))
    for _ in range(CALLS):
        jax.block_until_ready(grad_fn(problem.params, *problem.batch))


def in_new_process(model: str, contender: str) -> float:
    """The peak memory of a process of its own."""
    command = [sys.executable, "-m", "benchmarks.speed.process", model, contender]
    process = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    return float(process.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", choices=sorted(sizes.by_name()))
    parser.add_argument("contender", choices=contenders.ALL)
    parser.add_argument("--gpu-sizes", action="store_true")
    args = parser.parse_args()
    call(sizes.by_name(args.gpu_sizes)[args.model](), args.contender)
    print(f"{peak_megabytes():.1f}")


if __name__ == "__main__":
    main()

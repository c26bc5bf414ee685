"""What a device rounds, and what it costs to have it not do so.

    python -m benchmarks.speed.rounding [--output FILE]
    python -m benchmarks.speed.rounding --table          # of what is on record

Accelerators round what they multiply by default; this library asks for full precision
wherever a clipped gradient is summed or its norm is computed. Measured are

1. the product of two factors, as the gradient of a kernel is one, at each precision:
   microseconds, the mean of `CALLS` calls after two warm ones, and the largest error of
   an entry in standard deviations of one;
2. the norm of the clipped gradient of one example, and of the mean of copies of one,
   minus the clip norm of one, of models whose own products are rounded.
"""

import argparse
import json
import math
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dpadambc
from benchmarks import environment
from benchmarks.speed import models
from benchmarks.tables import markdown

RESULTS = pathlib.Path(__file__).with_suffix(".json")
CALLS = 30
SHAPES = ((8_192, 384, 1_536), (32_768, 1_024, 1_024), (32_768, 1_024, 4_096))
COMPARED = 64  # rows and columns of the product, in double precision

_Preset = jax.lax.DotAlgorithmPreset
PRECISIONS: Mapping[str, Any] = {
    "default": None,
    "HIGHEST": jax.lax.Precision.HIGHEST,
    "TF32_TF32_F32_X3": _Preset.TF32_TF32_F32_X3,
    "BF16_BF16_F32_X6": _Preset.BF16_BF16_F32_X6,
}
MODELS: Mapping[str, Callable[[], models.Problem]] = {
    "mlp": lambda: models.mlp(64),
    "cnn5": lambda: models.cnn5(64),
    "lstm": lambda: models.lstm(64),
}
LOSS_SCALE = 1e4  # so that every example is clipped
NUM_EXAMPLES = 6


def product(shape: tuple[int, int, int], precision: Any) -> dict[str, float]:
    """Of factors of shapes (t, i) and (t, j)."""
    rows, *widths = shape
    a, g = (
        np.random.default_rng(seed).standard_normal((rows, width), np.float32)
        for seed, width in enumerate(widths)
    )
    multiply = jax.jit(lambda a, g: jnp.einsum("ti,tj->ij", a, g, precision=precision))
    args = jnp.asarray(a), jnp.asarray(g)
    found = np.asarray(jax.block_until_ready(multiply(*args)), np.float64)
    last = jax.block_until_ready(multiply(*args))
    started = time.perf_counter()
    for _ in range(CALLS):
        last = multiply(*args)
    jax.block_until_ready(last)
    seconds = (time.perf_counter() - started) / CALLS
    few_a, few_g = (x[:, :COMPARED].astype(np.float64) for x in (a, g))
    error = np.abs(found[:COMPARED, :COMPARED] - few_a.T @ few_g).max()
    return {
        "microseconds": round(1e6 * seconds, 1),
        "teraflops": round(2e-12 * math.prod(shape) / seconds, 1),
        "error": float(error / np.sqrt(rows)),
    }


def _norm(tree: Any) -> float:
    """In double precision."""
    squares = (np.sum(np.asarray(x, np.float64) ** 2) for x in jax.tree.leaves(tree))
    return float(np.sqrt(sum(squares)))


def past_the_clip(problem: models.Problem) -> dict[str, float]:
    """How far clipped gradients are past the clip norm, relative to it."""
    number = problem.batch_size
    grad_fn = dpadambc.clipped_grad(
        lambda params, *x: LOSS_SCALE * problem.loss_fn(params, *x),
        l2_clip_norm=1.0,
        normalize_by=1,
    )
    clipped = jax.jit(
        lambda params, *x, padding: dpadambc.materialize(
            grad_fn(params, *x, is_padding_example=padding)
        )
    )
    others = [jnp.arange(number) != i for i in range(NUM_EXAMPLES)]
    of_one = [_norm(clipped(problem.params, *problem.batch, padding=x)) for x in others]
    same = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), problem.batch)
    total = clipped(problem.params, *same, padding=jnp.zeros(number, bool))
    return {
        "most of one example": max(of_one) - 1,
        "least of one example": min(of_one) - 1,
        "mean of copies": _norm(total) / number - 1,
    }


def table(record: Mapping[str, Any]) -> str:
    """Of products, and of clipped norms."""
    body = []
    for shape, by_precision in record["products"].items():
        exact = by_precision["HIGHEST"]["microseconds"]
        for name, row in by_precision.items():
            ratio = f"{row['microseconds'] / exact:.2f}"
            numbers = f"{row['microseconds']:,.0f}", f"{row['teraflops']:.0f}", ratio
            body.append([shape, name, *numbers, f"{row['error']:.1e}"])
    head = ["t, i, j", "precision", "µs", "TFLOP/s", "of HIGHEST", "error"]
    norms = [
        [name, *(f"{x:.1e}" for x in row.values())]
        for name, row in record["norms"].items()
    ]
    names = next(iter(record["norms"].values()))
    return "\n\n".join([markdown(head, body), markdown(["model", *names], norms)])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="measures nothing")
    arguments = parser.parse_args()
    if not arguments.table:
        record = {
            "environment": environment.environment(),
            "products": {
                ", ".join(f"{x:,}" for x in shape): {
                    name: product(shape, x) for name, x in PRECISIONS.items()
                }
                for shape in SHAPES
            },
            "norms": {name: past_the_clip(make()) for name, make in MODELS.items()},
        }
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    print(table(json.loads(arguments.output.read_text())))


if __name__ == "__main__":
    main()

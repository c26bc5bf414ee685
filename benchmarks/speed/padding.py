"""The cost of a step with the padding that Poisson batches have.

    python -m benchmarks.speed.padding [--models NAME ...] [--batch-sizes N ...]
        [--draws N] [--commit NAME] [--output FILE]
    python -m benchmarks.speed.padding --table      # of what is on record
    python -m benchmarks.speed.padding --small      # a trial

Of each model and expected batch size B: a step as `fit` sets it, on batches that the
mechanism draws, each with a number of examples of its own, against a step on exactly B
examples without padding. Both are compiled, warm, and take turns in one process, once
for each draw. The first ratio is of the means, the expected cost; the second of the
medians. The seconds are those of the processor that tracing and compiling takes.
"""

import argparse
import functools
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dpadambc
from benchmarks.environment import environment
from benchmarks.speed import models
from benchmarks.speed.models import Problem
from dpadambc import training
from dpadambc.training.microbatches import with_microbatches

RESULTS = pathlib.Path(__file__).with_suffix(".jsonl")
SAMPLING_PROB = 0.01
BATCH_SIZES = (64, 256, 1_024, 4_096)
WARM = 2  # calls before those that are timed

Sizes = Mapping[str, Callable[[int], Problem]]
GPU: Sizes = {
    "MLP": models.mlp,
    "CNN5": models.cnn5,
    "encoder": functools.partial(models.encoder, length=64),
}
CPU: Sizes = GPU | {
    "encoder": functools.partial(
        models.encoder,
        length=32,
        width=128,
        layers=2,
        heads=4,
        intermediate=512,
        vocabulary=1_000,
    )
}
SMALL: Sizes = {
    "MLP": functools.partial(models.mlp, sizes=(5, 4, 3)),
    "CNN5": functools.partial(models.cnn5, channels=(2, 3, 4, 5, 3), side=16),
    "encoder": functools.partial(
        models.encoder,
        length=4,
        width=8,
        layers=1,
        heads=2,
        intermediate=8,
        vocabulary=20,
    ),
}
# Larger batches take minutes on a processor.
MOST_ON_CPU = {"MLP": 4_096, "CNN5": 1_024, "encoder": 1_024}


def mechanism_of(batch_size: int) -> dpadambc.PoissonGaussian:
    return dpadambc.PoissonGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        sampling_prob=SAMPLING_PROB,
        iterations=1_000,
        normalize_by=batch_size,
    )


def step_of_fit(
    step: training.Step, num_examples: int, problem: Problem
) -> training.Step:
    """The step with the microbatches that `fit` chooses by itself on this device."""
    shape = lambda x: jax.ShapeDtypeStruct((num_examples, *x.shape[1:]), x.dtype)
    data = jax.tree.map(shape, problem.batch)
    state = step.init(problem.params, key=jax.random.key(0))
    return with_microbatches(step, num_examples, state, None, lambda _: data)


def seconds_of(step: Callable[..., Any], state: Any, *args: Any) -> tuple[float, Any]:
    """The time of a step, and the state after it, for which it gave its own."""
    start = time.perf_counter()
    state, _ = jax.block_until_ready(step(state, *args))
    return time.perf_counter() - start, state


def compiled(step: training.Step, *args: Any) -> tuple[Callable[..., Any], float]:
    """The program, and the processor's seconds that it took."""
    start = time.process_time()
    program = jax.jit(step, donate_argnums=0).lower(*args).compile()
    return program, time.process_time() - start


def measure(
    make: Callable[[int], Problem], batch_size: int, draws: int
) -> dict[str, Any]:
    """Times of both steps, by the draws of the mechanism."""
    mechanism, num_examples = (
        mechanism_of(batch_size),
        round(batch_size / SAMPLING_PROB),
    )
    sample = jax.jit(mechanism.sample_step, static_argnames="num_examples")
    masks = [
        sample(jax.random.key(1), i, num_examples=num_examples).is_padding_example
        for i in range(draws)
    ]
    rows = len(masks[0])
    optimizer = dpadambc.adam_bc(1e-3, mechanism)
    problem, padded = make(batch_size), make(rows)

    exact = training.Step(problem.loss_fn, mechanism, optimizer)
    ours = training.Step(padded.loss_fn, mechanism, optimizer, skip_padding=True)
    ours = step_of_fit(ours, num_examples, padded)
    of_exact, of_ours = (
        x.init(problem.params, key=jax.random.key(0)) for x in (exact, ours)
    )
    none = jnp.zeros(batch_size, bool)
    take_exact, of_compiling = compiled(exact, of_exact, problem.batch, none)
    take_ours, of_compiling_ours = compiled(ours, of_ours, padded.batch, masks[0])
    times = {"exact": [], "padded": []}
    for mask in [*masks[:WARM], *masks]:
        seconds, of_exact = seconds_of(take_exact, of_exact, problem.batch, none)
        times["exact"].append(seconds)
        seconds, of_ours = seconds_of(take_ours, of_ours, padded.batch, mask)
        times["padded"].append(seconds)
    times = {name: 1e3 * np.array(x[WARM:]) for name, x in times.items()}
    mean, median = (
        {name: float(f(x)) for name, x in times.items()} for f in (np.mean, np.median)
    )
    taken = [int(rows - mask.sum()) for mask in masks]
    return {
        "batch_size": batch_size,
        "rows": rows,
        "microbatch_size": ours.microbatch_size,
        "draws": draws,
        "compile_cpu_seconds": {
            "exact": round(of_compiling, 2),
            "padded": round(of_compiling_ours, 2),
        },
        "mean_examples": round(float(np.mean(taken)), 1),
        "mean_milliseconds": {name: round(x, 3) for name, x in mean.items()},
        "median_milliseconds": {name: round(x, 3) for name, x in median.items()},
        "ratio_of_means": round(mean["padded"] / mean["exact"], 3),
        "ratio_of_medians": round(median["padded"] / median["exact"], 3),
    }


def table(lines: Iterable[dict[str, Any]]) -> str:
    """The later one of what was measured twice on a device."""
    found = {
        (x["model"], x["device"], x["batch_size"]): x for x in lines if "model" in x
    }
    head = "| model | device | B | rows | microbatches | exact, ms | padded, ms |"
    head += " ratio of means | of medians | to compile, CPU s: exact, padded |"
    body = [
        f"| {x['model']} | {x['device']} | {x['batch_size']:,} | {x['rows']:,}"
        f" | {x['microbatch_size'] or '-'} | {x['mean_milliseconds']['exact']:.1f}"
        f" | {x['mean_milliseconds']['padded']:.1f}"
        f" | {x['ratio_of_means']:.2f} | {x['ratio_of_medians']:.2f}"
        f" | {x['compile_cpu_seconds']['exact']:.1f},"
        f" {x['compile_cpu_seconds']['padded']:.1f} |"
        for x in found.values()
    ]
    return "\n".join([head, f"| --- | --- |{' ---: |' * 8}", *body])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=[*GPU], default=[*GPU])
    add("--batch-sizes", nargs="+", type=int, help="larger ones, on a processor")
    add("--draws", type=int, default=40)
    add("--commit", default="not told")
    add("--output", type=pathlib.Path, default=RESULTS)
    add("--small", action="store_true", help="writes no file")
    add("--table", action="store_true", help="measures nothing")
    arguments = parser.parse_args()
    if arguments.table:
        recorded = arguments.output.read_text().splitlines()
        print(table(map(json.loads, recorded)))
        return
    on_cpu = jax.default_backend() == "cpu"
    sizes, draws = CPU if on_cpu else GPU, arguments.draws
    batch_sizes = arguments.batch_sizes
    if arguments.small:
        sizes, draws, batch_sizes = SMALL, 3, [4]
    output = os.devnull if arguments.small else arguments.output
    lines = [environment() | {"commit": arguments.commit}]
    with open(output, "a") as file:
        print(json.dumps(lines[0]), file=file, flush=True)
        for name in arguments.models:
            most = MOST_ON_CPU[name] if on_cpu else max(BATCH_SIZES)
            chosen = batch_sizes or [x for x in BATCH_SIZES if x <= most]
            for batch_size in chosen:
                which = {"model": name, "device": lines[0]["device"]}
                line = which | measure(sizes[name], batch_size, draws)
                print(json.dumps(line), file=file, flush=True)
                lines.append(line)
    print(table(lines))


if __name__ == "__main__":
    main()

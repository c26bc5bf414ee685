"""The cost of privacy on several models, against the same without privacy.

    python -m benchmarks.speed.run [--rounds N] [--models NAME ...] [--output FILE]

Of each model: the gradient (with clip and sum, without noise) in several ways; a whole
step, DP-AdamBC against Adam; and what comes after the gradient on its own. All of a
section are compiled, warm, and interleaved in one process. Times are ratios within a
round; memory is the compiled program's own analysis and, on a CPU, the peak of a
process that computes nothing else.
"""

import argparse
import importlib.metadata
import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpadambc
from benchmarks.environment import environment
from benchmarks.speed import contenders, limit, process, sizes, table, timing
from benchmarks.speed.models import Problem

RESULTS = pathlib.Path(__file__).with_name("results.json")
ADAM = "adam"

Results = dict[str, dict[str, Any]]
Times = dict[str, np.ndarray]


def mechanism(batch_size: int) -> dpadambc.PoissonGaussian:
    return dpadambc.PoissonGaussian(
        l2_clip_norm=contenders.L2_CLIP_NORM,
        noise_multiplier=1.0,
        sampling_prob=0.01,
        iterations=1_000,
        normalize_by=batch_size,
    )


def noise_and_adambc(
    numbers: dpadambc.PoissonGaussian,
) -> optax.GradientTransformation:
    """What follows a gradient that is clipped and summed."""
    return optax.chain(
        dpadambc.add_dp_noise(numbers.noise_stddev, key=jax.random.key(0)),
        dpadambc.adam_bc(1e-3, numbers.noise_stddev),
    )


def gradient_cases(problem: Problem) -> timing.Cases:
    """The mean gradient of the batch, clipped by all but the baseline."""
    grad_fns, _ = contenders.build(problem)
    args = (problem.params, *problem.arguments)
    return {name: (grad_fn, args) for name, grad_fn in grad_fns.items()}


def step_cases(problem: Problem) -> timing.Cases:
    """A whole step with and without privacy."""
    numbers = mechanism(problem.batch_size)
    adam = optax.adam(1e-3)
    private = noise_and_adambc(numbers)

    def adam_step(params, state, *args):
        grads = contenders.non_private(problem)(params, *args)
        updates, state = adam.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def private_step(params, state, padding, *args):
        grad_fn = dpadambc.clipped_grad(
            problem.loss_fn,
            l2_clip_norm=numbers.l2_clip_norm,
            normalize_by=numbers.normalize_by,
            batch_argnums=problem.batch_argnums,
        )
        grads = grad_fn(params, *args, is_padding_example=padding)
        updates, state = private.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, args = problem.params, problem.arguments
    padding = jnp.zeros(problem.batch_size, bool)
    return {
        ADAM: (adam_step, (params, adam.init(params), *args)),
        "private": (private_step, (params, private.init(params), padding, *args)),
    }


def chain_cases(problem: Problem) -> timing.Cases:
    """What comes after the clipped gradient, and its parts."""
    key, params = jax.random.key(0), problem.params
    numbers, ones = mechanism(1), optax.tree.ones_like(params)
    full = noise_and_adambc(numbers)
    noise = dpadambc.add_dp_noise(numbers.noise_stddev, key=key)
    adam = optax.adam(1e-3)
    clipped = dpadambc.as_clipped_sum(
        ones, l2_clip_norm=numbers.l2_clip_norm, normalize_by=numbers.normalize_by
    )
    args = lambda tx, gradient: (gradient, tx.init(params), params)

    def jax_noise(grads, key):
        return optax.tree.add(grads, optax.tree.random_like(key, grads))

    return {
        ADAM: (adam.update, args(adam, ones)),
        "noise": (noise.update, args(noise, clipped)),
        "jax.random.normal": (jax_noise, (ones, key)),
        "noise and DP-AdamBC": (full.update, args(full, clipped)),
    }


def measure(
    cases: timing.Cases, baseline: str, rounds: int, memory_limit: float = np.inf
) -> tuple[Results, Times]:
    """Time and memory of each case; memory only, of what exceeds the limit (bytes)."""
    compiled = timing.compile_cases(cases)
    peak = {name: timing.peak_bytes(compiled[name]) for name in cases}
    fitting = {name: cases[name] for name in cases if peak[name] <= memory_limit}
    times = timing.interleaved_times(fitting, compiled, rounds)
    results: Results = {
        name: {
            "peak_megabytes": peak[name] / 1e6,
            "memory_ratio": peak[name] / peak[baseline],
        }
        for name in cases
    }
    for name, seconds in times.items():
        results[name]["milliseconds"] = timing.quartiles(1e3 * seconds)
        ratios = seconds / times[baseline][: len(seconds)]
        results[name]["time_ratio"] = timing.quartiles(ratios)
    return results, times


def measure_chain(problem: Problem, rounds: int) -> dict[str, Any]:
    """The chain, and (noise and DP-AdamBC) / (adam + noise), round by round."""
    results, times = measure(chain_cases(problem), ADAM, rounds)
    together = times[ADAM] + times["noise"]
    ratio = timing.quartiles(times["noise and DP-AdamBC"] / together)
    return {"cases": results, "over_adam_plus_noise": ratio}


def measure_model(
    problem: Problem, rounds: int, memory_limit: float = np.inf
) -> dict[str, Any]:
    """All that is measured of one model in this process."""
    gradients, _ = measure(
        gradient_cases(problem), contenders.BASELINE, rounds, memory_limit
    )
    steps, _ = measure(step_cases(problem), ADAM, rounds, memory_limit)
    operations: dict[str, Any] = limit.operations(problem)._asdict()
    if problem.microbatched:
        operations["contenders"] = limit.of_contenders(problem)
    return {
        "command": command(),
        "environment": describe(),
        "model": problem.name,
        "batch_size": problem.batch_size,
        "num_params": problem.num_params,
        "left_out": contenders.build(problem)[1],
        "gradients": gradients,
        "steps": steps,
        "chain": measure_chain(problem, rounds),
        "operations": operations,
    }


def add_resident_megabytes(name: str, gradients: Results) -> None:
    """Adds the peak memory of one process for each gradient that was timed."""
    for contender, case in gradients.items():
        if "milliseconds" in case:
            case["resident_megabytes"] = process.in_new_process(name, contender)


def command() -> str:
    """The command line."""
    return " ".join(["python -m benchmarks.speed.run", *sys.argv[1:]])


def describe() -> dict[str, Any]:
    """Where the results were measured."""
    try:
        version = importlib.metadata.version("jax-privacy")
    except importlib.metadata.PackageNotFoundError:
        version = None
    return environment() | {"jax-privacy": version}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=60)
    names = sorted(sizes.by_name())
    parser.add_argument("--models", nargs="+", choices=names, help="all by default")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--memory-limit", type=float, default=12, help="in GiB")
    parser.add_argument("--gpu-sizes", action="store_true")
    parser.add_argument("--no-processes", action="store_true", help="see process.py")
    args = parser.parse_args()
    defaults = sizes.GPU if args.gpu_sizes else sizes.CPU
    problems = sizes.by_name(args.gpu_sizes)
    order = dict.fromkeys([*sizes.CPU, *sizes.GPU])
    # What is measured again replaces what was recorded.
    results: dict[str, Any] = {"models": {}}
    if args.output.exists():
        results = json.loads(args.output.read_text())
    for name in args.models or defaults:
        row = measure_model(problems[name](), args.rounds, args.memory_limit * 2**30)
        on_cpu = jax.default_backend() == "cpu" and not args.gpu_sizes
        if on_cpu and not args.no_processes:
            add_resident_megabytes(name, row["gradients"])
        measured = results["models"] | {name: row}
        results["models"] = {k: measured[k] for k in order if k in measured}
        args.output.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{name}: done", file=sys.stderr)
    print(table.render(results))


if __name__ == "__main__":
    main()

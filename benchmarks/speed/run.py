"""The cost of one private step against the same step without privacy.

    python -m benchmarks.speed.run [--rounds 60] [--output FILE]

A private step: per-example gradients, clip, noise, DP-AdamBC. An ordinary one: the
gradient of the mean loss, `optax.adam`. Both are compiled, warm, and interleaved in one
process. Times are ratios within a round; memory is the compiled program's own analysis.
"""

import argparse
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import optax

import dpadambc
from benchmarks.environment import environment
from benchmarks.speed import models, timing

RESULTS = pathlib.Path(__file__).with_name("results.json")

MODELS = {
    "MLP 784-512-512-10": models.mlp,
    "CNN 3x3 16-32, 28x28": models.cnn,
}
BATCH_SIZES = (64, 256)


def mechanism(batch_size: int) -> dpadambc.SubsampledGaussian:
    return dpadambc.SubsampledGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        sampling_prob=0.01,
        iterations=1_000,
        normalize_by=batch_size,
    )


def step_cases(problem: models.Problem, batch_size: int) -> timing.Cases:
    """A whole step with and without privacy; `clipped_grad` bounds the memory."""
    key = jax.random.key(0)
    numbers = mechanism(batch_size)
    padding = jnp.zeros(batch_size, bool)
    ordinary = optax.adam(1e-3)
    chained = dpadambc.dp_adambc(1e-3, numbers, key=key)
    pre_clipped = dpadambc.dp_adambc(1e-3, numbers, key=key, pre_clipped=True)

    def adam_step(params, state, *batch):
        grads = jax.grad(models.batch_loss(problem.loss_fn))(params, *batch)
        updates, state = ordinary.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def private_step(params, state, padding, *batch):
        grads = dpadambc.per_example_grad(problem.loss_fn)(params, *batch)
        updates, state = chained.update(
            grads, state, params, is_padding_example=padding
        )
        return optax.apply_updates(params, updates), state

    def microbatched_step(params, state, padding, *batch):
        fun = dpadambc.clipped_grad(problem.loss_fn, 1.0, batch_size, 16)
        grads = fun(params, *batch, is_padding_example=padding)
        updates, state = pre_clipped.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, batch = problem.params, problem.batch
    return {
        "adam": (adam_step, (params, ordinary.init(params), *batch)),
        "private": (private_step, (params, chained.init(params), padding, *batch)),
        "private, microbatches of 16": (
            microbatched_step,
            (params, pre_clipped.init(params), padding, *batch),
        ),
    }


def chain_cases(problem: models.Problem) -> timing.Cases:
    """What comes after the clipped gradient, and its parts."""
    key, params = jax.random.key(0), problem.params
    numbers = mechanism(1)
    full = dpadambc.dp_adambc(1e-3, numbers, key=key, pre_clipped=True)
    noise = dpadambc.add_dp_noise(numbers.noise_stddev, key=key)
    adam = optax.adam(1e-3)
    args = lambda tx: (optax.tree.ones_like(params), tx.init(params), params)
    return {
        "adam": (adam.update, args(adam)),
        "noise": (noise.update, args(noise)),
        "noise and DP-AdamBC": (full.update, args(full)),
    }


def measure(cases: timing.Cases, baseline: str, rounds: int) -> dict[str, Any]:
    compiled = timing.compile_cases(cases)
    times = timing.interleaved_times(cases, compiled, rounds)
    least = timing.peak_bytes(compiled[baseline])
    return {
        name: {
            "milliseconds": timing.quartiles(1e3 * t),
            "time_ratio": timing.quartiles(t / times[baseline]),
            "peak_megabytes": timing.peak_bytes(compiled[name]) / 1e6,
            "memory_ratio": timing.peak_bytes(compiled[name]) / least,
        }
        for name, t in times.items()
    }


def chain_ratio(cases: timing.Cases, rounds: int) -> dict[str, float]:
    """(noise and DP-AdamBC) / (adam + noise), round by round."""
    times = timing.interleaved_times(cases, timing.compile_cases(cases), rounds)
    together = times["adam"] + times["noise"]
    return timing.quartiles(times["noise and DP-AdamBC"] / together)


def run(rounds: int) -> dict[str, Any]:
    steps, chains = [], []
    for name, make in MODELS.items():
        for batch_size in BATCH_SIZES:
            problem = make(batch_size)
            result = measure(step_cases(problem, batch_size), "adam", rounds)
            steps.append({"model": name, "batch_size": batch_size, "cases": result})
            print(f"{name}, batch {batch_size}: done")
        problem = make(1)
        chains.append(
            {
                "model": name,
                "num_params": problem.num_params,
                "cases": measure(chain_cases(problem), "adam", 5 * rounds),
                "over_adam_plus_noise": chain_ratio(chain_cases(problem), 5 * rounds),
            }
        )
    return {
        "command": f"python -m benchmarks.speed.run --rounds {rounds}",
        "environment": environment(),
        "steps": steps,
        "chains": chains,
    }


def spread(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['q1']:.2f} to {ratio['q3']:.2f})"


def markdown(results: dict[str, Any]) -> str:
    """The tables of the README."""
    lines = [
        "| model | batch | step | time, ms | time against Adam | memory, MB |"
        " memory against Adam |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in results["steps"]:
        for name, case in row["cases"].items():
            lines.append(
                f"| {row['model']} | {row['batch_size']} | {name} |"
                f" {case['milliseconds']['median']:.1f} |"
                f" {spread(case['time_ratio'])} | {case['peak_megabytes']:.0f} |"
                f" {case['memory_ratio']:.1f} |"
            )
    lines += [
        "",
        "| model | parameters | `optax.adam`, ms | noise, ms |"
        " noise and DP-AdamBC, ms | over (adam + noise) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in results["chains"]:
        times = [f"{c['milliseconds']['median']:.2f}" for c in row["cases"].values()]
        lines.append(
            f"| {row['model']} | {row['num_params']:,} | {' | '.join(times)} |"
            f" {spread(row['over_adam_plus_noise'])} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    args = parser.parse_args()
    results = run(args.rounds)
    args.output.write_text(json.dumps(results, indent=1) + "\n")
    print(markdown(results))


if __name__ == "__main__":
    main()

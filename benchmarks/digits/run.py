"""The demo: all optimizers on handwritten digits, at one epsilon.

    python -m benchmarks.digits.run [--output-dir demo]

Prints a table, and writes it as results.json beside two pictures: learning_curves.png
and second_moments.png.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import rich.progress

import dpadambc
from benchmarks import environment, experiment, pictures
from benchmarks.digits import data
from benchmarks.experiment import AUTOMATIC, NON_PRIVATE, Data
from benchmarks.tables import markdown, spread
from dpadambc import clipping, diagnostics, training

TARGET_EPSILON, TARGET_DELTA = 3.0, 1e-5
BATCH_SIZE = 256  # expected
ITERATIONS, STEPS_PER_CALL = 300, 15
SEEDS = (0, 1, 2, 3, 4)
LAYER_SIZES = (64, 64, 10)

# The best of eight, a factor of two apart, on a validation part of the training data.
# Epsilon does not account for that search.
LEARNING_RATES = {
    AUTOMATIC: 0.016,
    "DP-SGD": 1.0,
    "DP-Adam": 0.016,
    "DP-AdamBC": 0.004,
    "DP-AdamW": 0.016,
    "DP-AdamW-BC": 0.004,
    NON_PRIVATE: 0.004,
}


class Trained(NamedTuple):
    """One run."""

    state: training.TrainState
    curve: list[float]  # test accuracy before the first step and after every call
    times: list[float]  # after every call


def train(
    method: str, mechanism: dpadambc.PoissonGaussian, data: Data, test: Data, seed: int
) -> Trained:
    """Without privacy, there is no noise and no clip."""
    init_key, key = jax.random.split(jax.random.key(seed))
    params = experiment.init_mlp(init_key, LAYER_SIZES)
    curve, times = [float(experiment.accuracy(params, test))], []

    def record(progress: training.Progress) -> None:
        curve.append(float(experiment.accuracy(progress.params, test)))
        times.append(time.perf_counter())

    result = training.fit(
        experiment.loss_fn,
        params,
        tuple(data),
        mechanism,
        optimizer(method, mechanism),
        key=key,
        target_delta=TARGET_DELTA,
        steps_per_call=STEPS_PER_CALL,
        callback=record,
        progress=False,
    )
    return Trained(result.state, curve, times)


@functools.cache  # one of each, so that it is compiled once
def optimizer(
    method: str, mechanism: dpadambc.PoissonGaussian
) -> optax.GradientTransformation:
    make = experiment.PRIVATE.get(method, experiment.PRIVATE["DP-Adam"])
    return make(LEARNING_RATES[method], mechanism.noise_stddev)


def summary(method: str, runs: Sequence[Trained]) -> dict[str, Any]:
    final = [run.curve[-1] for run in runs]
    # The first call compiles.
    seconds = [s for run in runs for s in np.diff(run.times) / STEPS_PER_CALL]
    snapshot = lambda run: diagnostics.snapshot(run.state.opt_state)
    is_corrected = method.endswith("BC")
    shares = [float(snapshot(x).share_at_floor) for x in runs] if is_corrected else None
    return {
        "learning_rate": LEARNING_RATES[method],
        "test_accuracy": final,
        "seconds_per_step": statistics.median(seconds),
        "share_at_floor": shares and statistics.fmean(shares),
        "learning_curves": [run.curve for run in runs],
    }


def table(report: dict[str, Any]) -> str:
    """± is the standard deviation over seeds; times are without compilation."""
    body = []
    for method, row in report["methods"].items():
        share = row["share_at_floor"]
        epsilon = "∞" if method == NON_PRIVATE else f"{report['epsilon']:.2f}"
        time = f"{1000 * row['seconds_per_step']:.2f}"
        at_floor = "-" if share is None else f"{share:.0%}"
        cells = spread(row["test_accuracy"]), epsilon, time, at_floor
        body.append([method, *cells])
    columns = "test accuracy, %", "ε", "ms per step", "at the floor"
    return markdown(["optimizer", *columns], body)


def run(
    output_dir: pathlib.Path,
    *,
    iterations: int = ITERATIONS,
    seeds: Sequence[int] = SEEDS,
) -> dict[str, Any]:
    """Trains, prints the table, writes results and pictures; returns the results."""
    sides = data.load()
    num_examples = sides[0].num_examples
    mechanism = dpadambc.PoissonGaussian.calibrate(
        target_epsilon=TARGET_EPSILON,
        target_delta=TARGET_DELTA,
        l2_clip_norm=1.0,
        sampling_prob=BATCH_SIZE / num_examples,
        iterations=iterations,
        normalize_by=BATCH_SIZE,
    )
    noiseless = {"noise_multiplier": 0.0, "l2_clip_norm": 1e6}
    others = {
        AUTOMATIC: dataclasses.replace(mechanism, clip_rule=clipping.Automatic()),
        NON_PRIVATE: dataclasses.replace(mechanism, **noiseless),
    }
    epsilon = mechanism.epsilon(TARGET_DELTA)
    print(
        f"{num_examples} training and {sides[1].num_examples} test images; {iterations}"
        f" steps, Poisson sampling at probability {mechanism.sampling_prob:.3f}, noise"
        f" multiplier {mechanism.noise_multiplier:.3f}: ε = {epsilon:.3f} at δ ="
        f" {TARGET_DELTA:g}, under {mechanism.neighboring_relation.name}."
    )
    found = {}
    for method in LEARNING_RATES:
        own = others.get(method, mechanism)
        of_seeds = rich.progress.track(seeds, method)
        found[method] = [train(method, own, *sides, seed) for seed in of_seeds]
    report = {
        "epsilon": epsilon,
        "delta": TARGET_DELTA,
        "noise_multiplier": mechanism.noise_multiplier,
        "environment": environment.environment(),
        "seeds": list(seeds),
        "steps": [0, *range(STEPS_PER_CALL, iterations + 1, STEPS_PER_CALL)],
        "methods": {method: summary(method, runs) for method, runs in found.items()},
    }
    print(table(report))
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / "results.json").write_text(json.dumps(report, indent=2) + "\n")
    curves = {
        method: 100 * np.transpose([run.curve for run in runs])
        for method, runs in found.items()
    }
    learning_curves = pictures.learning_curves(report["steps"], curves)
    learning_curves.savefig(output_dir / "learning_curves.png", dpi=150)
    seen = diagnostics.snapshot(found["DP-AdamBC"][0].state.opt_state)
    moments = pictures.second_moments(seen)
    moments.savefig(output_dir / "second_moments.png", dpi=150)
    print(f"Results and pictures are in {output_dir}.")
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The demo on handwritten digits.")
    parser.add_argument("--output-dir", type=pathlib.Path, default=pathlib.Path("demo"))
    run(parser.parse_args().output_dir)

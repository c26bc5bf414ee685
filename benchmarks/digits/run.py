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
from collections.abc import Sequence
from typing import Any

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


def train(
    method: str, mechanism: dpadambc.PoissonGaussian, data: Data, test: Data, seed: int
) -> tuple[list[float], Any]:
    """Test accuracy before the first step and after every call, and the last state."""
    init_key, key = jax.random.split(jax.random.key(seed))
    params = experiment.init_mlp(init_key, LAYER_SIZES)
    score = lambda params: float(experiment.accuracy(params, test))
    curve = [score(params)]
    result = training.fit(
        experiment.loss_fn,
        params,
        tuple(data),
        mechanism,
        optimizer(method, mechanism),
        key=key,
        target_delta=TARGET_DELTA,
        steps_per_call=STEPS_PER_CALL,
        callbacks=lambda progress: curve.append(score(progress.params)),
        progress=False,
    )
    return curve, result.state.opt_state


@functools.cache  # one of each, so that it is compiled once
def optimizer(
    method: str, mechanism: dpadambc.PoissonGaussian
) -> optax.GradientTransformation:
    make = experiment.PRIVATE.get(method, experiment.PRIVATE["DP-Adam"])
    return make(LEARNING_RATES[method], mechanism.noise_stddev)


def table(report: dict[str, Any]) -> str:
    """± is the standard deviation over seeds."""
    body = []
    for method, row in report["methods"].items():
        share = row["share_at_floor"]
        epsilon = "∞" if method == NON_PRIVATE else f"{report['epsilon']:.2f}"
        accuracy = spread([curve[-1] for curve in row["learning_curves"]])
        at_floor = "-" if share is None else f"{share:.0%}"
        body.append([method, accuracy, epsilon, at_floor])
    return markdown(["optimizer", "test accuracy, %", "ε", "at the floor"], body)


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
    rows, moments = {}, {}
    for method, rate in LEARNING_RATES.items():
        own = others.get(method, mechanism)
        of_seeds = rich.progress.track(seeds, method)
        runs = [train(method, own, *sides, seed) for seed in of_seeds]
        curves, states = zip(*runs, strict=True)
        row = {"learning_rate": rate, "learning_curves": curves, "share_at_floor": None}
        if method.endswith("BC"):
            seen = list(map(diagnostics.snapshot, states))
            moments[method] = seen[0]
            row["share_at_floor"] = float(np.mean([x.share_at_floor for x in seen]))
        rows[method] = row
    report = {
        "epsilon": epsilon,
        "delta": TARGET_DELTA,
        "noise_multiplier": mechanism.noise_multiplier,
        "environment": environment.environment(),
        "seeds": list(seeds),
        "steps": [0, *range(STEPS_PER_CALL, iterations + 1, STEPS_PER_CALL)],
        "methods": rows,
    }
    print(table(report))
    print(
        "At the floor: the share of coordinates whose second moment, with the noise"
        " subtracted, is below what the noise lets one tell from zero. They all are"
        " divided by the same number, the floor."
    )
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / "results.json").write_text(json.dumps(report, indent=2) + "\n")
    curves = {x: 100 * np.transpose(rows[x]["learning_curves"]) for x in rows}
    for name, figure in (
        ("learning_curves", pictures.learning_curves(report["steps"], curves)),
        ("second_moments", pictures.second_moments(moments["DP-AdamBC"])),
    ):
        figure.savefig(output_dir / f"{name}.png", dpi=150)
    print(f"Results and pictures are in {output_dir}.")
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The demo on handwritten digits.")
    parser.add_argument("--output-dir", type=pathlib.Path, default=pathlib.Path("demo"))
    run(parser.parse_args().output_dir)

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
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.console
import rich.progress
import rich.table

import dpadambc
from benchmarks import environment, experiment
from benchmarks.digits import data, pictures

TARGET_EPSILON = 3.0
TARGET_DELTA = 1e-5
EXPECTED_BATCH_SIZE = 256
L2_CLIP_NORM = 1.0
ITERATIONS = 300
STEPS_PER_CHUNK = 15
SEEDS = (0, 1, 2, 3, 4)
TASK = experiment.Mlp((data.NUM_FEATURES, 64, data.NUM_CLASSES))

# Chosen by `python -m benchmarks.digits.tune` on a validation part of the training
# data. Epsilon does not account for that search.
LEARNING_RATES = {
    "DP-SGD": 1.0,
    "DP-Adam": 0.016,
    "DP-AdamBC": 0.004,
    "DP-AdamW": 0.016,
    "DP-AdamW-BC": 0.004,
    experiment.NON_PRIVATE: 0.004,
}


@dataclasses.dataclass
class Result:
    """What is measured of one run."""

    steps: list[int]
    test_accuracy: list[float]
    seconds_per_step: list[float]
    share_at_floor: float | None
    moments: experiment.SecondMoments | None
    clean_second_moment: np.ndarray


def calibrate(
    num_examples: int, iterations: int = ITERATIONS
) -> dpadambc.PoissonGaussian:
    """The mechanism with the least noise for the target."""
    return dpadambc.PoissonGaussian.calibrate(
        target_epsilon=TARGET_EPSILON,
        target_delta=TARGET_DELTA,
        l2_clip_norm=L2_CLIP_NORM,
        sampling_prob=EXPECTED_BATCH_SIZE / num_examples,
        iterations=iterations,
        normalize_by=EXPECTED_BATCH_SIZE,
    )


@jax.jit
def _accumulate(nu: optax.Updates, gradients: optax.Updates) -> optax.Updates:
    """Goes on with the second moment of gradients stacked over steps."""
    update = lambda nu, g: (optax.tree.update_moment(g, nu, experiment.B2, 2), None)
    return jax.lax.scan(update, nu, gradients)[0]


def train_and_measure(
    trainer: experiment.Trainer,
    run: experiment.Run,
    train: experiment.Data,
    test: experiment.Data,
    advance_progress: Callable[[float], Any],
) -> Result:
    """One training, in chunks of steps with an evaluation after each."""
    state = trainer.start(run)
    # Computed from gradients without noise: not private, for the picture only.
    clean_nu = optax.tree.zeros_like(state.params)
    iterations = trainer.mechanism.iterations
    steps, seconds = [0], []
    accuracies = [float(experiment.accuracy(state.params, test))]
    for first in range(0, iterations, STEPS_PER_CHUNK):
        chunk = jnp.arange(first, min(first + STEPS_PER_CHUNK, iterations))
        begin = time.perf_counter()
        state, gradients = jax.block_until_ready(
            trainer.advance(run, state, train, chunk)
        )
        seconds.append((time.perf_counter() - begin) / len(chunk))
        clean_nu = _accumulate(clean_nu, gradients)
        steps.append(first + len(chunk))
        accuracies.append(float(experiment.accuracy(state.params, test)))
        advance_progress(len(chunk))
    moments = experiment.second_moments(state.opt_state)
    return Result(
        steps=steps,
        test_accuracy=accuracies,
        # The first chunk compiles.
        seconds_per_step=seconds[1:],
        share_at_floor=moments.share_at_floor if moments else None,
        moments=moments,
        clean_second_moment=experiment.flat(
            optax.tree.bias_correction(clean_nu, experiment.B2, iterations)
        ),
    )


def _summary(method: str, results: Sequence[Result], epsilon: float) -> dict[str, Any]:
    final = [result.test_accuracy[-1] for result in results]
    shares = [r.share_at_floor for r in results if r.share_at_floor is not None]
    seconds = [s for result in results for s in result.seconds_per_step]
    return {
        "learning_rate": LEARNING_RATES[method],
        "epsilon": epsilon if method in experiment.PRIVATE else None,
        "test_accuracy": final,
        "mean_test_accuracy": statistics.fmean(final),
        "stdev_test_accuracy": statistics.stdev(final) if len(final) > 1 else 0.0,
        "seconds_per_step": statistics.median(seconds) if seconds else None,
        "share_at_floor": statistics.fmean(shares) if shares else None,
        "steps": results[0].steps,
        "learning_curves": [result.test_accuracy for result in results],
    }


def _table(report: dict[str, Any]) -> rich.table.Table:
    table = rich.table.Table(
        title=f"Handwritten digits, {len(report['seeds'])} seeds",
        caption="± is the standard deviation over seeds. Times are warm, on this"
        " machine, without compilation.",
    )
    table.add_column("optimizer")
    for column in ("test accuracy", "ε", "ms per step", "coordinates at the floor"):
        table.add_column(column, justify="right")
    optional = lambda value, form, none="–": (
        none if value is None else f"{value:{form}}"
    )
    milliseconds = lambda s: None if s is None else 1000 * s
    for method, row in report["methods"].items():
        table.add_row(
            method,
            f"{row['mean_test_accuracy']:.1%} ± {row['stdev_test_accuracy']:.1%}",
            optional(row["epsilon"], ".2f", "∞"),
            optional(milliseconds(row["seconds_per_step"]), ".2f"),
            optional(row["share_at_floor"], ".0%"),
        )
    return table


def train_all(
    mechanism: dpadambc.PoissonGaussian,
    train: experiment.Data,
    test: experiment.Data,
    seeds: Sequence[int],
    console: rich.console.Console,
) -> dict[str, list[Result]]:
    """Every optimizer with every seed, with a progress bar for each optimizer."""
    results = {}
    with rich.progress.Progress(console=console) as progress:
        for method in experiment.METHODS:
            task = progress.add_task(method, total=mechanism.iterations * len(seeds))
            advance_progress = functools.partial(progress.advance, task)
            trainer = experiment.Trainer(
                method, mechanism, TASK, returns_gradients=True
            )
            runs = [
                experiment.Run(LEARNING_RATES[method], jax.random.key(seed))
                for seed in seeds
            ]
            results[method] = [
                train_and_measure(trainer, run, train, test, advance_progress)
                for run in runs
            ]
    return results


def _write(report: dict[str, Any], of_adambc: Result, output_dir: pathlib.Path) -> None:
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / "results.json").write_text(json.dumps(report, indent=2) + "\n")
    pictures.learning_curves(report, output_dir / "learning_curves.png")
    assert of_adambc.moments is not None
    pictures.second_moments(
        of_adambc.moments,
        of_adambc.clean_second_moment,
        report,
        output_dir / "second_moments.png",
    )


def run(
    output_dir: pathlib.Path,
    *,
    iterations: int = ITERATIONS,
    seeds: Sequence[int] = SEEDS,
) -> dict[str, Any]:
    """Trains, prints the table, writes results and pictures; returns the results."""
    console = rich.console.Console()
    train, test = data.load()
    mechanism = calibrate(train.num_examples, iterations)
    epsilon = mechanism.epsilon(TARGET_DELTA)
    relation = mechanism.neighboring_relation.name
    console.print(
        f"{train.num_examples} training and {test.num_examples} test images;"
        f" {iterations} steps, each with Poisson sampling at probability"
        f" {mechanism.sampling_prob:.3f} and noise multiplier"
        f" {mechanism.noise_multiplier:.3f}: ε = {epsilon:.3f} at δ ="
        f" {TARGET_DELTA:g}, under {relation}."
    )
    results = train_all(mechanism, train, test, seeds, console)
    report = {
        "epsilon": epsilon,
        "delta": TARGET_DELTA,
        "mechanism": vars(mechanism)
        | {"neighboring_relation": relation, "clip_rule": repr(mechanism.clip_rule)},
        "num_examples": train.num_examples,
        "environment": environment.environment(),
        "seeds": list(seeds),
        "methods": {m: _summary(m, rs, epsilon) for m, rs in results.items()},
    }
    console.print(_table(report))
    _write(report, results["DP-AdamBC"][0], output_dir)
    console.print(f"Results and pictures are in {output_dir}.")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description="The demo on handwritten digits.")
    parser.add_argument("--output-dir", type=pathlib.Path, default=pathlib.Path("demo"))
    run(parser.parse_args().output_dir)


if __name__ == "__main__":
    main()

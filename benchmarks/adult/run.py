"""The Adult benchmark: all optimizers, at four levels of privacy.

    python -m benchmarks.adult.run --data-dir DIR [--output FILE] [--seeds 5]

Each optimizer gets the same number of trials: six learning rates, in steps of about a
factor of three, of which the one with the best validation accuracy is kept. It is then
trained anew on all training data with each of the seeds. Epsilon is that of *one* such
training. It does not account for the search.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import rich.progress

import dpadambc
from benchmarks import environment, experiment
from benchmarks.adult import data, table

TARGET_EPSILONS = (0.5, 1.0, 3.0, 8.0)
TARGET_DELTA = 1e-5
RELATION = dpadambc.NeighboringRelation.ADD_OR_REMOVE_ONE
L2_CLIP_NORM = 1.0
EXPECTED_BATCH_SIZE = 1024
ITERATIONS = 500
NUM_HIDDEN = 64

_ADAM_LEARNING_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
LEARNING_RATES = {
    **dict.fromkeys(experiment.METHODS, _ADAM_LEARNING_RATES),
    "DP-SGD": (0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
}

# Of the validation split and of the trials; the seeds of the results count from 0.
TUNING_SEED = 1_000

RESULTS = pathlib.Path(__file__).parent / "results.json"


def calibrate(target_epsilon: float, num_examples: int) -> dpadambc.PoissonGaussian:
    """The mechanism with the least noise for the target."""
    return dpadambc.PoissonGaussian.calibrate(
        target_epsilon=target_epsilon,
        target_delta=TARGET_DELTA,
        l2_clip_norm=L2_CLIP_NORM,
        sampling_prob=EXPECTED_BATCH_SIZE / num_examples,
        iterations=ITERATIONS,
        normalize_by=EXPECTED_BATCH_SIZE,
        neighboring_relation=RELATION,
    )


def train_and_test(
    trainer: experiment.Trainer,
    learning_rate: float,
    seed: int,
    train: experiment.Data,
    test: experiment.Data,
) -> tuple[float, float | None]:
    """The accuracy on `test`, and the share of coordinates at the floor."""
    run = experiment.Run(learning_rate, jax.random.key(seed))
    steps = jnp.arange(trainer.mechanism.iterations)
    state, _ = trainer.advance(run, trainer.start(run), train, steps)
    moments = experiment.second_moments(state.opt_state)
    share = moments.share_at_floor if moments else None
    return float(experiment.accuracy(state.params, test)), share


def evaluate(
    method: str,
    mechanism: dpadambc.PoissonGaussian,
    adult: data.Adult,
    seeds: Sequence[int],
    on_training: Callable[[], Any],
) -> dict[str, Any]:
    """Chooses the learning rate, then trains with every seed."""
    task = experiment.Mlp((adult.train.features.shape[1], NUM_HIDDEN, 2))
    trainer = experiment.Trainer(method, mechanism, task)
    part, validation = data.split_validation(adult.train, TUNING_SEED)
    # The same noise, on batches of the same expected size.
    tuner = dataclasses.replace(
        trainer,
        mechanism=dataclasses.replace(
            mechanism, sampling_prob=EXPECTED_BATCH_SIZE / part.num_examples
        ),
    )
    trials = {}
    for learning_rate in LEARNING_RATES[method]:
        trials[learning_rate], _ = train_and_test(
            tuner, learning_rate, TUNING_SEED, part, validation
        )
        on_training()
    best = max(trials, key=lambda learning_rate: trials[learning_rate])
    accuracies, shares = [], []
    for seed in seeds:
        accuracy, share = train_and_test(trainer, best, seed, adult.train, adult.test)
        accuracies.append(accuracy)
        shares.append(share)
        on_training()
    return {
        "method": method,
        "learning_rate": best,
        "validation_accuracy_of_trials": trials,
        "test_accuracy": accuracies,
        "mean_test_accuracy": statistics.fmean(accuracies),
        "stdev_test_accuracy": statistics.stdev(accuracies) if len(seeds) > 1 else 0.0,
        "share_at_floor": None if None in shares else statistics.fmean(shares),
    }


def evaluate_all(
    adult: data.Adult, seeds: Sequence[int], on_training: Callable[[], Any]
) -> list[dict[str, Any]]:
    """All private optimizers at all epsilons, then training without privacy."""
    results = []
    mechanisms = {
        target: calibrate(target, adult.train.num_examples)
        for target in TARGET_EPSILONS
    }
    for target_epsilon, mechanism in mechanisms.items():
        privacy = {
            "target_epsilon": target_epsilon,
            "epsilon": mechanism.epsilon(TARGET_DELTA),
            "noise_multiplier": mechanism.noise_multiplier,
        }
        for method in experiment.PRIVATE:
            results.append(
                privacy | evaluate(method, mechanism, adult, seeds, on_training)
            )
    no_privacy = {"target_epsilon": None, "epsilon": None, "noise_multiplier": 0.0}
    # Of this one, only the sampling is used.
    without_noise = dataclasses.replace(
        mechanisms[TARGET_EPSILONS[0]], noise_multiplier=0.0
    )
    method = experiment.NON_PRIVATE
    results.append(
        no_privacy | evaluate(method, without_noise, adult, seeds, on_training)
    )
    return results


def describe(
    adult: data.Adult, seeds: Sequence[int], results: list[dict[str, Any]]
) -> dict[str, Any]:
    """The results with all that it takes to repeat them."""
    return {
        "command": "python -m benchmarks.adult.run --data-dir DIR"
        f" --seeds {len(seeds)}",
        "environment": environment.environment(),
        "data": {
            "sha256": adult.sha256,
            "num_train": adult.train.num_examples,
            "num_test": adult.test.num_examples,
            "num_features": adult.train.features.shape[1],
        },
        "num_hidden": NUM_HIDDEN,
        "iterations": ITERATIONS,
        "expected_batch_size": EXPECTED_BATCH_SIZE,
        "l2_clip_norm": L2_CLIP_NORM,
        "b2": experiment.B2,
        "relative_floor": experiment.VARIANCE_FLOOR.factor,
        "weight_decay": experiment.WEIGHT_DECAY,
        "neighboring_relation": RELATION.name,
        "delta": TARGET_DELTA,
        "tuning_seed": TUNING_SEED,
        "seeds": list(seeds),
        "majority_class_test_accuracy": float(jnp.mean(adult.test.labels == 0)),
        "results": results,
    }


def run(data_dir: pathlib.Path, output: pathlib.Path, num_seeds: int) -> None:
    """Runs everything and writes the results."""
    adult = data.load(data_dir)
    num_runs = len(experiment.PRIVATE) * len(TARGET_EPSILONS) + 1
    num_trials = len(LEARNING_RATES[experiment.NON_PRIVATE])
    with rich.progress.Progress() as progress:
        task = progress.add_task("trainings", total=num_runs * (num_trials + num_seeds))
        results = evaluate_all(adult, range(num_seeds), lambda: progress.advance(task))
    report = describe(adult, range(num_seeds), results)
    output.write_text(json.dumps(report, indent=2) + "\n")
    print(table.render(report))


def main() -> None:
    parser = argparse.ArgumentParser(description="The Adult benchmark.")
    parser.add_argument("--data-dir", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    arguments = parser.parse_args()
    run(arguments.data_dir, arguments.output, arguments.seeds)


if __name__ == "__main__":
    main()

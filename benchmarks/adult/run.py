"""The Adult benchmark: all optimizers, at four levels of privacy.

    python -m benchmarks.adult.run --data-dir DIR [--method DP-Adam] [--epsilon 3]
    python -m benchmarks.adult.run                       # the tables

Each optimizer gets the same number of trials: six learning rates, in steps of about a
factor of three, of which the one with the best validation accuracy is kept. It is then
trained anew on all training data with each of the seeds. Epsilon is that of *one* such
training. It does not account for the search.
"""

import argparse
import itertools
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import dpadambc
from benchmarks import experiment
from benchmarks.adult import data
from benchmarks.experiment import NON_PRIVATE, Data
from benchmarks.methods import methods, tasks
from benchmarks.records import Row
from benchmarks.study import Cell, Study
from benchmarks.tables import by_epsilon, spread
from dpadambc import diagnostics

EPSILONS = (0.5, 1.0, 3.0, 8.0)
TASK = tasks.Task("Adult", (104, 64, 2), 1_024, 500, 1e-5)
MODEL = tasks.model(TASK, is_preconditioned=False)
OF_ADAM = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
OF_SGD = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
SEEDS = (0, 1, 2, 3, 4)
SEED_OF_TRIALS = 1_000  # and of the validation split


def cells(*_: Any) -> list[Cell]:
    """All private optimizers at all epsilons, then training without privacy."""
    private = itertools.product(EPSILONS, experiment.PRIVATE)
    numbers = {
        "num_hidden": TASK.layer_sizes[1],
        "iterations": TASK.iterations,
        "expected_batch_size": TASK.batch_size,
        "seeds": list(SEEDS),
    }
    return [
        Cell(name, e, None, {"method": name, "target_epsilon": e, **numbers})
        for e, name in [*private, (None, NON_PRIVATE)]
    ]


def mechanism(
    target_epsilon: float | None, num_examples: int
) -> dpadambc.PoissonGaussian:
    """With the least noise for the target; without one, no noise and no clip."""
    if target_epsilon is not None:
        return TASK.poisson(target_epsilon, num_examples)
    return dpadambc.PoissonGaussian(
        l2_clip_norm=1e6,
        noise_multiplier=0.0,
        sampling_prob=TASK.batch_size / num_examples,
        iterations=TASK.iterations,
        normalize_by=TASK.batch_size,
    )


def evaluate(cell: Cell, train: Data, test: Data) -> Row:
    """Chooses the learning rate, then trains with every seed."""
    optimizer = experiment.PRIVATE.get(cell.method, experiment.PRIVATE["DP-Adam"])
    make = methods.behind_noise(lambda c, noise: optimizer(c["learning_rate"], noise))

    def run(rates: Sequence[float], seed: int, data: Data, scored: Data):
        keys = jnp.stack([jax.random.key(seed)] * len(rates))
        of_data = mechanism(cell.epsilon, data.num_examples)
        candidates = [{"learning_rate": rate} for rate in rates]
        return methods.train(make, of_data, MODEL, keys, candidates, data, scored)

    rates = OF_SGD if cell.method == "DP-SGD" else OF_ADAM
    fit, validation = experiment.split_validation(train, SEED_OF_TRIALS)
    trials = run(rates, SEED_OF_TRIALS, fit, validation).curve[:, -1]
    best = rates[int(jnp.argmax(trials))]
    # Seed by seed, since runs side by side have the same batches.
    tested = [run([best], seed, train, test) for seed in SEEDS]
    of_all = mechanism(cell.epsilon, train.num_examples)
    is_private, has_floor = cell.epsilon is not None, cell.method.endswith("BC")
    first = lambda tree: jax.tree.map(lambda x: x[0], tree)
    snapshots = [diagnostics.snapshot(first(x.opt_state)) for x in tested if has_floor]
    shares = [float(seen.share_at_floor) for seen in snapshots]
    return {
        "epsilon": of_all.epsilon(TASK.target_delta) if is_private else None,
        "noise_multiplier": of_all.noise_multiplier,
        "learning_rate": best,
        "validation_accuracy_of_trials": dict(zip(rates, trials.tolist(), strict=True)),
        "test_accuracy": [float(x.curve[0, -1]) for x in tested],
        "share_at_floor": statistics.fmean(shares) if has_floor else None,
        "majority_class_test_accuracy": float(jnp.mean(test.labels == 0)),
    }


def prepare(arguments: argparse.Namespace) -> Callable[[Cell], Row]:
    train, test, sha256 = data.load(arguments.data_dir / "adult")
    return lambda cell: evaluate(cell, train, test) | {"sha256": sha256}


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Accuracies, the best of each epsilon in bold, and the settings."""
    means: dict[float | None, dict[str, float]] = {}
    for row in rows:
        of_epsilon = means.setdefault(row["target_epsilon"], {})
        of_epsilon[row["method"]] = statistics.fmean(row["test_accuracy"])

    def accuracy(row: Row) -> str:
        of_epsilon, cell = means[row["target_epsilon"]], spread(row["test_accuracy"])
        is_best = of_epsilon[row["method"]] == max(of_epsilon.values())
        return f"**{cell}**" if is_best else cell

    def settings(row: Row) -> str:
        share = row["share_at_floor"]
        rate = f"{row['learning_rate']:g}"
        return rate if share is None else f"{rate} ({share:.0%})"

    private = [row for row in rows if row["target_epsilon"] is not None]
    table = lambda cell: by_epsilon(
        "optimizer", {(x["method"], x["target_epsilon"]): cell(x) for x in private}
    )
    made = {"accuracy": table(accuracy), "settings": table(settings)}
    if None in means:
        (other,) = (row for row in rows if row["target_epsilon"] is None)
        widest = max(max(x.values()) - min(x.values()) for x in means.values())
        majority = f"{100 * other['majority_class_test_accuracy']:.2f}"
        made["accuracy"] += (
            f"\n\nNo two means of a column are more than {100 * widest:.2f} apart."
            f" Without privacy, Adam reaches {spread(other['test_accuracy'])}; the"
            f" majority class is {majority}."
        )
    return made


STUDY = Study(
    results=pathlib.Path(__file__).with_name("results.jsonl"),
    cells=cells,
    prepare=prepare,
    tables=tables,
)

if __name__ == "__main__":
    STUDY.main(__doc__)

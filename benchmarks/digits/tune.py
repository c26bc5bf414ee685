"""The search for the demo's learning rates, on a validation part of the training data.

    python -m benchmarks.digits.tune

Epsilon does not account for it.
"""

import dataclasses
import statistics

import jax
import jax.numpy as jnp
import rich.console
import rich.progress
import rich.table

from benchmarks import experiment
from benchmarks.digits import data, run

# As many for each, in steps of a factor of two.
LEARNING_RATES = {
    method: [base * 2**i for i in range(8)]
    for method, base in {
        "DP-SGD": 0.125,
        "DP-Adam": 0.0005,
        "DP-AdamBC": 0.0005,
        "DP-AdamW": 0.0005,
        "DP-AdamW-BC": 0.0005,
        experiment.NON_PRIVATE: 0.0005,
    }.items()
}
# None of those of the demo.
SEEDS = (100, 101)


def validation_accuracy(
    trainer: experiment.Trainer,
    learning_rate: float,
    train: experiment.Data,
    validation: experiment.Data,
) -> float:
    """The mean over seeds after the last step."""
    steps = jnp.arange(trainer.mechanism.iterations)
    accuracies = []
    for seed in SEEDS:
        one_run = experiment.Run(learning_rate, jax.random.key(seed))
        state, _ = trainer.advance(one_run, trainer.start(one_run), train, steps)
        accuracies.append(float(experiment.accuracy(state.params, validation)))
    return statistics.fmean(accuracies)


def main() -> None:
    all_of_train, _ = data.load()
    train, validation = data.split_validation(all_of_train)
    # The noise of the demo, on batches of the same expected size.
    mechanism = dataclasses.replace(
        run.calibrate(all_of_train.num_examples),
        sampling_prob=run.EXPECTED_BATCH_SIZE / train.num_examples,
    )
    console = rich.console.Console()
    for method in experiment.METHODS:
        table = rich.table.Table("learning rate", "validation accuracy", title=method)
        trainer = experiment.Trainer(method, mechanism, run.TASK)
        for learning_rate in rich.progress.track(LEARNING_RATES[method], method):
            score = validation_accuracy(trainer, learning_rate, train, validation)
            table.add_row(f"{learning_rate:g}", f"{score:.2%}")
        console.print(table)


if __name__ == "__main__":
    main()

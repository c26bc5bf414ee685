"""All methods on all tasks at four epsilons, with equal trials, in one fair table.

    python -m benchmarks.methods.run --data-dir DIR --cache-dir DIR [--task NAME ...]
    python -m benchmarks.methods.run [--pictures]        # the tables, the picture

Each method has 16 trials at each epsilon, of one seed, on four fifths of the training
part; the best on the other fifth is trained on all of it with five seeds, and tested.
All methods draw the same quantiles of the numbers that they have in common, and see the
same batches, unless their sampling is another. What the search costs is not in epsilon:
`benchmarks.digits.tune` shows how it is accounted for.

What was trained is written down as it ends, and found there by a later call; calls for
different tasks may write to one record.
"""

import argparse
import itertools
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import experiment, records
from benchmarks.methods import options, table, tasks, train
from benchmarks.methods.methods import METHODS, NUM_TRIALS

RESULTS = pathlib.Path(__file__).with_name("results.jsonl")
EPSILONS = (3.0, 1.0, 8.0, 0.5)
NUM_SEEDS = 5
KEY_OF_TRIALS = 1_000


class Laboratory:
    """The examples of one task, and what was trained on them."""

    def __init__(self, task: tasks.Task, parts: tasks.Parts, found: records.Records):
        self._task, self._parts, self._found = task, parts, found

    def compare(self, name: str, epsilon: float) -> None:
        """The trials of a method, and the seeds of the best one."""
        drawn = METHODS[name].candidates()
        rows = [
            {key: float(f"{values[i]:.4g}") for key, values in drawn.items()}
            for i in range(NUM_TRIALS)
        ]
        fit, validation = self._parts.fit, self._parts.validation
        key = jax.random.key(KEY_OF_TRIALS)
        keys = jax.random.split(key, NUM_TRIALS)
        searched = self._get("search", name, epsilon, rows, keys, fit, validation)
        scores = searched["accuracies"]
        best = rows[scores.index(max(scores))]
        # Seed by seed, since runs side by side have the same batches.
        for seed in range(NUM_SEEDS):
            identity = f"seed {seed}"
            key = jax.random.key(seed)[None]
            sides = self._parts.train, self._parts.test
            self._get(identity, name, epsilon, [best], key, *sides)

    def _get(
        self,
        what: str,
        name: str,
        epsilon: float,
        candidates: Sequence[dict[str, float]],
        keys: jax.Array,
        data: experiment.Data,
        held_out: experiment.Data,
    ) -> records.Row:
        identity = {
            "what": what,
            "task": self._task.name,
            "method": name,
            "target_epsilon": epsilon,
            "candidates": list(candidates),
        }

        def make() -> records.Row:
            mechanism: Any = METHODS[name].mechanism(
                self._task, epsilon, data.num_examples
            )
            columns = {
                key: jnp.array([row[key] for row in candidates])
                for key in candidates[0]
            }
            start = time.perf_counter()
            found = train.accuracies(
                name, self._task, mechanism, keys, columns, data, held_out
            )
            scores = [round(float(x), 4) for x in found]
            return {
                "accuracies": scores,
                "noise_multiplier": mechanism.noise_multiplier,
                "seconds": round(time.perf_counter() - start, 1),
            }

        return self._found.get(identity, make)


def todo(arguments: argparse.Namespace) -> Iterator[tuple[float, str]]:
    """Epsilons and methods, so that what is cut off leaves whole columns."""
    return itertools.product(EPSILONS, arguments.method)


def main() -> None:
    parser = options.parser(__doc__, RESULTS)
    parser.add_argument("--method", choices=METHODS, nargs="+", default=METHODS)
    parser.add_argument("--pictures", action="store_true", help="draws the ranks")
    arguments = options.parsed(parser)
    if arguments.data_dir:
        found = records.Records(arguments.output)
        for name in arguments.task:
            parts = tasks.load(name, arguments.data_dir, arguments.cache_dir)
            laboratory = Laboratory(tasks.TASKS[name], parts, found)
            for epsilon, method in todo(arguments):
                laboratory.compare(method, epsilon)
                print(f"{name}: {method} at epsilon {epsilon:g} is done.", flush=True)
    rows = records.read(arguments.output)
    print(table.render(rows))
    if arguments.pictures:
        table.ranks_picture(rows).savefig(arguments.output.with_suffix(".png"), dpi=150)


if __name__ == "__main__":
    main()

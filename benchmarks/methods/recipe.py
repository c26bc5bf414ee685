"""A learning rate without a search: of the steps, and of the size of an input.

    python -m benchmarks.methods.recipe --data-dir DIR --cache-dir DIR [--task NAME]
    python -m benchmarks.methods.recipe                              # the tables

In T steps of Adam, few of which are longer than the learning rate η, a weight moves by
η T at most, and an output of the first layer on an example x by η T |x|_1. The recipe
has one such reach for all tasks and all epsilons:

    η = reach / (T mean |x|_1)

Gradients are clipped at one. For each task the reach is chosen on the validation parts
of the *other* tasks, at all epsilons; then it is tested with five seeds, beside what 16
trials found for the same method, and for the best of all methods (`run`).

The mean of |x|_1 is that of the training part. A user takes it from public data or from
how features are scaled: 0.8 times their number, where they are standardized.
"""

import pathlib
import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import records
from benchmarks.experiment import Data
from benchmarks.methods import options, run, table, tasks, train
from benchmarks.tables import markdown, spread

RESULTS = pathlib.Path(__file__).with_suffix(".jsonl")
REACHES = (5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
METHODS = ("DP-Adam", "AUTO-S, DP-Adam", "DP-AdamBC")
FIXED = {"l2_clip_norm": 1.0, "floor": 1.0}
SEEDS_OF_TRIALS = (1_000, 1_001)


def learning_rate(reach: float, task: tasks.Task, examples: Data) -> float:
    """What moves an output of the first layer by the reach, in all steps together."""
    size = float(jnp.mean(jnp.sum(jnp.abs(examples.features), axis=1)))
    return reach / (task.iterations * size)


class Laboratory:
    """The examples of one task, and what was trained on them."""

    def __init__(self, task: tasks.Task, parts: tasks.Parts, found: records.Records):
        self._task, self._parts, self._found = task, parts, found

    def try_reaches(self, method: str, epsilon: float) -> None:
        """All of them side by side, on validation examples."""
        fit, validation = self._parts.fit, self._parts.validation
        for seed in SEEDS_OF_TRIALS:
            self._get("reaches", method, epsilon, REACHES, seed, fit, validation)

    def test(self, method: str, epsilon: float, reach: float) -> None:
        """One of them, seed by seed."""
        sides = self._parts.train, self._parts.test
        for seed in range(run.NUM_SEEDS):
            self._get("test", method, epsilon, [reach], seed, *sides)

    def _get(
        self,
        what: str,
        method: str,
        epsilon: float,
        reaches: Sequence[float],
        seed: int,
        examples: Data,
        held_out: Data,
    ) -> None:
        task = self._task
        identity = {
            "what": what,
            "task": task.name,
            "method": method,
            "target_epsilon": epsilon,
            "reaches": list(reaches),
            "seed": seed,
        }

        def make() -> records.Row:
            rates = [learning_rate(reach, task, examples) for reach in reaches]
            columns = {name: jnp.full(len(rates), x) for name, x in FIXED.items()}
            columns["learning_rate"] = jnp.asarray(rates, jnp.float32)
            mechanism = task.poisson(epsilon, examples.num_examples)
            keys = jax.random.split(jax.random.key(seed), len(rates))
            start = time.perf_counter()
            scores = train.accuracies(
                method, task, mechanism, keys, columns, examples, held_out
            )
            return {
                "learning_rates": [float(f"{rate:.4g}") for rate in rates],
                "accuracies": [round(float(x), 4) for x in scores],
                "noise_multiplier": mechanism.noise_multiplier,
                "seconds": round(time.perf_counter() - start, 1),
            }

        self._found.get(identity, make)


def grid(rows: Sequence[records.Row], task: str, method: str) -> np.ndarray:
    """Means over seeds on validation examples, shape=(epsilons, reaches)."""
    by_epsilon = []
    for epsilon in sorted(run.EPSILONS):
        scores = [
            row["accuracies"]
            for row in rows
            if (row["what"], row["task"]) == ("reaches", task)
            and (row["method"], row["target_epsilon"]) == (method, epsilon)
        ]
        if scores:
            by_epsilon.append(np.mean(scores, axis=0))
    return np.array(by_epsilon).reshape(-1, len(REACHES))


def chosen(rows: Sequence[records.Row], task: str, method: str) -> float | None:
    """The reach that loses least on the other tasks; none before there are two."""
    others = [grid(rows, other, method) for other in tasks.TASKS if other != task]
    lost = [(x - x.max(axis=1, keepdims=True)).mean(axis=0) for x in others if x.size]
    if len(lost) < 2:
        return None
    return REACHES[int(np.argmax(np.mean(lost, axis=0)))]


def _tests(
    rows: Sequence[records.Row], task: str, method: str, epsilon: float
) -> list[float]:
    """Accuracies on test examples of the reach that was chosen."""
    reach = chosen(rows, task, method)
    return [
        x
        for row in rows
        if (row["what"], row["task"]) == ("test", task)
        and (row["method"], row["target_epsilon"]) == (method, epsilon)
        and row["reaches"] == [reach]
        for x in row["accuracies"]
    ]


def reaches_table(rows: Sequence[records.Row]) -> str:
    """Points below the best reach of a task, the mean over epsilons."""
    body = []
    for method in METHODS:
        for task in tasks.TASKS:
            found = grid(rows, task, method)
            if found.size:
                lost = 100 * (found.max(axis=1, keepdims=True) - found).mean(axis=0)
                body.append([method, task, *(f"{x:.1f}" for x in lost)])
    return markdown(["points lost", "", *(f"reach {x:g}" for x in REACHES)], body)


def tests_table(rows: Sequence[records.Row], tuned: table.Scores) -> str:
    """The recipe on test examples, beside what searches found."""
    body = []
    for task in tasks.TASKS:
        for epsilon in sorted(run.EPSILONS):
            cells, of_all = [], tuned.get((task, epsilon), {})
            for method in METHODS:
                found = _tests(rows, task, method, epsilon)
                cells.append(spread(found) if found else "-")
                searched = of_all.get(method)
                cells.append(spread(searched) if searched else "-")
            if any(cell != "-" for cell in cells[::2]):
                means = {name: statistics.fmean(x) for name, x in of_all.items()}
                best = max(means, key=lambda name: means[name], default=None)
                cells.append(f"{best}: {100 * means[best]:.2f}" if best else "-")
                body.append([task, f"{epsilon:g}", *cells])
    head = [cell for method in METHODS for cell in (method, "tuned")]
    return markdown(["task", "ε", *head, "best of all, tuned"], body)


def summary(rows: Sequence[records.Row], tuned: table.Scores) -> str:
    """Points lost to the same method with 16 trials, and to the best of all methods."""
    body = []
    for method in METHODS:
        own, best = [], []
        for (task, epsilon), of_all in tuned.items():
            found = _tests(rows, task, method, epsilon)
            if found and method in of_all:
                mean = statistics.fmean(found)
                own.append(100 * (statistics.fmean(of_all[method]) - mean))
                best.append(100 * (max(map(statistics.fmean, of_all.values())) - mean))
        if own:
            cells = (statistics.fmean(own), max(own), statistics.fmean(best), max(best))
            body.append([method, f"{len(own)}", *(f"{x:.1f}" for x in cells)])
    head = ["blocks", "to 16 trials", "at most", "to the best of all", "at most"]
    return markdown(["points lost", *head], body)


def render(rows: Sequence[records.Row], tuned: table.Scores) -> str:
    return "\n\n".join(
        [reaches_table(rows), tests_table(rows, tuned), summary(rows, tuned)]
    )


def main() -> None:
    arguments = options.parsed(options.parser(__doc__, RESULTS))
    if arguments.data_dir:
        found = records.Records(arguments.output)
        laboratories = {
            name: Laboratory(
                tasks.TASKS[name],
                tasks.load(name, arguments.data_dir, arguments.cache_dir),
                found,
            )
            for name in arguments.task
        }
        each = [(m, e) for e in run.EPSILONS for m in METHODS]
        for name, laboratory in laboratories.items():
            for method, epsilon in each:
                laboratory.try_reaches(method, epsilon)
                print(f"{name}: {method} at epsilon {epsilon:g} is tried.", flush=True)
        for name, laboratory in laboratories.items():
            for method, epsilon in each:
                reach = chosen(found.rows, name, method)
                if reach is not None:
                    laboratory.test(method, epsilon, reach)
                    print(f"{name}: {method} at {epsilon:g} is tested.", flush=True)
    print(
        render(records.read(arguments.output), table.scores(records.read(run.RESULTS)))
    )


if __name__ == "__main__":
    main()

"""Node-level private training on ogbn-arxiv, with every optimizer.

    python -m benchmarks.ogbn_arxiv_gcn.run --data-dir DIR [--output FILE] [--seeds 5]
        [--methods DP-Adam ...]

For every optimizer and epsilon ten settings are drawn and tried, the best three of them
once more with other noise, and the one with the best mean validation accuracy is
trained anew with each of the seeds. At epsilon 6 and 1 only the five settings are tried
that did best for the optimizer at epsilon 3. Epsilon is that of *one* such training; it
does not account for the search. Every training is written down as it ends, and found
there by a later call, so a run can be cut off and go on.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.progress

from benchmarks import environment, experiment
from benchmarks.ogbn_arxiv_gcn import data, settings, table, training
from benchmarks.ogbn_arxiv_gcn.settings import Setting
from benchmarks.ogbn_arxiv_gcn.table import score

RESULTS = pathlib.Path(__file__).with_name("results.jsonl")
PARTS = ("valid", "test")
NUM_CHUNKS = 10

Row = dict[str, Any]
Get = Callable[[Any, int], Row]  # of a setting and a seed


class Laboratory:
    """The graph and what is made of it, once."""

    def __init__(self, graph: data.Graph):
        self.graph = data.same_part(graph)
        self.task = training.task(self.graph)
        model = self.task.model
        self.evaluators = {
            "inductive": training.Evaluator(model, self.graph),
            "transductive": training.Evaluator(model, graph),
            "alone": training.WithoutNeighbors(model, self.graph),
        }
        self._roots: dict[int, training.Roots] = {}

    def roots(self, setting: Setting) -> training.Roots:
        """The subgraphs of a setting."""
        if setting.max_memberships not in self._roots:
            self._roots[setting.max_memberships] = training.roots(
                self.graph,
                max_memberships=setting.max_memberships,
                max_degree=setting.max_degree,
            )
        return self._roots[setting.max_memberships]

    def accuracies(self, params: Any) -> dict[str, dict[str, float]]:
        """On validation and test nodes, with neighbors and without."""
        return {
            name: evaluator.accuracies(params, PARTS)
            for name, evaluator in self.evaluators.items()
        }


def _numbers(setting: Setting, mechanism: settings.Mechanism) -> Row:
    """What the noise was, and what it costs."""
    deltas = {
        "epsilon": settings.TARGET_DELTA,
        "epsilon_at_other_delta": settings.OTHER_DELTA,
    }
    is_private = setting.target_epsilon is not None
    return {
        "noise_multiplier": mechanism.noise_multiplier,
        "noise_stddev": mechanism.noise_stddev,
        **{
            name: mechanism.epsilon(delta) if is_private else None
            for name, delta in deltas.items()
        },
    }


def _advance(
    trainer: experiment.Trainer,
    run: experiment.Run,
    roots: training.Roots,
    num_chunks: int,
) -> Iterator[tuple[int, float, experiment.State]]:
    """The number of steps taken, seconds for each, and the state, after each chunk."""
    state, steps = trainer.start(run), np.arange(trainer.mechanism.iterations)
    for chunk in np.array_split(steps, num_chunks):
        begin = time.perf_counter()
        state, _ = jax.block_until_ready(
            trainer.advance(run, state, roots, jnp.asarray(chunk))
        )
        yield int(chunk[-1]) + 1, (time.perf_counter() - begin) / len(chunk), state


def _trained(
    laboratory: Laboratory, setting: Setting, seed: int, num_chunks: int
) -> tuple[Row, list[tuple[int, float, experiment.State]]]:
    roots = laboratory.roots(setting)
    mechanism = setting.mechanism(roots.num_examples)
    trainer = experiment.Trainer(
        setting.method, mechanism, laboratory.task, options=setting.options
    )
    run = experiment.Run(setting.learning_rate, jax.random.key(seed))
    row = {"setting": dataclasses.asdict(setting), "seed": seed}
    row |= _numbers(setting, mechanism)
    return row, list(_advance(trainer, run, roots, num_chunks))


def try_out(laboratory: Laboratory, setting: Setting, seed: int) -> Row:
    """One training, and its accuracy on validation nodes."""
    row, ((_, _, state),) = _trained(laboratory, setting, seed, 1)
    names = ("inductive", "alone")
    return row | {
        "accuracy": {
            name: laboratory.evaluators[name].accuracies(state.params, ("valid",))
            for name in names
        }
    }


def train(laboratory: Laboratory, setting: Setting, seed: int) -> Row:
    """One training, and all that is measured of it."""
    row, chunks = _trained(laboratory, setting, seed, NUM_CHUNKS)
    steps, seconds, states = zip(*chunks, strict=True)
    inductive = laboratory.evaluators["inductive"]
    # Post-processing of what is private, and free.
    last = [state.params for state in states[NUM_CHUNKS // 2 :]]
    averaged = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *last)
    floor = dict(setting.options).get("variance_floor", experiment.VARIANCE_FLOOR)
    moments = experiment.second_moments(states[-1].opt_state, floor, setting.correction)
    return row | {
        "accuracy": laboratory.accuracies(states[-1].params),
        "averaged_accuracy": laboratory.accuracies(averaged),
        "steps": steps,
        "validation_curve": [
            inductive.accuracies(state.params, ("valid",))["valid"] for state in states
        ],
        "share_at_floor": moments.share_at_floor if moments else None,
        # The first chunk compiles.
        "seconds_per_step": float(np.median(seconds[1:])),
    }


class Results:
    """A file with a line for each training."""

    def __init__(self, path: pathlib.Path, graph: data.Graph):
        self._path, self._graph = path, graph.name
        self.rows = table.read(path)

    def find(self, setting: Any, seed: int) -> Row | None:
        """The training, if it is there."""
        for row in self.rows:
            # Read as a setting: a line has no field that is younger than it.
            is_here = row["seed"] == seed and row["graph"] == self._graph
            if is_here and type(setting)(**row["setting"]) == setting:
                return row
        return None

    def add(self, row: Row) -> Row:
        """Writes a training down."""
        return self.take_over(
            row | {"graph": self._graph, "environment": environment.environment()}
        )

    def take_over(self, row: Row) -> Row:
        """Writes a training of another record down as it is."""
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)
        return row


def measure(laboratory: Laboratory, setting: Any, seed: int) -> Row:
    """With a seed of the trials on validation nodes alone."""
    is_trial = seed in settings.TUNING_SEEDS
    return (try_out if is_trial else train)(laboratory, setting, seed)


def recorded(
    results: Results, make: Get, total: int, progress: rich.progress.Progress
) -> Get:
    """Looks a training up, or makes it and writes it down."""
    task = progress.add_task("trainings", total=total)

    def get(setting, seed):
        row = results.find(setting, seed) or results.add(make(setting, seed))
        progress.advance(task)
        return row

    return get


def groups(methods: Sequence[str]) -> list[list[Setting]]:
    """The trials of each line of the table: of these optimizers, and of every limit."""
    lines = [
        settings.trials(experiment.NON_PRIVATE, None, alone) for alone in (False, True)
    ]
    for target in settings.TARGET_EPSILONS:
        lines.append(settings.trials("DP-Adam", target, alone=True))
        for method in methods:
            lines.append(settings.trials(method, target))
    return lines


def num_trainings(lines: Sequence[Sequence[settings.Trial]], num_seeds: int) -> int:
    """How many trainings there are in all."""
    short = [line[0].target_epsilon in settings.SHORT_EPSILONS for line in lines]
    trials = [
        min(len(line), settings.NUM_SHORT_TRIALS) if is_short else len(line)
        for line, is_short in zip(lines, short, strict=True)
    ]
    finals = [min(count, settings.NUM_FINALISTS) for count in trials]
    return sum(trials) + sum(finals) + len(trials) * num_seeds


def run_all(
    lines: Sequence[Sequence[settings.Trial]], get: Get, seeds: Sequence[int]
) -> None:
    """Every search, each followed by the seeds of what it found."""
    first, second = settings.TUNING_SEEDS

    rankings: dict[tuple[str, bool], list[int]] = {}
    for line in lines:
        known = (line[0].method, line[0].max_memberships == 0)
        tried = range(len(line))
        if line[0].target_epsilon in settings.SHORT_EPSILONS:
            tried = rankings[known][: settings.NUM_SHORT_TRIALS]
        scores = {i: score(get(line[i], first)) for i in tried}
        ranking = sorted(tried, key=lambda i: scores[i], reverse=True)
        rankings.setdefault(known, ranking)
        finals = {
            i: scores[i] + score(get(line[i], second))
            for i in ranking[: settings.NUM_FINALISTS]
        }
        best = max(finals, key=lambda i: finals[i])
        for seed in seeds:
            get(line[best], seed)


def search(
    lines: Sequence[Sequence[settings.Trial]],
    results: Results,
    make: Get,
    seeds: Sequence[int],
) -> None:
    """Every search, with what is there already and with progress."""
    with rich.progress.Progress() as progress:
        total = num_trainings(lines, len(seeds))
        run_all(lines, recorded(results, make, total, progress), seeds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data-dir", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument(
        "--methods", nargs="+", choices=experiment.PRIVATE, default=experiment.PRIVATE
    )
    arguments = parser.parse_args()
    graph = data.load(arguments.data_dir)
    search(
        groups(arguments.methods),
        Results(arguments.output, graph),
        functools.partial(measure, Laboratory(graph)),
        range(arguments.seeds),
    )


if __name__ == "__main__":
    main()

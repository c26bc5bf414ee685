"""Node-level privacy on Cora, a small citation graph, in under a minute.

    python -m benchmarks.ogbn_arxiv_gcn.cora --data-dir DIR [--seeds 1] [--output FILE]

With 1,208 training nodes privacy is dear: this shows that everything works, on real
data, and not which optimizer is better. Nothing was tuned but the learning rates, by
hand, and epsilon does not account for that.
"""

import argparse
import json
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import rich.console
import rich.table

import dpadambc
from benchmarks import environment, experiment
from benchmarks.ogbn_arxiv_gcn import data, training
from dpadambc import graphs

TARGET_EPSILON = 8.0
TARGET_DELTA = 1e-4
ITERATIONS = 100
SAMPLING_PROB = 1.0
# A constant: the number of nodes may be private.
NORMALIZE_BY = 1_200
LEARNING_RATES = {"DP-Adam": 0.01, "DP-AdamBC": 0.005, experiment.NON_PRIVATE: 0.01}


def mechanism(
    method: str, max_memberships: int
) -> dpadambc.PoissonGaussian | dpadambc.graphs.NodePoissonGaussian:
    """With the least noise for the target; with none without privacy."""
    numbers = {
        "l2_clip_norm": 1.0,
        "sampling_prob": SAMPLING_PROB,
        "iterations": ITERATIONS,
        "normalize_by": NORMALIZE_BY,
    }
    cls = dpadambc.PoissonGaussian
    if max_memberships:
        cls = dpadambc.graphs.NodePoissonGaussian
        numbers["max_terms"] = graphs.max_terms(max_memberships)
    if method == experiment.NON_PRIVATE:
        return cls(noise_multiplier=0.0, **numbers)
    return cls.calibrate(
        target_epsilon=TARGET_EPSILON, target_delta=TARGET_DELTA, **numbers
    )


def train(graph: data.Graph, method: str, max_memberships: int, seed: int = 0):
    """The parameters after the last step."""
    roots = training.roots(
        graph, max_memberships=max_memberships, max_degree=2 * max_memberships
    )
    trainer = experiment.Trainer(
        method,
        mechanism(method, max_memberships),
        training.task(graph),
    )
    run = experiment.Run(LEARNING_RATES[method], jax.random.key(seed))
    state, _ = trainer.advance(run, trainer.start(run), roots, jnp.arange(ITERATIONS))
    return state.params


def measure(graph: data.Graph, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Test accuracy with neighbors, of every optimizer, trained with them or not."""
    inside = data.same_part(graph)
    evaluator = training.Evaluator(training.task(graph).model, inside)
    rows = []
    for method in LEARNING_RATES:
        for max_memberships in (1, 0):
            accuracies = [
                evaluator.accuracies(
                    train(inside, method, max_memberships, seed), ("test",)
                )["test"]
                for seed in seeds
            ]
            row = {"method": method, "max_memberships": max_memberships}
            rows.append(row | {"test_accuracy": accuracies})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data-dir", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, help="where to keep results")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    arguments = parser.parse_args()
    seeds = range(arguments.seeds)
    graph = data.load_cora(arguments.data_dir)
    report = {
        "environment": environment.environment(),
        "epsilon": TARGET_EPSILON,
        "delta": TARGET_DELTA,
        "seeds": list(seeds),
        "majority_class_test_accuracy": graph.majority_share,
        "rows": measure(graph, seeds),
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    table = rich.table.Table("optimizer", "K", "test accuracy")
    for row in report["rows"]:
        found = row["test_accuracy"]
        spread = f" ± {statistics.stdev(found):.1%}" if len(found) > 1 else ""
        cell = f"{statistics.fmean(found):.1%}{spread}"
        table.add_row(row["method"], str(row["max_memberships"]), cell)
    table.title = f"Cora at ε = {TARGET_EPSILON:g}, δ = {TARGET_DELTA:g}"
    table.caption = (
        "All with neighbors at prediction; K = 0 is trained on nodes alone. The"
        f" majority class is {graph.majority_share:.1%}."
    )
    rich.console.Console().print(table)


if __name__ == "__main__":
    main()

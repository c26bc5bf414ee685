"""Node-level privacy on Cora, a small citation graph, in under a minute.

    python -m benchmarks.ogbn_arxiv_gcn.cora --data-dir DIR

With 1,208 training nodes privacy is dear: this shows that everything works, on real
data, and not which optimizer is better. Nothing was tuned but the learning rates, by
hand, and epsilon does not account for that.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import rich.console
import rich.table

import dpadambc
from benchmarks import experiment
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
) -> dpadambc.SubsampledGaussian | dpadambc.SubsampledMultiTermGaussian:
    """With the least noise for the target; with none without privacy."""
    numbers = {
        "l2_clip_norm": 1.0,
        "sampling_prob": SAMPLING_PROB,
        "iterations": ITERATIONS,
        "normalize_by": NORMALIZE_BY,
    }
    cls = dpadambc.SubsampledGaussian
    if max_memberships:
        cls = dpadambc.SubsampledMultiTermGaussian
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data-dir", type=pathlib.Path, required=True)
    graph = data.load_cora(parser.parse_args().data_dir)
    inside = data.same_part(graph)
    evaluator = training.Evaluator(training.task(graph).model, inside)
    table = rich.table.Table(
        title=f"Cora at ε = {TARGET_EPSILON:g}, δ = {TARGET_DELTA:g}, one seed"
    )
    for column in ("optimizer", "trained with neighbours", "on nodes alone"):
        table.add_column(column)
    for method in LEARNING_RATES:
        cells = []
        for max_memberships in (1, 0):
            params = train(inside, method, max_memberships)
            accuracy = evaluator.accuracies(params, ("test",))["test"]
            cells.append(f"{accuracy:.1%}")
        table.add_row(method, *cells)
    table.caption = (
        "Test accuracy, with neighbours at prediction;"
        f" the majority class is {graph.majority_share:.1%}."
    )
    rich.console.Console().print(table)


if __name__ == "__main__":
    main()

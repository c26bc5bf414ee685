"""Seconds of a step of 10,000 roots, against what the arithmetic alone would take.

    python -m benchmarks.ogbn_arxiv_gcn.limit --data-dir DIR

The limit is the number of operations of the compiled step over those that this machine
does in a second in a large product of matrices.
"""

import argparse
import json
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import environment, experiment
from benchmarks.ogbn_arxiv_gcn import data, training
from benchmarks.ogbn_arxiv_gcn.settings import Setting
from benchmarks.speed import limit, timing

RESULTS = pathlib.Path(__file__).with_name("limit.json")
MAX_MEMBERSHIPS = (0, 1, 3, 7)
EXPECTED_BATCH_SIZE = 10_000
METHODS = ("DP-AdamBC", experiment.NON_PRIVATE)
WIDTH = 3_000  # of the product that measures the machine


def _setting(method: str, max_memberships: int) -> Setting:
    return Setting(
        method=method,
        target_epsilon=None if method == experiment.NON_PRIVATE else 3.0,
        max_memberships=max_memberships,
        expected_batch_size=EXPECTED_BATCH_SIZE,
        iterations=100,
        l2_clip_norm=1.0,
        learning_rate=1e-3,
    )


def operations_per_second(rounds: int) -> float:
    """Of a product of two large matrices."""
    x = jnp.ones((WIDTH, WIDTH))
    cases: timing.Cases = {"product": (jnp.dot, (x, x))}
    times = timing.interleaved_times(cases, timing.compile_cases(cases), rounds)
    return 2 * WIDTH**3 / float(times["product"].min())


def steps(graph: data.Graph, max_memberships: int, rounds: int) -> list[dict[str, Any]]:
    """The same step with and without privacy: sample, gather, gradient, update."""
    start = time.perf_counter()
    roots = training.roots(
        graph, max_memberships=max_memberships, max_degree=2 * max_memberships
    )
    seconds_for_subgraphs = time.perf_counter() - start
    cases: timing.Cases = {}
    for method in METHODS:
        mechanism = _setting(method, max_memberships).mechanism(roots.num_examples)
        trainer = experiment.Trainer(method, mechanism, training.task(graph))
        run = experiment.Run(1e-3, jax.random.key(0))
        arguments = run, trainer.start(run), roots, jnp.arange(1)
        cases[method] = trainer.advance, arguments
    compiled = timing.compile_cases(cases)
    times = timing.interleaved_times(cases, compiled, rounds)
    return [
        {
            "method": method,
            "max_memberships": max_memberships,
            "seconds": timing.quartiles(times[method]),
            "ratio": timing.quartiles(times[method] / times[experiment.NON_PRIVATE]),
            "operations": limit.count(cases[method][0], *cases[method][1]),
            "peak_bytes": timing.peak_bytes(compiled[method]),
            "seconds_for_subgraphs": seconds_for_subgraphs,
        }
        for method in METHODS
    ]


def render(report: dict[str, Any]) -> str:
    """The table in Markdown."""
    rate = report["operations_per_second"]
    lines = [
        f"A product of matrices runs at {rate / 1e9:.0f} GFLOP/s.",
        "",
        "| K | step | ms | against Adam | GFLOP | limit, ms | over the limit | MB |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in report["steps"]:
        seconds, ratio = row["seconds"], row["ratio"]
        least = row["operations"] / rate
        cells = (
            str(row["max_memberships"]),
            row["method"],
            f"{1e3 * seconds['median']:.0f}",
            f"{ratio['median']:.2f} ({ratio['q1']:.2f} to {ratio['q3']:.2f})",
            f"{row['operations'] / 1e9:.1f}",
            f"{1e3 * least:.0f}",
            f"{seconds['median'] / least:.2f}",
            f"{row['peak_bytes'] / 1e6:,.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data-dir", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    graph = data.same_part(data.load(arguments.data_dir))
    report: dict[str, Any] = {
        "graph": graph.name,
        "environment": environment.environment(),
        "majority_class_test_accuracy": graph.majority_share,
        "operations_per_second": operations_per_second(arguments.rounds),
    }
    report["steps"] = [
        row
        for max_memberships in MAX_MEMBERSHIPS
        for row in steps(graph, max_memberships, arguments.rounds)
    ]
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    print(render(report))


if __name__ == "__main__":
    main()

"""Seconds of a step of 10,000 roots, against what the arithmetic alone would take.

    python -m benchmarks.ogbn_arxiv_gcn.limit [--data-dir DIR]

The limit is the number of operations of the compiled step over those that this machine
does in a second in a large product of matrices.
"""

import argparse
import pathlib
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import optax

from benchmarks import experiment
from benchmarks.ogbn_arxiv_gcn import data, laboratory
from benchmarks.ogbn_arxiv_gcn.settings import Setting
from benchmarks.records import Row
from benchmarks.speed import limit, timing
from benchmarks.study import Cell, Find, Study
from benchmarks.tables import markdown
from dpadambc import training

RESULTS = pathlib.Path(__file__).with_name("limit.jsonl")
METHOD = "DP-AdamBC"
MAX_MEMBERSHIPS = (0, 1, 3, 7)
WIDTH = 3_000  # of the product that measures the machine
ROUNDS = 15


def operations_per_second() -> float:
    """Of a product of two large matrices."""
    x = jnp.ones((WIDTH, WIDTH))
    cases: timing.Cases = {"product": (jnp.dot, (x, x))}
    times = timing.interleaved_times(cases, timing.compile_cases(cases), ROUNDS)
    return 2 * WIDTH**3 / float(times["product"].min())


def steps(made: laboratory.Laboratory, setting: Setting) -> timing.Cases:
    """The same step with and without privacy: sample, gather, gradient, update."""
    loss_fn, examples, nodes = made.examples(setting)
    loss = lambda params, *rest: loss_fn(made.model, params, *rest)
    shared = () if nodes is None else (nodes,)
    mechanism = setting.mechanism(len(examples[1]))
    optimizer = setting.optimizer(mechanism.noise_stddev)
    step = training.Step(loss, mechanism, optimizer)
    params = made.model.init(jax.random.key(0), made.graph.features[0])
    state, adam = step.init(params, key=jax.random.key(1)), optax.adam(1e-3)

    def drawn(state, examples):
        batch = training.draw_batch(mechanism, state, num_examples=len(examples[1]))
        return batch.gather(examples), batch.is_padding_example

    def private(state, examples, *shared):
        return step(state, *drawn(state, examples), *shared)[0]

    def plain(state, opt_state, examples, *shared):
        rows, is_padding = drawn(state, examples)
        in_axes = (None, *(None for _ in shared), *(0 for _ in rows))
        losses = jax.vmap(loss, in_axes)
        mean = lambda p: jnp.mean(losses(p, *shared, *rows), where=~is_padding)
        updates, opt_state = adam.update(jax.grad(mean)(state.params), opt_state)
        return optax.apply_updates(state.params, updates), opt_state

    examples = jax.tree.map(jnp.asarray, examples)
    return {
        METHOD: (private, (state, examples, *shared)),
        experiment.NON_PRIVATE: (plain, (state, adam.init(params), examples, *shared)),
    }


def cells(find: Find, arguments: argparse.Namespace) -> Iterator[Cell]:
    graph = data.name(arguments.data_dir / laboratory.FOLDER)
    for k in MAX_MEMBERSHIPS:
        setting = Setting(METHOD, 3.0, k, 10_000, 100, 1.0, 1e-3)
        identity = {"graph": graph, "max_memberships": k}
        yield Cell(METHOD, setting.target_epsilon, None, identity, setting)


def prepare(arguments: argparse.Namespace) -> Callable[[Cell], Row]:
    graph = data.load(arguments.data_dir / laboratory.FOLDER)
    made, rate = laboratory.Laboratory(graph), operations_per_second()

    def measure(cell: Cell) -> Row:
        cases = steps(made, cell.setting)
        compiled = timing.compile_cases(cases)
        times = timing.interleaved_times(cases, compiled, ROUNDS)
        found = [
            {
                "method": method,
                "seconds": timing.quartiles(times[method]),
                "ratio": timing.quartiles(
                    times[method] / times[experiment.NON_PRIVATE]
                ),
                "operations": limit.count(cases[method][0], *cases[method][1]),
                "peak_bytes": timing.peak_bytes(compiled[method]),
            }
            for method in cases
        ]
        return {"operations_per_second": rate, "steps": found}

    return measure


def _cells(row: Row, step: Row) -> list[str]:
    seconds = step["seconds"]["median"]
    least = step["operations"] / row["operations_per_second"]
    return [
        f"{row['max_memberships']}",
        step["method"],
        f"{1e3 * seconds:.0f}",
        "{median:.2f} ({q1:.2f} to {q3:.2f})".format(**step["ratio"]),
        f"{step['operations'] / 1e9:.1f}",
        f"{1e3 * least:.0f}",
        f"{seconds / least:.2f}",
        f"{step['peak_bytes'] / 1e6:,.0f}",
    ]


def tables(rows: Sequence[Row]) -> dict[str, str]:
    head = ["K", "step", "ms", "against Adam", "GFLOP", "limit, ms", "over the limit"]
    body = [_cells(row, step) for row in rows for step in row["steps"]]
    rate = f"{rows[0]['operations_per_second'] / 1e9:.0f} GFLOP/s"
    told = f"A product of matrices runs at {rate}."
    return {"limit": f"{told}\n\n{markdown([*head, 'MB'], body)}"}


STUDY = Study(RESULTS, cells, prepare, laboratory.of_each_graph(tables))

if __name__ == "__main__":
    STUDY.main(__doc__)

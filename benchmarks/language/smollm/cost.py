"""Seconds and memory of a private step of SmolLM2-135M against an ordinary one.

    python -m benchmarks.language.smollm.cost [--run] [--rounds 5] [--length 64 512]

The steps of `benchmarks.speed`, with noise and DP-AdamBC or with Adam, take turns in
one process, on random weights. A batch has `--tokens` in all, and half of a row is the
text that the loss is of. Without --run it prints the table of what is on record.
"""

import argparse
import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.language.smollm import texts
from benchmarks.language.smollm.model import Config, Llama
from benchmarks.records import Row
from benchmarks.speed import gpu, timing
from benchmarks.speed.models import Problem
from benchmarks.study import Cell, Find, Study
from benchmarks.tables import markdown
from dpadambc import training

RESULTS = pathlib.Path(__file__).with_suffix(".jsonl")
KINDS = "ordinary", "private"


def problem_of(
    config: Config, length: int, batch_size: int, dtype: jax.typing.DTypeLike
) -> Problem:
    """The loss by adapters, if the model has some, or else by all parameters."""
    way = "lora" if config.rank else "full"
    parts = texts.split(Llama(config, rngs=nnx.Rngs(0)), way)
    parts = parts._replace(length=length // 2)
    rng, shape = np.random.default_rng(0), (batch_size, length)
    tokens = rng.integers(texts.END + 1, config.num_tokens, shape).astype(np.int32)
    batch = tokens, np.full(batch_size, length - parts.length, np.int32)
    loss_fn = training.with_compute_dtype(parts.loss_fn, dtype)
    mean_loss = lambda *args: jnp.mean(jax.vmap(loss_fn, (None, None, 0, 0))(*args))
    return Problem(
        way, loss_fn, mean_loss, parts.trained, batch, frozen=(parts.frozen,)
    )


def timed(problem: Problem, rounds: int) -> Row:
    """Seconds and bytes of both steps, and the ratio of seconds."""
    cases = gpu.steps(problem)
    compiled = timing.compile_cases(cases)
    seconds = timing.interleaved_times(cases, compiled, rounds)
    ratio = timing.quartiles(seconds["private"] / seconds["ordinary"])
    return {
        "seconds": {f"{x} step": timing.quartiles(seconds[x]) for x in KINDS},
        "peak_bytes": {f"{x} step": timing.peak_bytes(compiled[x]) for x in KINDS},
        "ratio_of_step": ratio,
    }


def cells(find: Find, arguments: argparse.Namespace) -> Iterator[Cell]:
    is_on_cpu = jax.default_backend() == "cpu"
    for length, way in itertools.product(arguments.length, ("lora", "full")):
        identity = {
            "way": way,
            "length": length,
            "batch_size": arguments.tokens // length,
            "num_blocks": Config().num_blocks,
            "dtype": "float32" if is_on_cpu else "bfloat16",
            "device": jax.devices()[0].device_kind,
        }
        yield Cell(way, None, None, identity)


def prepare(arguments: argparse.Namespace) -> Callable[[Cell], Row]:
    def measure(cell: Cell) -> Row:
        config = Config(rank=texts.RANK if cell.method == "lora" else 0)
        sizes = (cell.identity[name] for name in ("length", "batch_size", "dtype"))
        return timed(problem_of(config, *sizes), arguments.rounds)

    return measure


def table(rows: Sequence[Row]) -> str:
    """One line for each way and length: ordinary, private, and their ratio."""
    body = []
    for row in rows:
        seconds = [row["seconds"][f"{x} step"]["median"] for x in KINDS]
        megabytes = [row["peak_bytes"][f"{x} step"] / 1e6 for x in KINDS]
        ratio = row["ratio_of_step"]
        line = [row["way"], str(row["length"]), *(f"{x:.2f}" for x in seconds)]
        line += [f"{ratio['median']:.2f} ({ratio['q1']:.2f} to {ratio['q3']:.2f})"]
        line += [f"{x:,.0f}" for x in megabytes]
        body.append([*line, f"{megabytes[1] / megabytes[0]:.2f}"])
    head = "way", "tokens", "s", "s, private", "ratio", "MB", "MB, private", "ratio"
    return markdown(head, body)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=512, help="of a batch")
    parser.add_argument("--length", type=int, nargs="+", default=(64, 512))


TABLES = lambda rows: {"cost": table(rows)}
STUDY = Study(RESULTS, cells, prepare, TABLES, options=options, needs_data=False)

if __name__ == "__main__":
    STUDY.main(__doc__)

"""Seconds and memory of a private step of SmolLM2-135M against an ordinary one.

    python -m benchmarks.language.smollm.cost [--rounds 5] [--length 64 512]
    python -m benchmarks.language.smollm.cost --table        # of what is on record

As `benchmarks.language.cost` does it, on random weights. A batch has `--tokens` in all,
and half of a row is the text that the loss is of.
"""

import argparse
import itertools
import pathlib
from collections.abc import Callable, Iterator

import jax
import numpy as np
from flax import nnx

from benchmarks.language import cost
from benchmarks.language.smollm import texts
from benchmarks.language.smollm.model import Config, Llama
from benchmarks.records import Row
from benchmarks.speed import timing
from benchmarks.study import Cell, Find, Study
from dpadambc import training

WAYS, LENGTHS, TOKENS, RANK = ("lora", "full"), (64, 512), 512, 8


def cases_of(
    config: Config, length: int, batch_size: int, dtype: jax.typing.DTypeLike
) -> timing.Cases:
    """The programs of adapters, if the model has some, or else of all parameters."""
    way = "lora" if config.rank else "full"
    parts = texts.split(Llama(config, rngs=nnx.Rngs(0)), way)
    parts = parts._replace(length=length // 2)
    rng, shape = np.random.default_rng(0), (batch_size, length)
    tokens = rng.integers(texts.END + 1, config.num_tokens, shape).astype(np.int32)
    first = np.full(batch_size, length - parts.length, np.int32)
    loss_fn = training.with_compute_dtype(parts.loss_fn, dtype)
    return cost.programs(loss_fn, parts.trained, (parts.frozen, tokens, first))


def cells(find: Find, arguments: argparse.Namespace) -> Iterator[Cell]:
    for length, way in itertools.product(arguments.length, arguments.way):
        identity = {
            "way": way,
            "length": length,
            "batch_size": arguments.tokens // length,
            "num_blocks": arguments.blocks,
            "dtype": arguments.dtype,
            "device": jax.devices()[0].device_kind,
        }
        yield Cell(way, None, None, identity)


def prepare(arguments: argparse.Namespace) -> Callable[[Cell], Row]:
    def measure(cell: Cell) -> Row:
        of, rank = cell.identity, RANK if cell.method == "lora" else 0
        config = Config(num_blocks=of["num_blocks"], rank=rank)
        cases = cases_of(config, of["length"], of["batch_size"], of["dtype"])
        return cost.timed(cases, arguments.rounds)

    return measure


def options(parser: argparse.ArgumentParser) -> None:
    cost.options(parser)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a batch")
    parser.add_argument("--length", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--way", choices=WAYS, nargs="+", default=WAYS)
    parser.add_argument("--blocks", type=int, default=Config().num_blocks)
    default = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=default)


RESULTS = pathlib.Path(__file__).with_suffix(".jsonl")
TABLES = lambda rows: {"cost": cost.table(rows)}
STUDY = Study(RESULTS, cells, prepare, TABLES, options=options)

if __name__ == "__main__":
    STUDY.main(__doc__)

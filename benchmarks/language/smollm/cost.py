"""Seconds and memory of a private step of SmolLM2-135M against an ordinary one.

    python -m benchmarks.language.smollm.cost [--rounds 5] [--length 64 512]
    python -m benchmarks.language.smollm.cost --table        # of what is on record

As `benchmarks.language.cost` does it: four programs in turns in one process, on rows of
full length with made-up tokens, and random weights. Each row has `--tokens` in all, and
half of a row is the text that the loss is of. A row is written as it comes, and none is
measured twice.
"""

import argparse
import itertools
import pathlib

import jax
import numpy as np
from flax import nnx

from benchmarks import records
from benchmarks.language import cost
from benchmarks.language.smollm import texts
from benchmarks.language.smollm.model import Config, Llama
from benchmarks.speed import timing
from dpadambc import training

RESULTS = pathlib.Path(__file__).with_suffix(".jsonl")
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
    return cost.programs(loss_fn, parts.trained, parts.frozen, (tokens, first))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a batch")
    parser.add_argument("--length", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--way", choices=WAYS, nargs="+", default=WAYS)
    parser.add_argument("--blocks", type=int, default=Config().num_blocks)
    default = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=default)
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="measures nothing")
    arguments = parser.parse_args()
    found = records.Records(arguments.output)
    asked = itertools.product(arguments.length, arguments.way)
    for length, way in [] if arguments.table else asked:
        rank = RANK if way == "lora" else 0
        config = Config(num_blocks=arguments.blocks, rank=rank)
        batch_size = arguments.tokens // length
        identity = {
            "way": way,
            "length": length,
            "batch_size": batch_size,
            "num_blocks": arguments.blocks,
            "dtype": arguments.dtype,
            "device": jax.devices()[0].device_kind,
        }
        cases = cases_of(config, length, batch_size, arguments.dtype)
        found.get(identity, lambda cases=cases: cost.timed(cases, arguments.rounds))
    print(cost.table(records.read(arguments.output)))


if __name__ == "__main__":
    main()

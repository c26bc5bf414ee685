"""SST-2 by a linear probe on the embeddings of MiniLM, by equal searches.

    python -m benchmarks.language.probe --data-dir DIR --cache-dir DIR [--seeds 5]
    python -m benchmarks.language.probe [--pictures]     # the tables, the curves

The first call computes what MiniLM sees in each sentence, and keeps it in the cache:
3.4 GB, since fine-tuning the last block needs the hidden states. Each optimizer has
twelve random trials at each epsilon, on all training sentences but 3,000; the best on
these is trained on all of them, with five seeds, and tested on GLUE's development set.
Every training is written down as it ends, and found there by a later call.
"""

import argparse
import functools
import pathlib

import jax.numpy as jnp
import numpy as np

from benchmarks import records
from benchmarks.language import data, encoder, features
from benchmarks.probe import command, linear, search, table

RESULTS = pathlib.Path(__file__).with_suffix(".jsonl")
MAX_LENGTH = 64  # tokens; less than one sentence in a thousand is longer

PROTOCOL = search.Protocol(
    features="MiniLM, mean of the hidden states",
    num_classes=2,
    budgets=tuple(
        search.Budget(target_epsilon, batch_size=4_096, iterations=100)
        for target_epsilon in (1.0, 3.0, 8.0)
    ),
    l2_clip_norm=0.5,
    learning_rates_of_sgd=(3.0, 300.0),
    learning_rates_of_adam=(0.02, 2.0),
    trials_at_once=1,
)


def embeddings(arguments: argparse.Namespace, split: str) -> linear.Data:
    """Of the sentences in a file of SST-2, of norm 1."""
    examples = data.load(arguments.data_dir, "sst2", split)
    texts = data.cached(examples, MAX_LENGTH, arguments.cache_dir, data.tokenizer())
    pooled = features.extract(texts, arguments.cache_dir, encoder.load()).pooled
    units = pooled / np.linalg.norm(pooled, axis=-1, keepdims=True)
    return linear.Data(jnp.asarray(units), jnp.asarray(texts.labels))


def run(arguments: argparse.Namespace) -> None:
    """Everything that is not on record."""
    train, test = (embeddings(arguments, split) for split in ("train", "dev"))
    runs = search.Laboratory(
        PROTOCOL,
        train,
        test,
        data.split_validation(len(train.labels)),
        records.Records(arguments.output),
    )
    runs.all_optimizers(arguments.seeds)
    runs.without_privacy()


if __name__ == "__main__":
    render = functools.partial(table.render, goals={})
    command.main(__doc__, RESULTS, run, render)

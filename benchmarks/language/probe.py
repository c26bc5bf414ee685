"""SST-2 by a linear probe on the embeddings of MiniLM, by equal searches.

    python -m benchmarks.language.probe [--data-dir DIR]

What MiniLM sees in each sentence is kept in the cache. Trials are scored on 3,000
training sentences, and tests are of GLUE's development set.
"""

import argparse
import pathlib

import jax.numpy as jnp
import numpy as np

from benchmarks import probe
from benchmarks.experiment import Data, Sides
from benchmarks.language import data, encoder, features

MAX_LENGTH = 64  # tokens; less than one sentence in a thousand is longer


def embeddings(arguments: argparse.Namespace, split: str) -> Data:
    """Of the sentences in a file of SST-2, of norm 1."""
    examples = data.load(arguments.data_dir, split)
    texts = data.tokenize(examples, MAX_LENGTH, data.tokenizer())
    pooled = features.pooled(texts, encoder.load(), arguments.cache_dir)
    units = pooled / np.linalg.norm(pooled, axis=-1, keepdims=True)
    return Data(jnp.asarray(units), jnp.asarray(texts.labels))


def load(arguments: argparse.Namespace) -> Sides:
    train, test = (embeddings(arguments, split) for split in ("train", "dev"))
    parts = map(train.take, data.split_validation(train.num_examples))
    return Sides(train, test, *parts)


STUDY = probe.study(
    probe.Probe(
        features="MiniLM, mean of the hidden states",
        num_classes=2,
        budgets=tuple(probe.Budget(epsilon, 4_096, 100) for epsilon in (1.0, 3.0, 8.0)),
        l2_clip_norm=0.5,
        learning_rates_of_sgd=(3.0, 300.0),
        learning_rates_of_adam=(0.02, 2.0),
        load=load,
    ),
    pathlib.Path(__file__).with_suffix(".jsonl"),
)

if __name__ == "__main__":
    STUDY.main(__doc__)

"""CIFAR-10 without other data: a linear probe on fixed features of scattering.

    python -m benchmarks.cifar10.scattered --data-dir DIR --cache-dir DIR [--seeds 5]
    python -m benchmarks.cifar10.scattered [--pictures]  # the tables, the curves

The first call computes the features and keeps them in the cache. Each optimizer has
twelve random trials at each epsilon, on nine tenths of the training images; the best on
the other tenth is trained on all of them, with five seeds, and tested. Every training
is written down as it ends, and found there by a later call.
"""

import argparse
import functools
import pathlib

import jax.numpy as jnp
import numpy as np

from benchmarks import records
from benchmarks.cifar10 import data, patches
from benchmarks.probe import command, linear, search, table

RESULTS = pathlib.Path(__file__).with_suffix(".jsonl")

PROTOCOL = search.Protocol(
    features=patches.NAME,
    num_classes=data.NUM_CLASSES,
    budgets=(
        search.Budget(target_epsilon=1.0, batch_size=8_192, iterations=100),
        search.Budget(target_epsilon=3.0, batch_size=8_192, iterations=120),
        search.Budget(target_epsilon=8.0, batch_size=8_192, iterations=200),
    ),
    l2_clip_norm=0.5,
    learning_rates_of_sgd=(3.0, 100.0),
    learning_rates_of_adam=(0.01, 0.4),
)
# What this experiment set out to reach on the test images.
GOALS = {1.0: 0.63, 3.0: 0.70, 8.0: 0.74}


def laboratory(arguments: argparse.Namespace) -> search.Laboratory:
    """The features of all images, computed unless they are in the cache."""
    cifar = data.load(arguments.data_dir)
    num_train = cifar.train.num_examples
    images = np.concatenate([cifar.train.images, cifar.test.images])
    labels = np.concatenate([cifar.train.labels, cifar.test.labels])
    features = patches.extract(images, arguments.cache_dir)
    both = linear.Data(jnp.asarray(features, jnp.float32), jnp.asarray(labels))
    return search.Laboratory(
        PROTOCOL,
        both.take(slice(num_train)),
        both.take(slice(num_train, None)),
        data.split_validation(num_train),
        records.Records(arguments.output),
    )


def run(arguments: argparse.Namespace) -> None:
    """Everything that is not on record."""
    runs = laboratory(arguments)
    runs.all_optimizers(arguments.seeds)
    runs.without_privacy()


if __name__ == "__main__":
    command.main(__doc__, RESULTS, run, functools.partial(table.render, goals=GOALS))

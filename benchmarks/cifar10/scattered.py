"""CIFAR-10 without other data: a linear probe on fixed features of scattering.

    python -m benchmarks.cifar10.scattered --data-dir DIR
    python -m benchmarks.cifar10.scattered [--pictures]  # the tables, the curves

The first call computes the features and keeps them in the cache. Each optimizer has
twelve random trials at each epsilon, on nine tenths of the training images; the best on
the other tenth is trained on all of them, with five seeds, and tested.
"""

import argparse
import pathlib

import numpy as np

from benchmarks import probe
from benchmarks.cifar10 import data, patches
from benchmarks.experiment import Sides


def load(arguments: argparse.Namespace) -> Sides:
    of = lambda images: patches.extract(images, arguments.cache_dir)
    return data.sides(arguments.data_dir, lambda x: of(x).astype(np.float32))


STUDY = probe.study(
    probe.Probe(
        features=patches.NAME,
        num_classes=data.NUM_CLASSES,
        budgets=(
            probe.Budget(target_epsilon=1.0, batch_size=8_192, iterations=100),
            probe.Budget(target_epsilon=3.0, batch_size=8_192, iterations=120),
            probe.Budget(target_epsilon=8.0, batch_size=8_192, iterations=200),
        ),
        l2_clip_norm=0.5,
        learning_rates_of_sgd=(3.0, 100.0),
        learning_rates_of_adam=(0.01, 0.4),
        load=load,
    ),
    pathlib.Path(__file__).with_suffix(".jsonl"),
    # What this experiment set out to reach on the test images.
    goals={1.0: 0.63, 3.0: 0.70, 8.0: 0.74},
)

if __name__ == "__main__":
    STUDY.main(__doc__)

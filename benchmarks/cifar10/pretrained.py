"""CIFAR-10 on ImageNet's features: a linear probe, and the last block tuned.

    python -m benchmarks.cifar10.pretrained --data-dir DIR
    python -m benchmarks.cifar10.pretrained [--pictures] # the tables, the curves

The first call computes the features, in a quarter of an hour of one core, and keeps
them in the cache. Each optimizer has twelve random trials at each epsilon, on 45,000 of
the training images; the best on the others is trained on all of them, with five seeds,
and tested.
"""

import argparse
import dataclasses
import functools
import itertools
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import jax
import jax.numpy as jnp

from benchmarks import experiment, probe
from benchmarks.cifar10 import data, efficientnet, features, head
from benchmarks.experiment import Sides
from benchmarks.records import Row
from benchmarks.study import Cell, Find
from benchmarks.tables import by_epsilon, spread
from dpadambc import training

# The head is tuned with few settings, which a few tries on validation images gave.
LEARNING_RATES = {"DP-Adam": 0.1, "DP-AdamBC": 0.05}


def load(arguments: argparse.Namespace) -> Sides:
    """Each image averaged with its mirror image."""
    see = functools.partial(features.extract, cache_dir=arguments.cache_dir)
    views = lambda images: [see(images, is_mirrored=x) for x in (False, True)]
    return data.sides(arguments.data_dir, lambda x: features.prepare(views(x)))


PROBE = probe.Probe(
    features=f"EfficientNet-Lite0, {features.SIZE} pixels",
    num_classes=data.NUM_CLASSES,
    budgets=(
        probe.Budget(target_epsilon=1.0, batch_size=4_096, iterations=100),
        probe.Budget(target_epsilon=3.0, batch_size=4_096, iterations=100),
        probe.Budget(target_epsilon=8.0, batch_size=8_192, iterations=100),
    ),
    l2_clip_norm=0.5,
    learning_rates_of_sgd=(10.0, 400.0),
    learning_rates_of_adam=(0.02, 0.6),
    load=load,
)


def cells(find: Find, arguments: argparse.Namespace) -> Iterator[Cell]:
    """The probe, and then the head tuned, with one seed."""
    yield from PROBE.cells(find, arguments)
    for each, method, trained in itertools.product(
        PROBE.budgets, LEARNING_RATES, head.TRAINED
    ):
        budget = probe.Budget(each.target_epsilon, batch_size=4_096, iterations=60)
        rate = LEARNING_RATES[method]
        identity = {
            "what": "head",
            "trained": trained,
            "method": method,
            "target_epsilon": budget.target_epsilon,
            "candidate": {"learning_rate": rate, "weight_decay": 0.0, "floor": 1.0},
            "expected_batch_size": budget.batch_size,
            "iterations": budget.iterations,
            "l2_clip_norm": PROBE.l2_clip_norm,
            "seed": 0,
        }
        yield Cell(method, budget.target_epsilon, 0, identity, budget)


def prepare(arguments: argparse.Namespace) -> Callable[[Cell], Row]:
    of_probe = functools.cache(lambda: PROBE.prepare(arguments))

    @functools.cache
    def images() -> tuple[head.Data, head.Data]:
        def of(images: data.Images) -> head.Data:
            folder = arguments.cache_dir
            view = features.extract(images.images, folder, is_mirrored=False)
            earlier = view.pooled[:, : -efficientnet.HEAD_WIDTH]
            return head.Data(view.last_block, earlier, images.labels)

        train, test, _ = data.load(arguments.data_dir)
        return of(train), of(test)

    def make(cell: Cell) -> Row:
        if cell.identity["what"] == "head":
            return tune(cell, *images())
        return of_probe()(cell)

    return make


def tune(cell: Cell, train: head.Data, test: head.Data) -> Row:
    """Trains the head on all training images, and tests it."""
    start = time.perf_counter()
    frozen = head.frozen(efficientnet.load())
    mechanism = PROBE.mechanism(cell.setting, len(train.labels))
    rate = cell.identity["candidate"]["learning_rate"]
    noise_stddev = cast(float, mechanism.noise_stddev)
    params = training.fit(
        head.loss_fn,
        head.init(cell.identity["trained"]),
        tuple(map(jnp.asarray, train)),
        mechanism,
        experiment.PRIVATE[cell.method](rate, noise_stddev),
        key=jax.random.key(cell.seed or 0),
        target_delta=probe.DELTA,
        frozen=frozen,
        microbatch_size=512,
    ).params
    return {
        "accuracy": round(float(head.accuracy(params, frozen, test)), 4),
        "noise_multiplier": mechanism.noise_multiplier,
        "seconds": round(time.perf_counter() - start, 1),
    }


def heads(rows: Sequence[Row]) -> str:
    """Test accuracy with the head as it was, and tuned, by optimizer and epsilon."""
    found: dict[tuple[str, float], list[float]] = {}
    for row in rows:
        key = f"{row['trained']}, {row['method']}", row["target_epsilon"]
        found.setdefault(key, []).append(row["accuracy"])
    return by_epsilon("trained", {key: spread(x) for key, x in found.items()})


# What this experiment set out to reach on the test images.
OF_PROBE = probe.study(
    PROBE, pathlib.Path(__file__).with_suffix(".jsonl"), goals={1.0: 0.88, 8.0: 0.90}
)
STUDY = dataclasses.replace(
    OF_PROBE,
    cells=cells,
    prepare=prepare,
    tables=lambda rows: {
        **OF_PROBE.tables(rows),
        "heads": heads([row for row in rows if row["what"] == "head"]),
    },
)

if __name__ == "__main__":
    STUDY.main(__doc__)

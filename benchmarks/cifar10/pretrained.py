"""CIFAR-10 on ImageNet's features: a linear probe, and the last block tuned.

    python -m benchmarks.cifar10.pretrained --data-dir DIR --cache-dir DIR [--seeds 5]
    python -m benchmarks.cifar10.pretrained              # prints the tables

The first call computes the features, in half an hour of one core, and keeps them in the
cache. Each optimizer has twelve random trials at each epsilon, on nine tenths of the
training images; the best on the other tenth is trained on all of them, with five seeds,
and tested. Every training is written down as it ends, and found there by a later call.
"""

import argparse
import functools
import pathlib
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import sklearn.linear_model

import dpadambc
from benchmarks import experiment, records
from benchmarks.cifar10 import (
    data,
    efficientnet,
    features,
    head,
    pretrained_table,
    probe,
)
from dpadambc.mechanisms import trials

RESULTS = pathlib.Path(__file__).with_suffix(".jsonl")

DELTA = head.DELTA
NUM_TRIALS = 12
L2_CLIP_NORM = 0.5
ITERATIONS = 100
BATCH_SIZES = {1.0: 4_096, 3.0: 4_096, 8.0: 8_192}  # expected, by epsilon

# Logarithmically uniform between the two.
LEARNING_RATES = {"DP-SGD": (10.0, 400.0)}
LEARNING_RATES_OF_ADAM = (0.02, 0.6)
WEIGHT_DECAYS = (1e-3, 1.0)
FLOORS = (0.1, 10.0)

# The head is tuned with few settings, which a few tries on validation images gave.
TUNED_BATCH_SIZE, TUNED_ITERATIONS = 4_096, 60
TUNED = {
    "DP-Adam": probe.Candidate(0.1, 0.0, 1.0),
    "DP-AdamBC": probe.Candidate(0.05, 0.0, 1.0),
}

# Of a logistic regression without privacy: the inverse of its penalty.
INVERSE_PENALTIES = (1.0, 10.0, 100.0)


@functools.cache
def mechanism_of(
    target_epsilon: float, num_examples: int, batch_size: int, iterations: int
) -> dpadambc.PoissonGaussian:
    return dpadambc.PoissonGaussian.calibrate(
        target_epsilon=target_epsilon,
        target_delta=DELTA,
        sampling_prob=min(batch_size / num_examples, 1.0),
        iterations=iterations,
        l2_clip_norm=L2_CLIP_NORM,
        normalize_by=batch_size,
    )


@functools.cache
def search_epsilon(target_epsilon: float, num_examples: int) -> float:
    """Of a search that draws the number of its trials, as many in the mean as ours."""
    batch_size = BATCH_SIZES[target_epsilon]
    mechanism = mechanism_of(target_epsilon, num_examples, batch_size, ITERATIONS)
    return mechanism.tuned_epsilon(DELTA, trials=trials.Geometric(NUM_TRIALS)).epsilon


def candidates(method: str) -> probe.Candidate:
    """What the trials draw: the same quantiles for each optimizer and epsilon."""
    rng = np.random.default_rng(0)
    ranges = (
        LEARNING_RATES.get(method, LEARNING_RATES_OF_ADAM),
        WEIGHT_DECAYS,
        FLOORS,
    )
    draw = lambda low, high: low * (high / low) ** rng.uniform(size=NUM_TRIALS)
    return probe.Candidate(*(draw(*each) for each in ranges))


def _rows_of(many: probe.Candidate) -> list[dict[str, float]]:
    rounded = [[float(f"{x:.4g}") for x in np.asarray(column)] for column in many]
    return [
        dict(zip(probe.Candidate._fields, row, strict=True))
        for row in zip(*rounded, strict=True)
    ]


def _columns_of(rows: Sequence[dict[str, float]]) -> probe.Candidate:
    names = probe.Candidate._fields
    return probe.Candidate(*(jnp.array([row[name] for row in rows]) for name in names))


def _share_at_floor(
    method: str, trained: probe.Trained, run: int, floor: float
) -> float | None:
    if method not in probe.WITH_A_FLOOR:
        return None
    moments = experiment.second_moments(
        jax.tree.map(lambda x: x[run], trained.opt_state),
        dpadambc.RelativeFloor(floor),
        correction=0.0 if method == probe.CONTROL else 1.0,
    )
    return moments and moments.share_at_floor


class Laboratory:
    """The features of all images, and what was trained on them."""

    def __init__(self, images: probe.Data, num_train: int, found: records.Records):
        self._found = found
        self._train = images.take(slice(num_train))
        self._test = images.take(slice(num_train, None))
        fit, validation = data.split_validation(num_train)
        self._fit, self._validation = map(self._train.take, (fit, validation))

    def _train_all(self, identities, keys, method, target_epsilon, sides):
        """Several runs of one program, unless all of them are on record."""
        found = [known for x in identities if (known := self._found.find(x))]
        if len(found) == len(identities):
            return found
        fit, held_out = sides
        batch_size = BATCH_SIZES[target_epsilon]
        mechanism = mechanism_of(
            target_epsilon, len(fit.labels), batch_size, ITERATIONS
        )
        settings = [identity["candidate"] for identity in identities]
        start = time.perf_counter()
        trained = jax.block_until_ready(
            probe.train(method, mechanism, keys, _columns_of(settings), *sides)
        )
        seconds = (time.perf_counter() - start) / len(identities)

        def row(i):
            curve = np.asarray(trained.curve[i]).astype(float).round(4).tolist()
            floor = settings[i]["floor"]
            return {
                "accuracy": curve[-1],
                "curve": curve,
                "share_at_floor": _share_at_floor(method, trained, i, floor),
                "expected_batch_size": batch_size,
                "iterations": ITERATIONS,
                "l2_clip_norm": L2_CLIP_NORM,
                "noise_multiplier": mechanism.noise_multiplier,
                "seconds": round(seconds, 2),
            }

        return [
            self._found.get(identity, functools.partial(row, i))
            for i, identity in enumerate(identities)
        ]

    def search(self, method: str, target_epsilon: float) -> records.Row:
        """The trial that does best on validation images."""
        identities = [
            {
                "what": "trial of the probe",
                "method": method,
                "target_epsilon": target_epsilon,
                "trial": i,
                "candidate": candidate,
            }
            for i, candidate in enumerate(_rows_of(candidates(method)))
        ]
        keys = jax.random.split(jax.random.key(1_000), NUM_TRIALS)
        sides = (self._fit, self._validation)
        rows = self._train_all(identities, keys, method, target_epsilon, sides)
        return max(rows, key=lambda row: row["accuracy"])

    def test(self, method: str, target_epsilon: float, num_seeds: int) -> None:
        """Trains the best trial's candidate on all training images."""
        best = self.search(method, target_epsilon)
        num_fit = len(self._fit.labels)
        identities = [
            {
                "what": "probe",
                "method": method,
                "target_epsilon": target_epsilon,
                "candidate": best["candidate"],
                "seed": seed,
                "search_epsilon": round(search_epsilon(target_epsilon, num_fit), 3),
                "num_trials": NUM_TRIALS,
            }
            for seed in range(num_seeds)
        ]
        keys = jnp.stack([jax.random.key(seed) for seed in range(num_seeds)])
        sides = (self._train, self._test)
        self._train_all(identities, keys, method, target_epsilon, sides)

    def without_privacy(self) -> None:
        """Logistic regression, its penalty chosen on validation images."""

        def fit(inverse_penalty, train, held_out):
            model = sklearn.linear_model.LogisticRegression(
                C=inverse_penalty, max_iter=200
            )
            start = time.perf_counter()
            model.fit(*map(np.asarray, train))
            seconds = round(time.perf_counter() - start, 1)
            score = round(float(model.score(*map(np.asarray, held_out))), 4)
            return {"accuracy": score, "seconds": seconds}

        tried = [
            self._found.get(
                {"what": "trial without privacy", "inverse_penalty": x},
                lambda x=x: fit(x, self._fit, self._validation),
            )
            for x in INVERSE_PENALTIES
        ]
        best = max(tried, key=lambda row: row["accuracy"])["inverse_penalty"]
        self._found.get(
            {"what": "without privacy", "inverse_penalty": best},
            lambda: fit(best, self._train, self._test),
        )


class HeadLaboratory:
    """The output of the last block for all images, and what was tuned on it."""

    def __init__(self, images: head.Data, num_train: int, found: records.Records):
        self._found = found
        self._train = images.take(slice(num_train))
        self._test = images.take(slice(num_train, None))
        self._frozen = head.Frozen.of(efficientnet.load())

    def test(self, trained: str, method: str, target_epsilon: float, seed: int):
        """Trains on all training images."""
        mechanism = mechanism_of(
            target_epsilon, len(self._train.labels), TUNED_BATCH_SIZE, TUNED_ITERATIONS
        )

        def train():
            start = time.perf_counter()
            params = head.train(
                trained,
                method,
                TUNED[method],
                mechanism,
                jax.random.key(seed),
                self._frozen,
                self._train,
            )
            accuracy = float(head.accuracy(params, self._frozen, self._test))
            return {
                "accuracy": round(accuracy, 4),
                "noise_multiplier": mechanism.noise_multiplier,
                "seconds": round(time.perf_counter() - start, 1),
            }

        identity = {
            "what": "head",
            "trained": trained,
            "method": method,
            "target_epsilon": target_epsilon,
            "candidate": TUNED[method]._asdict(),
            "expected_batch_size": TUNED_BATCH_SIZE,
            "iterations": TUNED_ITERATIONS,
            "l2_clip_norm": L2_CLIP_NORM,
            "seed": seed,
        }
        return self._found.get(identity, train)


def run(arguments: argparse.Namespace) -> None:
    """Everything that is not on record."""
    cifar = data.load(arguments.data_dir)
    num_train = cifar.train.num_examples
    images = np.concatenate([cifar.train.images, cifar.test.images])
    labels = np.concatenate([cifar.train.labels, cifar.test.labels])
    views = [
        features.extract(images, arguments.cache_dir, view) for view in features.VIEWS
    ]
    found = records.Records(arguments.output)
    runs = Laboratory(probe.prepare(views, labels), num_train, found)
    for target_epsilon in BATCH_SIZES:
        for method in probe.OPTIMIZERS:
            runs.test(method, target_epsilon, arguments.seeds)
            print(f"{method} at epsilon {target_epsilon:g} is done.", flush=True)
    runs.without_privacy()
    del runs
    file = arguments.cache_dir / "last_block.npy"
    tuning = HeadLaboratory(head.prepare(views[0], labels, file), num_train, found)
    for seed in range(arguments.head_seeds):
        for target_epsilon in BATCH_SIZES:
            for method in TUNED:
                for trained in head.TRAINED:
                    tuning.test(trained, method, target_epsilon, seed)
            print(f"The head at epsilon {target_epsilon:g} is done.", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data-dir", type=pathlib.Path, help="trains, where given")
    parser.add_argument("--cache-dir", type=pathlib.Path, help="of the features")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--seeds", type=int, default=5, help="of the probe")
    parser.add_argument("--head-seeds", type=int, default=1, help="of the tuned head")
    arguments = parser.parse_args()
    if arguments.data_dir:
        if not arguments.cache_dir:
            parser.error("Expected --cache-dir beside --data-dir, for the features.")
        run(arguments)
    print(pretrained_table.render(records.read(arguments.output)))


if __name__ == "__main__":
    main()

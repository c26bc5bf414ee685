"""Equal trials for each optimizer of a linear probe, then seeds of the best one."""

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import sklearn.linear_model

import dpadambc
from benchmarks import experiment, records
from benchmarks.probe import linear
from dpadambc import accounting

DELTA = 1e-5
NUM_TRIALS = 12

# Logarithmically uniform between the two.
WEIGHT_DECAYS = (1e-3, 1.0)
FLOORS = (0.1, 10.0)

# Of a logistic regression without privacy: the inverse of its penalty.
INVERSE_PENALTIES = (1.0, 10.0, 100.0)

Range = tuple[float, float]


class Budget(NamedTuple):
    """How long to train at an epsilon."""

    target_epsilon: float
    batch_size: int  # expected
    iterations: int


@dataclasses.dataclass(frozen=True)
class Protocol:
    """What all optimizers have in common on some features."""

    features: str  # what tells them from others
    num_classes: int
    budgets: tuple[Budget, ...]
    l2_clip_norm: float
    learning_rates_of_sgd: Range  # of DP-SGD with momentum
    learning_rates_of_adam: Range  # of all others
    # Trials at once are faster, and share their batches: `search_epsilon`, which is of
    # independent trials, is that of this search where there is one at once.
    trials_at_once: int = NUM_TRIALS

    def mechanism(self, budget: Budget, num_examples: int) -> dpadambc.PoissonGaussian:
        return dpadambc.PoissonGaussian.calibrate(
            target_epsilon=budget.target_epsilon,
            target_delta=DELTA,
            sampling_prob=min(budget.batch_size / num_examples, 1.0),
            iterations=budget.iterations,
            l2_clip_norm=self.l2_clip_norm,
            normalize_by=budget.batch_size,
        )

    def search_epsilon(self, budget: Budget, num_examples: int) -> float:
        """Of a search that draws how many trials it makes, as many in the mean."""
        mechanism = self.mechanism(budget, num_examples)
        tuned = accounting.tuned_epsilon(
            mechanism, DELTA, trials=accounting.Geometric(NUM_TRIALS)
        )
        return tuned.epsilon

    def candidates(self, method: str) -> linear.Candidate:
        """What the trials draw: the same quantiles for each optimizer and epsilon."""
        rng = np.random.default_rng(0)
        is_sgd = method == "DP-SGD"
        ranges = (
            self.learning_rates_of_sgd if is_sgd else self.learning_rates_of_adam,
            WEIGHT_DECAYS,
            FLOORS,
        )
        draw = lambda low, high: low * (high / low) ** rng.uniform(size=NUM_TRIALS)
        return linear.Candidate(*(draw(*each) for each in ranges))


def _rows_of(many: linear.Candidate) -> list[dict[str, float]]:
    rounded = [[float(f"{x:.4g}") for x in np.asarray(column)] for column in many]
    return [
        dict(zip(linear.Candidate._fields, row, strict=True))
        for row in zip(*rounded, strict=True)
    ]


def _columns_of(rows: Sequence[dict[str, float]]) -> linear.Candidate:
    names = linear.Candidate._fields
    return linear.Candidate(*(jnp.array([row[name] for row in rows]) for name in names))


def _share_at_floor(
    method: str, trained: linear.Trained, run: int, floor: float
) -> float | None:
    if method not in linear.WITH_A_FLOOR:
        return None
    moments = experiment.second_moments(
        jax.tree.map(lambda x: x[run], trained.opt_state),
        dpadambc.RelativeFloor(floor),
        correction=0.0 if method == linear.CONTROL else 1.0,
    )
    return moments and moments.share_at_floor


def _regression(
    inverse_penalty: float, train: linear.Data, held_out: linear.Data
) -> records.Row:
    """Logistic regression without privacy."""
    model = sklearn.linear_model.LogisticRegression(C=inverse_penalty, max_iter=200)
    start = time.perf_counter()
    model.fit(*map(np.asarray, train))
    seconds = round(time.perf_counter() - start, 1)
    score = round(float(model.score(*map(np.asarray, held_out))), 4)
    return {"accuracy": score, "seconds": seconds}


class Laboratory:
    """The features of all examples, and what was trained on them."""

    def __init__(
        self,
        protocol: Protocol,
        train: linear.Data,
        test: linear.Data,
        split: tuple[np.ndarray, np.ndarray],
        found: records.Records,
    ):
        """`split` is of the training examples: to fit in trials, and to validate on."""
        self._protocol, self._found = protocol, found
        # One calibration for all optimizers.
        self._mechanism = functools.cache(protocol.mechanism)
        self._search_epsilon = functools.cache(protocol.search_epsilon)
        self.train, self.test = train, test
        self.fit, self.validation = map(train.take, split)

    def _identity(self, what: str, method: str, budget: Budget) -> records.Row:
        """What a row is of: one of another protocol is not taken for it."""
        return {
            "what": what,
            "features": self._protocol.features,
            "method": method,
            "target_epsilon": budget.target_epsilon,
            "expected_batch_size": budget.batch_size,
            "iterations": budget.iterations,
            "l2_clip_norm": self._protocol.l2_clip_norm,
        }

    def _train_all(
        self,
        identities: Sequence[records.Row],
        keys: jax.Array,
        method: str,
        budget: Budget,
        sides: tuple[linear.Data, linear.Data],
    ) -> list[records.Row]:
        """Several runs of one program, unless all of them are on record."""
        found = [known for x in identities if (known := self._found.find(x))]
        if len(found) == len(identities):
            return found
        mechanism = self._mechanism(budget, len(sides[0].labels))
        settings = [identity["candidate"] for identity in identities]
        start = time.perf_counter()
        trained = jax.block_until_ready(
            linear.train(
                method,
                mechanism,
                self._protocol.num_classes,
                keys,
                _columns_of(settings),
                *sides,
            )
        )
        seconds = (time.perf_counter() - start) / len(identities)

        def row(i):
            curve = np.asarray(trained.curve[i]).astype(float).round(4).tolist()
            floor = settings[i]["floor"]
            return {
                "accuracy": curve[-1],
                "curve": curve,
                "share_at_floor": _share_at_floor(method, trained, i, floor),
                "noise_multiplier": mechanism.noise_multiplier,
                "seconds": round(seconds, 2),
            }

        return [
            self._found.get(identity, functools.partial(row, i))
            for i, identity in enumerate(identities)
        ]

    def search(self, method: str, budget: Budget) -> records.Row:
        """The trial that does best on validation examples."""
        identities = [
            self._identity("trial of the probe", method, budget)
            | {"trial": i, "candidate": candidate}
            for i, candidate in enumerate(_rows_of(self._protocol.candidates(method)))
        ]
        keys = jax.random.split(jax.random.key(1_000), NUM_TRIALS)
        sides = (self.fit, self.validation)
        rows = []
        for first in range(0, NUM_TRIALS, self._protocol.trials_at_once):
            some = slice(first, first + self._protocol.trials_at_once)
            rows += self._train_all(identities[some], keys[some], method, budget, sides)
        return max(rows, key=lambda row: row["accuracy"])

    def retrain(self, method: str, budget: Budget, num_seeds: int) -> None:
        """Trains the best trial's candidate on all training examples, and tests it."""
        best = self.search(method, budget)
        cost = self._search_epsilon(budget, len(self.fit.labels))
        for seed in range(num_seeds):
            identity = self._identity("probe", method, budget) | {
                "candidate": best["candidate"],
                "seed": seed,
                "search_epsilon": round(cost, 3),
                "num_trials": NUM_TRIALS,
            }
            keys = jax.random.key(seed)[None]
            sides = (self.train, self.test)
            self._train_all([identity], keys, method, budget, sides)

    def all_optimizers(self, num_seeds: int) -> None:
        """The searches at every epsilon, each followed by the seeds of its best."""
        for budget in self._protocol.budgets:
            for method in linear.OPTIMIZERS:
                self.retrain(method, budget, num_seeds)
                print(f"{method} at epsilon {budget.target_epsilon:g} is done.")

    def without_privacy(self) -> None:
        """Logistic regression, its penalty chosen on validation examples."""
        tried = [
            self._found.get(
                {"what": "trial without privacy"} | self._penalized(x),
                functools.partial(_regression, x, self.fit, self.validation),
            )
            for x in INVERSE_PENALTIES
        ]
        best = max(tried, key=lambda row: row["accuracy"])["inverse_penalty"]
        self._found.get(
            {"what": "without privacy"} | self._penalized(best),
            functools.partial(_regression, best, self.train, self.test),
        )

    def _penalized(self, inverse_penalty: float) -> records.Row:
        features = self._protocol.features
        return {"features": features, "inverse_penalty": inverse_penalty}

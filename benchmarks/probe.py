"""A linear probe: one matrix on frozen features, trained privately, logits = W' x.

Where the norm of an example x is 1, that of its gradient is at most sqrt(2), and no
statistic of the private examples is needed to choose a clip norm.

Each optimizer has equal trials at each epsilon, on a part of the training examples; the
best on the others is trained on all of them, with five seeds, and tested.
"""

import argparse
import collections
import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import sklearn.linear_model

import dpadambc
from benchmarks.experiment import Data, Model, Sides
from benchmarks.methods.methods import CONTROL, CORRECTED, METHODS, train
from benchmarks.records import Row
from benchmarks.study import NOT_PRIVATE, Cell, Find, Study, best_then_seeds
from benchmarks.tables import by_epsilon, spread
from dpadambc import accounting, diagnostics

DELTA = 1e-5
NUM_TRIALS, NUM_SEEDS = 12, 5
SEED_OF_TRIALS = 1_000
NUM_EVALUATIONS = 20
OPTIMIZERS = (
    *("DP-SGD", "DP-Adam", "DP-AdamBC", "DP-AdamW", "DP-AdamW-BC", CONTROL),
    "AUTO-S, DP-Adam",
)
# Logarithmically uniform between the two.
WEIGHT_DECAYS = (1e-3, 1.0)
FLOORS = (0.1, 10.0)
# Of a logistic regression without privacy.
INVERSE_PENALTIES = (1.0, 10.0, 100.0)

Range = tuple[float, float]


class Budget(NamedTuple):
    """How long to train at an epsilon."""

    target_epsilon: float
    batch_size: int  # expected
    iterations: int


def loss_fn(weights: jax.Array, x: jax.Array, label: jax.Array) -> jax.Array:
    """Cross-entropy of one example."""
    return optax.softmax_cross_entropy_with_integer_labels(x @ weights, label)


def accuracy(weights: Any, data: Data) -> jax.Array:
    """The share of examples that the matrix labels correctly."""
    return jnp.mean(jnp.argmax(data.features @ weights, -1) == data.labels)


@functools.cache
def model(num_features: int, num_classes: int) -> Model:
    """It begins at zero."""
    return Model(lambda _: jnp.zeros((num_features, num_classes)), loss_fn, accuracy)


@dataclasses.dataclass(frozen=True)
class Probe:
    """The trainings on some features."""

    features: str  # their name
    num_classes: int
    budgets: tuple[Budget, ...]
    l2_clip_norm: float
    learning_rates_of_sgd: Range  # with momentum
    learning_rates_of_adam: Range  # and of all others
    load: Callable[[argparse.Namespace], Sides]

    def candidates(self, method: str) -> list[dict[str, float]]:
        """Of the trials: the same quantiles for each optimizer and epsilon."""
        rng, is_sgd = np.random.default_rng(0), method == "DP-SGD"
        rates = self.learning_rates_of_sgd if is_sgd else self.learning_rates_of_adam
        draw = lambda low, high: low * (high / low) ** rng.uniform(size=NUM_TRIALS)
        drawn = np.transpose([draw(*ends) for ends in (rates, WEIGHT_DECAYS, FLOORS)])
        rounded = [[float(f"{x:.4g}") for x in row] for row in drawn]
        names = "learning_rate", "weight_decay", "floor"
        return [dict(zip(names, row, strict=True)) for row in rounded]

    def cells(self, find: Find, _: argparse.Namespace) -> Iterator[Cell]:
        """The searches, each followed by the seeds of its best."""
        for budget in self.budgets:
            for method in OPTIMIZERS:
                yield from self._search(find, budget, method)

        def regression(what: str, penalty: float, seed: int | None = None) -> Cell:
            own = {"features": self.features, "inverse_penalty": penalty}
            return Cell(NOT_PRIVATE, None, seed, {"what": what, **own})

        trials = [regression("trial without privacy", x) for x in INVERSE_PENALTIES]
        best = lambda row: [regression("without privacy", row["inverse_penalty"], 0)]
        yield from best_then_seeds(find, trials, best)

    def _search(self, find: Find, budget: Budget, method: str) -> Iterator[Cell]:
        known = {
            "features": self.features,
            "method": method,
            "target_epsilon": budget.target_epsilon,
            "expected_batch_size": budget.batch_size,
            "iterations": budget.iterations,
            "l2_clip_norm": self.l2_clip_norm,
        }

        def cell(what, of_seed, **own):
            identity = {"what": what, **known, **own}
            return Cell(method, budget.target_epsilon, of_seed, identity, budget)

        trials = [
            cell("trial of the probe", None, trial=i, candidate=candidate)
            for i, candidate in enumerate(self.candidates(method))
        ]
        seeds = lambda row: [
            cell("probe", seed, candidate=row["candidate"], seed=seed)
            for seed in range(NUM_SEEDS)
        ]
        yield from best_then_seeds(find, trials, seeds)

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
        trials = accounting.GeometricTrials(NUM_TRIALS)
        one = self.mechanism(budget, num_examples)
        return round(accounting.tuned_epsilon(one, DELTA, trials=trials).epsilon, 3)

    def prepare(self, arguments: argparse.Namespace) -> Callable[[Cell], Row]:
        sides = self.load(arguments)
        own_model = model(sides.train.features.shape[1], self.num_classes)
        mechanism = functools.cache(self.mechanism)  # one for all optimizers
        search_epsilon = functools.cache(self.search_epsilon)

        def make(cell: Cell) -> Row:
            start, (data, held_out) = time.perf_counter(), sides.of(cell)
            if cell.method == NOT_PRIVATE:
                penalty = cell.identity["inverse_penalty"]
                found = sklearn.linear_model.LogisticRegression(C=penalty, max_iter=200)
                found.fit(*map(np.asarray, data))
                score = float(found.score(*map(np.asarray, held_out)))
                row = {"accuracy": round(score, 4)}
            else:
                of_data = mechanism(cell.setting, data.num_examples)
                row = _train(cell, of_data, own_model, data, held_out)
                if cell.seed is not None:
                    cost = search_epsilon(cell.setting, sides.fit.num_examples)
                    row |= {"search_epsilon": cost, "num_trials": NUM_TRIALS}
            return row | {"seconds": round(time.perf_counter() - start, 2)}

        return make


def _train(cell: Cell, mechanism: Any, model: Model, data: Data, held_out: Data) -> Row:
    """The accuracy over the steps, and the share of coordinates at the floor."""
    candidate, seed = cell.identity["candidate"], cell.seed
    if seed is None:
        seed = SEED_OF_TRIALS + cell.identity["trial"]
    how = METHODS[cell.method].make, mechanism, model, jax.random.key(seed)[None]
    trained = train(*how, [candidate], data, held_out, NUM_EVALUATIONS)
    curve = np.asarray(trained.curve[0]).astype(float).round(4).tolist()
    share = None
    if cell.method in CORRECTED:
        seen = diagnostics.snapshot(
            jax.tree.map(lambda x: x[0], trained.opt_state),
            variance_floor=dpadambc.RelativeFloor(candidate["floor"]),
            correction=0.0 if cell.method == CONTROL else 1.0,
        )
        share = float(seen.share_at_floor)
    noise = {"noise_multiplier": mechanism.noise_multiplier}
    return {"accuracy": curve[-1], "curve": curve, "share_at_floor": share} | noise


Groups = dict[tuple[str, float], list[Row]]


def _grouped(rows: Sequence[Row], what: str) -> Groups:
    """By optimizer and epsilon."""
    found = collections.defaultdict(list)
    for row in rows:
        if row["what"] == what:
            found[row["method"], row["target_epsilon"]].append(row)
    return dict(sorted(found.items(), key=lambda x: OPTIMIZERS.index(x[0][0])))


def _differences(tested: Groups) -> dict[tuple[str, float], str]:
    """What a choice changes, in points: mean and standard error over pairs of a seed.

    The two runs of a seed have the same batches and noise where one machine made both.
    """
    cells = {}
    for changed, other in (
        ("DP-AdamBC", "DP-Adam"),
        ("DP-AdamBC", CONTROL),
        ("DP-AdamW-BC", "DP-AdamW"),
        ("AUTO-S, DP-Adam", "DP-Adam"),
    ):
        for method, epsilon in tested:
            if method != changed:
                continue
            of_other = tested.get((other, epsilon), [])
            theirs = {row["seed"]: row["accuracy"] for row in of_other}
            gains = [
                100 * (row["accuracy"] - theirs[row["seed"]])
                for row in tested[changed, epsilon]
                if row["seed"] in theirs
            ]
            if len(gains) > 1:
                error = statistics.stdev(gains) / len(gains) ** 0.5
                cell = f"{statistics.fmean(gains):+.2f} ± {error:.2f}"
                cells[f"{changed} minus {other}", epsilon] = cell
    return cells


def _setting(rows: Sequence[Row]) -> str:
    """The best trial, and the share of coordinates at the floor at the end."""
    method, candidate = rows[0]["method"], rows[0]["candidate"]
    parts = [f"η {candidate['learning_rate']:.3g}"]
    if "AdamW" in method:
        parts.append(f"λ {candidate['weight_decay']:.2g}")
    if method in CORRECTED:
        share = statistics.fmean(row["share_at_floor"] for row in rows)
        parts.append(f"floor {candidate['floor']:.2g} ({share:.0%})")
    return ", ".join(parts)


def _best_and_median(rows: Sequence[Row]) -> str:
    scores = [100 * row["accuracy"] for row in rows]
    return f"{max(scores):.2f} ({statistics.median(scores):.2f})"


def tables(rows: Sequence[Row], goals: Mapping[float, float]) -> dict[str, str]:
    """Tables of test accuracy and differences, and of the settings and trials."""
    tested, trials = (_grouped(rows, x) for x in ("probe", "trial of the probe"))
    make = lambda groups, cell: {key: cell(of) for key, of in groups.items()}
    accuracies = make(tested, lambda of: spread([row["accuracy"] for row in of]))
    for (_, epsilon), of in tested.items():
        cost = f"{of[-1]['search_epsilon']:.2f}"
        accuracies["ε of the search", epsilon] = cost
    accuracies |= {("goal", epsilon): f"{100 * x:g}" for epsilon, x in goals.items()}
    found = {
        "accuracy": by_epsilon("optimizer", accuracies),
        "differences": by_epsilon("difference", _differences(tested)),
        "settings": by_epsilon("optimizer", make(tested, _setting)),
        "trials": by_epsilon("optimizer", make(trials, _best_and_median)),
    }
    for row in rows:
        if row["what"] == "without privacy":
            found["without privacy"] = f"Without privacy: {100 * row['accuracy']:.2f}."
    return found


def study(
    probe: Probe, results: pathlib.Path, goals: Mapping[float, float] | None = None
) -> Study:
    """Of one probe; the goals are accuracies by epsilon, to stand below the others."""
    of = lambda rows: tables(rows, goals or {})
    return Study(results, probe.cells, probe.prepare, of)

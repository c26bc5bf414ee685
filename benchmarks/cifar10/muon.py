r"""Muon on the hidden kernels of CNN5, corrected for the noise and not, by the recipe.

    python -m benchmarks.cifar10.muon --data-dir DIR [--method Muon]
    python -m benchmarks.cifar10.muon       # prints the tables

Muon's update is a function F of the momentum m, near the matrix sign. Noise of variance
:math:`s^2` in each coordinate of m changes its expectation, as it does Adam's:

.. math:: E F(m + s z) = F(m) + \frac{s^2}{2} \Delta F(m) + O(s^4)

(DP-MuonBC, arXiv:2605.12994, removes this term). So :math:`2 F(m) - E F(m + s u)`, with
a second noise u that is made up, has no bias of order :math:`s^2`. `corrected` takes
the mean over u and -u for the expectation. Its paper may estimate the term otherwise.

Everything else is that of `benchmarks.cifar10.short`: 20 epochs, epsilon 3, AUTO-S in
the place of the clip, Adam with the rate of the recipe for the other arrays, and four
trials, as many as found the recipe's rate there. The recipe is trained with the seeds
that study does not have.
"""

import argparse
import dataclasses
import itertools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from benchmarks import experiment, rates, records
from benchmarks.cifar10 import cnn5_training, short
from benchmarks.cifar10.cnn5_training import cell
from benchmarks.records import Row
from benchmarks.study import Cell, Find, Study
from benchmarks.tables import markdown, spread

MUON, CORRECTED, RECIPE = "Muon", "Muon, corrected", experiment.AUTOMATIC
SEARCHED = {name: (2e-2, 1e-2, 4e-2, 5e-3) for name in (MUON, CORRECTED)}
(ADAM_RATE,) = short.LEARNING_RATES[RECIPE]
BETA = 0.95  # of Muon's momentum

# Each hidden kernel is a matrix from its taps and channels to its features.
_AS_MATRIX = optax.contrib.MuonDimensionNumbers((0, 1, 2), 3)
KERNELS = {
    f"conv{i}": {"kernel": _AS_MATRIX if i in (2, 3, 4) else None, "bias": None}
    for i in range(1, 6)
}


def muon(learning_rate: float) -> optax.GradientTransformation:
    """Muon for hidden kernels, and the recipe's Adam for all else."""
    return optax.contrib.muon(
        learning_rate,
        beta=BETA,
        adam_b2=experiment.B2,
        adam_learning_rate=ADAM_RATE,
        muon_weight_dimension_numbers=KERNELS,
    )


def momentum_weights(count: Any) -> tuple[jax.Array, jax.Array]:
    """Computes the last gradient's weight in Muon's momentum, and the norm of all.

    With Nesterov's momentum, after `count` steps, as Optax divides them.
    """
    last = BETA * (1 - BETA) / (1 - BETA ** (count + 1.0))
    before = last**2 * (BETA**2 - BETA ** (2.0 * count)) / (1 - BETA**2)
    last += (1 - BETA) / (1 - BETA ** (count * 1.0))
    return last, jnp.sqrt(last**2 + before)


class CorrectedState(NamedTuple):
    count: jax.Array  # shape=(), int32
    inner: optax.OptState


def corrected(
    optimizer: optax.GradientTransformation, noise_stddev: float, key: jax.Array
) -> optax.GradientTransformation:
    """Subtracts the leading bias of Muon's update, for a gradient with this noise.

    The key, of the noise that is made up, need not be secret.
    """

    def init(params):
        return CorrectedState(jnp.zeros([], jnp.int32), optimizer.init(params))

    def update(updates, state, params=None):
        count = jnp.asarray(optax.safe_increment(state.count))
        # In the last gradient alone, for as much noise in the momentum as it has.
        last, norm = momentum_weights(count)
        scale = noise_stddev * norm / last
        normal = optax.tree.random_like(jax.random.fold_in(key, count), updates)
        probe = jax.tree.map(
            lambda kernel, z: scale * z if kernel else jnp.zeros_like(z),
            *(KERNELS, normal),
            is_leaf=lambda x: x is None or x is _AS_MATRIX,
        )
        at = lambda grads: optimizer.update(grads, state.inner, params)
        own, inner = at(updates)
        above, _ = at(optax.tree.add(updates, probe))
        below, _ = at(optax.tree.sub(updates, probe))
        extrapolate = lambda x, a, b: 2 * x - (a + b) / 2
        updates = jax.tree.map(extrapolate, own, above, below)
        return updates, CorrectedState(count, inner)

    return optax.GradientTransformation(init, update)


class Setting(cnn5_training.Setting):
    """One training with AUTO-S and Muon."""

    @property
    def is_automatic(self) -> bool:
        return True

    def optimizer(self, noise_stddev: float) -> optax.GradientTransformation:
        own = muon(self.learning_rate)
        if self.method == MUON:
            return own
        return corrected(own, noise_stddev, jax.random.key(0))

    def moments(self, opt_state: optax.OptState, noise_stddev: float) -> Row:
        del opt_state, noise_stddev
        return {}


def setting(method: str, target_epsilon: float, learning_rate: float) -> Any:
    """Of 20 epochs."""
    if method == RECIPE:
        return short.setting(method, target_epsilon, learning_rate)
    return Setting(method, target_epsilon, short.EPOCHS, learning_rate)


PLAN = rates.Plan(
    setting,
    {**SEARCHED, RECIPE: (ADAM_RATE,)},
    epsilon_of_trials=short.PLAN.epsilon_of_trials,
    other_epsilons=(),
    seeds=range(6),
)


def cells(find: Find, _: argparse.Namespace) -> Iterator[Cell]:
    """The trials, and then the best of them."""
    methods = list(PLAN.learning_rates)
    yield from itertools.starmap(cell, PLAN.trials(methods))
    get = lambda *task: find(cell(*task))
    for task in PLAN.results(get, methods):
        if task[0].method != RECIPE or task[1] not in short.PLAN.seeds:
            yield cell(*task)


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Of the test and of the trials, the recipe's first seeds from its own study."""
    of_short = records.read(short.RESULTS)
    get = rates.reader([*rows, *of_short], cnn5_training.identity)
    found: dict[str, dict[int, float]] = {}
    for method in PLAN.learning_rates:
        if (rate := PLAN.best(get, method)) is not None:
            of = setting(method, PLAN.epsilon_of_trials, rate)
            several = {seed: get(of, seed, "test") for seed in PLAN.seeds}
            found[method] = {k: row["accuracy"] for k, row in several.items() if row}
    seeds = [x for x in PLAN.seeds if any(x in of for of in found.values())]
    score = lambda of, seed: f"{100 * of[seed]:.2f}" if seed in of else "-"
    body = [
        [
            method,
            f"{PLAN.best(get, method):g}",
            *(score(of, seed) for seed in seeds),
            spread(list(of.values())),
        ]
        for method, of in found.items()
        if of
    ]
    names = (f"seed {seed}" for seed in seeds)
    accuracy = markdown(["optimizer", "η", *names, "all"], body)
    trials = dataclasses.replace(PLAN, learning_rates=SEARCHED).trials_table(get)
    return {"muon": accuracy, "muon, trials": trials}


STUDY = Study(
    results=pathlib.Path(__file__).with_name("muon.jsonl"),
    cells=cells,
    prepare=cnn5_training.prepare,
    tables=tables,
)

if __name__ == "__main__":
    STUDY.main(__doc__)

"""A recommender on MovieLens-100k, private for each user, at three levels of privacy.

    python -m benchmarks.movielens.run --data-dir DIR [--method recipe] [--epsilon 3]
    python -m benchmarks.movielens.run                   # the tables

A fifth of the users is the test. Each of their ratings is predicted from their other
ones. Width and learning rate are chosen for each optimizer and epsilon on a fifth of
the other users, with two seeds. Epsilon is of one training, and of all that a user has.
"""

import argparse
import itertools
import pathlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpadambc
from benchmarks import records
from benchmarks.experiment import AUTOMATIC, NON_PRIVATE
from benchmarks.movielens import data, model
from benchmarks.movielens.data import Ratings
from benchmarks.records import Row
from benchmarks.study import Cell, Find, Study
from benchmarks.tables import markdown
from dpadambc import training

EPSILONS, TARGET_DELTA = (8.0, 3.0, 1.0), 1e-4
MAX_ROWS = 128  # of a user in training
MOST_ROWS = 800  # of a test user
BATCH_SIZE, ITERATIONS = 256, 200
WIDTHS, LEARNING_RATES = (0, 4), (0.0025, 0.005, 0.01, 0.02, 0.04)
SEEDS_OF_TRIALS, SEEDS = (1_000, 1_001), (0, 1, 2)
ONE_STEP = "means of films, in one step"
BLOCKS = [
    (NON_PRIVATE, None),
    *itertools.product((AUTOMATIC, "DP-AdamBC"), EPSILONS),
]


def by_constant(_: Ratings, test: Ratings) -> np.ndarray:
    return np.full(test.stars.shape, model.MIDDLE)


def _level(test: Ratings, expected: np.ndarray) -> np.ndarray:
    """The mean of what a user's other ratings are above what was expected."""
    left_over = test.stars - expected
    _, user = np.unique(test.users, return_inverse=True)
    total, count = np.bincount(user, left_over)[user], np.bincount(user)[user]
    return (total - left_over) / (count - 1 + model.OTHERS)


def by_level(_: Ratings, test: Ratings) -> np.ndarray:
    expected = by_constant(_, test)
    return expected + _level(test, expected)


def by_film(train: Ratings, test: Ratings) -> np.ndarray:
    """With the means of films, which are not private."""
    mean = train.stars.mean()
    total = np.bincount(train.films, train.stars - mean, data.NUM_FILMS)
    count = np.bincount(train.films, minlength=data.NUM_FILMS)
    expected = mean + (total / (count + 5))[test.films]
    return expected + _level(test, expected)


BASELINES: dict[str, Callable[[Ratings, Ratings], np.ndarray]] = {
    "three stars": by_constant,
    "a user's own other ratings": by_level,
    "means of films, not private": by_film,
}


def cell(block: tuple[str, float | None], setting: Any, seed: int, part: str) -> Cell:
    identity = dict(zip(("method", "target_epsilon"), block, strict=True))
    identity |= dict(zip(("width", "learning_rate"), setting, strict=True))
    identity |= {"seed": seed, "scored_on": part}
    return Cell(*block, seed if part == "test" else None, identity)


def _baseline(name: str) -> Cell:
    return Cell(name, None, None, {"method": name, "scored_on": "test"})


def trials(block: tuple[str, float | None], width: int) -> list[list[Cell]]:
    """With all seeds of each learning rate."""
    return [
        [cell(block, (width, x), seed, "validation") for seed in SEEDS_OF_TRIALS]
        for x in LEARNING_RATES
    ]


def validated(find: Find, block: tuple[str, float | None], width: int) -> list[float]:
    """The mean error of each learning rate, once all are there."""
    rows = [[find(each) for each in several] for several in trials(block, width)]
    if not all(map(all, rows)):
        return []
    return [statistics.fmean(row["rmse"] for row in each if row) for each in rows]


def chosen(find: Find, block: tuple[str, float | None]) -> tuple[int, float] | None:
    """The width and the learning rate with the least error, once all are there."""
    settings = list(itertools.product(WIDTHS, LEARNING_RATES))
    errors = [x for width in WIDTHS for x in validated(find, block, width)]
    is_there = len(errors) == len(settings)
    return settings[int(np.argmin(errors))] if is_there else None


def tests(find: Find, block: tuple[str, float | None]) -> list[Cell]:
    """Of the setting that was chosen, or the only one."""
    setting = (0, None) if block[0] == ONE_STEP else chosen(find, block)
    return [cell(block, setting, x, "test") for x in SEEDS] if setting else []


def cells(find: Find, arguments: argparse.Namespace) -> Iterator[Cell]:
    for name in BASELINES:
        yield _baseline(name)
    for epsilon in EPSILONS:
        yield from tests(find, (ONE_STEP, epsilon))
    for width, block in itertools.product(WIDTHS, BLOCKS):
        yield from itertools.chain.from_iterable(trials(block, width))
    for block in BLOCKS:
        yield from tests(find, block)


def settings(
    cell: Cell, learning_rate: float, num_users: int
) -> tuple[dpadambc.PoissonGaussian, optax.GradientTransformation]:
    """Both optimizers with the mechanism of the recipe; without privacy, no clip."""
    if cell.epsilon is None:
        mechanism = dpadambc.PoissonGaussian(
            l2_clip_norm=1e6,
            noise_multiplier=0.0,
            sampling_prob=BATCH_SIZE / num_users,
            iterations=ITERATIONS,
            normalize_by=BATCH_SIZE,
        )
        return mechanism, optax.adam(learning_rate)
    recipe = dpadambc.recipe(
        learning_rate,
        target_epsilon=cell.epsilon,
        target_delta=TARGET_DELTA,
        num_examples=num_users,
        batch_size=BATCH_SIZE,
        epochs=ITERATIONS * BATCH_SIZE / num_users,
    )
    if cell.method == AUTOMATIC:
        return recipe
    return recipe.mechanism, dpadambc.adam_bc(learning_rate, recipe.mechanism)


def in_one_step(cell: Cell, examples: tuple[np.ndarray, ...]) -> tuple[Any, Row]:
    """The means of films as a private release: a noised sum of ratings and of counts.

    A user has a mean square of about one together, whatever the number of ratings.
    """

    def loss_fn(sums: jax.Array, films: Any, stars: Any, is_padding: Any) -> jax.Array:
        level = jnp.mean(stars, where=~is_padding)
        own = jnp.stack([stars - level, jnp.ones_like(stars)], axis=1)
        own = jnp.where(is_padding[:, None], 0, own)
        return -jnp.sum(sums[films] * own) / jnp.sqrt(2 * jnp.sum(~is_padding))

    mechanism = dpadambc.PoissonGaussian.calibrate(
        target_epsilon=cast(float, cell.epsilon),
        target_delta=TARGET_DELTA,
        l2_clip_norm=1.0,
        sampling_prob=1.0,
        iterations=1,
        normalize_by=1,
    )
    result = training.fit(
        loss_fn,
        jnp.zeros((data.NUM_FILMS, 2)),
        examples,
        mechanism,
        optax.sgd(1.0),
        key=jax.random.key(cell.identity["seed"]),
        target_delta=TARGET_DELTA,
        progress=False,
    )
    stars, counts = np.asarray(result.params).T
    least = 2 * cast(float, mechanism.noise_stddev)
    biases = stars / (np.maximum(counts, 0) + least)
    params = model.init(jax.random.key(0), 0) | {"biases": biases}
    return params, _of_run(result)


def rmse(predicted: np.ndarray, stars: np.ndarray) -> float:
    """Of all ratings together."""
    return round(float(np.sqrt(np.mean((predicted - stars) ** 2))), 5)


@jax.jit
def _predictions(params: Any, users: tuple[jax.Array, ...]) -> jax.Array:
    of_user = lambda user: model.predictions(params, *user)
    return jax.lax.map(of_user, users, batch_size=32)


def in_many_steps(cell: Cell, examples: tuple[np.ndarray, ...]) -> tuple[Any, Row]:
    """The model of a setting."""
    width, learning_rate, seed = (
        cell.identity[name] for name in ("width", "learning_rate", "seed")
    )
    mechanism, optimizer = settings(cell, learning_rate, len(examples[0]))
    init_key, key = jax.random.split(jax.random.key(seed))
    result = training.fit(
        model.loss_fn,
        model.init(init_key, width),
        examples,
        mechanism,
        optimizer,
        key=key,
        target_delta=TARGET_DELTA,
        steps_per_call=ITERATIONS,
        progress=False,
    )
    return result.params, _of_run(result)


def _of_run(result: training.Result) -> Row:
    return {
        "iterations": result.iterations,
        "noise_multiplier": result.mechanism.noise_multiplier,
        "epsilon": result.epsilon if np.isfinite(result.epsilon) else None,
    }


def train(cell: Cell, fitted: Ratings, scored: Ratings) -> Row:
    """Trains on some users, and predicts the ratings of others."""
    examples, users = fitted.by_user(MAX_ROWS), scored.by_user(MOST_ROWS)
    fit = in_one_step if cell.method == ONE_STEP else in_many_steps
    params, row = fit(cell, examples)
    _, stars, is_padding = users
    predicted = np.asarray(_predictions(params, users))
    error = rmse(predicted[~is_padding], stars[~is_padding])
    return {"rmse": error, **row, "num_users": len(examples[0])}


def prepare(arguments: argparse.Namespace) -> Callable[[Cell], Row]:
    ratings = data.load(arguments.data_dir / "movielens")
    users = np.random.default_rng(0).permutation(np.unique(ratings.users))
    of_test, of_validation, of_fit = np.split(users, [189, 340])
    test, fit, validation = map(ratings.of, (of_test, of_fit, of_validation))
    of_all = ratings.of(np.concatenate([of_fit, of_validation]))

    def make(cell: Cell) -> Row:
        if predict := BASELINES.get(cell.method):
            return {"rmse": rmse(predict(of_all, test), test.stars)}
        is_test = cell.identity["scored_on"] == "test"
        return train(cell, *((of_all, test) if is_test else (fit, validation)))

    return make


def _finder(rows: Sequence[Row]) -> Find:
    return lambda cell: records.find(rows, cell.identity)


def _results(rows: Sequence[Row]) -> str:
    """Errors on test users, and the width and learning rate of each."""
    find, body = _finder(rows), []
    for name in BASELINES:
        row = find(_baseline(name))
        body.append([name, *["-"] * 3, f"{row['rmse']:.3f}" if row else "-"])
    for block in [*itertools.product([ONE_STEP], EPSILONS), *BLOCKS]:
        found = [row for x in tests(find, block) if (row := find(x))]
        if len(found) == len(SEEDS):
            method, epsilon = block
            width, rate = found[0]["width"], found[0]["learning_rate"]
            errors = [row["rmse"] for row in found]
            shown = f"{statistics.fmean(errors):.3f} ± {statistics.stdev(errors):.3f}"
            at = "-" if epsilon is None else f"{epsilon:g}"
            eta = "-" if rate is None else f"{rate:g}"
            body.append([method, at, str(width), eta, shown])
    return markdown(["prediction", "ε", "width", "η", "RMSE"], body)


def _trials(rows: Sequence[Row]) -> str:
    """The error of the best learning rate on validation users, by width."""
    body = []
    for method, epsilon in BLOCKS:
        errors = [validated(_finder(rows), (method, epsilon), x) for x in WIDTHS]
        at = "-" if epsilon is None else f"{epsilon:g}"
        body.append([method, at, *(f"{min(x):.3f}" if x else "-" for x in errors)])
    return markdown(["RMSE", "ε", *(f"width {x}" for x in WIDTHS)], body)


def tables(rows: Sequence[Row]) -> dict[str, str]:
    return {"results": _results(rows), "trials": _trials(rows)}


STUDY = Study(
    results=pathlib.Path(__file__).with_name("results.jsonl"),
    cells=cells,
    prepare=prepare,
    tables=tables,
)

if __name__ == "__main__":
    STUDY.main(__doc__)

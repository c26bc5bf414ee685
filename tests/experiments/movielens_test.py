"""The recommender on MovieLens: its predictions, its baselines, and its data."""

import zipfile

import jax
import numpy as np
import pytest

from benchmarks.experiment import AUTOMATIC
from benchmarks.movielens import data, model, run

RNG = np.random.default_rng(0)


def user(num_rows, max_rows=12):
    """Films, stars and padding, which is a copy of the first row."""
    films = RNG.choice(data.NUM_FILMS, num_rows, replace=False)
    stars = RNG.integers(1, 6, num_rows)
    rows = np.append(np.arange(num_rows), np.zeros(max_rows - num_rows, int))
    is_padding = np.arange(max_rows) >= num_rows
    return films[rows].astype(np.int32), stars[rows].astype(np.float32), is_padding


@pytest.fixture(scope="module")
def params():
    made = model.init(jax.random.key(0), 4)
    return made | {"biases": RNG.normal(size=data.NUM_FILMS).astype(np.float32)}


def test_a_rating_is_predicted_from_the_others_as_by_a_loop(params):
    films, stars, is_padding = user(7)
    found = np.asarray(model.predictions(params, films, stars, is_padding))
    biases, vectors = (np.asarray(params[name]) for name in ("biases", "vectors"))
    for i in range(7):
        others = [j for j in range(7) if j != i]
        left_over = {j: stars[j] - 3 - biases[films[j]] for j in range(7)}
        size = len(others) + model.OTHERS
        level = sum(left_over[j] for j in others) / size
        taste = sum((left_over[j] - level) * vectors[films[j]] for j in others)
        expected = 3 + biases[films[i]] + level + vectors[films[i]] @ taste / size
        assert found[i] == pytest.approx(expected, abs=1e-5)


def test_padding_and_a_rating_itself_say_nothing_of_it(params):
    films, stars, is_padding = user(7)
    of_stars = lambda x: model.predictions(params, films, x, is_padding)
    moved = np.asarray(jax.jacobian(of_stars)(stars))[:7]
    np.testing.assert_allclose(np.diag(moved), 0, atol=1e-6)
    np.testing.assert_array_equal(moved[:, 7:], 0)
    others = moved[:, :7] - np.diag(np.diag(moved))
    assert np.abs(others).max() > 0.05  # negative control
    gradient = jax.grad(model.loss_fn)(params, films, stars, is_padding)
    assert set(np.flatnonzero(gradient["biases"])) == set(films)


def test_the_baselines_are_those_of_a_loop():
    users = np.array([1, 1, 1, 2, 2])
    stars = np.float32([5, 4, 3, 1, 2])
    test = data.Ratings(users, np.int32([0, 1, 2, 0, 1]), stars)
    train = data.Ratings(users, np.int32([0, 0, 1, 1, 1]), stars)
    others = lambda x: [
        np.sum(x[(users == users[i]) & (np.arange(5) != i)])
        / (np.sum(users == users[i]) - 1 + model.OTHERS)
        for i in range(5)
    ]
    by_level = run.by_level(train, test)
    np.testing.assert_allclose(by_level, 3 + np.array(others(stars - 3)))
    film = np.array([3 + (9 - 6) / 7, 3 + (6 - 9) / 8, 3, 3 + 3 / 7, 3 - 3 / 8])
    expected = film + others(stars - film)
    np.testing.assert_allclose(run.by_film(train, test), expected, rtol=1e-6)
    # With no parameters the model is the second one.
    zeros = jax.tree.map(np.zeros_like, model.init(jax.random.key(0), 4))
    films, stars, is_padding = (x[0] for x in test.by_user(4))
    found = model.predictions(zeros, films, stars, is_padding)
    np.testing.assert_allclose(found[:3], by_level[:3], rtol=1e-6)


def test_what_is_chosen_has_the_least_mean_error_on_validation_users():
    block, errors = (AUTOMATIC, 3.0), {(4, 0.01): (0.95, 0.97), (0, 0.02): (0.93, 1.2)}

    def find(cell):
        name = cell.identity
        is_second = name["seed"] == run.SEEDS_OF_TRIALS[1]
        setting = name["width"], name["learning_rate"]
        return {"rmse": errors.get(setting, (1.0, 1.0))[is_second]}

    assert run.chosen(find, block) == (4, 0.01)
    assert {cell.identity["scored_on"] for cell in run.tests(find, block)} == {"test"}
    without_one = lambda cell: None if cell.identity["width"] == 0 else find(cell)
    assert run.chosen(without_one, block) is None
    assert run.tests(without_one, block) == []


def ratings(num_users):
    """Of films of which each is liked or not, by all users alike."""
    users = np.repeat(np.arange(num_users), 20)
    films = RNG.integers(30, size=len(users)).astype(np.int32)
    stars = np.where(films % 2, 5, 1).astype(np.float32)
    return data.Ratings(users, films, stars)


@pytest.mark.parametrize(
    "block, iterations",
    [
        (run.BLOCKS[0], 20),
        ((AUTOMATIC, 8.0), 20),
        (("DP-AdamBC", 8.0), 20),
        ((run.ONE_STEP, 8.0), 1),
    ],
)
def test_training_learns_what_films_are_like_within_its_epsilon(
    monkeypatch, block, iterations
):
    monkeypatch.setattr(run, "ITERATIONS", 20)
    cell = run.cell(block, (2, 0.1), 0, "test")
    found = run.train(cell, ratings(1_000), test := ratings(20))
    assert found["rmse"] < 0.8 * run.rmse(run.by_level(test, test), test.stars)
    assert found["num_users"] == 1_000 and found["iterations"] == iterations
    if block[1] is None:
        assert found["epsilon"] is None and found["noise_multiplier"] == 0
    else:
        assert 7.9 < found["epsilon"] <= 8.0 and found["noise_multiplier"] > 0.5


def test_the_wheel_is_read_and_another_one_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="pip download --no-deps"):
        data.load(tmp_path)
    with zipfile.ZipFile(tmp_path / data.WHEEL, "w") as wheel:
        wheel.writestr("recbole/dataset_example/ml-100k/ml-100k.inter", "user\n1")
    with pytest.raises(ValueError, match="SHA-256"):
        data.load(tmp_path)

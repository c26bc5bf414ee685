"""The search over linear probes, its tables and its picture."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpadambc
from benchmarks import records
from benchmarks.probe import linear, pictures, search, table

NUM_FEATURES = 10
PROTOCOL = search.Protocol(
    features="made up",
    num_classes=10,
    budgets=(search.Budget(target_epsilon=3.0, batch_size=64, iterations=20),),
    l2_clip_norm=0.5,
    learning_rates_of_sgd=(3.0, 30.0),
    learning_rates_of_adam=(0.05, 0.3),
)
SPLIT = np.arange(270), np.arange(270, 300)


@pytest.fixture(scope="module")
def separable() -> linear.Data:
    """Four hundred rows of norm 1, the class in the mean of each."""
    rng = np.random.default_rng(0)
    labels = rng.integers(10, size=400)
    features = np.eye(NUM_FEATURES)[labels] + 0.3 * rng.normal(size=(400, NUM_FEATURES))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    return linear.Data(jnp.asarray(features, jnp.float32), jnp.asarray(labels))


@pytest.fixture
def laboratory(separable, tmp_path, monkeypatch):
    """Makes a laboratory with two trials that goes on with what is on record."""
    monkeypatch.setattr(search, "NUM_TRIALS", 2)
    monkeypatch.setattr(search, "INVERSE_PENALTIES", (1.0, 10.0))
    path = tmp_path / "records.jsonl"

    def make() -> search.Laboratory:
        train, test = (separable.take(x) for x in (slice(300), slice(300, None)))
        return search.Laboratory(PROTOCOL, train, test, SPLIT, records.Records(path))

    return make, path


def test_every_optimizer_has_equal_trials_and_a_cut_off_search_goes_on(
    laboratory, monkeypatch
):
    make, path = laboratory
    some = {name: linear.OPTIMIZERS[name] for name in ("DP-SGD", "DP-AdamW-BC")}
    monkeypatch.setattr(linear, "OPTIMIZERS", some)
    make().all_optimizers(num_seeds=2)
    rows = records.read(path)
    for method in linear.OPTIMIZERS:
        of = [row for row in rows if row["method"] == method]
        assert [row["what"] for row in of] == 2 * ["trial of the probe"] + 2 * ["probe"]
        best = max(of[:2], key=lambda row: row["accuracy"])["candidate"]
        assert all(row["candidate"] == best for row in of[2:])
        assert all(row["search_epsilon"] > 3 for row in of[2:])
    sgd = [row["accuracy"] for row in rows if row["what"] == "probe"][:2]
    assert min(sgd) > 0.5  # a tenth by chance
    monkeypatch.setattr(linear, "train", lambda *_: pytest.fail("trained again"))
    make().all_optimizers(num_seeds=2)
    assert records.read(path) == rows
    tables = table.render(rows, {3.0: 0.7})
    assert "| DP-AdamW-BC |" in tables and "| goal | 70 |" in tables
    with pytest.raises(ValueError, match="one protocol"):
        table.render([*rows, rows[0] | {"iterations": 40}], {})


@pytest.mark.slow
def test_the_tables_and_the_picture_are_of_what_is_on_record(laboratory):
    make, path = laboratory
    (budget,) = PROTOCOL.budgets
    runs = make()
    for method in ("DP-AdamBC", linear.CONTROL):
        runs.retrain(method, budget, num_seeds=2)
    runs.without_privacy()
    rows = records.read(path)
    tested = [row for row in rows if row["what"] == "probe"]
    assert min(row["accuracy"] for row in tested) > 0.5  # of ten classes
    (row,) = [row for row in rows if row["what"] == "without privacy"]
    tables = table.render(rows, {})
    assert f"Without privacy: {100 * row['accuracy']:.2f}." in tables
    gains = [100 * (tested[i]["accuracy"] - tested[2 + i]["accuracy"]) for i in (0, 1)]
    assert f"| DP-AdamBC less floor alone | {np.mean(gains):+.2f} ±" in tables
    (panel,) = pictures.learning_curves(rows).axes
    first, _ = panel.lines
    curves = [row["curve"] for row in tested[:2]]
    np.testing.assert_allclose(first.get_ydata(), np.mean(curves, 0))


def test_no_example_is_on_two_sides(laboratory):
    make, _ = laboratory
    runs = make()
    sides = [runs.fit, runs.validation, runs.test]
    assert [len(side.labels) for side in sides] == [270, 30, 100]
    rows = np.concatenate([side.features for side in sides])
    assert len(np.unique(rows, axis=0)) == 400


@pytest.mark.slow
@pytest.mark.usefixtures("without_nonces")  # it may round otherwise beside others
def test_the_first_run_does_not_depend_on_those_beside_it(separable):
    mechanism = dpadambc.PoissonGaussian(
        l2_clip_norm=0.5,
        noise_multiplier=1.0,
        sampling_prob=0.1,
        iterations=20,
        normalize_by=40,
    )
    keys = jax.random.split(jax.random.key(0), 2)
    candidates = linear.Candidate(*(jnp.array([x, 2 * x]) for x in (0.1, 0.1, 1.0)))
    train = functools.partial(linear.train, "DP-AdamW-BC", mechanism, 10)
    both = train(keys, candidates, separable, separable)
    one = jax.tree.map(lambda x: x[:1], candidates)
    first = train(keys[:1], one, separable, separable)
    np.testing.assert_allclose(both.weights[0], first.weights[0], rtol=1e-5, atol=1e-5)
    assert np.abs(both.weights[0] - both.weights[1]).max() > 0.01


def test_each_optimizer_has_the_same_number_of_trials():
    for method in linear.OPTIMIZERS:
        candidate = PROTOCOL.candidates(method)
        assert {len(column) for column in candidate} == {search.NUM_TRIALS}
    low, high = PROTOCOL.learning_rates_of_sgd
    rates = np.asarray(PROTOCOL.candidates("DP-SGD").learning_rate)
    assert low <= rates.min() < np.sqrt(low * high) < rates.max() <= high

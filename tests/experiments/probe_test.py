"""The search over linear probes, and its tables."""

import argparse
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpadambc
from benchmarks import probe, records
from benchmarks.experiment import Data, Sides
from benchmarks.methods.methods import CONTROL, METHODS, train

NUM_FEATURES = 10


@pytest.fixture(scope="module")
def separable() -> Data:
    """Four hundred rows of norm 1, the class in the mean of each."""
    rng = np.random.default_rng(0)
    labels = rng.integers(10, size=400)
    features = np.eye(NUM_FEATURES)[labels] + 0.3 * rng.normal(size=(400, NUM_FEATURES))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    return Data(jnp.asarray(features, jnp.float32), jnp.asarray(labels))


PROBE = probe.Probe(
    features="made up",
    num_classes=10,
    budgets=(probe.Budget(target_epsilon=3.0, batch_size=64, iterations=20),),
    l2_clip_norm=0.5,
    learning_rates_of_sgd=(3.0, 30.0),
    learning_rates_of_adam=(0.05, 0.3),
    load=lambda _: pytest.fail("not loaded"),
)


@pytest.fixture
def study(separable, tmp_path, monkeypatch):
    """With two trials and two seeds of each optimizer."""
    monkeypatch.setattr(probe, "NUM_TRIALS", 2)
    monkeypatch.setattr(probe, "NUM_SEEDS", 2)
    monkeypatch.setattr(probe, "INVERSE_PENALTIES", (1.0, 10.0))
    parts = (slice(300), slice(300, None), slice(270), slice(270, 300))
    sides = Sides(*map(separable.take, parts))
    of = dataclasses.replace(PROBE, load=lambda _: sides)
    return probe.study(of, tmp_path / "records.jsonl", goals={3.0: 0.7})


def _asked(*methods):
    return argparse.Namespace(method=methods, epsilon=None, seed=None)


def test_every_optimizer_has_equal_trials_and_a_cut_off_search_goes_on(
    study, monkeypatch
):
    methods = ("DP-SGD", "DP-AdamW-BC")
    study.make(_asked(*methods), records.Records(study.results))
    rows = records.read(study.results)
    for method in methods:
        of = [row for row in rows if row["method"] == method]
        assert [row["what"] for row in of] == 2 * ["trial of the probe"] + 2 * ["probe"]
        best = max(of[:2], key=lambda row: row["accuracy"])["candidate"]
        assert all(row["candidate"] == best for row in of[2:])
        assert all(row["search_epsilon"] > 3 for row in of[2:])
    sgd = [row["accuracy"] for row in rows if row["what"] == "probe"][:2]
    assert min(sgd) > 0.5  # a tenth by chance
    monkeypatch.setattr(probe, "train", lambda *_: pytest.fail("trained again"))
    study.make(_asked(*methods), records.Records(study.results))
    assert records.read(study.results) == rows
    table = study.tables(rows)["accuracy"]
    assert "| DP-AdamW-BC |" in table and "| goal | 70 |" in table


@pytest.mark.slow
def test_the_tables_are_of_what_is_on_record(study):
    methods = "DP-AdamBC", CONTROL, "not private"
    study.make(_asked(*methods), records.Records(study.results))
    rows = records.read(study.results)
    tested = [row for row in rows if row["what"] == "probe"]
    assert min(row["accuracy"] for row in tested) > 0.5  # of ten classes
    (row,) = [row for row in rows if row["what"] == "without privacy"]
    tables = study.tables(rows)
    private_less = f"Without privacy: {100 * row['accuracy']:.2f}."
    assert tables["without privacy"] == private_less
    gains = [100 * (tested[i]["accuracy"] - tested[2 + i]["accuracy"]) for i in (0, 1)]
    line = f"| DP-AdamBC minus floor alone | {np.mean(gains):+.2f} ±"
    assert line in tables["differences"]


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
    numbers = {"learning_rate": 0.1, "weight_decay": 0.1, "floor": 1.0}
    both_candidates = [numbers, {name: 2 * x for name, x in numbers.items()}]
    how = METHODS["DP-AdamW-BC"].make, mechanism, probe.model(NUM_FEATURES, 10)
    both = train(*how, keys, both_candidates, separable, separable)
    first = train(*how, keys[:1], [numbers], separable, separable)
    np.testing.assert_allclose(both.params[0], first.params[0], rtol=1e-5, atol=1e-5)
    assert np.abs(both.params[0] - both.params[1]).max() > 0.01


def test_each_optimizer_has_the_same_number_of_trials():
    for method in probe.OPTIMIZERS:
        assert len(PROBE.candidates(method)) == probe.NUM_TRIALS
    low, high = PROBE.learning_rates_of_sgd
    rates = [each["learning_rate"] for each in PROBE.candidates("DP-SGD")]
    assert low <= min(rates) < np.sqrt(low * high) < max(rates) <= high

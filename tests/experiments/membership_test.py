"""The attack on Adult: its likelihood ratios, and what it finds where it is known."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from benchmarks.adult import membership
from benchmarks.experiment import Data
from benchmarks.study import Cell
from dpadambc import accounting


def made_up(shift, num_models=64, num_examples=500):
    """Confidences of unit variance, a shift higher for members; hard and easy ones."""
    rng = np.random.default_rng(0)
    is_member = membership.members(num_models, num_examples)
    level = 3 * rng.standard_normal(num_examples)
    noise = rng.standard_normal((num_models, num_examples))
    return level + shift * is_member + noise, is_member


def test_each_model_has_half_of_the_examples():
    is_member = membership.members(20, 100)
    assert (is_member.sum(axis=1) == 50).all()
    assert len(np.unique(is_member, axis=0)) == 20


def test_ratios_are_those_of_a_loop_without_the_model_attacked():
    seen, is_member = made_up(1.0, num_models=24, num_examples=5)
    expected = np.zeros(seen.shape)
    for sign, group in ((1, is_member), (-1, ~is_member)):
        deviations, means = [], np.zeros(seen.shape)
        for model, example in np.ndindex(seen.shape):
            others = [
                seen[other, example]
                for other in range(len(seen))
                if other != model and group[other, example]
            ]
            means[model, example] = np.mean(others)
            if group[model, example]:
                deviations.append(seen[model, example] - means[model, example])
        logpdf = scipy.stats.norm.logpdf(seen, means, np.std(deviations))
        expected += sign * logpdf
    np.testing.assert_allclose(
        membership.likelihood_ratios(seen, is_member), expected, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("shift", [0.0, 0.3, 1.0])
def test_the_area_is_that_of_the_best_attack_on_known_confidences(shift):
    # Means that many models estimate: the attack is as good as with the true ones.
    seen, is_member = made_up(shift, num_models=1_000, num_examples=100)
    ratios = membership.likelihood_ratios(seen, is_member)
    areas = membership.success(ratios, is_member)["areas"]
    best = scipy.stats.norm.cdf(shift / math.sqrt(2))
    # The standard error of all areas together, each of 50 members and 50 others.
    error = math.sqrt(101 / (12 * 50 * 50) / 1_000)
    assert best - 0.005 - 4 * error < np.mean(areas) < best + 4 * error


def test_members_are_found_by_no_more_than_chance_where_they_are_others():
    seen, is_member = made_up(1.0)
    ratios = membership.likelihood_ratios(seen, is_member)
    strangers = np.random.default_rng(1).permuted(is_member, axis=1)
    found = membership.success(ratios, strangers)
    assert abs(np.mean(found["areas"]) - 0.5) < 0.01
    assert abs(found["true_positive_rates"]["0.1"] - 0.1) < 0.01


def test_labels_that_a_model_remembers_are_found_and_private_ones_are_not(monkeypatch):
    monkeypatch.setattr(membership, "BATCH_SIZE", 32)
    monkeypatch.setattr(membership, "ITERATIONS", 100)
    rng = np.random.default_rng(0)
    features = rng.standard_normal((64, 104), np.float32)
    labels = rng.integers(0, 2, 64).astype(np.int32)
    examples = Data(jnp.asarray(features), jnp.asarray(labels))
    cells = [cell for cell in membership.cells() if cell.method == "Adam, not private"]
    cells.append(Cell("DP-AdamBC", 1.0, None, {}))
    remembers, private = (
        membership.attack(cell, examples, examples, num_models=12) for cell in cells
    )
    assert np.mean(remembers["areas"]) > 0.9
    assert abs(np.mean(private["areas"]) - 0.5) < 0.1
    assert private["epsilon"] <= 1.0 and remembers["epsilon"] is None
    # A replacement is found more easily than an addition, and no more than two of them.
    of_addition = accounting.trade_off(membership.mechanism(cells[1], 32))
    once = of_addition.true_positive_rate([0.001, 0.01, 0.1])
    found = np.array(membership.bounds(private))
    assert np.all(once < found)
    assert np.all(found <= of_addition.true_positive_rate(once) + 1e-5)
    assert (
        "DP-AdamBC"
        in membership.tables(
            [private | {"method": "DP-AdamBC", "target_epsilon": 1.0}]
        )["attack"]
    )

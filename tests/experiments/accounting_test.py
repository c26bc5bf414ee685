"""The reference for epsilon, and how accountants are compared with it."""

import json
import math

import dp_accounting
import numpy as np
import pytest
import scipy.integrate
import scipy.stats
from dp_accounting.pld import privacy_loss_distribution

from benchmarks.accounting import (
    exact,
    ours,
    peers,
    process,
    rounding,
    settings,
    table,
)
from benchmarks.accounting.settings import Setting
from dpadambc import accounting
from dpadambc.core import accounting as core_accounting

SMALL = dict(batch_size=100, num_examples=1_000, iterations=20)


def composed(pair, count, delta):
    steps_of = lambda tilt: [(exact.mixture_losses(*pair, tilt), count)]
    return exact.Composition(steps_of, delta)


def test_the_reference_of_a_gaussian_is_its_closed_form():
    moved, pure = (np.ones(1) / 10, np.ones(1)), (np.zeros(1), np.ones(1))
    for delta in (1e-3, 1e-12):
        below, above = composed((moved, pure), 100, delta).epsilon_bounds(delta)
        expected = exact.gaussian_epsilon(1.0, delta)
        assert below <= expected * (1 + 1e-9) <= above * (1 + 2e-9)
        assert above < below * (1 + 1e-9)
    mu, epsilon = 1.0, exact.gaussian_epsilon(1.0, 1e-3)
    ndtr = scipy.stats.norm.cdf
    second = math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu)
    assert ndtr(mu / 2 - epsilon / mu) - second == pytest.approx(1e-3)


def delta_by_integration(pair, epsilon):
    def density(mixture, x):
        means, probs = mixture
        return (probs * scipy.stats.norm.pdf(x - means)).sum()

    def excess(x):
        first, second = (density(mixture, x) for mixture in pair)
        return max(first - math.exp(epsilon) * second, 0)

    return scipy.integrate.quad(excess, -12, 14, limit=500, epsabs=1e-13)[0]


@pytest.mark.parametrize("kind", ["add", "remove", "replace", "node"])
def test_the_delta_of_one_step_is_an_integral(kind):
    pairs = (
        exact._add_pairs(0.3) + exact._replace_pairs(0.3) + exact._node_pairs(0.3, 3)
    )
    make = dict(zip(("add", "remove", "replace", "node"), pairs, strict=False))[kind]
    pair = make(0.5)
    epsilon = 0.7
    step = exact.mixture_losses(*pair, 2.0)
    direct = np.exp(step.log_masses) @ np.maximum(1 - np.exp(epsilon - step.losses), 0)
    assert direct == pytest.approx(delta_by_integration(pair, epsilon), rel=5e-3)


def test_the_bound_without_replacement_has_the_profile_of_joint_convexity():
    rate, shift, epsilon = 0.2, 1.5, 0.4
    steps_of = lambda tilt: [(exact.symmetric_losses(rate, shift, tilt), 1)]
    inner = math.log1p(math.expm1(epsilon) / rate)
    cdf = scipy.stats.norm.cdf
    gaussian = cdf(shift / 2 - inner / shift)
    gaussian -= math.exp(inner) * cdf(-shift / 2 - inner / shift)
    losses = exact.symmetric_losses(rate, shift, 2.0)
    masses = np.exp(losses.log_masses)
    assert masses.sum() == pytest.approx(1)
    exchanged = np.exp(losses.log_masses - losses.losses)
    assert exchanged.sum() == pytest.approx(1)
    direct = (masses * np.maximum(1 - np.exp(epsilon - losses.losses), 0)).sum()
    assert direct == pytest.approx(rate * gaussian, rel=1e-3)
    often = lambda tilt: [(step, 100) for step, _ in steps_of(tilt)]
    above = exact.Composition(often, 1e-5).epsilon_bounds(1e-5)
    pair = exact._add_pairs(rate)[0](1 / shift)
    assert above[0] > composed(pair, 100, 1e-5).epsilon_bounds(1e-5)[1]


@pytest.mark.parametrize("relation", ["ADD_OR_REMOVE_ONE", "REPLACE_ONE"])
def test_the_reference_lies_between_grids_from_below_and_above(relation):
    setting = Setting(noise_multiplier=1.0, relation=relation, **SMALL)
    replaces = relation == "REPLACE_ONE"
    below, above = (
        privacy_loss_distribution.from_gaussian_mechanism(
            1.0 + replaces,
            pessimistic_estimate=pessimistic,
            value_discretization_interval=1e-3,
            sampling_prob=setting.rate,
            use_connect_dots=pessimistic,
            neighboring_relation=dp_accounting.NeighboringRelation[relation],
        )
        .self_compose(setting.iterations)
        .get_epsilon_for_delta(setting.delta)
        for pessimistic in (False, True)
    )
    least, most = exact.epsilon_bounds(setting)
    assert below < least <= most < above
    assert above < 1.03 * below


def test_twice_as_many_nodes_change_nothing(monkeypatch):
    # Rare sampling needs the longest contours, and is left out.
    few = [s for s in settings.ALL if s.target is None and s.linear_to is None]
    chosen = [s for s in few if s.rate * s.iterations > 100]
    before = [exact.epsilon_bounds(setting)[1] for setting in chosen]
    monkeypatch.setattr(exact, "_NODES_PER_DEVIATION", 16)
    after = [exact.epsilon_bounds(setting)[1] for setting in chosen]
    np.testing.assert_allclose(before, after, rtol=1e-8)


def test_recorded_references_are_of_the_settings():
    recorded = json.loads(exact.RESULTS.read_text())
    assert set(recorded) == set(settings.BY_NAME)
    assert len(settings.BY_NAME) == len(settings.ALL)
    setting = settings.ALL[4]
    noise = recorded[setting.name]["noise_multiplier"]
    assert exact.epsilon_bounds(setting, noise)[1] == pytest.approx(setting.target)


def test_accountants_read_the_settings_in_their_units():
    """A factor of 2 in the noise, or another rate, would show."""
    for relation in ("ADD_OR_REMOVE_ONE", "REPLACE_ONE"):
        setting = Setting(noise_multiplier=1.0, relation=relation, **SMALL)
        below, above = exact.epsilon_bounds(setting)
        for account in (ours.account, peers.ACCOUNTANTS["dp-accounting, PLD"]):
            assert below < account(setting) < 1.01 * above
    for kind in ("fixed", "node"):
        relation = "REPLACE_ONE" if kind == "fixed" else "ADD_OR_REMOVE_ONE"
        setting = Setting(noise_multiplier=1.0, kind=kind, relation=relation, **SMALL)
        below, above = exact.epsilon_bounds(setting)
        assert below < ours.account(setting) < 2 * above
        assert peers.ACCOUNTANTS["dp-accounting, PLD"](setting) is None


def test_what_is_calibrated_spends_no_more_than_the_target():
    setting = Setting(target=2.0, **SMALL)
    for account in (ours.account, peers.ACCOUNTANTS["dp-accounting, RDP"]):
        assert exact.epsilon_bounds(setting, account(setting))[0] <= 2.0
    assert exact.epsilon_bounds(setting, 1.0)[0] > 2.0


def test_an_accountant_is_measured_in_a_process_of_its_own(monkeypatch):
    name, module = "dp-accounting, RDP", peers.__name__
    setting = settings.ALL[0]
    row = process.measure(module, name, setting)
    assert row["value"] == pytest.approx(peers.ACCOUNTANTS[name](setting))
    assert row["seconds"] > 0
    assert row["megabytes"] > 0
    node = next(s for s in settings.ALL if s.kind == "node")
    assert process.measure(module, name, node) == {}
    slow = next(s for s in settings.ALL if s.linear_to is not None)
    row = process.measure(module, "dp-accounting, PLD", slow, most_seconds=1)
    assert row == {"error": "more than 1 s"}


def test_what_was_recorded_is_tabled():
    results, references = table.load()
    report = table.render(results, references)
    for setting in settings.ALL:
        assert f"| {setting.name} |" in report
    for name in results:
        assert f"| {name} | " in report
    assert "dpadambc" in results


def test_no_epsilon_of_this_library_is_below_the_truth():
    results, references = table.load()
    for name in ours.ACCOUNTANTS & results.keys():
        for setting, row in results[name]["settings"].items():
            which = settings.BY_NAME[setting]
            assert not table.is_false(which, row, references[setting])


def test_an_epsilon_that_is_too_small_is_bold():
    asked = settings.ALL[0]
    calibrated = next(s for s in settings.ALL if s.target == 3)
    references = table.load()[1]
    row = {"seconds": 1.0, "megabytes": 1.0}
    below = references[asked.name]["below"]
    for factor, is_false in ((1.001, False), (0.999, True)):
        found = row | {"value": factor * below}
        assert table.is_false(asked, found, references[asked.name]) == is_false
        cell = table._cell(asked, found, references[asked.name])
        assert cell.startswith("**") == is_false
        spent = row | {"value": 1.0, "epsilon": 3 / factor}
        reference = references[calibrated.name]
        assert table.is_false(calibrated, spent, reference) == is_false


def test_a_tilted_composition_is_that_of_dp_accounting_where_none_rounds():
    step = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.0))
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = dp_accounting.pld.PLDAccountant(relation, 1e-2)
    one = accounting.PLD.composed(step, accountant)._pld._pmf_remove.to_dense_pmf()
    values = 1e-2 * (one._lower_loss + np.arange(one.size))
    sums, law = rounding.tilted(values, one._probs, 100, 1e-5)
    epsilon = one.self_compose(100).get_epsilon_for_delta(1e-5)
    above = sums > epsilon
    assert law[above] @ -np.expm1(epsilon - sums[above]) == pytest.approx(
        1e-5, rel=1e-6
    )


def test_more_is_spent_on_rounding_than_it_takes():
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    # Of one number of steps it may be nothing: that depends on the processor.
    taken = max(rounding.taken(0.7, 0.057, n, relation, 9.4e-4) for n in (385, 400))
    recorded = json.loads(rounding.RESULTS.read_text())["most_taken_per_step"]
    assert 0 < taken <= 2 * recorded < core_accounting._ROUNDING / 2

"""Runs on the same people's data compose; a run that is given twice counts twice."""

import dataclasses
from typing import Any

import dp_accounting
import hypothesis
import hypothesis.strategies as st
import optax
import pytest

import dpadambc
from dpadambc import NeighboringRelation, accounting
from dpadambc.core.spending import run_of
from tests import common

DELTA = 1e-5
SPECIAL = NeighboringRelation.REPLACE_SPECIAL
REPLACE = NeighboringRelation.REPLACE_ONE
FIRST = common.poisson_gaussian(noise_multiplier=2.0)
SECOND = common.poisson_gaussian(noise_multiplier=4.0, sampling_prob=0.5, iterations=7)
GRAPH = dpadambc.graphs.NodePoissonGaussian(
    l2_clip_norm=1.0,
    noise_multiplier=2.0,
    max_terms=3,
    sampling_prob=0.1,
    iterations=10,
    normalize_by=100,
)
SIZED = dict(l2_clip_norm=1.0, num_examples=1_000, normalize_by=100)
SHUFFLED = dpadambc.ShuffledGaussian(
    noise_multiplier=4.0, batch_size=300, iterations=6, **SIZED
)
TRUNCATED = dpadambc.TruncatedPoissonGaussian(
    noise_multiplier=2.0,
    sampling_prob=0.1,
    truncated_batch_size=130,
    iterations=5,
    neighboring_relation=REPLACE,
    **SIZED,
)


def by_hand(*events):
    """Of plain dp-accounting, on the finest grid that we use."""
    accountant = dp_accounting.pld.PLDAccountant(FIRST.neighboring_relation, 1e-4)
    for event in events:
        accountant.compose(event)
    return accountant.get_epsilon(DELTA)


def poisson_event(q, z, steps):
    sampled = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z))
    return dp_accounting.SelfComposedDpEvent(sampled, steps)


def test_it_is_the_composition_of_the_events():
    both = accounting.compose([(FIRST, 12), SECOND])
    exact = by_hand(poisson_event(0.25, 2.0, 12), poisson_event(0.5, 4.0, 7))
    assert exact - 1e-6 <= both.epsilon(DELTA) <= 1.005 * exact + 1e-4
    own = accounting.epsilon(
        both.dp_event(),
        target_delta=DELTA,
        neighboring_relation=both.neighboring_relation,
    )
    assert both.epsilon(DELTA) == own
    # The last run alone, which is what a second fit would have stated.
    assert SECOND.epsilon(DELTA) < 0.8 * both.epsilon(DELTA)


def test_one_run_is_that_of_its_mechanism():
    for mechanism in (FIRST, GRAPH, SHUFFLED, TRUNCATED):
        assert accounting.compose([mechanism]).epsilon(DELTA) == mechanism.epsilon(
            DELTA
        )
    by_rdp = accounting.compose([FIRST]).epsilon(DELTA, accountant=accounting.RDP)
    assert by_rdp == FIRST.epsilon(DELTA, accountant=accounting.RDP)


def test_different_mechanisms_and_samplers():
    both = accounting.compose([SHUFFLED, TRUNCATED])
    accountant = dp_accounting.pld.PLDAccountant(REPLACE, 1e-4)
    accountant.compose(SHUFFLED.dp_event())
    steps: Any = TRUNCATED.dp_event()
    losses = steps.event.privacy_losses(1e-4).self_compose(steps.count)
    exact = losses.compose(accountant._pld).get_epsilon_for_delta(DELTA)
    assert exact - 1e-6 <= both.epsilon(DELTA) <= 1.005 * exact + 1e-4
    nodes = accounting.compose([GRAPH, FIRST]).epsilon(DELTA)
    assert max(GRAPH.epsilon(DELTA), FIRST.epsilon(DELTA)) < nodes


@hypothesis.settings(max_examples=2, deadline=None, derandomize=True)
@hypothesis.given(
    z=st.floats(1.0, 4.0), q=st.floats(0.05, 1.0), steps=st.integers(1, 20)
)
def test_it_is_between_the_largest_and_the_sum_and_in_any_order(z, q, steps):
    other = common.poisson_gaussian(noise_multiplier=z, sampling_prob=q)
    both = accounting.compose([FIRST, (other, steps)]).epsilon(DELTA)
    of_each = lambda delta: (
        FIRST.epsilon(delta),
        other.epsilon(delta, iterations=steps),
    )
    # Each is an upper bound within half a percent.
    assert max(of_each(DELTA)) * 0.995 - 1e-4 <= both
    assert both <= sum(of_each(DELTA / 2)) * 1.005 + 1e-4
    turned = accounting.compose([(other, steps), FIRST]).epsilon(DELTA)
    assert turned == pytest.approx(both, rel=1e-6)


def test_the_same_object_twice_is_two_runs():
    twice = accounting.compose([FIRST, FIRST])
    assert twice.epsilon(DELTA) == pytest.approx(
        FIRST.epsilon(DELTA, iterations=2 * FIRST.iterations), rel=5e-3
    )
    assert twice.epsilon(DELTA) > 1.2 * FIRST.epsilon(DELTA)
    event: Any = twice.dp_event()
    (once,) = event.events
    assert once.count == 2


def test_results_compose_further():
    both = accounting.compose([(FIRST, 5), SECOND])
    flat = accounting.compose([(FIRST, 5), SECOND, (GRAPH, None)])
    assert accounting.compose([both, GRAPH]) == flat
    assert accounting.compose([both, GRAPH]) != accounting.compose([GRAPH, both])
    assert accounting.compose(both) == both
    assert [run.steps for run in accounting.compose([both, both]).runs] == [5, 7, 5, 7]


def test_an_epoch_that_is_begun_counts_in_full_in_each_run():
    """An epoch of four steps; two runs of five steps begin two epochs each."""
    parts = accounting.compose([(SHUFFLED, 5), (SHUFFLED, 5)])
    four_epochs = SHUFFLED.epsilon(DELTA, iterations=16)
    assert parts.epsilon(DELTA) == pytest.approx(four_epochs, rel=5e-3)
    # As one run they would have begun three.
    assert SHUFFLED.epsilon(DELTA, iterations=10) < 0.9 * four_epochs


def test_a_schedule_counts_with_the_levels_that_it_had():
    levels = {"late": 1.0}
    schedule = lambda step: 2.0 - (2.0 - levels["late"]) * (step >= 5)
    scheduled = dataclasses.replace(FIRST, noise_multiplier=schedule, iterations=8)
    spent = accounting.compose([scheduled])
    expected = scheduled.epsilon(DELTA)
    levels["late"] = 10.0
    assert spent.epsilon(DELTA) == expected > 1.2 * scheduled.epsilon(DELTA)
    assert accounting.spending_to_json(spent)[0]["noise_multiplier"] == [
        [1.0, 3],
        [2.0, 5],
    ]
    assert accounting.compose([(scheduled, 0)]).epsilon(DELTA) == 0
    many = dataclasses.replace(
        FIRST, noise_multiplier=optax.linear_schedule(4.0, 2.0, 300), iterations=300
    )
    for steps in (None, 100):
        event: Any = many.dp_event(steps)
        assert (
            len(event.events) == 64
            and event == accounting.compose([(many, steps)]).dp_event()
        )


def test_equal_runs_are_accounted_for_at_once():
    spent = accounting.compose([(FIRST, 3), (FIRST, 2), (FIRST, 3)])
    thrice, two = spent.dp_event().events
    assert (thrice.count, two.count) == (2, 2)
    (two_runs,) = accounting.compose([(SHUFFLED, 3)] * 2).dp_event().events
    # Each has begun an epoch.
    assert (two_runs.count, two_runs.event.count) == (2, 1)


def test_without_noise_all_is_spent():
    silent = dataclasses.replace(FIRST, noise_multiplier=0.0)
    assert accounting.compose([FIRST, silent]).epsilon(DELTA) == float("inf")
    assert accounting.compose([FIRST, (silent, 0)]).epsilon(DELTA) == FIRST.epsilon(
        DELTA
    )


def test_other_relations_and_sizes_are_refused():
    other = dataclasses.replace(FIRST, neighboring_relation=SPECIAL)
    names = "neighboring_relation"
    with pytest.raises(ValueError, match=names):
        accounting.compose([FIRST, other])
    with pytest.raises(ValueError, match=names):
        accounting.compose([accounting.compose([FIRST]), other])
    smaller = dataclasses.replace(SHUFFLED, num_examples=500)
    with pytest.raises(ValueError, match="num_examples"):
        accounting.compose([SHUFFLED, smaller])
    # Poisson sampling knows no size, and goes with any.
    unsized = dataclasses.replace(FIRST, neighboring_relation=REPLACE)
    assert accounting.compose([unsized, SHUFFLED]).runs


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByRenyi(dpadambc.PoissonGaussian):
    """A mechanism that one accountant alone knows."""

    relations = {relation: (accounting.RDP,) for relation in NeighboringRelation}


def test_the_accountant_is_one_that_knows_all_runs():
    renyi = ByRenyi(
        **{f.name: getattr(FIRST, f.name) for f in dataclasses.fields(FIRST)}
    )
    both = accounting.compose([FIRST, renyi])
    twice = accounting.compose([FIRST, FIRST])
    assert both.epsilon(DELTA) == twice.epsilon(DELTA, accountant=accounting.RDP)
    replaced = dataclasses.replace(renyi, neighboring_relation=REPLACE)
    with pytest.raises(ValueError, match="accountant"):
        accounting.compose([TRUNCATED, replaced])


@pytest.mark.parametrize(
    ("runs", "error", "message"),
    [
        ([], ValueError, "run"),
        ([(FIRST, -1)], ValueError, "steps"),
        ([(FIRST, 1.0)], TypeError, "steps"),
        ([(FIRST, True)], TypeError, "steps"),
        ([FIRST.dp_event()], TypeError, "runs"),
        ((FIRST, 5), TypeError, "runs"),
    ],
)
def test_what_is_not_a_run_is_refused(runs, error, message):
    with pytest.raises(error, match=message):
        accounting.compose(runs)


def test_a_run_that_another_goes_on_from_counts_once_and_ways_apart_count_each():
    of = lambda n, *parts: accounting.Spending((run_of(FIRST, n, parts),))
    begun, whole = of(3, ("a", 3)), of(9, ("a", 3), ("b", 9))
    apart = of(9, ("a", 2), ("c", 9))
    for several in ([begun, whole], [whole, begun], [whole, whole, begun]):
        assert accounting.compose(several) == whole
    assert len(accounting.compose([begun, whole, apart]).runs) == 2
    # Steps that no other has: they count, with the whole run.
    assert len(accounting.compose([of(5, ("a", 5)), whole]).runs) == 2
    # More steps were counted of it than of the other.
    assert len(accounting.compose([of(12, ("a", 3)), whole]).runs) == 2
    # Runs that nothing is known of are runs of their own.
    assert len(accounting.compose([of(3), of(3)]).runs) == 2

"""An event keeps its unit; what was computed of one before is what is computed now."""

import copy
import pickle

import dp_accounting
import numpy as np
import pytest

import dpadambc
from dpadambc import NeighboringRelation, accounting
from dpadambc.core import accounting as _events
from dpadambc.core.accounting import _cached

ADD = NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE = NeighboringRelation.REPLACE_ONE
GAUSSIAN = dp_accounting.GaussianDpEvent
OURS = {"pld": accounting.PLDAccountant, "rdp": accounting.RdpAccountant}
THEIRS = {
    "pld": dp_accounting.pld.PLDAccountant,
    "rdp": dp_accounting.rdp.RdpAccountant,
}

AROUND = {
    "alone": lambda event: event,
    "copied": copy.deepcopy,
    "pickled": lambda event: pickle.loads(pickle.dumps(event)),
    "sampled": lambda event: dp_accounting.PoissonSampledDpEvent(0.1, event),
    "repeated": lambda event: copy.copy(dp_accounting.SelfComposedDpEvent(event, 3)),
    "composed": lambda event: dp_accounting.ComposedDpEvent(
        [GAUSSIAN(2.0), dp_accounting.SelfComposedDpEvent(event, 3)]
    ),
}


@pytest.mark.parametrize("accountant", [accounting.PLD, accounting.RDP])
@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND.keys())
def test_an_event_keeps_its_unit(around, accountant):
    """Whatever is made of it: the other accountant refuses it."""
    other = {"pld": "rdp", "rdp": "pld"}[accountant]
    event = around(_events.gaussian(2.0, REPLACE, accountant))
    assert _events.refusal(event, accountant, REPLACE) is None
    assert "in units of" in _events.refusal(event, other, REPLACE)
    with pytest.raises(dp_accounting.UnsupportedEventError, match="in units of"):
        OURS[other](neighboring_relation=REPLACE).compose(event)


@pytest.mark.parametrize("accountant", [accounting.PLD, accounting.RDP])
@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND.keys())
def test_dp_accounting_reads_it_as_its_own(around, accountant):
    """Nor is one that dp-accounting has no unit for refused, under any relation."""
    event, plain = around(_events.gaussian(2.0, ADD, accountant)), around(GAUSSIAN(2.0))
    assert event == plain and plain == event
    spent = {
        of(neighboring_relation=ADD).compose(x).get_epsilon(1e-5)
        for of in (OURS[accountant], THEIRS[accountant])
        for x in (event, plain)
    }
    assert len(spent) == 1
    for relation in (ADD, REPLACE):
        assert _events.refusal(plain, accountant, relation) is None


def test_equality_is_of_the_noise_and_of_units_where_both_have_one():
    ours = _events.gaussian(2.0, REPLACE, "pld")
    assert ours == GAUSSIAN(4.0) == _events.gaussian(4.0, ADD, "rdp")
    assert hash(ours) == hash(GAUSSIAN(4.0))
    assert ours != GAUSSIAN(2.0) and ours != 4.0
    assert ours != _events.gaussian(4.0, REPLACE, "rdp")
    assert dp_accounting.DpEvent.from_named_tuple(ours.to_named_tuple()) == ours


@pytest.fixture
def counted():
    """A function of an event, and for what it was called."""
    calls = []

    @_cached
    def count(event, factor, *, shift=0.0):
        calls.append(event)
        return factor * event.noise_multiplier + shift

    return count, calls


def test_equal_arguments_are_computed_once(counted):
    count, calls = counted
    assert [count(GAUSSIAN(2.0), 3.0), count(GAUSSIAN(2.0), 3.0)] == [6.0, 6.0]
    assert len(calls) == 1
    assert count(GAUSSIAN(2.0), 4.0) == 8.0
    assert count(GAUSSIAN(2.0), 3.0, shift=1.0) == 7.0
    assert count(GAUSSIAN(2.5), 3.0) == 7.5
    assert len(calls) == 4


MECHANISM = dict(l2_clip_norm=1.0, noise_multiplier=2.0, iterations=3, normalize_by=9)
SIZED = dict(batch_size=9, num_examples=30)
EVENTS = {
    "Poisson": dpadambc.PoissonGaussian(**MECHANISM, sampling_prob=0.1),
    "of changing noise": dpadambc.PoissonGaussian(
        **MECHANISM | {"noise_multiplier": lambda step: 2.0 + step}, sampling_prob=0.1
    ),
    "of a fixed size": dpadambc.FixedSizeGaussian(**MECHANISM, **SIZED),
    "of nodes": dpadambc.graphs.NodePoissonGaussian(
        **MECHANISM, sampling_prob=0.1, max_terms=3
    ),
    "of two runs": accounting.compose(
        [
            dpadambc.PoissonGaussian(**MECHANISM, sampling_prob=prob)
            for prob in (0.1, 0.2)
        ]
    ),
}


@pytest.mark.parametrize("mechanism", EVENTS.values(), ids=EVENTS.keys())
def test_epsilon_of_a_mechanism_is_computed_once(mechanism):
    calls = []
    spent = _cached(lambda event: len(calls.append(event) or calls))
    assert [spent(mechanism.dp_event()) for _ in range(3)] == [1, 1, 1]


class OfOnesOwn(dp_accounting.DpEvent):
    """Without an equality of its own: to dp-accounting all are equal."""

    def __init__(self, noise_multiplier):
        object.__setattr__(self, "noise_multiplier", noise_multiplier)


@pytest.mark.parametrize(
    "around",
    [
        lambda event: event,
        lambda event: dp_accounting.PoissonSampledDpEvent(0.1, event),
        lambda event: dp_accounting.SelfComposedDpEvent(event, 2),
        lambda event: dp_accounting.ComposedDpEvent([GAUSSIAN(1.0), event]),
    ],
)
def test_an_event_that_may_be_equal_to_another_is_computed_each_time(around):
    calls = []
    spent = _cached(lambda event: len(calls.append(event) or calls))
    assert [spent(around(OfOnesOwn(z))) for z in (1.0, 2.0)] == [1, 2]


def test_an_event_without_a_hash_is_computed_each_time():
    calls = []
    spent = _cached(lambda event: len(calls.append(event) or calls))
    assert [spent(GAUSSIAN(np.ones(1))) for _ in range(2)] == [1, 2]


def test_an_event_whose_fields_changed_is_another():
    """A list of events has no hash, and may be added to."""
    events = [GAUSSIAN(2.0)]
    both = dp_accounting.ComposedDpEvent(events)
    epsilon = lambda: accounting.epsilon(
        both, target_delta=1e-5, neighboring_relation=ADD
    )
    before = epsilon()
    events.append(GAUSSIAN(1.0))
    assert epsilon() > 2 * before


@pytest.mark.parametrize("accountant", [accounting.PLD, accounting.RDP])
def test_relation_delta_and_accountant_tell_calls_apart(accountant):
    def spent(delta, relation):
        return accounting.epsilon(
            GAUSSIAN(1.5),
            target_delta=delta,
            neighboring_relation=relation,
            accountant=accountant,
        )

    found = {
        (delta, relation): spent(delta, relation)
        for delta in (1e-5, np.float32(1e-6))
        for relation in (ADD, REPLACE)
        if (accountant, relation) != ("rdp", REPLACE)
    }
    assert len(set(found.values())) == len(found)
    assert {key: spent(*key) for key in found} == found

"""What was computed of an event before is what would be computed now."""

import dp_accounting
import numpy as np
import pytest

from dpadambc import NeighboringRelation
from dpadambc.mechanisms import accounting
from dpadambc.mechanisms._remembered import remembered

ADD = NeighboringRelation.ADD_OR_REMOVE_ONE
GAUSSIAN = dp_accounting.GaussianDpEvent


@pytest.fixture
def counted():
    """A function of an event, and for what it was called."""
    calls = []

    @remembered
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


class Mutable(dp_accounting.DpEvent):
    """Of a package that is not known, whose code may change."""

    noise_multiplier = 2.0


def test_an_event_of_a_user_is_computed_each_time(counted, monkeypatch):
    """Its class may be another one under the same name, as in a notebook."""
    count, calls = counted
    assert count(Mutable(), 1.0) == 2.0
    monkeypatch.setattr(Mutable, "noise_multiplier", 5.0)
    assert count(Mutable(), 1.0) == 5.0
    assert len(calls) == 2


def test_an_event_around_one_of_a_user_is_computed_each_time(monkeypatch):
    composed = dp_accounting.SelfComposedDpEvent(Mutable(), 3)
    of_inner = remembered(lambda event: event.event.noise_multiplier)
    assert of_inner(composed) == 2.0
    monkeypatch.setattr(Mutable, "noise_multiplier", 5.0)
    assert of_inner(composed) == 5.0


def two():
    return 2.0


def test_an_event_with_a_function_of_a_user_is_computed_each_time(monkeypatch):
    """Of a function, too, a pickle has the name alone."""
    event = GAUSSIAN(two)
    of_inner = remembered(lambda event: event.noise_multiplier())
    assert of_inner(event) == 2.0
    monkeypatch.setattr(two, "__code__", (lambda: 5.0).__code__)
    assert of_inner(event) == 5.0


def test_an_event_that_is_too_deep_for_a_pickle_is_computed():
    event = GAUSSIAN(2.0)
    for _ in range(2_000):
        event = dp_accounting.SelfComposedDpEvent(event, 1)
    assert remembered(lambda event: event.count)(event) == 1


def test_an_event_whose_fields_changed_is_another(counted):
    """A list of events has no hash, and may be added to."""
    events = [GAUSSIAN(2.0)]
    both = dp_accounting.ComposedDpEvent(events)
    epsilon = lambda: accounting.epsilon(
        both, target_delta=1e-5, neighboring_relation=ADD
    )
    before = epsilon()
    events.append(GAUSSIAN(1.0))
    assert epsilon() > 2 * before


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
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
        for relation in (ADD, NeighboringRelation.REPLACE_ONE)
        if (accountant, relation) != ("rdp", NeighboringRelation.REPLACE_ONE)
    }
    assert len(set(found.values())) == len(found)
    assert {key: spent(*key) for key in found} == found

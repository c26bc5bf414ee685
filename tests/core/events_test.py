"""Both accountants read one event; an epsilon that is known is not computed again."""

import dp_accounting
import numpy as np
import pytest

import dpadambc
from dpadambc import NeighboringRelation, accounting
from dpadambc.core import accounting as core

ADD = NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE = NeighboringRelation.REPLACE_ONE
GAUSSIAN = dp_accounting.GaussianDpEvent


def spent(event, relation=ADD, accountant=accounting.PLD, delta=1e-5):
    return accounting.epsilon(
        event,
        target_delta=delta,
        neighboring_relation=relation,
        accountant=accountant,
    )


@pytest.mark.guarantee
@pytest.mark.parametrize("relation", NeighboringRelation)
def test_both_accountants_read_the_noise_in_units_of_the_clip_norm(relation):
    """dp-accounting's own, each in its unit, are the oracles."""
    replaces = relation == REPLACE
    event = core.gaussian(2.0, relation)
    assert event == GAUSSIAN(4.0 if replaces else 2.0)
    pld = dp_accounting.pld.PLDAccountant(relation).compose(event).get_epsilon(1e-5)
    rdp = dp_accounting.rdp.RdpAccountant(None, relation).compose(GAUSSIAN(2.0))
    assert spent(event, relation) == pytest.approx(pld, rel=1e-3)
    by_rdp = spent(event, relation, accounting.RDP)
    assert by_rdp == rdp.get_epsilon(1e-5) > pld
    if replaces:  # The negative control: as dp-accounting reads the same event.
        theirs = dp_accounting.rdp.RdpAccountant(None, relation).compose(event)
        assert theirs.get_epsilon(1e-5) < 0.6 * by_rdp


@pytest.mark.guarantee
def test_sampled_steps_have_no_renyi_bound_under_replacement():
    for sampled in (
        dp_accounting.PoissonSampledDpEvent(0.1, GAUSSIAN(2.0)),
        dp_accounting.SampledWithoutReplacementDpEvent(10, 1, GAUSSIAN(2.0)),
        dp_accounting.TruncatedSubsampledGaussianDpEvent(10, 0.1, 3, 2.0),
    ):
        several = dp_accounting.ComposedDpEvent([GAUSSIAN(2.0), sampled])
        for event in (sampled, dp_accounting.SelfComposedDpEvent(several, 3)):
            with pytest.raises(ValueError, match="accounting.RDP"):
                spent(event, REPLACE, accounting.RDP)


MECHANISM = dict(l2_clip_norm=1.0, noise_multiplier=2.0, iterations=3, normalize_by=9)
POISSON = dpadambc.PoissonGaussian(**MECHANISM, sampling_prob=0.1)
EVENTS = {
    "Poisson": POISSON,
    "of changing noise": dpadambc.PoissonGaussian(
        **MECHANISM | {"noise_multiplier": lambda step: 2.0 + step}, sampling_prob=0.1
    ),
    "of a fixed size": dpadambc.FixedSizeGaussian(
        **MECHANISM, batch_size=9, num_examples=30
    ),
    "of nodes": dpadambc.graphs.NodePoissonGaussian(
        **MECHANISM, sampling_prob=0.1, max_terms=3
    ),
    "of two runs": accounting.compose([POISSON, POISSON, (POISSON, 2)]),
}


@pytest.fixture
def computed(monkeypatch):
    """The calls of the accountant, none of whose answers is known."""
    calls = []
    core._known_bound.cache_clear()
    bound = core.PrivacyLosses.on_fine_grid

    def counted(self, event, *args, **how):
        calls.append(event)
        return bound(self, event, *args, **how)

    monkeypatch.setattr(core.PrivacyLosses, "on_fine_grid", counted)
    yield calls
    core._known_bound.cache_clear()


@pytest.mark.parametrize("mechanism", EVENTS.values(), ids=EVENTS.keys())
def test_epsilon_of_a_mechanism_is_computed_once(mechanism, computed):
    assert len({mechanism.epsilon(1e-5) for _ in range(3)}) == 1
    assert len(computed) == 1


class OfOnesOwn(dp_accounting.GaussianDpEvent):
    """With no equality of its own: equal to another that has the same noise."""

    def __init__(self, noise_multiplier, doubled):
        super().__init__(noise_multiplier)
        object.__setattr__(self, "doubled", doubled)


@pytest.mark.guarantee
@pytest.mark.parametrize(
    "around",
    [
        lambda event: event,
        lambda event: dp_accounting.PoissonSampledDpEvent(0.1, event),
        lambda event: dp_accounting.SelfComposedDpEvent(event, 2),
        lambda event: dp_accounting.ComposedDpEvent([GAUSSIAN(1.0), event]),
    ],
)
def test_an_event_that_may_be_equal_to_another_is_computed_each_time(around, computed):
    one, other = OfOnesOwn(1.0, False), OfOnesOwn(1.0, True)
    assert one == other
    spent(around(one)), spent(around(other))
    assert len(computed) == 2


def test_an_event_without_a_hash_is_computed_each_time(computed):
    for _ in range(2):
        spent(GAUSSIAN(np.array(2.0)))
    assert len(computed) == 2


def test_an_event_whose_fields_changed_is_another():
    """A list of events has no hash, and may be added to."""
    events = [GAUSSIAN(2.0)]
    both = dp_accounting.ComposedDpEvent(events)
    before = spent(both)
    events.append(GAUSSIAN(1.0))
    assert spent(both) > 2 * before


@pytest.mark.parametrize("accountant", [accounting.PLD, accounting.RDP])
def test_relation_delta_and_accountant_tell_calls_apart(accountant):
    each = [(d, r) for d in (1e-5, np.float32(1e-6)) for r in (ADD, REPLACE)]
    found = {(d, r): spent(GAUSSIAN(1.5), r, accountant, d) for d, r in each}
    assert len(set(found.values())) == len(found)
    assert {(d, r): spent(GAUSSIAN(1.5), r, accountant, d) for d, r in each} == found


def test_an_accountant_is_a_value_and_no_string():
    assert repr(accounting.PLD) == "accounting.PLD" and accounting.RDP.name == "rdp"
    assert len({accounting.PLD, type(accounting.PLD)(), accounting.RDP}) == 2
    for wrong in ("pld", None, dp_accounting.pld.PLDAccountant):
        with pytest.raises(TypeError, match="accountant"):
            spent(GAUSSIAN(1.0), ADD, wrong)
    with pytest.raises(TypeError, match="accountant"):
        POISSON.epsilon(1e-5, accountant="pld")

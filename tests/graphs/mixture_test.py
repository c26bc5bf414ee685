"""The bound on one step and on several, against distributions that are computed."""

import itertools

import dp_accounting
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.stats

import dpadambc
from dpadambc import NeighboringRelation
from dpadambc.graphs import _mixture
from dpadambc.mechanisms import accounting

ADD = NeighboringRelation.ADD_OR_REMOVE_ONE
SPECIAL = NeighboringRelation.REPLACE_SPECIAL
REPLACE = NeighboringRelation.REPLACE_ONE

GRID = np.linspace(-30, 30, 3_001)
# What the sum over the grid may be off by, where two densities cross between points of
# it: it falls with the square of the spacing.
QUADRATURE = 1e-5
EPSILONS = np.linspace(-3, 3, 61)


def by_losses(event, delta, interval, relation=ADD):
    accountant = accounting.PLDAccountant(relation, interval)
    return accountant.compose(event).get_epsilon(delta)


def steps(event, count):
    return dp_accounting.SelfComposedDpEvent(event, count)


NUMBERS = dict(l2_clip_norm=1.0, iterations=1, normalize_by=1.0)


def poisson(terms, sampling_prob):
    """All samples of terms, with their probabilities."""
    for taken in itertools.product([0, 1], repeat=len(terms)):
        share = sampling_prob ** sum(taken)
        yield np.dot(taken, terms), share * (1 - sampling_prob) ** taken.count(0)


def fixed_size(terms, batch_size):
    subsets = list(itertools.combinations(terms, batch_size))
    for subset in subsets:
        yield sum(subset), 1 / len(subsets)


def density(outcomes, stddev):
    """That of the noisy sum, on the grid."""
    return sum(p * scipy.stats.norm.pdf(GRID, mean, stddev) for mean, p in outcomes)


def hockey_sticks(p, q, epsilons):
    excess = np.maximum(p - np.exp(epsilons)[(...,) + (None,) * p.ndim] * q, 0)
    return excess.reshape(len(epsilons), -1).sum(1) * (GRID[1] - GRID[0]) ** p.ndim


def terms(number, low=-1.0):
    """Clipped terms of one dimension, often at the bound."""
    bounds = st.sampled_from([-1.0, 1.0])
    value = st.one_of(bounds, bounds, st.floats(low, 1.0))
    return st.lists(value, min_size=number, max_size=number)


def event(cls, noise_multiplier, **numbers):
    mechanism = cls(**NUMBERS, noise_multiplier=noise_multiplier, **numbers)
    return mechanism, mechanism.dp_event(1).event


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    before=terms(3),
    after=terms(3),
    unaffected=terms(2),
    stddev=st.floats(0.7, 4),
    sampling_prob=st.floats(0.02, 1),
    relation=st.sampled_from([ADD, SPECIAL, REPLACE]),
)
def test_poisson_sampling_of_changing_terms_stays_below_the_bound(
    before, after, unaffected, stddev, sampling_prob, relation
):
    if relation != REPLACE:
        after[0] = 0.0
    number = dict(max_terms=3, sampling_prob=sampling_prob)
    mechanism, step = event(
        dpadambc.graphs.PoissonGaussian,
        stddev / (6 if relation == REPLACE else 5),
        neighboring_relation=relation,
        **number,
    )
    assert mechanism.noise_stddev == pytest.approx(stddev)
    p, q = (
        density(poisson([*unaffected, *affected], sampling_prob), stddev)
        for affected in (before, after)
    )
    bound = _mixture.deltas(step, EPSILONS)
    assert (hockey_sticks(p, q, EPSILONS) <= bound + QUADRATURE).all()
    assert (hockey_sticks(q, p, EPSILONS) <= bound + QUADRATURE).all()


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    before=terms(2),
    after=terms(2),
    unaffected=terms(4),
    stddev=st.floats(0.7, 4),
    batch_size=st.integers(1, 6),
)
@hypothesis.example([-1.0, -1.0], [1.0, 1.0], [-1.0] * 4, 1.0, 1)  # meets the bound
def test_sampling_without_replacement_stays_below_the_bound(
    before, after, unaffected, stddev, batch_size
):
    _, step = event(
        dpadambc.graphs.FixedSizeGaussian,
        stddev / 4,
        max_terms=2,
        batch_size=batch_size,
        num_examples=6,
    )
    p, q = (
        density(fixed_size([*affected, *unaffected], batch_size), stddev)
        for affected in (before, after)
    )
    bound = _mixture.deltas(step, EPSILONS)
    assert (hockey_sticks(p, q, EPSILONS) <= bound + QUADRATURE).all()
    assert (hockey_sticks(q, p, EPSILONS) <= bound + QUADRATURE).all()


def test_the_test_sees_terms_that_move_further_than_is_accounted_for():
    """Negative control: one term more than `max_terms`."""
    _, step = event(
        dpadambc.graphs.PoissonGaussian,
        1 / 4,
        neighboring_relation=REPLACE,
        max_terms=2,
        sampling_prob=0.5,
    )
    p, q = (density(poisson([x] * 3, 0.5), 1.0) for x in (1.0, -1.0))
    excess = hockey_sticks(p, q, EPSILONS) - _mixture.deltas(step, EPSILONS)
    assert excess.max() > 0.01


@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_two_steps_stay_below_the_bound(relation):
    mechanism, step = event(
        dpadambc.graphs.PoissonGaussian,
        0.5,
        neighboring_relation=relation,
        max_terms=2,
        sampling_prob=0.3,
    )
    before, after = [1.0, 1.0], [-1.0 if relation == REPLACE else 0.0, -1.0]
    p, q = (
        density(poisson(x, 0.3), mechanism.noise_stddev)[::4] for x in (before, after)
    )
    pair = np.multiply.outer(p, p), np.multiply.outer(q, q)
    for delta in (0.1, 1e-2, 1e-4):
        epsilon = by_losses(steps(step, 2), delta, 1e-3, relation)
        for one, other in (pair, pair[::-1]):
            spent = hockey_sticks(one, other, np.array([epsilon]))[0] * 4**2
            assert spent <= delta


def test_a_term_that_is_always_there_is_the_gaussian():
    step = _mixture.ShiftMixtureDpEvent(2.0, (0.0, 1.0), (0.0, 1.0))
    for count, multiplier in ((1, 2.0), (4, 1.0)):
        exact = dp_accounting.get_epsilon_gaussian(multiplier, 1e-5)
        by_grid = by_losses(steps(step, count), 1e-5, 1e-4)
        assert by_grid == pytest.approx(exact, rel=1e-3)
        orders = accounting.RdpAccountant().compose(step, count)
        assert exact <= orders.get_epsilon(1e-5) < 1.1 * exact


def test_one_step_with_one_term_is_the_poisson_subsampled_gaussian():
    step = _mixture.ShiftMixtureDpEvent(1.0, (0.0, 1.0), (0.9, 0.1))
    exact = dp_accounting.pld.PLDAccountant(ADD, 1e-4).compose(
        dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.0))
    )
    for delta in (1e-2, 1e-4, 1e-6):
        bound = by_losses(step, delta, 1e-4)
        assert bound == pytest.approx(exact.get_epsilon(delta), rel=2e-3)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_steps_of_several_kinds_compose(accountant):
    """One Gaussian, one step of a node and a nested composition of both."""
    node = _mixture.ShiftMixtureDpEvent(1.0, (0.0, 1.0), (0.0, 1.0))
    gaussian = dp_accounting.GaussianDpEvent(1.0)
    both = dp_accounting.ComposedDpEvent([node, gaussian])
    epsilon = lambda event: accounting.epsilon(
        event, target_delta=1e-5, neighboring_relation=ADD, accountant=accountant
    )
    assert epsilon(steps(both, 2)) == pytest.approx(
        epsilon(steps(gaussian, 4)), rel=0.1
    )
    assert epsilon(both) == pytest.approx(epsilon(steps(gaussian, 2)), rel=0.1)


def test_what_affects_nobody_costs_nothing_and_no_noise_everything():
    never = _mixture.ShiftMixtureDpEvent(1.0, (0.0, 1.0), (1.0, 0.0))
    bare = _mixture.ShiftMixtureDpEvent(0.0, (0.0, 1.0), (0.5, 0.5))
    for cls in (accounting.PLDAccountant, accounting.RdpAccountant):
        assert cls().compose(never, 10).get_epsilon(1e-5) == 0
        assert cls().compose(bare).get_epsilon(1e-5) == np.inf


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_an_event_has_no_epsilon_for_another_relation(accountant):
    """Removal moves the sum by 2 T - 1 terms, replacement by 2 T: more epsilon."""
    numbers = dict(max_terms=2, sampling_prob=0.3)
    for relation, other in [(ADD, REPLACE), (REPLACE, ADD)]:
        _, step = event(
            dpadambc.graphs.PoissonGaussian,
            1.0,
            neighboring_relation=relation,
            **numbers,
        )
        epsilon = lambda relation, step=step: accounting.epsilon(
            dp_accounting.ComposedDpEvent([step, dp_accounting.GaussianDpEvent(9.0)]),
            target_delta=1e-5,
            neighboring_relation=relation,
            accountant=accountant,
        )
        assert epsilon(relation) > 0
        with pytest.raises(
            ValueError, match=f"Expected neighboring_relation {relation.name}"
        ):
            epsilon(other)

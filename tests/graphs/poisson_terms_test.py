"""The pairs that dominate a step, against computed distributions.

Removal is compared with the pair of removal, addition with that of addition.
"""

import math

import dp_accounting
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import dpadambc
from dpadambc import NeighboringRelation, accounting
from dpadambc.graphs import poisson_terms
from tests import common, worlds

ADD = NeighboringRelation.ADD_OR_REMOVE_ONE
SPECIAL = NeighboringRelation.REPLACE_SPECIAL
REPLACE = NeighboringRelation.REPLACE_ONE

# Every grid is from above; this one makes little work, the fine one is tight.
COARSE, FINE = 0.05, 1e-3
EPSILONS = worlds.EPSILONS


def step_of(stddev, max_terms, sampling_prob, relation):
    """A step whose noise has this deviation where terms are clipped to one."""
    largest_shift = 2 * max_terms - (relation != REPLACE)
    return poisson_terms.PoissonTermsDpEvent(
        stddev / largest_shift, max_terms, sampling_prob, relation
    )


def bounds(step, epsilons=EPSILONS, count=1, interval=COARSE):
    """On removal and on addition."""
    losses = step.privacy_losses(interval).self_compose(count)
    remove, add = losses._pmf_remove, losses._pmf_add
    return remove.get_delta_for_epsilon(epsilons), add.get_delta_for_epsilon(epsilons)


def attained(max_terms, sampling_prob, relation):
    """Terms of one direction: all of them, and those that are left without the node."""
    gone = relation != REPLACE
    left = [0.0] * gone + [-1.0] * (max_terms - gone)
    return [1.0] * max_terms, left


def densities(pair, sampling_prob, stddev):
    return (
        worlds.density(worlds.poisson(terms, sampling_prob), stddev) for terms in pair
    )


@pytest.mark.slow
@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    before=worlds.clipped(3),
    after=worlds.clipped(3),
    unaffected=worlds.clipped(2),
    stddev=st.floats(0.7, 4),
    sampling_prob=st.floats(0.02, 1),
    relation=st.sampled_from([ADD, SPECIAL, REPLACE]),
)
def test_worlds_stay_below_the_pair_of_their_direction(
    before, after, unaffected, stddev, sampling_prob, relation
):
    if relation != REPLACE:
        after[0] = 0.0
    mechanism = dpadambc.graphs.NodePoissonGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=stddev / (6 if relation == REPLACE else 5),
        max_terms=3,
        sampling_prob=sampling_prob,
        iterations=1,
        normalize_by=1.0,
        neighboring_relation=relation,
    )
    assert mechanism.noise_stddev == pytest.approx(stddev)
    pair = [*unaffected, *before], [*unaffected, *after]
    p, q = densities(pair, sampling_prob, stddev)
    remove, add = bounds(mechanism.dp_event(1).event)
    assert (worlds.hockey_sticks(p, q, EPSILONS) <= remove + worlds.QUADRATURE).all()
    assert (worlds.hockey_sticks(q, p, EPSILONS) <= add + worlds.QUADRATURE).all()


@pytest.mark.parametrize("relation", [ADD, SPECIAL, REPLACE])
@pytest.mark.parametrize(
    ("max_terms", "sampling_prob", "stddev"),
    [
        (3, 0.3, 2.0),
        *(common.slow(*row) for row in [(1, 0.1, 1.0), (5, 0.02, 1.0), (2, 1.0, 3.0)]),
    ],
)
def test_terms_of_one_direction_attain_the_pair(
    max_terms, sampling_prob, stddev, relation
):
    pair = attained(max_terms, sampling_prob, relation)
    p, q = densities(pair, sampling_prob, stddev)
    step = step_of(stddev, max_terms, sampling_prob, relation)
    remove, add = bounds(step, interval=FINE)
    within = dict(rtol=0, atol=2 * worlds.QUADRATURE)
    np.testing.assert_allclose(worlds.hockey_sticks(p, q, EPSILONS), remove, **within)
    np.testing.assert_allclose(worlds.hockey_sticks(q, p, EPSILONS), add, **within)


@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(
    seed=st.integers(0, 2**32 - 1),
    stddev=st.floats(1.0, 2.0),
    sampling_prob=st.floats(0.05, 1),
    relation=st.sampled_from([ADD, REPLACE]),
)
def test_worlds_of_two_dimensions_stay_below(seed, stddev, sampling_prob, relation):
    rng = np.random.default_rng(seed)
    before, after = rng.normal(size=(2, 2, 2))
    before, after = (x / np.linalg.norm(x, axis=1)[:, None] for x in (before, after))
    if relation != REPLACE:
        after[0] = 0.0
    line = np.linspace(-12, 12, 161)
    plane = np.stack(np.meshgrid(line, line, indexing="ij"), axis=-1)

    def density(terms):
        return sum(
            share
            * np.exp(-((plane - mean) ** 2).sum(-1) / (2 * stddev**2))
            / (2 * math.pi * stddev**2)
            for mean, share in worlds.poisson(terms, sampling_prob)
        )

    p, q = density(before), density(after)
    assert p.sum() * (line[1] - line[0]) ** 2 == pytest.approx(1)
    epsilons = np.linspace(-2, 2, 9)
    remove, add = bounds(step_of(stddev, 2, sampling_prob, relation), epsilons)
    divergences = lambda p, q: worlds.hockey_sticks(p, q, epsilons, line[1] - line[0])
    assert (divergences(p, q) <= remove + 1e-3).all()
    assert (divergences(q, p) <= add + 1e-3).all()


@hypothesis.settings(max_examples=10, deadline=None)
@hypothesis.given(
    first=worlds.clipped(2),
    second=worlds.clipped(2),
    sampling_prob=st.floats(0.05, 1),
    relation=st.sampled_from([ADD, REPLACE]),
)
@hypothesis.example([1.0, 1.0], [-1.0, -1.0], 0.3, ADD)  # meets the bound
@hypothesis.example([1.0, 1.0], [-1.0, -1.0], 0.3, REPLACE)
def test_two_adaptive_steps_stay_below(first, second, sampling_prob, relation):
    """The terms of the second step turn with the sign of the first output."""
    stddev = 2.0
    gone = 0.0 if relation != REPLACE else 1.0
    second = np.array(second) * np.array([gone, 1.0])
    p, q = densities((first, second), sampling_prob, stddev)
    p, q = p[::8], q[::8]
    # Where the first output is negative both datasets have their terms turned round.
    turn = (worlds.GRID[::8] < 0)[:, None]
    joint = lambda x: x[:, None] * np.where(turn, x[None, ::-1], x[None])
    p, q = joint(p), joint(q)
    spacing = worlds.GRID[8] - worlds.GRID[0]
    epsilons = np.linspace(-2, 3, 11)
    remove, add = bounds(step_of(stddev, 2, sampling_prob, relation), epsilons, 2)
    spent = lambda p, q: worlds.hockey_sticks(p, q, epsilons, spacing)
    assert (spent(p, q) <= remove + 1e-3).all()
    assert (spent(q, p) <= add + 1e-3).all()


def test_the_test_sees_terms_that_move_further_than_is_accounted_for():
    """Negative controls."""
    p, q = densities(([1.0] * 3, [-1.0] * 3), 0.5, 1.0)
    for step in (
        step_of(1.0, 2, 0.5, REPLACE),  # one term more than max_terms
        step_of(1.0, 3, 0.5, ADD),  # the own term turned round, and not gone
    ):
        remove, _ = bounds(step, interval=FINE)
        assert (worlds.hockey_sticks(p, q, EPSILONS) - remove).max() > 0.01


def test_a_removal_is_no_addition():
    """Negative control: neither pair covers both directions."""
    p, q = densities(attained(2, 0.3, ADD), 0.3, 1.0)
    remove, add = bounds(step_of(1.0, 2, 0.3, ADD), interval=FINE)
    assert (worlds.hockey_sticks(p, q, EPSILONS) - add).max() > 0.01
    assert (worlds.hockey_sticks(q, p, EPSILONS) - remove).max() > 0.01


@pytest.mark.parametrize(
    ("relation", "epsilon"), [(ADD, 1.828), (SPECIAL, 1.828), (REPLACE, 1.205)]
)
def test_one_term_is_the_subsampled_gaussian(relation, epsilon):
    numbers = dict(l2_clip_norm=1.0, noise_multiplier=1.0, normalize_by=1.0)
    numbers |= dict(sampling_prob=0.01, iterations=1_000, neighboring_relation=relation)
    exact = dpadambc.PoissonGaussian(**numbers)
    node = dpadambc.graphs.NodePoissonGaussian(**numbers, max_terms=1)
    assert node.noise_stddev == exact.noise_stddev
    assert node.epsilon(1e-5) == pytest.approx(epsilon, abs=1e-3)
    for delta in (1e-2, 1e-5, 1e-9):
        assert node.epsilon(delta) == pytest.approx(exact.epsilon(delta), rel=1e-5)


@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize("max_terms", [1, 3])
def test_renyi_divergences_are_bounded(max_terms, relation):
    sampling_prob, stddev = 0.3, 2.0
    step = step_of(stddev, max_terms, sampling_prob, relation)
    p, q = densities(
        attained(max_terms, sampling_prob, relation), sampling_prob, stddev
    )
    orders = np.array([1.5, 2.0, 4.0, 8.0])
    spacing = worlds.GRID[1] - worlds.GRID[0]
    for one, other in ((p, q), (q, p)):
        one, other = one[abs(worlds.GRID) < 20], other[abs(worlds.GRID) < 20]
        powers = one ** orders[:, None] * other ** (1 - orders[:, None])
        exact = np.log(powers.sum(1) * spacing) / (orders - 1)
        assert (exact <= step.renyi_divergences(orders) * (1 + 1e-9)).all()


def test_a_node_that_is_always_there_is_the_gaussian():
    step = step_of(10.0, 3, 1.0, ADD)
    exact = dp_accounting.get_epsilon_gaussian(step.noise_multiplier, 1e-5)
    of = lambda accountant: accounting.epsilon(
        step, target_delta=1e-5, neighboring_relation=ADD, accountant=accountant
    )
    assert of(accounting.PLD) == pytest.approx(exact, rel=1e-3)
    assert exact <= of(accounting.RDP) < 1.1 * exact


@pytest.mark.parametrize("accountant", [accounting.PLD, accounting.RDP])
def test_steps_of_several_kinds_compose(accountant):
    """One Gaussian, one step of a node and a nested composition of both."""
    node, gaussian = step_of(1.0, 1, 1.0, ADD), dp_accounting.GaussianDpEvent(1.0)
    both = dp_accounting.ComposedDpEvent([node, gaussian])
    steps = dp_accounting.SelfComposedDpEvent
    epsilon = lambda event: accounting.epsilon(
        event, target_delta=1e-5, neighboring_relation=ADD, accountant=accountant
    )
    for ours, known in ((steps(both, 2), 4), (both, 2)):
        expected = epsilon(steps(gaussian, known))
        assert epsilon(ours) == pytest.approx(expected, rel=1e-3)


def test_nothing_costs_nothing_and_no_noise_everything():
    never, bare = step_of(1.0, 2, 0.0, ADD), step_of(0.0, 2, 0.5, ADD)
    for accountant in (accounting.PLD, accounting.RDP):
        of = lambda event, count, by=accountant: accounting.epsilon(
            dp_accounting.SelfComposedDpEvent(event, count),
            target_delta=1e-5,
            neighboring_relation=ADD,
            accountant=by,
        )
        assert of(never, 10) == 0
        assert of(bare, 1) == np.inf


@pytest.mark.parametrize("accountant", [accounting.PLD, accounting.RDP])
def test_an_event_has_no_epsilon_for_another_relation(accountant):
    """Removal moves the sum by 2 T - 1 terms, replacement by 2 T: more epsilon."""
    for relation, other in [(ADD, REPLACE), (REPLACE, ADD), (SPECIAL, ADD)]:
        step = step_of(3.0, 2, 0.3, relation)
        epsilon = lambda relation, step=step: accounting.epsilon(
            dp_accounting.ComposedDpEvent([step, step]),
            target_delta=1e-5,
            neighboring_relation=relation,
            accountant=accountant,
        )
        assert epsilon(relation) > 0
        with pytest.raises(ValueError, match="neighboring_relation"):
            epsilon(other)


@pytest.mark.parametrize("sampling_prob", [1e-8, 1e-5, 1 - 1e-9])
def test_probabilities_near_the_least_number_do_not_overflow(sampling_prob):
    step = step_of(450.0 * 199, 100, sampling_prob, ADD)
    for deltas in bounds(step, interval=1e-5):
        assert np.isfinite(deltas).all()
    assert np.isfinite(step.renyi_divergences(np.array([2.0, 8.0]))).all()

"""The bound on truncated batches, against distributions that are computed."""

import dp_accounting
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.stats

import dpadambc
from dpadambc import NeighboringRelation, accounting
from dpadambc.mechanisms._truncated import FullBatches, TruncatedPoissonDpEvent
from tests import worlds

REPLACE = NeighboringRelation.REPLACE_ONE
SPECIAL = NeighboringRelation.REPLACE_SPECIAL
EPSILONS = worlds.EPSILONS
INTERVAL = 1e-3


def step_of(stddev, q, size, num_examples, relation):
    """A step whose noise has this deviation where terms are clipped to one."""
    z = stddev / (1 + (relation == REPLACE))
    return TruncatedPoissonDpEvent(z, q, size, num_examples, relation)


def divergences(before, after, others, stddev, q, size, sample=worlds.truncated):
    """Of both orders of two worlds that differ in their first term."""
    p, r = (
        worlds.density(sample([term, *others], q, size), stddev)
        for term in (before, after)
    )
    return worlds.hockey_sticks(p, r, EPSILONS), worlds.hockey_sticks(r, p, EPSILONS)


def bounds(losses):
    return [
        pmf.get_delta_for_epsilon(EPSILONS) + 4 * worlds.QUADRATURE
        for pmf in (losses._pmf_remove, losses._pmf_add)
    ]


def stays_below(found, losses):
    return all(
        (x <= bound).all() for x, bound in zip(found, bounds(losses), strict=True)
    )


PAIRS = st.tuples(worlds.clipped(2), worlds.clipped(4))
AGAINST = [1.0, -1.0], [-1.0] * 4
ALONG = [1.0, -1.0], [1.0] * 4


@pytest.mark.guarantee
@hypothesis.settings(max_examples=10, deadline=None)
@hypothesis.given(
    pairs=st.lists(PAIRS, min_size=4, max_size=4),  # the bound is what takes long
    stddev=st.floats(0.7, 4),
    q=st.sampled_from([0.05, 0.3, 0.6, 0.9, 1.0]),
    size=st.integers(1, 6),
    relation=st.sampled_from([REPLACE, SPECIAL]),
)
@hypothesis.example([AGAINST], 1.0, 0.6, 2, REPLACE)
@hypothesis.example([AGAINST], 0.7, 0.9, 1, SPECIAL)
@hypothesis.example([ALONG], 0.7, 0.6, 3, SPECIAL)
@hypothesis.example([AGAINST], 0.7, 1.0, 4, REPLACE)
def test_no_attack_on_a_small_world_exceeds_the_bound(pairs, stddev, q, size, relation):
    losses = step_of(stddev, q, size, 5, relation).privacy_losses(INTERVAL)
    for (term, other), others in pairs:
        after = other * (relation == REPLACE)
        assert stays_below(divergences(term, after, others, stddev, q, size), losses)


@pytest.mark.parametrize("relation", [REPLACE, SPECIAL])
def test_the_test_sees_examples_that_are_pushed_out(relation):
    """Negative controls: the bound of uncut batches, and one with nobody displaced."""
    numbers = 0.7, 0.4, 1
    others = [-1.0] * 3
    found = divergences(1.0, -1.0 * (relation == REPLACE), others, *numbers)
    step = step_of(*numbers, 4, relation)
    assert stays_below(found, step.privacy_losses(INTERVAL))
    uncut = step_of(*numbers[:2], 4, 4, relation)
    assert not stays_below(found, uncut.privacy_losses(INTERVAL))
    full = step.full_batches
    assert full.prob == pytest.approx(1.0)
    s = 1 / numbers[0]
    down = s * (relation == REPLACE)
    assert (found[0] <= full.deltas(EPSILONS, s, s, down) + 1e-4).all()
    assert not (found[0] <= full.deltas(EPSILONS, 0.0, s, down) + 1e-4).all()


@pytest.mark.parametrize(
    ("n", "q", "size"), [(10, 0.3, 3), (10, 0.3, 1), (10, 1.0, 4), (200, 0.05, 12)]
)
def test_the_shares_are_those_of_the_sampling(n, q, size):
    k = np.arange(n)
    drawn = scipy.stats.binom.pmf(k, n - 1, q)
    taken = drawn * q * np.minimum(1, size / (k + 1))
    parts = [
        taken[size - 1 :].sum(),
        drawn[size - 1] * (1 - q),
        (drawn - taken)[size:].sum(),
    ]
    step = step_of(1.0, q, size, n, SPECIAL)
    full = step.full_batches
    assert full.prob == pytest.approx(sum(parts))
    np.testing.assert_allclose(full[:3], np.array(parts) / sum(parts), rtol=1e-9)
    assert step.rate == pytest.approx(taken.sum())


FULL = [
    FullBatches(0.1, 0.5, 0.4, 1.0),
    FullBatches(0.02, 0.0, 0.98, 1.0),
    FullBatches(0.6, 0.4, 0.0, 1.0),
    FullBatches(1.0, 0.0, 0.0, 1.0),
]


@pytest.mark.parametrize("full", FULL)
@pytest.mark.parametrize("s", [0.2, 1.0, 3.0])
def test_the_supremum_is_found(full, s):
    alphas = np.exp(np.linspace(-2, 3, 21))[:, None]
    t = np.linspace(-40, 40, 80_001)
    phi = scipy.stats.norm.cdf
    for u, v in ((s, 0.0), (0.0, s), (s, s)):
        other = np.where(alphas > 1, t - s, t + s)
        slow = (1 - alphas) * (full.without_it * phi(t) + full.of_others * phi(other))
        slow += full.with_it * (phi(t + u) - alphas * phi(t - v))
        found = full.deltas(np.log(alphas[:, 0]), s, u, v)
        assert (found >= slow.max(axis=1) - 1e-12).all()
        np.testing.assert_allclose(found, slow.max(axis=1), atol=1e-6)


@pytest.mark.parametrize("full", FULL)
@pytest.mark.parametrize("s", [0.2, 1.0, 3.0])
def test_the_profile_is_that_of_a_pair(full, s):
    """Convex and falling in exp(epsilon), from 1, above the least that there is."""
    alphas = np.linspace(1e-3, 5, 5_000)
    for u, v in ((s, 0.0), (0.0, s), (s, s)):
        profile = full.deltas(np.log(alphas), s, u, v)
        assert (np.diff(profile) <= 1e-12).all()
        assert (np.diff(profile, n=2) >= -1e-12).all()
        assert (profile >= np.maximum(1 - alphas, 0) - 1e-12).all()
        assert profile[0] <= 1


NUMBERS = dict(l2_clip_norm=1.0, normalize_by=1.0, iterations=20, noise_multiplier=1.0)


def truncated(q, size, n, relation=SPECIAL, **changes):
    return dpadambc.TruncatedPoissonGaussian(
        sampling_prob=q,
        truncated_batch_size=size,
        num_examples=n,
        neighboring_relation=relation,
        **NUMBERS | changes,
    )


def test_a_batch_that_is_always_full_is_one_of_fixed_size():
    fixed = dpadambc.FixedSizeGaussian(batch_size=30, num_examples=300, **NUMBERS)
    always = truncated(1.0, 30, 300, REPLACE)
    assert always.epsilon(1e-5) == pytest.approx(fixed.epsilon(1e-5), rel=1e-6)


@pytest.mark.parametrize("relation", [REPLACE, SPECIAL])
@pytest.mark.parametrize("size", [30, 36, 45])
def test_the_bound_is_below_the_one_that_reveals_which_batches_are_full(size, relation):
    mechanism = truncated(0.1, size, 300, relation)
    revealed = dp_accounting.TruncatedSubsampledGaussianDpEvent(
        300, 0.1, size, 1.0 * (1 + (relation == REPLACE))
    )
    known = accounting.epsilon(
        dp_accounting.SelfComposedDpEvent(revealed, 20),
        target_delta=1e-5,
        neighboring_relation=relation,
    )
    poisson = dpadambc.PoissonGaussian(
        sampling_prob=0.1, neighboring_relation=relation, **NUMBERS
    )
    assert poisson.epsilon(1e-5) <= mechanism.epsilon(1e-5) * 1.001
    assert mechanism.epsilon(1e-5) <= known


def test_rare_truncation_costs_next_to_nothing():
    """One batch of a thousand is cut: revealed, that would double epsilon."""
    changes = dict(noise_multiplier=0.7, iterations=5_000)
    poisson = dpadambc.PoissonGaussian(
        sampling_prob=0.005, neighboring_relation=SPECIAL, **NUMBERS | changes
    )
    cut = truncated(0.005, 300, 50_000, **changes)
    assert cut.epsilon(1e-5) == pytest.approx(poisson.epsilon(1e-5), rel=0.01)
    assert truncated(0.005, 250, 50_000, **changes).epsilon(1e-5) < 16

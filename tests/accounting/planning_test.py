"""Plans meet their budgets."""

import math

import pytest

import dpadambc
from dpadambc import accounting

Relation = dpadambc.NeighboringRelation


@pytest.fixture(scope="module")
def rows():
    return accounting.plan(
        target_epsilons=[1.0, 4.0],
        target_delta=1e-5,
        batch_sizes=[100, 250],
        epochs=[2, 3.5],
        num_examples=2_000,
        accountant=accounting.RDP,
    )


@pytest.mark.slow
def test_a_plan_has_a_row_for_each_combination_and_each_meets_its_budget(rows):
    seen = [(row.epochs, row.target_epsilon, row.batch_size) for row in rows]
    assert seen == [(t, e, b) for t in (2, 3.5) for e in (1, 4) for b in (100, 250)]
    for row in rows:
        spent = row.mechanism.epsilon(1e-5, accountant=accounting.RDP)
        assert 0.995 * row.target_epsilon < spent <= row.target_epsilon
        assert row.mechanism.iterations == row.epochs * 2_000 / row.batch_size
        assert row.mechanism.sampling_prob == row.batch_size / 2_000
        assert row.noise_stddev == pytest.approx(
            row.mechanism.noise_multiplier / row.batch_size
        )


@pytest.mark.slow
def test_more_budget_or_larger_batches_need_less_noise_and_more_epochs_more(rows):
    noise = {(r.epochs, r.target_epsilon, r.batch_size): r.noise_stddev for r in rows}
    for (epochs, epsilon, size), stddev in noise.items():
        assert noise[epochs, 4.0, size] <= stddev
        assert noise[epochs, epsilon, 250] <= stddev
        assert noise[3.5, epsilon, size] >= stddev


@pytest.mark.slow
def test_one_number_is_as_good_as_a_list_of_it(rows):
    (row,) = accounting.plan(
        target_epsilons=4.0,
        target_delta=1e-5,
        batch_sizes=250,
        epochs=2,
        num_examples=2_000,
        accountant=accounting.RDP,
    )
    assert row == rows[3]


def test_other_samplings_are_compared_at_the_same_noise(rows):
    """Each epsilon is that of the mechanism which a user would make by hand."""
    row = rows[0]
    stddev = row.mechanism.noise_stddev
    found = {
        (s.sampling, s.neighboring_relation, s.accountant): s.epsilon
        for s in row.comparison()
    }
    by_hand = dpadambc.ShuffledGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=stddev / (2 / 100),
        batch_size=100,
        num_examples=2_000,
        iterations=40,
        normalize_by=100,
        neighboring_relation=Relation.REPLACE_ONE,
    )
    assert by_hand.noise_stddev == pytest.approx(stddev)
    assert found["shuffled", Relation.REPLACE_ONE, accounting.PLD] == by_hand.epsilon(
        1e-5
    )
    # Two epochs without amplification: one Gaussian of z / sqrt(2).
    goes = found["shuffled", Relation.REPLACE_SPECIAL, accounting.PLD]
    single = dpadambc.PoissonGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=row.mechanism.noise_multiplier / math.sqrt(2),
        sampling_prob=1.0,
        iterations=1,
        normalize_by=1,
    )
    assert goes == pytest.approx(single.epsilon(1e-5), rel=1e-2)
    poisson = found["poisson", Relation.ADD_OR_REMOVE_ONE, accounting.PLD]
    assert poisson < found["poisson", Relation.ADD_OR_REMOVE_ONE, accounting.RDP] <= 1.0
    assert poisson < goes < found["shuffled", Relation.REPLACE_ONE, accounting.PLD]
    assert poisson < found["poisson", Relation.REPLACE_ONE, accounting.PLD]
    allocated = found["random-allocation", Relation.ADD_OR_REMOVE_ONE, accounting.PLD]
    assert 0.8 * poisson < allocated < 1.05 * poisson
    relations = {(s, r) for s, r, _ in found}
    assert ("fixed-size", Relation.ADD_OR_REMOVE_ONE) not in relations
    with pytest.raises(ValueError, match="sampling"):
        row.spent("shuffle", Relation.REPLACE_ONE)
    with pytest.raises(ValueError, match="neighboring_relation"):
        row.spent("shuffled", Relation.ADD_OR_REMOVE_ONE)

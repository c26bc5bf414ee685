"""Plans meet their budgets."""

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

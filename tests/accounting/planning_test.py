"""Plans meet their budgets, and users' numbers become fields by the stated rules."""

import math

import numpy as np
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


def of_epochs(cls=dpadambc.PoissonGaussian, **numbers):
    common = dict(l2_clip_norm=1.0, noise_multiplier=1.0)
    return cls.of_epochs(**{**common, **numbers})


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
    assert found["shuffled", Relation.REPLACE_ONE, "pld"] == by_hand.epsilon(1e-5)
    # Two epochs without amplification: one Gaussian of z / sqrt(2).
    goes = found["shuffled", Relation.REPLACE_SPECIAL, "pld"]
    single = dpadambc.PoissonGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=row.mechanism.noise_multiplier / math.sqrt(2),
        sampling_prob=1.0,
        iterations=1,
        normalize_by=1,
    )
    assert goes == pytest.approx(single.epsilon(1e-5), rel=1e-2)
    poisson = found["poisson", Relation.ADD_OR_REMOVE_ONE, "pld"]
    assert poisson < found["poisson", Relation.ADD_OR_REMOVE_ONE, "rdp"] <= 1.0
    assert poisson < goes < found["shuffled", Relation.REPLACE_ONE, "pld"]
    assert poisson < found["poisson", Relation.REPLACE_ONE, "pld"]
    allocated = found["random-allocation", Relation.ADD_OR_REMOVE_ONE, "pld"]
    assert 0.8 * poisson < allocated < 1.05 * poisson
    relations = {(s, r) for s, r, _ in found}
    assert ("fixed-size", Relation.ADD_OR_REMOVE_ONE) not in relations
    with pytest.raises(ValueError, match="one of poisson, random-allocation, fixed"):
        row.spent("shuffle", Relation.REPLACE_ONE)
    with pytest.raises(ValueError, match="cannot be accounted for"):
        row.spent("shuffled", Relation.ADD_OR_REMOVE_ONE)


@pytest.mark.parametrize(
    ("epochs", "batch_size", "num_examples", "steps"),
    [
        (30, 1024, 60_000, 1758),  # 1757.8
        (1, 100, 1_000, 10),
        (0.1, 1, 10, 1),  # a tenth of ten, not a little more
        (3, 1, 1, 3),
        (0.7, 1, 10, 7),
        (0.701, 1, 10, 8),
    ],
)
def test_steps_are_rounded_up(epochs, batch_size, num_examples, steps):
    made = of_epochs(epochs=epochs, batch_size=batch_size, num_examples=num_examples)
    assert made.iterations == steps
    assert made.sampling_prob == batch_size / num_examples
    assert made.normalize_by == batch_size


def test_an_epoch_that_deals_all_examples_is_a_whole_number_of_steps():
    numbers = dict(epochs=30, batch_size=1024, num_examples=60_000)
    dealt = of_epochs(dpadambc.ShuffledGaussian, **numbers)
    assert dealt.iterations == 30 * 59
    drawn = of_epochs(dpadambc.FixedSizeGaussian, **numbers)
    assert drawn.iterations == 1758
    assert (drawn.batch_size, drawn.num_examples) == (1024, 60_000)
    allocated = of_epochs(dpadambc.RandomAllocationGaussian, **numbers)
    assert (allocated.batches_per_epoch, allocated.iterations) == (59, 30 * 59)
    twice = of_epochs(dpadambc.RandomAllocationGaussian, participations=2, **numbers)
    assert (twice.batches_per_epoch, twice.iterations) == (118, 30 * 118)
    # In the 32 bits that these come in, twice as many have no place.
    many = dict(num_examples=np.int32(2_000_000_000), batch_size=np.int32(10**6))
    rest = dict(epochs=1, participations=np.int32(2))
    allocated = of_epochs(dpadambc.RandomAllocationGaussian, **rest, **many)
    assert allocated.iterations == 4_000
    assert type(allocated.batches_per_epoch) is type(allocated.iterations) is int
    # All of the dealt epochs are counted, and no more.
    one_more = of_epochs(
        dpadambc.ShuffledGaussian, **{**numbers, "epochs": None}, iterations=1771
    )
    assert dealt.dp_event().count == 30
    assert one_more.dp_event().count == 31


@pytest.mark.slow
def test_calibrate_takes_the_same_numbers():
    target = dict(target_epsilon=3.0, target_delta=1e-5, accountant=accounting.RDP)
    fields = dict(l2_clip_norm=1.0, batch_size=100, num_examples=2_000)
    found = dpadambc.PoissonGaussian.calibrate(**target, **fields, epochs=3)
    same = dpadambc.PoissonGaussian.calibrate(
        **target, l2_clip_norm=1.0, sampling_prob=0.05, iterations=60, normalize_by=100
    )
    assert found == same
    steps = dpadambc.PoissonGaussian.calibrate(
        **target, **fields, noise_multiplier=found.noise_multiplier
    )
    assert steps.iterations == 60
    own = dpadambc.PoissonGaussian.calibrate(
        **target, **fields, epochs=3, normalize_by=99
    )
    assert own.normalize_by == 99
    with pytest.raises(ValueError, match="target_delta below 1 / num_examples"):
        dpadambc.PoissonGaussian.calibrate(
            **{**target, "target_delta": 1e-3}, **fields, epochs=3
        )


@pytest.mark.parametrize(
    ("numbers", "error", "message"),
    [
        (dict(epochs=2), TypeError, "batch_size and num_examples with epochs"),
        (dict(epochs=2, sampling_prob=0.1), TypeError, "with epochs"),
        (dict(batch_size=9, iterations=1), TypeError, "num_examples with batch_size"),
        (dict(batch_size=9, num_examples=8, iterations=1), ValueError, "<= num_ex"),
        (dict(batch_size=0, num_examples=8, iterations=1), ValueError, "positive"),
        (dict(batch_size=9, num_examples=0, iterations=1), ValueError, ">= 1"),
        (dict(batch_size=9, num_examples=9.5, iterations=1), TypeError, "an int"),
        (
            dict(batch_size=2, num_examples=8, sampling_prob=0.25, iterations=1),
            TypeError,
            "batch_size in place of sampling_prob",
        ),
        (
            dict(batch_size=2, num_examples=8, epochs=1, iterations=4),
            TypeError,
            "epochs in place of iterations",
        ),
        (dict(batch_size=2, num_examples=8, epochs=0), ValueError, "epochs to be pos"),
        (dict(batch_size=2, num_examples=8, epochs=math.nan), ValueError, "positive"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(numbers, error, message):
    with pytest.raises(error, match=message):
        of_epochs(**numbers)
    target = dict(target_epsilon=1.0, target_delta=1e-5, l2_clip_norm=1.0)
    with pytest.raises(error, match=message):
        dpadambc.PoissonGaussian.calibrate(**target, **numbers)

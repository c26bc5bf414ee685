"""`audit.sampling`: its false alarms, its power, and its refusals."""

import jax
import numpy as np
import pytest

import dpadambc
from dpadambc import audit
from dpadambc.audit import statistics
from tests import common

NUM_EXAMPLES = 400
MECHANISM = common.poisson_gaussian(sampling_prob=0.05, iterations=60)


def poisson(rng, prob=0.05):
    return np.flatnonzero(rng.random(NUM_EXAMPLES) < prob)


def in_pairs(taken):
    """Two neighbors for each of the first half."""
    first = np.unique(taken // 2 * 2)
    return np.sort(np.concatenate([first, first + 1]))


def finding_of(draw, seed=0):
    def loader(run):
        rng = np.random.default_rng([seed, run])
        return (draw(rng) for _ in range(MECHANISM.iterations))

    return audit.sampling(loader, MECHANISM, num_examples=NUM_EXAMPLES)


def failed(finding):
    return {part.check for part in finding.parts if part.passed is False}


@pytest.mark.slow
def test_false_alarms_are_no_more_than_stated(monkeypatch):
    """Of each part, in 200 sound loaders, at a rate that these can measure."""
    monkeypatch.setattr(statistics, "FALSE_ALARM", 0.05)
    alarms = [failed(finding_of(poisson, seed)) for seed in range(200)]
    counts = {name: sum(name in x for x in alarms) for name in set().union(*alarms)}
    # One in twenty for the overlaps, one in a hundred for each of the five numbers.
    for name, count in counts.items():
        rate = 0.05 if name == "sampling independence" else 0.01
        assert count <= 200 * rate + 3 * np.sqrt(200 * rate) + 1, (name, count)


def test_a_rate_that_is_off_as_stated_is_found():
    sound = finding_of(poisson)
    assert sound.passed
    (rate,) = (part for part in sound.parts if part.check == "sampling rate")
    shift = float(rate.fails_if.split()[-1])
    found = [
        "sampling rate" in failed(finding_of(lambda rng: poisson(rng, 0.05 + shift), i))
        for i in range(30)
    ]
    assert sum(found) >= 29  # but for one in a thousand


@pytest.mark.parametrize(
    ("draw", "part"),
    [
        (lambda rng: rng.choice(NUM_EXAMPLES, 20, replace=False), "sampling sizes"),
        (lambda rng: np.repeat(poisson(rng, 0.025), 2), "sampling duplicates"),
        (lambda rng: poisson(rng)[:22], "sampling sizes"),
        (lambda rng: poisson(rng) + 100, "sampling duplicates"),
        (lambda rng: in_pairs(poisson(rng, 0.025)), "sampling neighbors"),
    ],
    ids=["fixed size", "twice", "cut", "beyond the data", "in pairs"],
)
def test_what_is_wrong_is_found_by_its_part(draw, part):
    finding = finding_of(draw)
    assert finding.passed is False and part in failed(finding)


def test_batches_are_read_in_three_forms():
    def padded(rng):
        taken = poisson(rng)
        indices = np.concatenate([taken, np.full(5, -1)]).astype(np.int32)
        return indices, indices < 0

    as_batch = lambda rng: dpadambc.Batch(*padded(rng), num_examples=NUM_EXAMPLES)
    for draw in (padded, as_batch, lambda rng: padded(rng)[0]):
        assert finding_of(draw).passed


def test_rows_of_data_are_refused():
    with pytest.raises(TypeError, match="loader"):
        finding_of(lambda rng: rng.normal(size=(20, 3)))


def of_batches(number, rng, prob=0.05):
    return (poisson(rng, prob) for _ in range(number))


@pytest.mark.parametrize(
    ("number", "iterations", "passed"),
    [(5, 5, None), (20, 60, None), (61, 60, None), (60, 60, True)],
)
def test_only_the_batches_of_a_whole_run_are_tested(number, iterations, passed):
    """Not a few, one epoch of several, or more than epsilon is for."""
    mechanism = common.poisson_gaussian(sampling_prob=0.05, iterations=iterations)
    loader = lambda seed: of_batches(number, np.random.default_rng(seed))
    finding = audit.sampling(loader, mechanism, num_examples=NUM_EXAMPLES)
    assert finding.passed is passed


def test_batches_of_all_examples_pass_and_no_batches_do_not():
    whole = common.poisson_gaussian(sampling_prob=1.0, iterations=2)
    every = lambda seed: [np.arange(NUM_EXAMPLES)] * 2
    for loader, passed in ((lambda seed: [], None), (every, True)):
        finding = audit.sampling(loader, whole, num_examples=NUM_EXAMPLES)
        assert finding.passed is passed


@pytest.mark.parametrize("is_new", [True, False])
def test_small_batches_that_come_again_in_a_row_are_found(is_new):
    """They have four examples each, in epochs that begin with one seed."""
    small = common.poisson_gaussian(sampling_prob=0.01, iterations=60)

    def loader(seed):
        for epoch in range(3):
            rng = np.random.default_rng([seed, epoch if is_new else 0])
            yield from of_batches(20, rng, 0.01)

    finding = audit.sampling(loader, small, num_examples=NUM_EXAMPLES)
    assert finding.passed is is_new
    assert ("sampling repetition" in failed(finding)) is not is_new


@pytest.mark.slow
def test_overlaps_that_are_rare_are_no_surprise():
    """Of batches of 32 among 100,000, two share an example now and then."""
    rare = common.poisson_gaussian(sampling_prob=32e-5, iterations=100)
    for seed in range(25):
        loader = lambda run, seed=seed: rare.batches(
            jax.random.key(1_000 * seed + run), num_examples=100_000
        )
        finding = audit.sampling(loader, rare, num_examples=100_000)
        assert finding.passed, finding
    # One overlap where 0.004 are expected is 16 standard deviations, and no alarm.
    assert statistics.score_of_count(1, 0.004, 0.004) < 3
    assert statistics.score_of_count(40, 10, 10) > 6
    # Of 30 squares, a mean of 2.6 is one in 1e5, not one in 1e9.
    assert 3.8 < statistics.score_of_dispersion(2.6, 2 / 30) < 4.8
    assert statistics.score_of_dispersion(0.0, 2 / 800) < -10


ALLOCATION = dpadambc.RandomAllocationGaussian(
    l2_clip_norm=1.0,
    noise_multiplier=1.0,
    batches_per_epoch=10,
    iterations=60,
    normalize_by=40.0,
)


def dealt(rng, is_same=False, is_even=False):
    """Epochs in which each example is in one batch."""
    places = rng.integers(10, size=NUM_EXAMPLES)
    for _ in range(6):
        if is_even:
            places = rng.permutation(np.arange(NUM_EXAMPLES) % 10)
        elif not is_same:
            places = rng.integers(10, size=NUM_EXAMPLES)
        yield from (np.flatnonzero(places == step) for step in range(10))


def allocated(draw):
    loader = lambda run: draw(np.random.default_rng(run))
    return audit.sampling(loader, ALLOCATION, num_examples=NUM_EXAMPLES)


@pytest.mark.parametrize(
    ("draw", "part"),
    [
        (lambda rng: dealt(rng, is_even=True), "sampling sizes"),
        (lambda rng: dealt(rng, is_same=True), "sampling independence"),
        (lambda rng: (poisson(rng, 0.1) for _ in range(60)), "sampling epochs"),
        (lambda rng: map(in_pairs, dealt(rng)), "sampling epochs"),
    ],
    ids=["shuffled", "the same each epoch", "poisson", "in pairs"],
)
def test_what_is_not_random_allocation_is_found(draw, part):
    assert allocated(dealt).passed
    finding = allocated(draw)
    assert finding.passed is False and part in failed(finding)

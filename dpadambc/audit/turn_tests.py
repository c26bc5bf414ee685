"""What is tested of batches that are dealt: an example has its turn in each epoch."""

import math

import numpy as np

from dpadambc.audit import draw_tests as _draw_tests
from dpadambc.audit import statistics as _statistics
from dpadambc.audit.batches import Drawn, allocated
from dpadambc.audit.finding import Finding, combined, not_tested, within
from dpadambc.contrib.banded import BandedGaussian
from dpadambc.mechanisms.random_allocation import RandomAllocationGaussian
from dpadambc.mechanisms.shuffled import ShuffledGaussian


def once_an_epoch(drawn: Drawn, mechanism: ShuffledGaussian) -> Finding:
    """Whether an example takes part once in an epoch, in batches of the size."""
    length = math.ceil(drawn.num_examples / mechanism.batch_size)
    again = 0
    for run in drawn.runs:
        for start in range(0, len(run), length):
            epoch = np.concatenate(run[start : start + length])
            again += len(epoch) - len(np.unique(epoch))
    largest = max(map(len, drawn.batches), default=0)
    sentence = f"{again} examples take part twice in an epoch of {length} batches."
    parts = [
        within("sampling epochs", again, 0, sentence, "fails at one such example"),
        within(
            "sampling sizes",
            largest,
            mechanism.batch_size,
            f"The largest batch has {largest} examples.",
            "fails at a larger batch",
        ),
    ]
    return combined("sampling epochs", parts)


def _in_turn(drawn: Drawn, mechanism: BandedGaussian) -> Finding:
    """Whether each example is only in steps of one part, in each run."""
    wrong = 0
    for matrix in drawn.matrices():
        turns = [matrix[part :: mechanism.parts] for part in range(mechanism.parts)]
        is_in = [np.asarray(turn.sum(axis=0)) > 0 for turn in turns]
        wrong += int(np.sum(np.sum(is_in, axis=0) > 1))
    sentence = (
        f"{wrong} examples are in steps that are not a multiple of {mechanism.parts}"
        " apart, where what they move overlaps."
    )
    return within("sampling turns", wrong, 0, sentence, "fails at one such example")


def _rate_of_turns(drawn: Drawn, mechanism: BandedGaussian) -> Finding:
    """How many are drawn in whole cycles, in which each example has one turn."""
    parts, prob = mechanism.parts, mechanism.sampling_prob
    cycles = [len(sizes) // parts for sizes in drawn.sizes]
    count = sum(
        int(s[: n * parts].sum()) for s, n in zip(drawn.sizes, cycles, strict=True)
    )
    turns = sum(cycles) * drawn.num_examples
    return _draw_tests.standard_errors(
        "rate",
        count,
        turns * prob,
        turns * prob * (1 - prob),
        "The number of participations in whole cycles",
    )


def _independent_turns(drawn: Drawn, mechanism: BandedGaussian) -> Finding:
    """Whether who is drawn in a turn says anything of the next one of the part."""
    parts, prob = mechanism.parts, mechanism.sampling_prob
    both = eligible = 0
    for matrix in drawn.matrices():
        cycles = matrix.shape[0] // parts
        whole = matrix[: cycles * parts]
        both += int(whole[parts:].multiply(whole[:-parts]).sum())
        eligible += max(cycles - 1, 0) * drawn.num_examples
    # Of pairs that share a turn the covariance is prob^3 (1 - prob), twice each.
    variance = eligible * prob**2 * (1 - prob) * (1 + prob + 2 * prob)
    return _draw_tests.standard_errors(
        "independence",
        both,
        eligible * prob**2,
        variance,
        "The number of examples that are in two turns of their part in a row",
    )


def of_cycles(drawn: Drawn, mechanism: BandedGaussian) -> list[Finding]:
    """Each example has its turn in steps of one part."""
    tests = (_in_turn, _rate_of_turns, _independent_turns)
    return [test(drawn, mechanism) for test in tests]


def _so_often_an_epoch(drawn: Drawn, mechanism: RandomAllocationGaussian) -> Finding:
    length, wrong, epochs = mechanism.batches_per_epoch, 0, 0
    for matrix in drawn.matrices():
        for start in range(0, matrix.shape[0], length):
            counts = np.asarray(matrix[start : start + length].sum(axis=0))
            is_whole = start + length <= matrix.shape[0]
            least = mechanism.participations if is_whole else 0
            wrong += int(np.sum(counts > mechanism.participations))
            wrong += int(np.sum(counts < least))
            epochs += is_whole
    sentence = (
        f"{wrong} examples are not in {mechanism.participations} batches of an epoch of"
        f" {length} ({epochs} whole epochs)."
    )
    return within("sampling epochs", wrong, 0, sentence, "fails at one such example")


def _independent_epochs(drawn: Drawn, mechanism: RandomAllocationGaussian) -> Finding:
    """Whether an epoch says anything of the one before, by overlaps at each place."""
    length = mechanism.batches_per_epoch
    pairs = []
    for matrix, sizes in zip(drawn.matrices(), drawn.sizes, strict=True):
        if len(sizes) > length:
            overlaps = matrix[length:].multiply(matrix[:-length]).sum(axis=1)
            pairs.append(
                (np.asarray(overlaps).ravel(), sizes[length:], sizes[:-length])
            )
    if not pairs:
        return not_tested("sampling independence", "a run is one epoch.")
    columns = map(np.concatenate, zip(*pairs, strict=True))
    found = _draw_tests.shared(drawn, [(length, *columns)], "lag")
    if not found:
        return not_tested("sampling independence", "the batches are empty.")
    ((_, sums),) = found
    count, mean, variance = map(float, sums)
    return _draw_tests.standard_errors(
        "independence",
        count,
        mean,
        variance,
        "The number of examples in the same batch of two epochs in turn",
        _statistics.score_of_count(count, mean, variance),
    )


def of_allocation(drawn: Drawn, mechanism: RandomAllocationGaussian) -> list[Finding]:
    """Each example is in so many batches of an epoch, which are drawn."""
    prob, length = allocated(mechanism), mechanism.batches_per_epoch
    exact = [_so_often_an_epoch(drawn, mechanism)]
    if prob == 1:
        return exact
    # The sizes of an epoch have a fixed sum: one number less varies.
    sizes = _draw_tests.spread_of_sizes(drawn, prob, length / (length - 1))
    chances = (_draw_tests.adjacent(drawn), _draw_tests.same_batches(drawn))
    return [*exact, sizes, _independent_epochs(drawn, mechanism), *chances]

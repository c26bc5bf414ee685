"""Tests of batches: independent draws, and epochs in which examples take turns."""

import functools
import itertools
import math
from typing import Any

import numpy as np
import scipy.sparse
import scipy.stats

from dpadambc.audit import statistics
from dpadambc.audit.finding import Finding, combined, not_tested, within
from dpadambc.contrib.banded import BandedGaussian
from dpadambc.mechanisms.random_allocation import RandomAllocationGaussian
from dpadambc.mechanisms.shuffled import ShuffledGaussian
from dpadambc.mechanisms.truncated import TruncatedPoissonGaussian

_MOST_BATCHES = 400
_LEAST_SIZE = 16  # the size of a set that never occurs twice by chance
_COMPARISONS = 5  # for each number


class Batches:
    """The batches of several runs, as arrays of the indices of their examples."""

    def __init__(self, runs: list[list[np.ndarray]], num_examples: int):
        self.num_examples = num_examples
        self.identical, self.compared = _identical(runs, num_examples)
        self.runs = [run[:_MOST_BATCHES] for run in runs]
        self.each = list(itertools.chain(*self.runs))
        self.steps = min(map(len, self.runs))
        self.sizes = [np.array([len(b) for b in run]) for run in self.runs]
        self.all_sizes = np.concatenate(self.sizes)

    @functools.cached_property
    def matrices(self) -> list[Any]:
        """One matrix of zeros and ones for each run, shape (batches, examples)."""
        found = []
        for run, sizes in zip(self.runs, self.sizes, strict=True):
            starts = np.concatenate([[0], np.cumsum(sizes)])
            columns = np.concatenate(run) if run else np.zeros(0, int)
            ones = np.ones(len(columns), np.float32)
            shape = (len(run), self.num_examples)
            found.append(scipy.sparse.csr_matrix((ones, columns, starts), shape))
        return found

    @property
    def participations(self) -> np.ndarray:
        """The number of times that each example takes part, over all runs."""
        counts = [np.asarray(m.sum(axis=0)).ravel() for m in self.matrices]
        return np.sum(counts, axis=0)


def _identical(runs: list[list[np.ndarray]], num_examples: int) -> tuple[int, int]:
    """Counts the batches that repeat an earlier one, and the batches compared.

    Small batches are compared several in a row: together they are one of many sets.
    """
    # The number of examples that are hardly in both, or hardly missing in both, by
    # chance.
    rare = lambda size: min(size, num_examples - size)
    mean = np.mean([rare(len(b)) for run in runs for b in run] or [0])
    in_a_row = math.ceil(_LEAST_SIZE / max(mean, 0.1))
    hashes = []
    for run in runs:
        each = [(hash(np.sort(b).tobytes()), rare(len(b))) for b in run]
        for first in range(len(run) - in_a_row + 1):
            names, sizes = zip(*each[first : first + in_a_row], strict=True)
            if sum(sizes) >= _LEAST_SIZE:
                hashes.append(hash(names))
    return len(hashes) - len(set(hashes)), len(hashes)


def _by_chance(
    name: str,
    subject: str,
    value: float,
    mean: float,
    variance: float,
    score: float | None = None,
) -> Finding:
    """Tests that a number is near its mean, as by chance."""
    error = math.sqrt(max(variance, 1e-300))
    if score is None:
        score = (value - mean) / error if value != mean else 0.0
    power = statistics.detected(_COMPARISONS) * error
    bound = statistics.normal_bound(_COMPARISONS)
    off = f"{abs(score):.2g} standard errors"
    sentence = f"The {subject} is {value:.6g}, expected {mean:.6g}: {off}."
    fails_if = f"fails if the {subject} is off by {power:.3g}"
    return within(f"sampling {name}", abs(score), bound, sentence, fails_if)


def _exact(name: str, count: int, sentence: str) -> Finding:
    """Tests that a number of cases is zero."""
    return within(f"sampling {name}", count, 0, sentence, "fails at one such case")


def duplicates(drawn: Batches) -> Finding:
    """Tests that no batch has an example twice, or an index beyond the data."""
    twice = lambda batch: len(batch) - len(np.unique(batch))
    beyond = lambda batch: int(np.sum(batch >= drawn.num_examples))
    bad = sum(twice(batch) + beyond(batch) for batch in drawn.each)
    sentence = f"{bad} indices are in a batch twice, or beyond the data."
    return _exact("duplicates", bad, sentence)


def _repetition(drawn: Batches) -> Finding:
    sentence = f"{drawn.identical} of {drawn.compared:,} sets of examples occur again."
    return _exact("repetition", drawn.identical, sentence)


def _rate(drawn: Batches, prob: float) -> Finding:
    """Tests that examples are drawn with this probability."""
    count = int(drawn.all_sizes.sum())
    trials = drawn.num_examples * len(drawn.all_sizes)
    variance = prob * (1 - prob)
    score = statistics.score_of_count(count, prob * trials, variance * trials)
    subject = "share of examples in a batch"
    return _by_chance("rate", subject, count / trials, prob, variance / trials, score)


def _sizes(drawn: Batches, prob: float, repeated: float = 1.0) -> Finding:
    """Tests that sizes vary like those of independent draws.

    `repeated` is the variance of their mean, relative to that of independent sizes.
    """
    mean = drawn.num_examples * prob
    variance = mean * (1 - prob)
    dispersion = float(np.mean((drawn.all_sizes - mean) ** 2) / variance)
    # The fourth moment of a binomial is slightly larger than a normal's.
    fourth = 2 + (1 - 6 * prob * (1 - prob)) / variance
    spread = fourth / len(drawn.all_sizes) * repeated
    subject = "variance of batch sizes, relative to independent draws,"
    score = statistics.score_of_dispersion(dispersion, spread)
    return _by_chance("sizes", subject, dispersion, 1.0, spread, score)


def fixed_sizes(drawn: Batches, size: int) -> Finding:
    """Tests that all batches have this size."""
    wrong = int(np.sum(drawn.all_sizes != size))
    sentence = f"{wrong} of {len(drawn.all_sizes)} batches do not have {size} examples."
    return _exact("sizes", wrong, sentence)


def truncated_sizes(drawn: Batches, mechanism: TruncatedPoissonGaussian) -> Finding:
    """Tests that sizes are those of Poisson batches that are cut off."""
    sizes, cap = drawn.all_sizes, mechanism.truncated_batch_size
    number = np.arange(drawn.num_examples + 1)
    chances = scipy.stats.binom.pmf(number, drawn.num_examples, mechanism.sampling_prob)
    cut = np.minimum(number, cap)
    mean = float(chances @ cut)
    second, fourth = (float(chances @ (cut - mean) ** k) for k in (2, 4))
    spread = float(np.mean((sizes - mean) ** 2))
    error = (fourth - second**2) / len(sizes)
    score = statistics.score_of_dispersion(spread / second, error / second**2)
    beyond = int(np.sum(sizes > cap))
    parts = [
        _exact("cap", beyond, f"{beyond} batches have more than {cap} examples."),
        _by_chance("sizes", "mean batch size", sizes.mean(), mean, second / len(sizes)),
        _by_chance("sizes", "variance of batch sizes", spread, second, error, score),
    ]
    return combined("sampling sizes", parts)


def _participation(drawn: Batches) -> Finding:
    """Tests that examples take part equally often, except for chance."""
    probs = drawn.all_sizes / drawn.num_examples
    mean, variance = probs.sum(), float(np.sum(probs * (1 - probs)))
    if not variance:
        return not_tested("sampling participation", "all examples are in each batch.")
    dispersion = float(np.mean((drawn.participations - mean) ** 2) / variance)
    fourth = float(np.sum(probs * (1 - probs) * (1 - 6 * probs * (1 - probs))))
    spread = (2 + fourth / variance**2) / drawn.num_examples
    subject = "variance of how often examples take part, relative to chance,"
    score = statistics.score_of_dispersion(dispersion, spread)
    return _by_chance("participation", subject, dispersion, 1.0, spread, score)


def _most_often(drawn: Batches) -> Finding:
    """Tests that no example takes part more often than any would by chance."""
    most, trials = drawn.participations.max(), len(drawn.all_sizes)
    prob = float(drawn.all_sizes.mean()) / drawn.num_examples
    chance = scipy.stats.binom.logsf(most - 1, trials, prob)
    surprise = -float(chance + math.log(drawn.num_examples)) / math.log(10)
    rare = statistics.FALSE_ALARM / drawn.num_examples
    least = float(scipy.stats.binom.isf(rare, trials, prob)) / max(trials * prob, 1e-9)
    surprise, bound = max(surprise, 0.0), -math.log10(statistics.FALSE_ALARM)
    sentence = (
        f"One example takes part in {int(most)} of {trials} batches: by chance once in"
        f" 10 to the {surprise:.1f}."
    )
    fails_if = f"fails if an example is drawn {least:.2g} times as often as others"
    return within("sampling of one example", surprise, bound, sentence, fails_if)


def _overlap(n: int, overlaps: Any, one: Any, two: Any) -> np.ndarray:
    """Returns the overlaps of pairs of batches: sum, mean and variance by chance."""
    mean = one * two / n
    variance = mean * (n - one) * (n - two) / (n * max(n - 1, 1))
    return np.array([float(np.sum(x)) for x in (overlaps, mean, variance)])


def _independence(drawn: Batches) -> Finding:
    """Tests that no batch predicts another, of the same run or of another run."""
    matrices, sizes, steps = drawn.matrices, drawn.sizes, drawn.steps
    products = [np.asarray((m @ m.T).todense()) for m in matrices]
    lags: dict[str, np.ndarray] = {}
    for lag in range(1, steps):
        at_lag = lambda p, s, lag=lag: (np.diagonal(p, lag), s[lag:], s[:-lag])
        pairs = map(at_lag, products, sizes)
        columns = map(np.concatenate, zip(*pairs, strict=True))
        lags[f"steps at lag {lag}"] = _overlap(drawn.num_examples, *columns)
    runs: dict[str, np.ndarray] = {}
    for i, k in itertools.combinations(range(len(matrices)), 2):
        both = matrices[i][:steps].multiply(matrices[k][:steps]).sum(axis=1)
        pair = np.asarray(both).ravel(), sizes[i][:steps], sizes[k][:steps]
        runs[f"runs {i} and {k}"] = _overlap(drawn.num_examples, *pair)
    varies = lambda sums: {name: x for name, x in sums.items() if x[2]}
    lags, sums = varies(lags), varies(lags) | varies(runs)
    if lags:  # each lag may be too small to detect
        sums["all steps"] = np.sum(list(lags.values()), axis=0)
    if not sums:
        return not_tested("sampling independence", "all batches are the whole data.")
    scores = {name: statistics.score_of_count(*x) for name, x in sums.items()}
    name, worst = max(scores.items(), key=lambda pair: abs(pair[1]))
    bound = statistics.normal_bound(len(scores))
    power = statistics.detected(len(scores))
    sentence = (
        f"Batches of {name} share {'more' if worst > 0 else 'fewer'} examples than by"
        f" chance: {abs(worst):.2g} standard errors ({len(scores)} comparisons)."
    )
    fails_if = f"fails at {power:.2g} standard errors"
    return within("sampling independence", abs(worst), bound, sentence, fails_if)


def _adjacent(drawn: Batches) -> Finding:
    """Tests that adjacent examples are not drawn together."""
    n, sizes = drawn.num_examples, drawn.all_sizes.astype(float)
    together = sum(float(m[:, :-1].multiply(m[:, 1:]).sum()) for m in drawn.matrices)
    expected = sizes * (sizes - 1) / n
    rest = 1 - sizes / n
    mean, variance = float(expected.sum()), float(np.sum(expected * rest**2)) + 1.0
    subject = "number of adjacent examples in one batch"
    score = statistics.score_of_count(together, mean, variance)
    return _by_chance("neighbors", subject, together, mean, variance, score)


def independent(drawn: Batches) -> list[Finding]:
    """Tests that draws are independent, for any sizes of their batches."""
    tests = (_participation, _most_often, _independence, _adjacent, _repetition)
    return [test(drawn) for test in tests]


def poisson(drawn: Batches, prob: float) -> list[Finding]:
    """Tests that each example is in each batch with this probability."""
    return [_rate(drawn, prob), _sizes(drawn, prob), *independent(drawn)]


def shuffled(drawn: Batches, mechanism: ShuffledGaussian) -> Finding:
    """Tests that an example takes part once in an epoch, in batches of the size."""
    length = math.ceil(drawn.num_examples / mechanism.batch_size)
    again = 0
    for run in drawn.runs:
        for start in range(0, len(run), length):
            epoch = np.concatenate(run[start : start + length])
            again += len(epoch) - len(np.unique(epoch))
    sentence = f"{again} examples take part twice in an epoch of {length} batches."
    largest = int(drawn.all_sizes.max(initial=0))
    of_size = f"The largest batch has {largest} examples."
    size = within("sampling sizes", largest, mechanism.batch_size, of_size)
    return combined("sampling epochs", [_exact("epochs", again, sentence), size])


def cycles(drawn: Batches, mechanism: BandedGaussian) -> list[Finding]:
    """Tests that the turns of each part of the data are a cycle apart.

    It counts the participations in whole cycles, in which each example has one turn,
    and the examples that are in two turns in a row.
    """
    parts, prob = mechanism.parts, mechanism.sampling_prob
    wrong = count = turns = both = pairs = 0
    for matrix in drawn.matrices:
        of_parts = [matrix[part::parts] for part in range(parts)]
        is_in = [np.asarray(turn.sum(axis=0)) > 0 for turn in of_parts]
        wrong += int(np.sum(np.sum(is_in, axis=0) > 1))
        number = matrix.shape[0] // parts
        whole = matrix[: number * parts]
        count, turns = count + int(whole.sum()), turns + number
        both += int(whole[parts:].multiply(whole[:-parts]).sum())
        pairs += max(number - 1, 0)
    turns, pairs = turns * drawn.num_examples, pairs * drawn.num_examples
    # The covariance of pairs that share a turn is prob^3 (1 - prob), twice each.
    variance = pairs * prob**2 * (1 - prob) * (1 + prob + 2 * prob)
    sentence = (
        f"{wrong} examples are in steps that are not a multiple of {parts} apart, so"
        " that their contributions overlap."
    )
    of_rate = count, turns * prob, turns * prob * (1 - prob)
    in_a_row = "number of examples that are in two turns of their part in a row"
    return [
        _exact("turns", wrong, sentence),
        _by_chance("rate", "number of participations in whole cycles", *of_rate),
        _by_chance("independence", in_a_row, both, pairs * prob**2, variance),
    ]


def allocation(drawn: Batches, mechanism: RandomAllocationGaussian) -> list[Finding]:
    """Tests that each example is in the right number of random batches of an epoch."""
    length, number, wrong = mechanism.batches_per_epoch, mechanism.participations, 0
    for matrix in drawn.matrices:
        for start in range(0, matrix.shape[0], length):
            counts = np.asarray(matrix[start : start + length].sum(axis=0))
            is_whole = start + length <= matrix.shape[0]
            wrong += int(np.sum(counts > number))
            wrong += int(np.sum(counts < number)) if is_whole else 0
    sentence = f"{wrong} examples are not in {number} batches of an epoch of {length}."
    exact = _exact("epochs", wrong, sentence)
    prob = number / length
    if prob == 1:
        return [exact]
    # The sizes of an epoch have a fixed sum, so one number fewer varies.
    sizes = _sizes(drawn, prob, length / (length - 1))
    tests = (_independent_epochs(drawn, length), _adjacent(drawn), _repetition(drawn))
    return [exact, sizes, *tests]


def _independent_epochs(drawn: Batches, length: int) -> Finding:
    """Tests that no epoch predicts the next one, by overlaps at each position."""
    pairs = []
    for matrix, sizes in zip(drawn.matrices, drawn.sizes, strict=True):
        if len(sizes) > length:
            both = matrix[length:].multiply(matrix[:-length]).sum(axis=1)
            pairs.append((np.asarray(both).ravel(), sizes[length:], sizes[:-length]))
    if not pairs:
        return not_tested("sampling independence", "a run is one epoch.")
    columns = map(np.concatenate, zip(*pairs, strict=True))
    count, mean, variance = map(float, _overlap(drawn.num_examples, *columns))
    if not variance:
        return not_tested("sampling independence", "the batches are empty.")
    subject = "number of examples in the same batch of two epochs in turn"
    score = statistics.score_of_count(count, mean, variance)
    return _by_chance("independence", subject, count, mean, variance, score)

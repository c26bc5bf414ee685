"""That the batches are drawn as they are accounted for."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import scipy.sparse
import scipy.stats

from dpadambc._core import validate
from dpadambc.audit import _statistics
from dpadambc.audit._finding import Finding, combined, not_tested, within
from dpadambc.mechanisms import _check
from dpadambc.mechanisms._sampled import FixedSizeSampled, PoissonSampled
from dpadambc.mechanisms.banded import BandedGaussian
from dpadambc.mechanisms.base import Mechanism
from dpadambc.mechanisms.batch import Batch
from dpadambc.mechanisms.random_allocation import RandomAllocationGaussian
from dpadambc.mechanisms.shuffled import ShuffledGaussian
from dpadambc.mechanisms.truncated import TruncatedPoissonGaussian

_CHECK = "sampling"
_RUNS = 4
_MOST_BATCHES = 400
_MOST_INDICES = 5_000_000
_LEAST_SIZE = 16  # of batches that are never the same by chance
_NO_MORE_THAN_CHANCE = _statistics.normal_bound(5)

Sizes = np.ndarray  # shape=(batches,), of one run


def _indices(batch: Any) -> np.ndarray:
    """Who takes part: without padding."""
    if isinstance(batch, Batch):
        batch = (batch.indices, batch.is_padding_example)
    if isinstance(batch, tuple):
        indices, mask = map(np.asarray, batch)
        return indices[~mask]
    found = np.asarray(batch)
    if found.shape == (0,):
        return np.zeros(0, int)
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise TypeError(
            "Expected the loader to yield a dpadambc.Batch, indices and their mask, or"
            f" an array of indices with -1 for padding, got shape {found.shape},"
            f" {found.dtype}."
        )
    return found[found >= 0]


class _Drawn:
    """Who took part in each batch of several runs."""

    def __init__(self, loader: Callable[[int], Iterable[Any]], mechanism, num_examples):
        self.num_examples = num_examples
        expected = _expected_size(mechanism, num_examples)
        steps = int(_MOST_INDICES / (_RUNS * max(expected, 1)))
        steps = min(max(steps, 8), mechanism.iterations)
        take = lambda seed: itertools.islice(iter(loader(seed)), steps)
        whole = [[_indices(b) for b in take(seed)] for seed in range(_RUNS)]
        self.identical, self.compared = _identical(whole, num_examples)
        self.runs = [run[:_MOST_BATCHES] for run in whole]
        self.steps = min(map(len, self.runs))
        self.sizes = [np.array([len(b) for b in run]) for run in self.runs]

    @property
    def batches(self) -> Iterator[np.ndarray]:
        return itertools.chain(*self.runs)

    def matrices(self) -> list[Any]:
        """Of each run, who took part: shape (batches, examples)."""
        found = []
        for run, sizes in zip(self.runs, self.sizes, strict=True):
            starts = np.concatenate([[0], np.cumsum(sizes)])
            columns = np.concatenate(run) if run else np.zeros(0, int)
            ones = np.ones(len(columns), np.float32)
            shape = (len(run), self.num_examples)
            found.append(scipy.sparse.csr_matrix((ones, columns, starts), shape))
        return found


def _identical(runs: list[list[np.ndarray]], num_examples: int) -> tuple[int, int]:
    """How many batches are an earlier one again, where there are many sets."""
    is_one_of_many = lambda b: _LEAST_SIZE <= len(b) <= num_examples - _LEAST_SIZE
    batches = filter(is_one_of_many, itertools.chain(*runs))
    hashes = [hash(np.sort(batch).tobytes()) for batch in batches]
    return len(hashes) - len(set(hashes)), len(hashes)


def _expected_size(mechanism: Any, num_examples: int) -> float:
    if isinstance(mechanism, PoissonSampled | TruncatedPoissonGaussian):
        return mechanism.sampling_prob * num_examples
    if isinstance(mechanism, BandedGaussian):
        return mechanism.sampling_prob / mechanism.parts * num_examples
    if isinstance(mechanism, RandomAllocationGaussian):
        return _allocated(mechanism) * num_examples
    return getattr(mechanism, "batch_size", num_examples)


def _standard_errors(
    name: str,
    value: float,
    mean: float,
    variance: float,
    what: str,
    score: float | None = None,
) -> Finding:
    """A finding of a number that is near its mean, by chance."""
    error = math.sqrt(max(variance, 1e-300))
    shift = abs(value - mean) / error if value != mean else 0.0
    shift = shift if score is None else abs(score)
    found = _statistics.detected(5) * error
    return within(
        f"sampling {name}",
        shift,
        _NO_MORE_THAN_CHANCE,
        f"{what} is {value:.6g}, expected {mean:.6g}: {shift:.2g} standard errors.",
        f"fails if {what[0].lower()}{what[1:]} is off by {found:.3g}",
    )


def _duplicates(drawn: _Drawn) -> Finding:
    bad = sum(
        len(batch) - len(np.unique(batch)) + int(np.sum(batch >= drawn.num_examples))
        for batch in drawn.batches
    )
    sentence = f"{bad} indices are in a batch twice, or beyond the data."
    return within("sampling duplicates", bad, 0, sentence, "fails at one duplicate")


def _same_batches(drawn: _Drawn) -> Finding:
    sentence = (
        f"{drawn.identical} of {drawn.compared:,} batches are the same set as another."
    )
    return within(
        "sampling repetition", drawn.identical, 0, sentence, "fails at one such batch"
    )


def _rate(drawn: _Drawn, prob: float) -> Finding:
    count = sum(map(len, drawn.batches))
    trials = drawn.num_examples * sum(map(len, drawn.sizes))
    variance = prob * (1 - prob) / trials
    what = "The share of examples in a batch"
    expected = prob * trials
    score = _statistics.score_of_count(count, expected, expected * (1 - prob))
    return _standard_errors("rate", count / trials, prob, variance, what, score)


def _spread_of_sizes(drawn: _Drawn, prob: float, repeated: float = 1.0) -> Finding:
    sizes = np.concatenate(drawn.sizes)
    mean = drawn.num_examples * prob
    variance = mean * (1 - prob)
    dispersion = float(np.mean((sizes - mean) ** 2) / variance)
    # Of a binomial: its fourth moment is a little more than a normal's.
    spread = (2 + (1 - 6 * prob * (1 - prob)) / variance) / len(sizes) * repeated
    what = "The variance of batch sizes, relative to independent draws,"
    score = _statistics.score_of_dispersion(dispersion, spread)
    return _standard_errors("sizes", dispersion, 1.0, spread, what, score)


def _fixed_sizes(drawn: _Drawn, size: int) -> Finding:
    sizes = np.concatenate(drawn.sizes)
    wrong = int(np.sum(sizes != size))
    sentence = f"{wrong} of {len(sizes)} batches do not have {size} examples."
    return within("sampling sizes", wrong, 0, sentence, "fails at one such batch")


def _truncated_sizes(drawn: _Drawn, mechanism: TruncatedPoissonGaussian) -> Finding:
    sizes, cap = np.concatenate(drawn.sizes), mechanism.truncated_batch_size
    beyond = int(np.sum(sizes > cap))
    number = np.arange(drawn.num_examples + 1)
    chances = scipy.stats.binom.pmf(number, drawn.num_examples, mechanism.sampling_prob)
    cut = np.minimum(number, cap)
    mean = float(chances @ cut)
    second, fourth = (float(chances @ (cut - mean) ** k) for k in (2, 4))
    spread = float(np.mean((sizes - mean) ** 2))
    what = "The mean batch size", "The variance of batch sizes"
    error = (fourth - second**2) / len(sizes)
    score = _statistics.score_of_dispersion(spread / second, error / second**2)
    sentence = f"{beyond} batches have more than {cap} examples."
    parts = [
        within("sampling cap", beyond, 0, sentence, "fails at one such batch"),
        _standard_errors("sizes", sizes.mean(), mean, second / len(sizes), what[0]),
        _standard_errors("sizes", spread, second, error, what[1], score),
    ]
    return combined("sampling sizes", parts)


def _participation(drawn: _Drawn) -> Finding:
    """How unequal examples are in how often they take part."""
    counts = sum(np.asarray(m.sum(axis=0)).ravel() for m in drawn.matrices())
    probs = np.concatenate(drawn.sizes) / drawn.num_examples
    mean, variance = probs.sum(), float(np.sum(probs * (1 - probs)))
    if not variance:
        return not_tested("sampling participation", "all examples are in each batch.")
    dispersion = float(np.mean((counts - mean) ** 2) / variance)
    fourth = float(np.sum(probs * (1 - probs) * (1 - 6 * probs * (1 - probs))))
    spread = (2 + fourth / variance**2) / drawn.num_examples
    what = "The variance of how often examples take part, relative to chance,"
    score = _statistics.score_of_dispersion(dispersion, spread)
    return _standard_errors("participation", dispersion, 1.0, spread, what, score)


def _shared(
    drawn: _Drawn, pairs: Iterable[tuple[Any, ...]], name: str
) -> list[tuple[str, np.ndarray]]:
    """Overlaps of pairs of batches: their sum, and its mean and variance by chance."""
    n, found = drawn.num_examples, []
    for label, overlaps, one, two in pairs:
        mean = one * two / n
        variance = mean * (n - one) * (n - two) / (n * max(n - 1, 1))
        if np.sum(variance):
            sums = [float(np.sum(x)) for x in (overlaps, mean, variance)]
            found.append((f"{name} {label}", np.array(sums)))
    return found


def _most_often(drawn: _Drawn) -> Finding:
    """Whether one example takes part more often than any would by chance."""
    counts = np.sum([m.sum(axis=0) for m in drawn.matrices()], axis=0).ravel()
    sizes = np.concatenate(drawn.sizes)
    trials, prob = len(sizes), float(sizes.mean()) / drawn.num_examples
    chance = scipy.stats.binom.logsf(counts.max() - 1, trials, prob)
    surprise = -float(chance + math.log(drawn.num_examples)) / math.log(10)
    surprise = max(surprise, 0.0)
    bound = -math.log10(_statistics.FALSE_ALARM)
    rare = _statistics.FALSE_ALARM / drawn.num_examples
    least = float(scipy.stats.binom.isf(rare, trials, prob)) / max(trials * prob, 1e-9)
    return within(
        "sampling of one example",
        surprise,
        bound,
        f"The example that takes part most often does so in {int(counts.max())} of"
        f" {trials} batches: by chance once in 10 to the {surprise:.1f}.",
        f"fails if an example is drawn {least:.2g} times as often as others",
    )


def _independence(drawn: _Drawn) -> Finding:
    """Whether a batch says anything of another, of the same run or of another."""
    matrices, sizes = drawn.matrices(), drawn.sizes

    def of_lags():
        products = [np.asarray((m @ m.T).todense()) for m in matrices]
        for lag in range(1, drawn.steps):
            pairs = [
                (np.diagonal(p, lag), s[lag:], s[:-lag])
                for p, s in zip(products, sizes, strict=True)
            ]
            yield (lag, *(np.concatenate(x) for x in zip(*pairs, strict=True)))

    def of_runs():
        for (i, m), (j, k) in itertools.combinations(enumerate(matrices), 2):
            steps = drawn.steps
            overlaps = np.asarray(m[:steps].multiply(k[:steps]).sum(axis=1)).ravel()
            yield f"{i} and {j}", overlaps, sizes[i][:steps], sizes[j][:steps]

    lags = _shared(drawn, of_lags(), "steps at lag")
    sums = [*lags, *_shared(drawn, of_runs(), "runs")]
    if lags:  # each of them may be too little to see
        sums.append(("all steps", np.sum([x for _, x in lags], axis=0)))
    found = [(what, _statistics.score_of_count(*x)) for what, x in sums]
    if not found:
        return not_tested("sampling independence", "all batches are the whole data.")
    bound = _statistics.normal_bound(len(found))
    what, worst = max(found, key=lambda pair: abs(pair[1]))
    return within(
        "sampling independence",
        abs(worst),
        bound,
        f"Batches of {what} share {'more' if worst > 0 else 'fewer'} examples than by"
        f" chance: {abs(worst):.2g} standard errors ({len(found)} comparisons).",
        f"fails at {_statistics.detected(len(found)):.2g} standard errors",
    )


def _adjacent(drawn: _Drawn) -> Finding:
    """Whether examples that are next to each other are drawn together."""
    n, sizes = drawn.num_examples, np.concatenate(drawn.sizes).astype(float)
    together = sum(float(m[:, :-1].multiply(m[:, 1:]).sum()) for m in drawn.matrices())
    expected = sizes * (sizes - 1) / n
    rest = 1 - sizes / n
    mean, variance = float(expected.sum()), float(np.sum(expected * rest**2)) + 1.0
    what = "The number of adjacent examples in one batch"
    score = _statistics.score_of_count(together, mean, variance)
    return _standard_errors("neighbors", together, mean, variance, what, score)


def _once_an_epoch(drawn: _Drawn, mechanism: ShuffledGaussian) -> Finding:
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


def _allocated(mechanism: RandomAllocationGaussian) -> float:
    """The probability that an example is in a batch."""
    return mechanism.participations / mechanism.batches_per_epoch


def _in_turn(drawn: _Drawn, mechanism: BandedGaussian) -> Finding:
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


def _rate_of_turns(drawn: _Drawn, mechanism: BandedGaussian) -> Finding:
    """How many are drawn in whole cycles, in which each example has one turn."""
    parts, prob = mechanism.parts, mechanism.sampling_prob
    cycles = [len(sizes) // parts for sizes in drawn.sizes]
    count = sum(
        int(s[: n * parts].sum()) for s, n in zip(drawn.sizes, cycles, strict=True)
    )
    turns = sum(cycles) * drawn.num_examples
    return _standard_errors(
        "rate",
        count,
        turns * prob,
        turns * prob * (1 - prob),
        "The number of participations in whole cycles",
    )


def _independent_turns(drawn: _Drawn, mechanism: BandedGaussian) -> Finding:
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
    return _standard_errors(
        "independence",
        both,
        eligible * prob**2,
        variance,
        "The number of examples that are in two turns of their part in a row",
    )


def _parts_of_cycles(drawn: _Drawn, mechanism: BandedGaussian) -> list[Finding]:
    tests = (_in_turn, _rate_of_turns, _independent_turns)
    return [test(drawn, mechanism) for test in tests]


def _so_often_an_epoch(drawn: _Drawn, mechanism: RandomAllocationGaussian) -> Finding:
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


def _independent_epochs(drawn: _Drawn, mechanism: RandomAllocationGaussian) -> Finding:
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
    found = _shared(drawn, [(length, *columns)], "lag")
    if not found:
        return not_tested("sampling independence", "the batches are empty.")
    ((_, sums),) = found
    count, mean, variance = map(float, sums)
    return _standard_errors(
        "independence",
        count,
        mean,
        variance,
        "The number of examples in the same batch of two epochs in turn",
        _statistics.score_of_count(count, mean, variance),
    )


def _parts_of_allocation(
    drawn: _Drawn, mechanism: RandomAllocationGaussian
) -> list[Finding]:
    prob, length = _allocated(mechanism), mechanism.batches_per_epoch
    exact = [_so_often_an_epoch(drawn, mechanism)]
    if prob == 1:
        return exact
    # The sizes of an epoch have a fixed sum: one number less varies.
    sizes = _spread_of_sizes(drawn, prob, length / (length - 1))
    chances = (_adjacent(drawn), _same_batches(drawn))
    return [*exact, sizes, _independent_epochs(drawn, mechanism), *chances]


def sampling(
    loader: Callable[[int], Iterable[Any]],
    mechanism: Mechanism,
    *,
    num_examples: int,
) -> Finding:
    """Draws batches, and tests whether the mechanism accounts for such batches.

    For Poisson sampling: the rate, the distribution of sizes, how often each example
    takes part, the overlap of any two batches of a run and of two runs, whether
    adjacent examples come together, and duplicates. So shuffled epochs, batches of
    fixed size, a fixed order, or blocks of the data do not pass for it. For random
    allocation: how often each example takes part in an epoch, the distribution of
    sizes, the overlap of epochs, adjacent examples and duplicates. Each test has a
    false-alarm rate of 1e-6; four runs of at most 400 batches, or five million indices,
    are drawn.

    Args:
      loader: of a seed, returns an iterable of batches: `Batch`, indices and their
        padding mask, or an array of indices with -1 for padding. Seeds 0 to 3 are
        used; other seeds must give other batches.
      mechanism: which says how batches are drawn.
      num_examples: the size of the data set.

    Returns:
      A `Finding` with a part for each test. *Not tested* for a mechanism of another
      kind, or fewer than 8 batches.

    Raises:
      TypeError: if a batch is none.

    Example:
      >>> import numpy as np
      >>> import dpadambc
      >>> from dpadambc import audit
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.05,
      ...     iterations=200, normalize_by=50)
      >>> def loader(seed):
      ...     return mechanism.batches(np.random.default_rng(seed), num_examples=1_000)
      >>> audit.sampling(loader, mechanism, num_examples=1_000).passed
      True
      >>> def shuffled(seed):
      ...     rng = np.random.default_rng(seed)
      ...     for _ in range(10):
      ...         yield from rng.permutation(1_000).reshape(20, 50)
      >>> audit.sampling(shuffled, mechanism, num_examples=1_000).word
      'FAIL'
    """
    _check.is_mechanism(mechanism)
    validate.count(num_examples=num_examples, least=2)
    drawn = _Drawn(loader, mechanism, num_examples)
    if drawn.steps < 8 and getattr(mechanism, "sampling_prob", 0) != 1:
        return not_tested(_CHECK, f"a run has {drawn.steps} batches only.")
    if any((batch >= num_examples).any() for batch in drawn.batches):
        return combined(_CHECK, [_duplicates(drawn)])
    parts = _parts(drawn, mechanism)
    if parts is None:
        name = type(mechanism).__name__
        return not_tested(_CHECK, f"there is no test for batches of {name}.")
    return combined(_CHECK, [*parts, _duplicates(drawn)])


def _parts(drawn: _Drawn, mechanism: Mechanism) -> list[Finding] | None:
    """What is tested of the batches of a mechanism; None of one that is not known."""
    match mechanism:
        case ShuffledGaussian():
            return [_once_an_epoch(drawn, mechanism)]
        case RandomAllocationGaussian():
            return _parts_of_allocation(drawn, mechanism)
        case BandedGaussian():
            return _parts_of_cycles(drawn, mechanism)
        case PoissonSampled() if mechanism.sampling_prob == 1:
            return [_fixed_sizes(drawn, drawn.num_examples)]
        case PoissonSampled():
            prob = mechanism.sampling_prob
            sizes = [_rate(drawn, prob), _spread_of_sizes(drawn, prob)]
        case FixedSizeSampled():
            sizes = [_fixed_sizes(drawn, mechanism.batch_size)]
        case TruncatedPoissonGaussian():
            sizes = [_truncated_sizes(drawn, mechanism)]
        case _:
            return None
    tests = (_participation, _most_often, _independence, _adjacent, _same_batches)
    return [*sizes, *(test(drawn) for test in tests)]

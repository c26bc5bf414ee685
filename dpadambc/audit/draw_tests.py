"""What is tested of batches that are drawn independently: rate, sizes, overlaps."""

import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import scipy.stats

from dpadambc.audit import statistics as _statistics
from dpadambc.audit.batches import Drawn
from dpadambc.audit.finding import Finding, combined, not_tested, within
from dpadambc.mechanisms.truncated import TruncatedPoissonGaussian

_NO_MORE_THAN_CHANCE = _statistics.normal_bound(5)


def standard_errors(
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


def duplicates(drawn: Drawn) -> Finding:
    """Whether a batch has an example twice, or one that there is not."""
    bad = sum(
        len(batch) - len(np.unique(batch)) + int(np.sum(batch >= drawn.num_examples))
        for batch in drawn.batches
    )
    sentence = f"{bad} indices are in a batch twice, or beyond the data."
    return within("sampling duplicates", bad, 0, sentence, "fails at one duplicate")


def same_batches(drawn: Drawn) -> Finding:
    """Whether two batches are the same set, or of small ones some in a row."""
    sentence = (
        f"{drawn.identical} of {drawn.compared:,} batches are the same set as another."
    )
    power = f"fails at one such batch among the first {drawn.asked:,}"
    return within("sampling repetition", drawn.identical, 0, sentence, power)


def rate(drawn: Drawn, prob: float) -> Finding:
    """Whether examples are drawn with this probability."""
    count = sum(map(len, drawn.batches))
    trials = drawn.num_examples * sum(map(len, drawn.sizes))
    variance = prob * (1 - prob) / trials
    what = "The share of examples in a batch"
    expected = prob * trials
    score = _statistics.score_of_count(count, expected, expected * (1 - prob))
    return standard_errors("rate", count / trials, prob, variance, what, score)


def spread_of_sizes(drawn: Drawn, prob: float, repeated: float = 1.0) -> Finding:
    """Whether sizes vary as those of independent draws.

    `repeated` is the variance of a mean of them, relative to that of independent sizes.
    """
    sizes = np.concatenate(drawn.sizes)
    mean = drawn.num_examples * prob
    variance = mean * (1 - prob)
    dispersion = float(np.mean((sizes - mean) ** 2) / variance)
    # Of a binomial: its fourth moment is a little more than a normal's.
    spread = (2 + (1 - 6 * prob * (1 - prob)) / variance) / len(sizes) * repeated
    what = "The variance of batch sizes, relative to independent draws,"
    score = _statistics.score_of_dispersion(dispersion, spread)
    return standard_errors("sizes", dispersion, 1.0, spread, what, score)


def fixed_sizes(drawn: Drawn, size: int) -> Finding:
    """Whether all batches have this size."""
    sizes = np.concatenate(drawn.sizes)
    wrong = int(np.sum(sizes != size))
    sentence = f"{wrong} of {len(sizes)} batches do not have {size} examples."
    return within("sampling sizes", wrong, 0, sentence, "fails at one such batch")


def truncated_sizes(drawn: Drawn, mechanism: TruncatedPoissonGaussian) -> Finding:
    """Whether sizes are those of Poisson batches that are cut off."""
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
        standard_errors("sizes", sizes.mean(), mean, second / len(sizes), what[0]),
        standard_errors("sizes", spread, second, error, what[1], score),
    ]
    return combined("sampling sizes", parts)


def participation(drawn: Drawn) -> Finding:
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
    return standard_errors("participation", dispersion, 1.0, spread, what, score)


def shared(
    drawn: Drawn, pairs: Iterable[tuple[Any, ...]], name: str
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


def most_often(drawn: Drawn) -> Finding:
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


def independence(drawn: Drawn) -> Finding:
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

    lags = shared(drawn, of_lags(), "steps at lag")
    sums = [*lags, *shared(drawn, of_runs(), "runs")]
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


def adjacent(drawn: Drawn) -> Finding:
    """Whether examples that are next to each other are drawn together."""
    n, sizes = drawn.num_examples, np.concatenate(drawn.sizes).astype(float)
    together = sum(float(m[:, :-1].multiply(m[:, 1:]).sum()) for m in drawn.matrices())
    expected = sizes * (sizes - 1) / n
    rest = 1 - sizes / n
    mean, variance = float(expected.sum()), float(np.sum(expected * rest**2)) + 1.0
    what = "The number of adjacent examples in one batch"
    score = _statistics.score_of_count(together, mean, variance)
    return standard_errors("neighbors", together, mean, variance, what, score)


def of_any(drawn: Drawn) -> list[Finding]:
    """What holds of independent draws, whatever the sizes of their batches."""
    tests = (participation, most_often, independence, adjacent, same_batches)
    return [test(drawn) for test in tests]


def of_poisson(drawn: Drawn, prob: float) -> list[Finding]:
    """Each example is in each batch with this probability."""
    return [rate(drawn, prob), spread_of_sizes(drawn, prob), *of_any(drawn)]

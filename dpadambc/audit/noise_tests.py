"""Tests of the noise at the crossings, which make up the noise check."""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import scipy.stats

from dpadambc.audit import draws, statistics
from dpadambc.audit.draws import Drawn, Measured, Noise, Response
from dpadambc.audit.finding import Finding, combined, not_tested, within
from dpadambc.audit.flow import Label
from dpadambc.audit.later_steps import later_steps, repetition
from dpadambc.audit.steps import Followed
from dpadambc.core.mechanism import Mechanism

_ROUNDING = 1e-3
# Float32 noise has 23 to 26 random bits.
_LEAST_BITS = 28
UNFOLLOWED = (
    "a part cannot be followed: a callback to the host makes it, or its noise is"
    " concatenated, scattered, or scaled by a private value."
)


def noise_finding(found: Measured) -> Finding:
    """Combines all tests to one finding."""
    followed, noise, moved = found.followed, found.noise, found.moved
    if not followed.crossings:
        if followed.paths(Label.OPAQUE):
            return not_tested("noise", UNFOLLOWED)
        if not followed.paths(Label.DATA):
            return not_tested("noise", "nothing that is kept depends on the data.")
        return combined("noise", [_coverage(followed, {}, [])])
    parts = [
        _level(found.mechanism, noise, moved),
        _coverage(followed, noise, moved),
        _distribution(noise),
        combined("noise independence", [_correlation(noise), _repetition(noise)]),
        _bits(noise),
        _coordinates(noise),
        later_steps(found),
    ]
    return combined("noise", parts)


def _coverage(followed: Followed, noise: Noise, moved: list[Response]) -> Finding:
    """Tests that every coordinate that depends on the data has noise."""
    check = "noise coverage"
    fails_if = "fails if a value or a coordinate that follows the data has no noise"
    bare = followed.paths(Label.DATA)
    if bare:
        sentence = (
            f"{bare[0]} is made of the data without noise ({len(bare)} of"
            f" {len(followed.labels)} arrays that are kept)."
        )
        return within(check, len(bare), 0, sentence, fails_if)
    if followed.paths(Label.OPAQUE):
        return not_tested(check, UNFOLLOWED)
    silent = 0
    for path, drawn in noise.items():
        has_noise = np.any(drawn.values != 0, axis=(0, 1))
        follows = np.any([m[path] != 0 for m in moved], axis=0)
        silent += int(np.sum(follows & ~has_noise))
    sentence = f"{silent} coordinates that follow the data get no noise."
    return within(check, silent, 0, sentence, fails_if)


def _level(mechanism: Mechanism, noise: Noise, moved: list[Response]) -> Finding:
    """Compares the effective noise multiplier with the mechanism's.

    Each change is the largest by one example. It is measured in units of the noise of
    each step, and of all steps together if their level is one number.
    """
    spans = [slice(step, step + 1) for step in range(draws.ITERATIONS)]
    if not callable(mechanism.noise_multiplier):
        spans.append(slice(draws.ITERATIONS))
    count = len(spans) * len(moved)
    trials = []  # excess over the claim, allowance for chance, power
    for span, move in itertools.product(spans, moved):
        squares, spread = 0.0, 0.0
        for path, drawn in noise.items():
            values = drawn.of_steps(span)
            if not values.size or not np.any(move[path]):
                continue
            variance = float(np.mean(values**2))
            square = float(move[path] @ move[path]) / variance if variance else math.inf
            squares += square
            spread += square**2 / (2 * values.size)
        if squares:
            spread = math.sqrt(spread) / squares if math.isfinite(squares) else 0.0
            excess = math.sqrt(squares) * draws.multiplier(mechanism, span.start or 0)
            allowance = _ROUNDING + statistics.normal_bound(count) * spread
            power = _ROUNDING + statistics.detected(count) * spread
            trials.append((excess, allowance, power))
    if not trials:
        return not_tested("noise level", "no data reached the noise.")
    severity = lambda trial: (trial[0] - 1) / trial[1]
    worst = max(trials, key=severity)
    if severity(worst) <= 1:
        worst = min(trials, key=lambda trial: trial[1])
    excess, allowance, power = worst
    least = max(trial[2] for trial in trials)
    sentence = f"The noise is {1 / excess:.4g} of the claimed noise multiplier."
    fails_if = f"fails if noise is {power:.2g} too small, or {least:.2g} in one array"
    return within("noise level", excess, 1 + allowance, sentence, fails_if)


def _distribution(noise: Noise) -> Finding:
    """Tests that the noise is Gaussian."""
    values = np.concatenate([x.normalized[x.happened].ravel() for x in noise.values()])
    figure, bound = statistics.kolmogorov_smirnov(values)
    size = f"{len(values):,}"
    sentence = f"Of {size} draws, the distance from a Gaussian is {figure:.2g}."
    fails_if = f"fails if the distribution is {2 * bound:.2g} from a Gaussian"
    return within("noise distribution", figure, bound, sentence, fails_if)


def _bits(noise: Noise) -> Finding:
    """Tests that the noise has enough values to leave no holes.

    Where float32 noise has holes, the sum plus noise has none: a release in a hole
    reveals that the sum is not 0. On a public grid, with noise of all bits, the values
    of the noised sum are the same for every sum.

    It compares the numbers of a step over all leaves: another leaf may have the same
    numbers in another order.
    """
    found = [_random_bits(drawn.values[drawn.happened]) for drawn in noise.values()]
    seen = [bits for bits, is_least in found if not is_least]
    bits = min(seen) if seen else max(bits for bits, _ in found)
    cells = max(map(_cells_per_level, noise.values()))
    happened = np.all([drawn.happened for drawn in noise.values()], axis=0)
    rows = [drawn.values[happened][:500, :20_000] for drawn in noise.values()]
    rows = np.sort(np.abs(np.concatenate(rows, axis=1)), axis=1)
    share = float(np.mean(rows[:, 1:] == rows[:, :-1])) if rows.shape[1] > 1 else 0.0
    where = f"a grid of 1/{cells:.0f} of the level" if cells < 2**16 else "no grid"
    sentence = (
        f"The noise has {'' if seen else 'at least '}{bits:.0f} random bits, and the"
        f" noised sum is on {where}; {share:.2g} of the numbers of a step repeat."
    )
    fails_if = (
        f"fails below {_LEAST_BITS} random bits, of which float32 noise has less: then"
        " the values that are possible depend on the sum; or if 0.5 % of the numbers of"
        " a step repeat"
    )
    figure = max(_LEAST_BITS / bits if seen else 0.0, share / 0.005)
    return within("noise bits", figure, 1.0, sentence, fails_if)


def _random_bits(values: np.ndarray) -> tuple[float, bool]:
    """Estimates the random bits of draws from the number of equal pairs.

    Of n draws of one of 2^b values, about :math:`n^2 / 2^{b+1}` pairs are equal.

    Returns:
      The bits, and whether there may be more: fewer than ten pairs are equal.
    """
    _, counts = np.unique(values, return_counts=True)
    pairs = float(np.sum(counts * (counts - 1.0))) / 2
    return math.log2(max(values.size, 2) ** 2 / (2 * max(pairs, 10.0))), pairs < 10


def _cells_per_level(drawn: Drawn) -> float:
    """Returns the noise level in units of the coarsest grid of powers of two."""
    most = 1.0
    for step in range(drawn.values.shape[1]):
        span = slice(step, step + 1)
        totals = drawn.totals[:, span][drawn.happened[:, span]]
        mantissa, exponent = np.frexp(totals[totals != 0])
        if exponent.size:
            integer = np.ldexp(mantissa, 53).astype(np.int64)
            lowest = np.log2((integer & -integer).astype(float)) + exponent - 53
            level = math.sqrt(float(np.mean(drawn.of_steps(span) ** 2)))
            most = max(most, level / 2.0 ** float(lowest.min()))
    return most


def _coordinates(noise: Noise) -> Finding:
    """Tests that each coordinate has the same noise as the others of its leaf."""
    least, count, fewest = 0.0, 0, math.inf
    for drawn in noise.values():
        rows = drawn.normalized[drawn.happened]
        if not rows.size:
            continue
        chances = scipy.stats.chi2.logcdf(np.sum(rows**2, axis=0), df=len(rows))
        least = min(least, float(chances.min()))
        count, fewest = count + rows.shape[1], min(fewest, len(rows))
    surprise, chance = -least / math.log(10), statistics.FALSE_ALARM / max(count, 1)
    weakest = math.sqrt(scipy.stats.chi2.ppf(chance, fewest) / fewest) if count else 0
    sentence = (
        f"The weakest of {count:,} coordinates has as little noise as by chance once"
        f" in 10 to the {min(surprise, 999):.1f}."
    )
    fails_if = f"fails if a coordinate has {weakest:.2g} of the noise of its array"
    bound = -math.log10(chance)
    return within("noise coordinates", surprise, bound, sentence, fails_if)


def _pairs(noise: Noise) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yields arrays that must be independent of each other."""
    rows = [drawn.normalized for drawn in noise.values()]
    starts = next(iter(noise.values())).start if noise else []
    for row, start in itertools.islice(itertools.product(rows, starts), 500):
        size = min(row.shape[-1], start.shape[-1])
        if size and np.any(start) and np.isfinite(start).all():
            yield "the noise and the first state", row[:, 0, :size], start[:, :size]
    for one, two in itertools.islice(itertools.combinations(rows, 2), 500):
        size = min(one.shape[-1], two.shape[-1], 20_000)
        yield "leaves", one[..., :size], two[..., :size]
    for row in rows:
        for lag in range(1, row.shape[1]):
            yield "steps", row[:, lag:], row[:, :-lag]
        yield "runs", row[1:], row[:-1]
        yield "runs", row[1:], np.broadcast_to(row[:1], row[1:].shape)
        for lag in {1, 2, row.shape[-1] // 2} - {0}:
            if lag < row.shape[-1]:
                yield "coordinates", row[..., lag:], row[..., :-lag]


def _correlation(noise: Noise) -> Finding:
    found = [
        (statistics.correlation(one.ravel(), two.ravel()), one.size, pair)
        for pair, one, two in _pairs(noise)
    ]
    count = len(found)
    power = statistics.detected(count) / math.sqrt(min(size for _, size, _ in found))
    worst, size, pair = max(found, key=lambda x: abs(x[0]))
    sentence = (
        f"The largest correlation of {count} pairs, between {pair}, is"
        f" {worst / math.sqrt(size):.2g}, or {abs(worst):.2g} standard errors."
    )
    fails_if = f"fails at a correlation of {power:.2g} in the shortest pair"
    bound = statistics.normal_bound(count)
    return within("noise correlation", abs(worst), bound, sentence, fails_if)


def _repetition(noise: Noise) -> Finding:
    rows = (row for drawn in noise.values() for row in drawn.values[drawn.happened])
    most, kept = 500_000, []
    for row in rows:
        kept.append(row[:most])
        most -= len(kept[-1])
        if most <= 0:
            break
    return repetition("noise repetition", kept, "")

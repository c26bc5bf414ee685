"""What is tested of the noise: level, coverage, distribution, independence, dtype."""

import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np
import scipy.stats

from dpadambc.audit import draws as _drawn
from dpadambc.audit import flow as _flow
from dpadambc.audit import statistics as _statistics
from dpadambc.audit import steps as _steps
from dpadambc.audit.finding import Finding, combined, not_tested, within
from dpadambc.core.mechanism import Mechanism

_ROUNDING = 1e-3
UNFOLLOWED = (
    "a part cannot be followed: a callback to the host makes it, or its noise is"
    " concatenated, scattered, or scaled by what is private."
)


def coverage(
    followed: _steps.Followed, noise: _drawn.Noise, moved: list[_drawn.Response]
) -> Finding:
    """Whether all that is kept of the data has noise, in every coordinate."""
    check = "noise coverage"
    fails_if = "fails if a value or a coordinate that follows the data has no noise"
    bare = followed.of(_flow.Label.DATA)
    if bare:
        sentence = (
            f"{bare[0]} is made of the data without noise ({len(bare)} of"
            f" {len(followed.labels)} arrays that are kept)."
        )
        return within(check, len(bare), 0, sentence, fails_if)
    if followed.of(_flow.Label.OPAQUE):
        return not_tested(check, UNFOLLOWED)
    silent = 0
    for path, drawn in noise.items():
        has_noise = np.any(drawn.values != 0, axis=(0, 1))
        follows = np.any([m[path] != 0 for m in moved], axis=0)
        silent += int(np.sum(follows & ~has_noise))
    sentence = f"{silent} coordinates that follow the data get no noise."
    return within(check, silent, 0, sentence, fails_if)


@dataclasses.dataclass(frozen=True)
class _Trial:
    """How far some data move what arrives, in units of the noise there."""

    excess: float  # over what the mechanism says
    allowance: float  # what chance may add to it
    power: float

    @property
    def severity(self) -> float:
        return (self.excess - 1) / self.allowance


def _spans(mechanism: Mechanism) -> list[tuple[float, slice]]:
    """The noise multiplier of each step; of all steps together where it is one."""
    spans = [slice(step, step + 1) for step in range(_drawn.ITERATIONS)]
    if not callable(mechanism.noise_multiplier):
        spans.append(slice(_drawn.ITERATIONS))
    return [(_drawn.multiplier(mechanism, span.start or 0), span) for span in spans]


def _trials(
    mechanism: Mechanism, noise: _drawn.Noise, moved: list[_drawn.Response]
) -> Iterator[_Trial]:
    """Each movement by as much as one example may, at each step and over all."""
    spans = _spans(mechanism)
    count = len(spans) * len(moved)
    for (claimed, span), move in itertools.product(spans, moved):
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
            yield _Trial(
                excess=math.sqrt(squares) * claimed,
                allowance=_ROUNDING + _statistics.normal_bound(count) * spread,
                power=_ROUNDING + _statistics.detected(count) * spread,
            )


def level(
    mechanism: Mechanism, noise: _drawn.Noise, moved: list[_drawn.Response]
) -> Finding:
    """The noise multiplier that the noise amounts to, against the mechanism's.

    Args:
      mechanism: that is claimed.
      noise: at the crossings.
      moved: how far data that differ by one example move what arrives there.
    """
    trials = list(_trials(mechanism, noise, moved))
    if not trials:
        return not_tested("noise level", "no data reached the noise.")
    worst = max(trials, key=lambda trial: trial.severity)
    if worst.severity <= 1:
        worst = min(trials, key=lambda trial: trial.allowance)
    least = max(trials, key=lambda trial: trial.power)
    return within(
        "noise level",
        worst.excess,
        1 + worst.allowance,
        f"The noise amounts to {1 / worst.excess:.4g} of the mechanism's noise"
        " multiplier.",
        f"fails if the noise is too small by {worst.power:.2g} in all parameters, by"
        f" {least.power:.2g} in the smallest one",
    )


def of_distribution(noise: _drawn.Noise) -> Finding:
    """Whether it is Gaussian."""
    values = np.concatenate(
        [drawn.normalized[drawn.happened].ravel() for drawn in noise.values()]
    )
    figure, bound = _statistics.kolmogorov_smirnov(values)
    return within(
        "noise distribution",
        figure,
        bound,
        f"The noise is {figure:.2g} from a Gaussian (Kolmogorov-Smirnov,"
        f" {len(values):,} draws).",
        f"fails if its distribution function is {2 * bound:.2g} from a Gaussian's",
    )


def of_resolution(noise: _drawn.Noise) -> Finding:
    """Whether it is drawn, and added, in at least float32, and once for each number.

    The numbers of a step are compared over all leaves: those of another leaf may be the
    same in another order.
    """
    bits = min(drawn.bits for drawn in noise.values())
    happened = np.all([drawn.happened for drawn in noise.values()], axis=0)
    rows = [drawn.values[happened][:500, :20_000] for drawn in noise.values()]
    rows = np.sort(np.abs(np.concatenate(rows, axis=1)), axis=1)
    share = float(np.mean(rows[:, 1:] == rows[:, :-1])) if rows.shape[1] > 1 else 0.0
    return within(
        "noise dtype",
        max(32 / bits, share / 0.005),
        1.0,
        f"Noise is drawn and added in {bits} bits; {share:.2g} of the numbers of a step"
        " repeat.",
        "fails below 32 bits, or if 0.5 % of the numbers of a step repeat",
    )


def of_coordinates(noise: _drawn.Noise) -> Finding:
    """Whether each coordinate has the noise that the others of its leaf have."""
    least, count, fewest = 0.0, 0, math.inf
    for drawn in noise.values():
        rows = drawn.normalized[drawn.happened]
        if not rows.size:
            continue
        chances = scipy.stats.chi2.logcdf(np.sum(rows**2, axis=0), df=len(rows))
        least = min(least, float(chances.min()))
        count, fewest = count + rows.shape[1], min(fewest, len(rows))
    surprise = -least / math.log(10)
    bound = math.log10(max(count, 1) / _statistics.FALSE_ALARM)
    chance = _statistics.FALSE_ALARM / max(count, 1)
    weakest = math.sqrt(scipy.stats.chi2.ppf(chance, fewest) / fewest) if count else 0
    return within(
        "noise coordinates",
        surprise,
        bound,
        f"The weakest of {count:,} coordinates has as little noise as by chance once"
        f" in 10 to the {min(surprise, 999):.1f}.",
        f"fails if a coordinate has {weakest:.2g} of the noise of its parameter",
    )


def _pairs(noise: _drawn.Noise) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Vectors that must have nothing to do with each other."""
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


def of_independence(noise: _drawn.Noise) -> Finding:
    """Whether leaves, steps, runs, coordinates and devices have noise of their own."""
    return combined("noise independence", [_correlated(noise), _repeated(noise)])


def _correlated(noise: _drawn.Noise) -> Finding:
    found = [
        (_statistics.correlation(one.ravel(), two.ravel()), one.size, what)
        for what, one, two in _pairs(noise)
    ]
    bound = _statistics.normal_bound(len(found))
    power = _statistics.detected(len(found)) / math.sqrt(min(n for _, n, _ in found))
    worst, size, what = max(found, key=lambda x: abs(x[0]))
    return within(
        "noise correlation",
        abs(worst),
        bound,
        f"The largest correlation, between {what}, is {worst / math.sqrt(size):.2g}, or"
        f" {abs(worst):.2g} standard errors ({len(found)} pairs).",
        f"fails at a correlation of {power:.2g} in the shortest pair",
    )


def _repeated(noise: _drawn.Noise) -> Finding:
    cells = itertools.chain(*(drawn.values[drawn.happened] for drawn in noise.values()))
    most, kept = 500_000, []
    for cell in cells:
        kept.append(cell[:most])
        most -= len(kept[-1])
        if most <= 0:
            break
    repeated, runs = _statistics.repetitions(kept)
    return within(
        "noise repetition",
        repeated,
        2,
        f"{repeated} of {runs:,} runs of six numbers occur again.",
        "fails if three runs of six numbers occur again, at any scale",
    )


def all_tests(
    mechanism: Mechanism,
    followed: _steps.Followed,
    noise: _drawn.Noise,
    moved: list[_drawn.Response],
) -> list[Finding]:
    """One finding for each."""
    return [
        level(mechanism, noise, moved),
        coverage(followed, noise, moved),
        of_distribution(noise),
        of_independence(noise),
        of_resolution(noise),
        of_coordinates(noise),
    ]

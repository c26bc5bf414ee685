"""Tests of random numbers, each with its false-alarm rate and its power."""

import math
from collections.abc import Sequence

import numpy as np
import scipy.special
import scipy.stats

FALSE_ALARM = 1e-6  # the rate of each test, over all its comparisons
MISS = 1e-3  # the rate for a defect of the stated size
_QUANTILES = 1 << 18
_WINDOW = 6


def normal_bound(comparisons: int = 1) -> float:
    """Returns the bound that standard normal numbers keep, except for a false alarm."""
    return float(scipy.stats.norm.isf(FALSE_ALARM / (2 * comparisons)))


def detected(comparisons: int = 1) -> float:
    """Returns the shift, in standard errors, that is found except for a miss."""
    return normal_bound(comparisons) + float(scipy.stats.norm.isf(MISS))


def spread_of_stddev(count: int) -> float:
    """Returns the relative standard error of a standard deviation of `count` draws."""
    return 1 / math.sqrt(2 * max(count, 1))


def kolmogorov_smirnov(normalized: np.ndarray) -> tuple[float, float]:
    """Computes the distance to the standard normal distribution, and its bound.

    It counts the numbers between a fourth of a million quantiles. That is faster than
    sorting millions of them, and shortens the distance by at most 4e-6.
    """
    bound = scipy.stats.kstwobign.isf(FALSE_ALARM) / math.sqrt(len(normalized))
    ranks = scipy.special.ndtr(normalized)
    if np.isnan(ranks).any():
        return math.nan, float(bound)
    bins = np.minimum(ranks * _QUANTILES, _QUANTILES - 1).astype(np.int32)
    shares = np.cumsum(np.bincount(bins, minlength=_QUANTILES)) / len(normalized)
    quantiles = np.arange(1, _QUANTILES + 1) / _QUANTILES
    return float(np.abs(shares - quantiles).max()), float(bound)


def correlation(one: np.ndarray, two: np.ndarray) -> float:
    """Computes the correlation of two vectors in its standard errors."""
    size = math.sqrt(float(one @ one) * float(two @ two))
    return float(one @ two) / size * math.sqrt(len(one)) if size else 0.0


def _score(upper: float, lower: float, fallback: float) -> float:
    """Returns the signed normal number that has these tails."""
    tail = min(upper, lower)
    size = float(scipy.stats.norm.isf(min(tail, 0.5))) if tail > 0 else abs(fallback)
    return size if upper < lower else -size


def score_of_count(count: float, mean: float, variance: float) -> float:
    """Computes the surprise of a count, in standard errors.

    Above its mean the count is taken as Poisson, so that a few are no surprise even for
    a tiny mean. Below it the count is taken as normal, of this variance.
    """
    shift = (count - mean) / math.sqrt(max(variance, 1e-300)) if count != mean else 0.0
    if count <= mean:
        return shift
    return _score(float(scipy.stats.poisson.sf(count - 1, mean)), 1.0, shift)


def score_of_dispersion(ratio: float, variance: float) -> float:
    """Computes the surprise of a variance that should be 1, as of a gamma number."""
    gamma = scipy.stats.gamma(1 / variance, scale=variance)
    shift = (ratio - 1) / math.sqrt(variance)
    return _score(float(gamma.sf(ratio)), float(gamma.cdf(ratio)), shift)


def repetitions(sequences: Sequence[np.ndarray]) -> tuple[int, int]:
    """Counts the runs of six numbers that occur again, at any scale, and all runs.

    Numbers are compared to 1e-3 of the norm of their run. In half a million independent
    draws, 1e-4 runs occur again by chance.
    """
    view = np.lib.stride_tricks.sliding_window_view
    windows = [view(x, _WINDOW) for x in sequences if len(x) >= _WINDOW]
    if not windows:
        return 0, 0
    rows = np.concatenate(windows)
    norms = np.linalg.norm(rows, axis=1, keepdims=True) * np.sign(rows[:, :1])
    rounded = np.round(1000 * rows / np.where(norms == 0, 1, norms)).astype(np.int16)
    words = np.ascontiguousarray(rounded).view([("", np.int16)] * _WINDOW).ravel()
    return len(words) - len(np.unique(words)), len(words)

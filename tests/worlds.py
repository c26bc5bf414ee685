"""Small worlds whose outputs are computed: all samples of a few terms, with noise."""

import itertools

import hypothesis.strategies as st
import numpy as np
import scipy.stats

GRID = np.linspace(-30, 30, 3_001)
# What the sum over the grid may be off by, where two densities cross between points of
# it: it falls with the square of the spacing.
QUADRATURE = 1e-5
EPSILONS = np.linspace(-3, 3, 61)


def poisson(terms, sampling_prob):
    """All samples of terms, with their probabilities."""
    for taken in itertools.product([0, 1], repeat=len(terms)):
        share = sampling_prob ** sum(taken)
        yield np.dot(taken, terms), share * (1 - sampling_prob) ** taken.count(0)


def truncated(terms, sampling_prob, batch_size):
    """All Poisson samples; of one that is too large, all of its subsets."""
    for taken in itertools.product([False, True], repeat=len(terms)):
        sampled = [term for term, is_in in zip(terms, taken, strict=True) if is_in]
        share = sampling_prob ** len(sampled)
        share *= (1 - sampling_prob) ** (len(terms) - len(sampled))
        for total, part in without_replacement(sampled, min(len(sampled), batch_size)):
            yield total, share * part


def without_replacement(terms, batch_size):
    """All subsets of one size."""
    subsets = list(itertools.combinations(terms, batch_size))
    for subset in subsets:
        yield sum(subset), 1 / len(subsets)


def with_replacement(terms, batch_size):
    """All sequences of one length."""
    for sequence in itertools.product(terms, repeat=batch_size):
        yield sum(sequence), len(terms) ** -batch_size


def density(outcomes, stddev):
    """That of the noisy sum, on the grid."""
    means, probabilities = np.array(list(outcomes)).T
    means, place = np.unique(means, return_inverse=True)  # many samples have one sum
    weights = np.bincount(place, probabilities)
    return scipy.stats.norm.pdf(GRID[:, None], means, stddev) @ weights


def hockey_sticks(p, q, epsilons, spacing=GRID[1] - GRID[0]):
    """The divergence at each epsilon, of densities on a grid of any dimension."""
    excess = np.maximum(p - np.exp(epsilons)[(...,) + (None,) * p.ndim] * q, 0)
    return excess.reshape(len(epsilons), -1).sum(1) * spacing**p.ndim


def clipped(number, low=-1.0):
    """Clipped terms of one dimension, often at the bound."""
    bounds = st.sampled_from([low, 1.0])
    value = st.one_of(bounds, bounds, st.floats(low, 1.0))
    return st.lists(value, min_size=number, max_size=number)

"""Batches of random size, padded to one that hardly any exceeds."""

import numpy as np
import scipy.stats

from dpadambc.core.sampling import Batch

# Batches have one static size. On the device, the chance that a batch does not fit is a
# failure probability on top of delta, so it must be negligible; on the host, that of a
# second shape.
OVERFLOW_PROB = 1e-15


def padded(indices: np.ndarray, size: int, num_examples: int) -> Batch:
    """A batch on the host."""
    found = np.full(size, -1, np.int32)
    found[: len(indices)] = indices
    return Batch(found, np.arange(size) >= len(indices), num_examples)


def size_exceeded_with(prob: float, num_examples: int, sampling_prob: float) -> int:
    """The least size that a binomial batch exceeds with at most this probability."""
    return int(scipy.stats.binom.isf(prob, num_examples, sampling_prob))

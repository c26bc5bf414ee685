"""Who took part in the batches of several runs."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import scipy.sparse

from dpadambc.contrib.banded import BandedGaussian
from dpadambc.core.mechanism import PoissonGaussian
from dpadambc.core.sampling import Batch
from dpadambc.mechanisms.fixed_size import FixedSizeGaussian
from dpadambc.mechanisms.random_allocation import RandomAllocationGaussian
from dpadambc.mechanisms.truncated import TruncatedPoissonGaussian

_RUNS = 4
_MOST_BATCHES = 400
_MOST_INDICES = 5_000_000
_LEAST_SIZE = 16  # of what is never the same by chance


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


class Drawn:
    """Who took part in each batch of several runs."""

    def __init__(self, loader: Callable[[int], Iterable[Any]], mechanism, num_examples):
        self.num_examples = num_examples
        expected = _expected_size(mechanism, num_examples)
        steps = int(_MOST_INDICES / (_RUNS * max(expected, 1)))
        self.asked = min(max(steps, 8), mechanism.iterations)
        # One more, for a loader that goes on after the steps that epsilon is for.
        most = self.asked + (self.asked == mechanism.iterations)
        take = lambda seed: itertools.islice(iter(loader(seed)), most)
        whole = [[_indices(b) for b in take(seed)] for seed in range(_RUNS)]
        self.lengths = [len(run) for run in whole]
        whole = [run[: self.asked] for run in whole]
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
    """How many batches are an earlier one again, where there are many sets.

    Of small ones as many in a row as together are one of many.
    """
    # How many examples are hardly in two of them by chance, or hardly left out of two.
    told = [min(len(b), num_examples - len(b)) for run in runs for b in run]
    in_a_row = math.ceil(_LEAST_SIZE / max(np.mean(told or [0]), 0.1))
    hashes = []
    for run in runs:
        each = [(hash(np.sort(b).tobytes()), len(b)) for b in run]
        for first in range(len(run) - in_a_row + 1):
            names, sizes = zip(*each[first : first + in_a_row], strict=True)
            if sum(min(size, num_examples - size) for size in sizes) >= _LEAST_SIZE:
                hashes.append(hash(names))
    return len(hashes) - len(set(hashes)), len(hashes)


def is_poisson(mechanism: Any) -> bool:
    """Whether batches are drawn by Poisson sampling, of examples or of nodes."""
    of_nodes = hasattr(mechanism, "max_terms") and hasattr(mechanism, "sampling_prob")
    return of_nodes or isinstance(mechanism, PoissonGaussian)


def is_of_fixed_size(mechanism: Any) -> bool:
    """Whether batches are uniform subsets of one size, of examples or of nodes."""
    of_nodes = hasattr(mechanism, "max_terms") and hasattr(mechanism, "batch_size")
    return of_nodes or isinstance(mechanism, FixedSizeGaussian)


def _expected_size(mechanism: Any, num_examples: int) -> float:
    if is_poisson(mechanism) or isinstance(mechanism, TruncatedPoissonGaussian):
        return mechanism.sampling_prob * num_examples
    if isinstance(mechanism, BandedGaussian):
        return mechanism.sampling_prob / mechanism.parts * num_examples
    if isinstance(mechanism, RandomAllocationGaussian):
        return allocated(mechanism) * num_examples
    return getattr(mechanism, "batch_size", num_examples)


def allocated(mechanism: RandomAllocationGaussian) -> float:
    """The probability that an example is in a batch."""
    return mechanism.participations / mechanism.batches_per_epoch

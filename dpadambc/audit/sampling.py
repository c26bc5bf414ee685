"""Compares the batches of a loop with those that its mechanism accounts for."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from dpadambc.audit import batch_tests
from dpadambc.audit.batch_tests import Batches
from dpadambc.audit.finding import Finding, combined, not_tested
from dpadambc.contrib.banded import BandedGaussian
from dpadambc.core import validate
from dpadambc.core.mechanism import Mechanism, PoissonGaussian
from dpadambc.core.sampling import Batch
from dpadambc.mechanisms.checks import check_mechanism
from dpadambc.mechanisms.fixed_size import FixedSizeGaussian
from dpadambc.mechanisms.random_allocation import RandomAllocationGaussian
from dpadambc.mechanisms.shuffled import ShuffledGaussian
from dpadambc.mechanisms.truncated import TruncatedPoissonGaussian

_CHECK = "sampling"
_RUNS = 4
_MOST_INDICES = 5_000_000


def sampling(
    loader: Callable[[int], Iterable[Any]], mechanism: Mechanism, *, num_examples: int
) -> Finding:
    """Draws batches, and tests whether the mechanism accounts for such batches.

    For Poisson sampling it tests the rate, the distribution of sizes, the
    participations of each example, the overlap of any two batches of a run and of two
    runs, whether adjacent examples come together, and duplicates. So shuffled epochs,
    batches of fixed size, a fixed order, or blocks of the data do not pass. For random
    allocation it tests the participations of each example in an epoch, the distribution
    of sizes, the overlap of epochs, adjacent examples and duplicates. Each test has a
    false-alarm rate of 1e-6; it draws four runs of at most 400 batches, or five million
    indices.

    Args:
      loader: a function of a seed that returns an iterable of batches: `Batch`, indices
        and their padding mask, or an array of indices with -1 for padding. Seeds 0 to 3
        are used; different seeds must give different batches.
      mechanism: the mechanism, which says how batches are drawn.
      num_examples: the size of the data set.

    Returns:
      A `Finding` with a part for each test. *Not tested* for a mechanism of another
        kind, fewer than 8 batches, or a loader that ends before `iterations` or goes on
        after them.

    Raises:
      TypeError: if a batch has another type.

    Example:
      >>> import jax, numpy as np
      >>> import dpadambc
      >>> from dpadambc import audit
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.05,
      ...     iterations=200, normalize_by=50)
      >>> def loader(seed):
      ...     return mechanism.batches(jax.random.key(seed), num_examples=1_000)
      >>> audit.sampling(loader, mechanism, num_examples=1_000).passed
      True
      >>> def shuffled(seed):
      ...     rng = np.random.default_rng(seed)
      ...     for _ in range(10):
      ...         yield from rng.permutation(1_000).reshape(20, 50)
      >>> audit.sampling(shuffled, mechanism, num_examples=1_000).word
      'FAIL'
    """
    check_mechanism(mechanism)
    mechanism = mechanism.accounted_as  # it draws the batches of a moving bound
    validate.count(num_examples=num_examples, least=2)
    expected = _expected_size(mechanism, num_examples)
    asked = max(int(_MOST_INDICES / (_RUNS * max(expected, 1))), 8)
    asked = min(asked, mechanism.iterations)
    # One more, for a loader that continues after the steps that epsilon is for.
    most = asked + (asked == mechanism.iterations)
    take = lambda seed: itertools.islice(iter(loader(seed)), most)
    runs = [[_indices(batch) for batch in take(seed)] for seed in range(_RUNS)]
    lengths = list(map(len, runs))
    drawn = Batches([run[:asked] for run in runs], num_examples)
    least = 1 if getattr(mechanism, "sampling_prob", 0) == 1 else 8
    if drawn.steps < least:
        return not_tested(_CHECK, f"a run has {drawn.steps} batches only.")
    duplicates = batch_tests.duplicates(drawn)
    if any((batch >= num_examples).any() for batch in drawn.each):
        return combined(_CHECK, [duplicates])
    parts = _tests(drawn, mechanism)
    if parts is None:
        name = type(mechanism).__name__
        return not_tested(_CHECK, f"there is no test for batches of {name}.")
    parts.append(duplicates)
    check = "sampling length"
    if min(lengths) < asked:
        reason = (
            f"the loader ends after {min(lengths)} batches, and epsilon is for"
            f" iterations={mechanism.iterations}. Let it yield the batches of a whole"
            " run: whether it begins again with the same ones is not seen."
        )
        parts.append(not_tested(check, reason))
    elif max(lengths) > mechanism.iterations:
        reason = (
            f"the loader goes on after iterations={mechanism.iterations}, the batches"
            " that epsilon is for. Let the loader end there, or give the mechanism as"
            " many iterations as the loop takes."
        )
        parts.append(not_tested(check, reason))
    return combined(_CHECK, parts)


def _indices(batch: Any) -> np.ndarray:
    """Returns the indices of a batch, without padding."""
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
            "Expected loader to yield a dpadambc.Batch, indices and their mask, or an"
            f" array of indices with -1 for padding, got shape {found.shape},"
            f" {found.dtype}."
        )
    return found[found >= 0]


def _expected_size(mechanism: Any, num_examples: int) -> float:
    match mechanism:
        case PoissonGaussian():
            parts = getattr(mechanism, "parts", 1)  # that take turns
            return mechanism.sampling_prob / parts * num_examples
        case RandomAllocationGaussian():
            share = mechanism.participations / mechanism.batches_per_epoch
            return share * num_examples
    return getattr(mechanism, "batch_size", num_examples)


def _tests(drawn: Batches, mechanism: Mechanism) -> list[Finding] | None:
    """Tests the batches of a mechanism; returns None for an unknown one.

    Mechanisms of nodes are subclasses of those of examples. Truncated and banded ones
    are subclasses of Poisson's, hence the order.
    """
    match mechanism:
        case ShuffledGaussian():
            return [batch_tests.shuffled(drawn, mechanism)]
        case RandomAllocationGaussian():
            return batch_tests.allocation(drawn, mechanism)
        case BandedGaussian():
            return batch_tests.cycles(drawn, mechanism)
        case TruncatedPoissonGaussian():
            sizes = batch_tests.truncated_sizes(drawn, mechanism)
            return [sizes, *batch_tests.independent(drawn)]
        case PoissonGaussian():
            if mechanism.sampling_prob == 1:
                return [batch_tests.fixed_sizes(drawn, drawn.num_examples)]
            return batch_tests.poisson(drawn, mechanism.sampling_prob)
        case FixedSizeGaussian():
            sizes = batch_tests.fixed_sizes(drawn, mechanism.batch_size)
            return [sizes, *batch_tests.independent(drawn)]
    return None

"""That the batches are drawn as they are accounted for."""

from collections.abc import Callable, Iterable
from typing import Any

from dpadambc.audit import _draw_tests, _turn_tests
from dpadambc.audit._batches import Drawn, is_of_fixed_size, is_poisson
from dpadambc.audit._finding import Finding, combined, not_tested
from dpadambc.contrib.banded import BandedGaussian
from dpadambc.core import validate
from dpadambc.core.mechanism import Mechanism, check_mechanism
from dpadambc.mechanisms.random_allocation import RandomAllocationGaussian
from dpadambc.mechanisms.shuffled import ShuffledGaussian
from dpadambc.mechanisms.truncated import TruncatedPoissonGaussian

_CHECK = "sampling"


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
        kind, fewer than 8 batches, or a loader that ends before `iterations` or goes on
        after them.

    Raises:
      TypeError: if a batch is none.

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
    validate.count(num_examples=num_examples, least=2)
    drawn = Drawn(loader, mechanism, num_examples)
    least = 1 if getattr(mechanism, "sampling_prob", 0) == 1 else 8
    if drawn.steps < least:
        return not_tested(_CHECK, f"a run has {drawn.steps} batches only.")
    if any((batch >= num_examples).any() for batch in drawn.batches):
        return combined(_CHECK, [_draw_tests.duplicates(drawn)])
    parts = _parts(drawn, mechanism)
    if parts is None:
        name = type(mechanism).__name__
        return not_tested(_CHECK, f"there is no test for batches of {name}.")
    parts = [*parts, _draw_tests.duplicates(drawn), *_length(drawn, mechanism)]
    return combined(_CHECK, parts)


def _length(drawn: Drawn, mechanism: Mechanism) -> list[Finding]:
    """Not tested, where a loader has other batches than those of a run."""
    steps, shortest = mechanism.iterations, min(drawn.lengths)
    if shortest < drawn.asked:
        reason = (
            f"the loader ends after {shortest} batches, and epsilon is for"
            f" iterations={steps}. Whether it begins again with the same ones is not"
            " seen: let it yield the batches of a whole run."
        )
    elif max(drawn.lengths) > steps:
        reason = (
            f"the loader goes on after iterations={steps}, the batches that epsilon is"
            " for. Give the mechanism as many iterations as the loop takes, and let the"
            " loader end there."
        )
    else:
        return []
    return [not_tested("sampling length", reason)]


def _parts(drawn: Drawn, mechanism: Mechanism) -> list[Finding] | None:
    """What is tested of the batches of a mechanism; None of one that is not known."""
    match mechanism:
        case ShuffledGaussian():
            return [_turn_tests.once_an_epoch(drawn, mechanism)]
        case RandomAllocationGaussian():
            return _turn_tests.of_allocation(drawn, mechanism)
        case BandedGaussian():
            return _turn_tests.of_cycles(drawn, mechanism)
        case TruncatedPoissonGaussian():
            sizes = _draw_tests.truncated_sizes(drawn, mechanism)
            return [sizes, *_draw_tests.of_any(drawn)]
    if is_poisson(mechanism):
        prob = getattr(mechanism, "sampling_prob", 0.0)
        if prob == 1:
            return [_draw_tests.fixed_sizes(drawn, drawn.num_examples)]
        return _draw_tests.of_poisson(drawn, prob)
    if is_of_fixed_size(mechanism):
        sizes = _draw_tests.fixed_sizes(drawn, getattr(mechanism, "batch_size", 0))
        return [sizes, *_draw_tests.of_any(drawn)]
    return None

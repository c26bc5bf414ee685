"""Random allocation: each example takes part in so many random steps of an epoch."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.core import padding, validate
from dpadambc.core.sampling import Batch

# Up to here products of two steps fit in 32 bits.
_MOST_BATCHES = 2**16


def check(num_examples: int, batches_per_epoch: int, participations: int) -> None:
    """Raises for numbers out of their range."""
    validate.count(num_examples=num_examples)
    validate.count(batches_per_epoch=batches_per_epoch, least=1)
    validate.count(participations=participations, least=1)
    if batches_per_epoch > _MOST_BATCHES:
        raise ValueError(
            f"Expected batches_per_epoch <= {_MOST_BATCHES}, of which one is drawn"
            f" uniformly, got {batches_per_epoch=}."
        )
    if participations > batches_per_epoch:
        raise ValueError(
            "Expected participations <= batches_per_epoch, distinct steps of an epoch,"
            f" got {participations=} and {batches_per_epoch=}."
        )


def _steps_of_examples(draws: Any, batches_per_epoch: int, xp: Any) -> Any:
    """For each example distinct steps, every set of them equally likely: Floyd.

    Args:
      draws: row i uniform on the first batches_per_epoch - participations + 1 + i
        steps; shape (participations, num_examples).
      batches_per_epoch: the number of steps.
      xp: NumPy or JAX's.
    """
    first = batches_per_epoch - len(draws)
    chosen = draws[:1]
    for i in range(1, len(draws)):
        draw = draws[i : i + 1]
        is_taken = (chosen == draw).any(axis=0, keepdims=True)
        # If taken, the step that no earlier draw could reach.
        chosen = xp.concatenate([chosen, xp.where(is_taken, first + i, draw)])
    return chosen


def _ends(batches_per_epoch: int, participations: int) -> np.ndarray:
    return np.arange(batches_per_epoch - participations, batches_per_epoch)[:, None] + 1


def _size(num_examples: int, batches_per_epoch: int, participations: int) -> int:
    prob = participations / batches_per_epoch
    return padding.size_exceeded_with(padding.OVERFLOW_PROB, num_examples, prob)


def random_allocation_batches(
    rng: np.random.Generator,
    *,
    num_examples: int,
    batches_per_epoch: int,
    participations: int = 1,
    iterations: int,
) -> Iterator[Batch]:
    """Random allocation on the host: each example in random steps of each epoch.

    In every epoch, and independently of the others, an example takes part in exactly
    `participations` steps, uniformly random among the `batches_per_epoch`. So batches
    have random sizes. They are padded to the size of `random_allocation_sample`, and
    never truncated: a batch that does not fit, once in 1e15 steps, has the size of the
    data set. A second call begins a new epoch, so take all batches of a run from one
    call.

    Args:
      rng: the generator to draw from; its seed is secret, and fresh for each run.
      num_examples: size of the data set.
      batches_per_epoch: how many steps an epoch has.
      participations: in how many of them each example takes part.
      iterations: how many batches to draw.

    Yields:
      One `Batch` of NumPy arrays a step.

    Raises:
      TypeError: if a count is not an int.
      ValueError: if a count is out of its range.

    Example:
      >>> import numpy as np
      >>> from dpadambc.mechanisms import sampling
      >>> batches = sampling.random_allocation_batches(
      ...     np.random.default_rng(0), num_examples=6, batches_per_epoch=3,
      ...     iterations=3)
      >>> for batch in batches:
      ...     print(batch.indices)
      [ 3  4  5 -1 -1 -1]
      [ 1  2 -1 -1 -1 -1]
      [ 0 -1 -1 -1 -1 -1]

    References:
      Chua et al., `Balls-and-Bins Sampling for DP-SGD
      <https://arxiv.org/abs/2412.16802>`_, 2024
    """
    check(num_examples, batches_per_epoch, participations)
    validate.count(iterations=iterations)
    size = _size(num_examples, batches_per_epoch, participations)
    ends = _ends(batches_per_epoch, participations)

    def batches():
        while True:
            draws = rng.integers(ends, size=(participations, num_examples))
            steps = _steps_of_examples(draws, batches_per_epoch, np)
            for step in range(batches_per_epoch):
                chosen = np.flatnonzero((steps == step).any(axis=0))
                fits = len(chosen) <= size
                yield padding.padded(
                    chosen, size if fits else num_examples, num_examples
                )

    return itertools.islice(batches(), iterations)


def _uniform(key: jax.Array, num: int, ends: np.ndarray) -> jax.Array:
    """Numbers below each end: of 64 random bits the remainder.

    None is more probable than it should be by more than a 2^-48th.
    """
    high, low = jax.random.bits(key, (2, len(ends), num), jnp.uint32)
    ends = ends.astype(np.uint32)
    of_high = (2**32 % ends.astype(np.int64)).astype(np.uint32)
    return (((high % ends) * of_high + low % ends) % ends).astype(jnp.int32)


def random_allocation_sample(
    run_key: jax.Array,
    step: int | jax.Array,
    *,
    num_examples: int,
    batches_per_epoch: int,
    participations: int = 1,
) -> Batch:
    """Random allocation on the device: the batch of a step, inside jit and scan.

    All batches of an epoch follow from one key, that of the run with the number of the
    epoch folded in. *A fresh key for each step is not random allocation*: an example
    would take part any number of times in an epoch.

    Args:
      run_key: a typed key, secret, and the same for all steps of one run.
      step: of the run, counted from 0; it may be traced.
      num_examples: size of the data set; static.
      batches_per_epoch: how many steps an epoch has; static.
      participations: in how many of them each example takes part; static. Time and
        memory are in proportion to it, and time to its square where it is large.

    Returns:
      A `Batch` of arrays whose size a batch exceeds with probability 1e-15 at most,
      which each step adds to the delta of the run.

    Raises:
      TypeError: if `run_key` is not a typed key, or a count not an int.
      ValueError: if a number is out of its range.

    Example:
      >>> import jax
      >>> from dpadambc.mechanisms import sampling
      >>> for step in range(3):
      ...     batch = sampling.random_allocation_sample(
      ...         jax.random.key(1), step, num_examples=6, batches_per_epoch=3)
      ...     print(batch.indices)
      [ 2  3  4 -1 -1 -1]
      [ 0  1  5 -1 -1 -1]
      [-1 -1 -1 -1 -1 -1]
    """
    validate.typed_key(run_key=run_key)
    check(num_examples, batches_per_epoch, participations)
    known = validate.known_number("step", step)
    if known is not None and (known < 0 or known % 1):
        raise ValueError(f"Expected step to be a whole number >= 0, got {step}.")
    epoch_key = jax.random.fold_in(run_key, step // batches_per_epoch)
    draws = _uniform(epoch_key, num_examples, _ends(batches_per_epoch, participations))
    steps = _steps_of_examples(draws, batches_per_epoch, jnp)
    takes_part = (steps == step % batches_per_epoch).any(axis=0)
    size = _size(num_examples, batches_per_epoch, participations)
    (indices,) = jnp.nonzero(takes_part, size=size, fill_value=-1)
    return Batch(indices.astype(jnp.int32), indices < 0, num_examples)

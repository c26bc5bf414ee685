"""Who takes part in a step: random batches of static shape, padded and masked.

Each function draws by one scheme, and each scheme has the mechanism that accounts for
it. On the host they take a NumPy generator and yield one batch for each step; inside
`jax.jit` and `jax.lax.scan` they take a key and return one batch. Epsilon holds only if
nobody knows who takes part. So the seed or the key must be secret, drawn from entropy
(`np.random.default_rng()`, `training.secret_key()`), and used in this run alone.

================================  =================================
sampling                          mechanism
================================  =================================
`poisson_*`                       `PoissonGaussian`
`truncated_poisson_*`             `TruncatedPoissonGaussian`
`fixed_size_*`                    `FixedSizeGaussian`
`random_allocation_*`             `RandomAllocationGaussian`
`shuffled_batches`                `ShuffledGaussian`
`cyclic_poisson_*`                `BandedGaussian`
================================  =================================
"""

import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.core import bernoulli, padding, validate
from dpadambc.core.padding import padded, size_exceeded_with
from dpadambc.core.sampling import Batch
from dpadambc.mechanisms._allocation_sampling import (
    random_allocation_batches,
    random_allocation_sample,
)
from dpadambc.mechanisms._cyclic_sampling import (
    cyclic_poisson_batches,
    cyclic_poisson_sample,
)

__all__ = [
    "cyclic_poisson_batches",
    "cyclic_poisson_sample",
    "fixed_size_batches",
    "fixed_size_sample",
    "padded_sizes",
    "poisson_batches",
    "poisson_sample",
    "random_allocation_batches",
    "random_allocation_sample",
    "shuffled_batches",
    "truncated_poisson_batches",
    "truncated_poisson_sample",
]

_OVERFLOW_PROB = padding.OVERFLOW_PROB


def _check(num_examples: int, sampling_prob: float | None = None) -> None:
    validate.count(num_examples=num_examples)
    if sampling_prob is not None:
        validate.probability(sampling_prob=sampling_prob)


def padded_sizes(num_examples: int, sampling_prob: float) -> tuple[int, ...]:
    """Four sizes at most for Poisson batches, to give as `batch_sizes`.

    The batch size of Poisson sampling is binomial. The sizes are its quantiles at
    probability 0.9, 1 - 1e-4 and 1 - 1e-15, and the whole data set. In most steps the
    first is enough, which saves the most where the expected batch is small. But JAX
    compiles a second and a third program in the middle of training.

    Args:
      num_examples: size of the data set.
      sampling_prob: the probability with which each example takes part.

    Returns:
      Increasing sizes, the last of which is `num_examples`.

    Raises:
      ValueError: if `sampling_prob` is outside [0, 1] or `num_examples` negative.

    Example:
      >>> from dpadambc.mechanisms import sampling
      >>> sampling.padded_sizes(50_000, 1024 / 50_000)
      (1065, 1144, 1285, 50000)
    """
    _check(num_examples, sampling_prob)
    sizes = [
        size_exceeded_with(p, num_examples, sampling_prob)
        for p in (0.1, 1e-4, _OVERFLOW_PROB)
    ]
    return tuple(sorted({*sizes, num_examples}))


def _checked_sizes(batch_sizes: Sequence[int], num_examples: int) -> tuple[int, ...]:
    sizes = tuple(batch_sizes)
    for size in sizes:
        validate.count(batch_sizes=size)
    if list(sizes) != sorted(set(sizes)) or sizes[-1:] < (num_examples,):
        raise ValueError(
            "Expected increasing batch_sizes of which the last holds any batch, that"
            f" is all {num_examples} examples, got {sizes}. Poisson batches are never"
            " cut: to cap them, use TruncatedPoissonGaussian."
        )
    return sizes


def poisson_batches(
    rng: np.random.Generator,
    *,
    num_examples: int,
    sampling_prob: float,
    iterations: int,
    batch_sizes: Sequence[int] | None = None,
) -> Iterator[Batch]:
    """Poisson sampling on the host: each example takes part independently.

    All batches have one shape, that of `poisson_sample`, so JAX compiles a step once.
    They are never truncated: a sample that does not fit, once in 1e15 steps, has a
    batch of the size of the data set.

    Args:
      rng: the generator to draw from; its seed is secret, and fresh for each run.
      num_examples: size of the data set.
      sampling_prob: the probability with which each example takes part in a step.
      iterations: how many batches to draw.
      batch_sizes: increasing sizes, such as `padded_sizes`, to the least of which that
        holds it a batch is padded; the last one holds all examples. A step is compiled
        for each, and takes less time for the small ones: whoever sees that time learns
        something of how many took part, which epsilon does not cover.

    Yields:
      One `Batch` of NumPy arrays a step.

    Raises:
      TypeError: if a size is not an int.
      ValueError: if a number is out of its range, or `batch_sizes` do not increase or
        do not hold every batch.

    Example:
      >>> import numpy as np
      >>> from dpadambc.mechanisms import sampling
      >>> numbers = dict(num_examples=20, sampling_prob=0.1, iterations=2)
      >>> batches = sampling.poisson_batches(np.random.default_rng(0), **numbers)
      >>> for batch in batches:
      ...     print(batch.indices)
      [ 2  3 11 13 -1 -1 -1 -1 -1 -1 -1 -1 -1 -1 -1 -1 -1]
      [ 0 -1 -1 -1 -1 -1 -1 -1 -1 -1 -1 -1 -1 -1 -1 -1 -1]
      >>> batches = sampling.poisson_batches(
      ...     np.random.default_rng(0), **numbers, batch_sizes=(2, 5, 20))
      >>> for batch in batches:
      ...     print(batch.indices, batch.is_padding_example)
      [ 2  3 11 13 -1] [False False False False  True]
      [ 0 -1] [False  True]
    """
    _check(num_examples, sampling_prob)
    validate.count(iterations=iterations)
    if batch_sizes is None:
        safe = size_exceeded_with(_OVERFLOW_PROB, num_examples, sampling_prob)
        sizes = (safe, num_examples)
    else:
        sizes = _checked_sizes(batch_sizes, num_examples)
    return (
        padded(chosen, next(n for n in sizes if n >= len(chosen)), num_examples)
        for _ in range(iterations)
        for chosen in [np.flatnonzero(rng.random(num_examples) < sampling_prob)]
    )


def truncated_poisson_batches(
    rng: np.random.Generator,
    *,
    num_examples: int,
    sampling_prob: float,
    truncated_batch_size: int,
    iterations: int,
) -> Iterator[Batch]:
    """Poisson sampling on the host, cut to a random subset where a batch is too large.

    Args:
      rng: the generator to draw from; its seed is secret, and fresh for each run.
      num_examples: size of the data set.
      sampling_prob: the probability with which each example is drawn in a step.
      truncated_batch_size: the size of every batch. Where more are drawn, a uniformly
        random subset of this size stays.
      iterations: how many batches to draw.

    Yields:
      One `Batch` of NumPy arrays, of `truncated_batch_size`, a step.

    Raises:
      ValueError: if a number is out of its range.

    Example:
      >>> import numpy as np
      >>> from dpadambc.mechanisms import sampling
      >>> rng = np.random.default_rng(0)
      >>> batches = sampling.truncated_poisson_batches(
      ...     rng, num_examples=20, sampling_prob=0.2, truncated_batch_size=4,
      ...     iterations=2)
      >>> for batch in batches:
      ...     print(batch.indices)
      [13 11  2  3]
      [10 -1 -1 -1]
    """
    _check(num_examples, sampling_prob)
    validate.count(truncated_batch_size=truncated_batch_size, least=1)
    validate.count(iterations=iterations)
    return (
        padded(
            rng.permutation(chosen)[:truncated_batch_size],
            truncated_batch_size,
            num_examples,
        )
        for _ in range(iterations)
        for chosen in [np.flatnonzero(rng.random(num_examples) < sampling_prob)]
    )


def fixed_size_batches(
    rng: np.random.Generator, *, num_examples: int, batch_size: int, iterations: int
) -> Iterator[Batch]:
    """Sampling without replacement on the host: a fresh uniform subset each step.

    Args:
      rng: the generator to draw from; its seed is secret, and fresh for each run.
      num_examples: size of the data set.
      batch_size: how many take part in a step.
      iterations: how many batches to draw.

    Yields:
      One `Batch` of NumPy arrays without padding a step.

    Raises:
      ValueError: if `batch_size` exceeds `num_examples`, or a number is negative.

    Example:
      >>> import numpy as np
      >>> from dpadambc.mechanisms import sampling
      >>> rng = np.random.default_rng(0)
      >>> batches = sampling.fixed_size_batches(
      ...     rng, num_examples=20, batch_size=3, iterations=2)
      >>> for batch in batches:
      ...     print(batch.indices)
      [12 10 15]
      [19  1  0]
    """
    _check_fixed_size(num_examples, batch_size)
    validate.count(iterations=iterations)
    return (
        padded(
            rng.choice(num_examples, batch_size, replace=False),
            batch_size,
            num_examples,
        )
        for _ in range(iterations)
    )


def shuffled_batches(
    rng: np.random.Generator, *, num_examples: int, batch_size: int, iterations: int
) -> Iterator[Batch]:
    """Epochs over a shuffled data set, which is *not* Poisson sampling.

    Each epoch deals the whole data set, in a fresh random order, into batches; the last
    one is padded. Shuffling gets no credit: `ShuffledGaussian` accounts for each epoch
    as one use of the whole data set without sampling. A second call begins a new epoch,
    so take all batches of a run from one call.

    Args:
      rng: the generator to draw from; its seed is secret, and fresh for each run.
      num_examples: size of the data set.
      batch_size: how many take part in a step, but for the last one of an epoch.
      iterations: how many batches to draw.

    Yields:
      One `Batch` of NumPy arrays, of `batch_size`, a step.

    Raises:
      ValueError: if `batch_size` exceeds `num_examples`, or a number is negative.

    Example:
      >>> import numpy as np
      >>> from dpadambc.mechanisms import sampling
      >>> rng = np.random.default_rng(0)
      >>> batches = sampling.shuffled_batches(
      ...     rng, num_examples=5, batch_size=2, iterations=4)
      >>> for batch in batches:
      ...     print(batch.indices)
      [2 4]
      [3 0]
      [ 1 -1]
      [4 1]
    """
    _check_fixed_size(num_examples, batch_size)
    validate.count(iterations=iterations)

    def batches():
        while True:
            order = rng.permutation(num_examples)
            for start in range(0, num_examples, batch_size):
                rows = order[start : start + batch_size]
                yield padded(rows, batch_size, num_examples)

    return itertools.islice(batches(), iterations)


def _check_fixed_size(num_examples: int, batch_size: int) -> None:
    _check(num_examples)
    validate.count(batch_size=batch_size, least=1)
    if batch_size > num_examples:
        raise ValueError(
            f"Expected batch_size <= num_examples, got {batch_size=} and"
            f" {num_examples=}."
        )


def poisson_sample(
    key: jax.Array,
    *,
    num_examples: int,
    sampling_prob: float,
    size: int | None = None,
) -> Batch:
    """Poisson sampling on the device: one batch of static size, inside jit and scan.

    Args:
      key: a typed key, a fresh one for each step.
      num_examples: size of the data set; static.
      sampling_prob: the probability with which each example takes part; static.
      size: the size of the batch with its padding; static. By default the least that
        a sample exceeds with probability 1e-15 at most (which each step adds to the
        delta of the run); a smaller one is refused. To cap the batch, use
        `truncated_poisson_sample` and its mechanism.

    Returns:
      A `Batch` of arrays of shape (size,).

    Raises:
      TypeError: if `key` is not a typed key.
      ValueError: if a number is out of its range, or `size` too small.

    Example:
      >>> import jax
      >>> from dpadambc.mechanisms import sampling
      >>> batch = sampling.poisson_sample(
      ...     jax.random.key(0), num_examples=1000, sampling_prob=0.01)
      >>> batch.indices.shape, int((~batch.is_padding_example).sum())
      ((44,), 9)
    """
    validate.typed_key(key=key)
    _check(num_examples, sampling_prob)
    safe = size_exceeded_with(_OVERFLOW_PROB, num_examples, sampling_prob)
    size = safe if size is None else size
    if size < safe:
        raise ValueError(
            f"Expected size >= {safe}, which a Poisson sample of {num_examples}"
            f" examples with probability {sampling_prob:g} exceeds with probability"
            f" {_OVERFLOW_PROB:g}, got {size=}. To cap batches at that size, use"
            " truncated_poisson_sample with TruncatedPoissonGaussian."
        )
    _, selected = bernoulli.selection_bits(key, num_examples, sampling_prob)
    (indices,) = jnp.nonzero(selected, size=size, fill_value=-1)
    return Batch(indices.astype(jnp.int32), indices < 0, num_examples)


def truncated_poisson_sample(
    key: jax.Array,
    *,
    num_examples: int,
    sampling_prob: float,
    truncated_batch_size: int,
) -> Batch:
    """Truncated Poisson sampling on the device, inside jit and scan.

    Args:
      key: a typed key, a fresh one for each step.
      num_examples: size of the data set; static.
      sampling_prob: the probability with which each example is drawn; static.
      truncated_batch_size: the size of the batch; static. Where more are drawn, a
        uniformly random subset of this size stays.

    Returns:
      A `Batch` of arrays of shape (truncated_batch_size,).

    Raises:
      TypeError: if `key` is not a typed key.
      ValueError: if a number is out of its range.

    Example:
      >>> import jax
      >>> from dpadambc.mechanisms import sampling
      >>> batch = sampling.truncated_poisson_sample(
      ...     jax.random.key(0), num_examples=1000, sampling_prob=0.01,
      ...     truncated_batch_size=12)
      >>> batch.indices.shape, int((~batch.is_padding_example).sum())
      ((12,), 9)
    """
    validate.typed_key(key=key)
    _check(num_examples, sampling_prob)
    validate.count(truncated_batch_size=truncated_batch_size, least=1)
    bits, selected = bernoulli.selection_bits(key, num_examples, sampling_prob)
    # The selected have the lowest words, and among themselves a random order.
    kept = min(truncated_batch_size, num_examples)
    order = jnp.argsort(bits)[:kept]
    indices = jnp.where(selected[order], order, -1).astype(jnp.int32)
    indices = jnp.pad(indices, (0, truncated_batch_size - kept), constant_values=-1)
    return Batch(indices, indices < 0, num_examples)


def fixed_size_sample(key: jax.Array, *, num_examples: int, batch_size: int) -> Batch:
    """Sampling without replacement on the device, inside jit and scan.

    Args:
      key: a typed key, a fresh one for each step.
      num_examples: size of the data set; static.
      batch_size: how many take part; static.

    Returns:
      A `Batch` of arrays of shape (batch_size,) without padding.

    Raises:
      TypeError: if `key` is not a typed key.
      ValueError: if `batch_size` exceeds `num_examples`.

    Example:
      >>> import jax
      >>> from dpadambc.mechanisms import sampling
      >>> batch = sampling.fixed_size_sample(
      ...     jax.random.key(0), num_examples=10, batch_size=3)
      >>> print(batch.indices, batch.is_padding_example)
      [0 1 8] [False False False]
    """
    validate.typed_key(key=key)
    _check_fixed_size(num_examples, batch_size)
    indices = jax.random.choice(key, num_examples, (batch_size,), replace=False)
    return Batch(indices.astype(jnp.int32), jnp.zeros(batch_size, bool), num_examples)

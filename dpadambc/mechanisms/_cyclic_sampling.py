"""Cyclic Poisson sampling: parts of the data take turns, and each is sampled from."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.core import bernoulli, keys, padding, validate
from dpadambc.core.sampling import Batch
from dpadambc.mechanisms import _allocation_sampling

# Of which one is drawn uniformly, by 32-bit words.
_MOST_PARTS = 2**16


def check(num_examples: int, sampling_prob: float, parts: int) -> None:
    """Raises for numbers out of their range."""
    validate.count(num_examples=num_examples)
    validate.probability(sampling_prob=sampling_prob)
    validate.count(parts=parts, least=1)
    if parts > _MOST_PARTS:
        raise ValueError(f"Expected at most {_MOST_PARTS} parts, got {parts=}.")


def _size(num_examples: int, sampling_prob: float, parts: int) -> int:
    """Of a batch, with who is in which part as random as who is drawn from it."""
    prob = sampling_prob / parts
    return padding.size_exceeded_with(padding.OVERFLOW_PROB, num_examples, prob)


def cyclic_poisson_batches(
    rng: np.random.Generator,
    *,
    num_examples: int,
    sampling_prob: float,
    parts: int,
    iterations: int,
) -> Iterator[Batch]:
    """Cyclic Poisson sampling on the host: in each step from the part whose turn it is.

    Once, at random and independently of the others, each example is dealt into one of
    the parts. In step t each example of part t mod `parts` takes part independently
    with `sampling_prob`, and no other does. So two participations of an example are a
    multiple of `parts` steps apart. Batches are padded to the size of
    `cyclic_poisson_sample`. Never truncated: should a batch not fit, once in 1e15
    steps, it has the size of the data set. A second call deals anew, so take all
    batches of a run from one.

    Args:
      rng: the generator to draw from; its seed is secret, and fresh for each run.
      num_examples: size of the data set.
      sampling_prob: the probability with which an example takes part in a step of its
        part. A batch has `num_examples * sampling_prob / parts` examples on average.
      parts: how many parts take turns.
      iterations: how many batches to draw.

    Yields:
      One `Batch` of NumPy arrays a step.

    Raises:
      TypeError: if a count is not an int.
      ValueError: if a number is out of its range.

    Example:
      >>> import numpy as np
      >>> from dpadambc.mechanisms import sampling
      >>> batches = sampling.cyclic_poisson_batches(
      ...     np.random.default_rng(0), num_examples=6, sampling_prob=0.7, parts=2,
      ...     iterations=4)
      >>> for batch in batches:
      ...     print(batch.indices)
      [ 3  5 -1 -1 -1 -1]
      [ 2 -1 -1 -1 -1 -1]
      [ 3  4  5 -1 -1 -1]
      [ 0  1  2 -1 -1 -1]

    References:
      Choquette-Choo et al., `(Amplified) Banded Matrix Factorization
      <https://arxiv.org/abs/2306.08153>`_, 2023
    """
    check(num_examples, sampling_prob, parts)
    validate.count(iterations=iterations)
    size = _size(num_examples, sampling_prob, parts)
    part = rng.integers(parts, size=num_examples)

    def batch(step):
        is_drawn = rng.random(num_examples) < sampling_prob
        chosen = np.flatnonzero((part == step % parts) & is_drawn)
        fits = len(chosen) <= size
        return padding.padded(chosen, size if fits else num_examples, num_examples)

    return map(batch, range(iterations))


def cyclic_poisson_sample(
    run_key: jax.Array,
    step: int | jax.Array,
    *,
    num_examples: int,
    sampling_prob: float,
    parts: int,
) -> Batch:
    """Cyclic Poisson sampling on the device: the batch of a step, inside jit and scan.

    Who is in which part follows from the key alone, and who is drawn from the key and
    the step. *A fresh key for each step is not cyclic*: examples would change parts.

    Args:
      run_key: a typed key, secret, and the same for all steps of one run.
      step: of the run, counted from 0; it may be traced.
      num_examples: size of the data set; static.
      sampling_prob: the probability with which an example takes part in a step of its
        part; static.
      parts: how many parts take turns; static.

    Returns:
      A `Batch` of arrays whose size a batch exceeds with probability 1e-15 at most,
      which each step adds to the delta of the run.

    Raises:
      TypeError: if `run_key` is not a typed key, or a count not an int.
      ValueError: if a number is out of its range.

    Example:
      >>> import jax
      >>> from dpadambc.mechanisms import sampling
      >>> for step in range(4):
      ...     batch = sampling.cyclic_poisson_sample(
      ...         jax.random.key(1), step, num_examples=6, sampling_prob=0.7, parts=2)
      ...     print(batch.indices)
      [ 1  4  5 -1 -1 -1]
      [ 2 -1 -1 -1 -1 -1]
      [ 0  4  5 -1 -1 -1]
      [ 2  3 -1 -1 -1 -1]
    """
    validate.typed_key(run_key=run_key)
    check(num_examples, sampling_prob, parts)
    known = validate.known_number("step", step)
    if known is not None and (known < 0 or known % 1):
        raise ValueError(f"Expected step to be a whole number >= 0, got {step}.")
    part_key = keys.of_domain(run_key, "parts of cyclic Poisson sampling")
    (part,) = _allocation_sampling._uniform(part_key, num_examples, np.array([[parts]]))
    turns_key = keys.of_domain(run_key, "turns of cyclic Poisson sampling")
    step_key = jax.random.fold_in(turns_key, step)
    _, is_drawn = bernoulli.selection_bits(step_key, num_examples, sampling_prob)
    takes_part = (part == step % parts) & is_drawn
    size = _size(num_examples, sampling_prob, parts)
    (indices,) = jnp.nonzero(takes_part, size=size, fill_value=-1)
    return Batch(indices.astype(jnp.int32), indices < 0, num_examples)

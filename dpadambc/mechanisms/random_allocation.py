"""Random allocation: each example takes part in given many random steps of an epoch."""

import dataclasses
import math

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.core import validate
from dpadambc.core.accounting import PLD, gaussian
from dpadambc.core.clip import FLAT, ClipRule, NeighboringRelation
from dpadambc.core.sampling import Batch, batch_of, padded_size
from dpadambc.mechanisms import names
from dpadambc.mechanisms._random_allocation import RandomAllocationDpEvent
from dpadambc.mechanisms.mechanism import Mechanism

_ADD_OR_REMOVE_ONE = NeighboringRelation.ADD_OR_REMOVE_ONE
_REPLACE_SPECIAL = NeighboringRelation.REPLACE_SPECIAL

# Up to this number, products of two steps fit in 32 bits.
_MOST_BATCHES = 2**16


def check_parts(**named: int) -> None:
    """Raises unless one of `number` parts or batches can be drawn uniformly."""
    validate.count(**named, least=1)
    ((name, number),) = named.items()
    if number > _MOST_BATCHES:
        raise ValueError(f"Expected {name} <= {_MOST_BATCHES}, got {number}.")


def uniform(key: jax.Array, num: int, ends: np.ndarray) -> jax.Array:
    """Draws numbers below each end, shape (len(ends), num), from 64 bits each.

    Each is the remainder of a 64-bit number, so no probability is too large by more
    than 2^-48 of it.

    Args:
      key: a typed key.
      num: how many numbers for each end.
      ends: the exclusive ends, shape (k, 1), at most 2^16.
    """
    high, low = jax.random.bits(key, (2, len(ends), num), jnp.uint32)
    ends = ends.astype(np.uint32)
    of_high = (2**32 % ends.astype(np.int64)).astype(np.uint32)
    return (((high % ends) * of_high + low % ends) % ends).astype(jnp.int32)


def steps_of_examples(draws: jax.Array, batches_per_epoch: int) -> jax.Array:
    """Draws a uniform set of distinct steps for each example, by Floyd's algorithm.

    Args:
      draws: row i uniform on the first batches_per_epoch - participations + 1 + i
        steps; shape (participations, num_examples).
      batches_per_epoch: the number of steps.
    """
    first = batches_per_epoch - len(draws)
    chosen = draws[:1]
    for i in range(1, len(draws)):
        draw = draws[i : i + 1]
        is_taken = (chosen == draw).any(axis=0, keepdims=True)
        # If it is taken, use the step that no earlier draw could reach.
        chosen = jnp.concatenate([chosen, jnp.where(is_taken, first + i, draw)])
    return chosen


def allocated_batch(
    epoch_key: jax.Array,
    step: int | jax.Array,
    num_examples: int,
    batches_per_epoch: int,
    participations: int = 1,
) -> Batch:
    """Draws a batch of an epoch, all of whose batches follow from one key.

    Args:
      epoch_key: the key, the same for all steps of the epoch.
      step: the step of the epoch.
      num_examples: the size of the data set.
      batches_per_epoch: the number of steps in the epoch.
      participations: the number of steps in which each example takes part. Time and
        memory are proportional to it, and time to its square where it is large.

    Returns:
      A `Batch` whose size is exceeded with probability 1e-15 at most, which each step
      adds to the delta of the run.
    """
    ends = np.arange(batches_per_epoch - participations, batches_per_epoch)[:, None] + 1
    draws = uniform(epoch_key, num_examples, ends)
    takes_part = (steps_of_examples(draws, batches_per_epoch) == step).any(axis=0)
    size = padded_size(num_examples, participations / batches_per_epoch)
    return batch_of(takes_part, size)


@names.explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomAllocationGaussian(Mechanism):
    """The Gaussian mechanism on epochs that allocate examples to batches at random.

    In an epoch each example takes part in exactly `participations` steps, uniformly
    random among the `batches_per_epoch` and independently of the others: balls and
    bins. Batches have random sizes, unlike those of a shuffled data set, for which
    there is no such proof (`ShuffledGaussian`). At a small delta, epsilon is mostly
    below that of Poisson sampling, and every example takes part equally often.

    All batches of an epoch follow from one key: that of the run, and the epoch.

    Guarantees:
      * Epsilon is an upper bound in both directions, for steps that depend on earlier
        outputs and contributions of any norm up to C.
      * It is tight for one participation, up to the numerics, which cost less than 1 %;
        for several it is that of one participation in each of as many shorter epochs.
      * An epoch that is begun counts in full.

    Args:
      l2_clip_norm: C, positive.
      noise_multiplier: z, non-negative, in units of the sensitivity.
      batches_per_epoch: b, the number of steps in an epoch.
      participations: k, the number of steps of an epoch in which each example takes
        part.
      iterations: the number of steps.
      normalize_by: B, positive; usually `num_examples * participations /
        batches_per_epoch`, rounded. It does not change epsilon.
      neighboring_relation: ADD_OR_REMOVE_ONE or REPLACE_SPECIAL.
      clip_rule: the fraction of each gradient that is taken; see `clip_per_example`. No
        rule changes epsilon.

    Raises:
      TypeError: if a number is not a number, or a count not an int.
      ValueError: if a number is out of its range, or for another relation.

    Example:
      >>> import dpadambc
      >>> numbers = dict(l2_clip_norm=1.0, noise_multiplier=1.0, normalize_by=100)
      >>> mechanism = dpadambc.RandomAllocationGaussian(
      ...     batches_per_epoch=15, iterations=75, **numbers)
      >>> round(mechanism.epsilon(target_delta=1e-5), 2)
      3.49
      >>> poisson = dpadambc.PoissonGaussian(
      ...     sampling_prob=1 / 15, iterations=75, **numbers)
      >>> round(poisson.epsilon(target_delta=1e-5), 2)
      4.12

    References:
      * Chua et al., `Balls-and-Bins Sampling for DP-SGD
        <https://arxiv.org/abs/2412.16802>`_, 2024
      * Feldman and Shenfeld, `Privacy amplification by random allocation
        <https://arxiv.org/abs/2502.08202>`_, 2025
      * Feldman and Shenfeld, `Efficient privacy loss accounting for subsampling and
        random allocation <https://arxiv.org/abs/2602.17284>`_, 2026
    """

    l2_clip_norm: float
    # A schedule would make the noise of an example depend on its step.
    noise_multiplier: float  # pyright: ignore[reportIncompatibleVariableOverride]
    batches_per_epoch: int
    participations: int = 1
    iterations: int
    normalize_by: float
    neighboring_relation: NeighboringRelation = _ADD_OR_REMOVE_ONE
    clip_rule: ClipRule = FLAT

    # The privacy losses are those of an example that appears or vanishes. A replaced
    # one moves its step from one side to the other. There is no Rényi bound.
    relations = {_ADD_OR_REMOVE_ONE: (PLD,), _REPLACE_SPECIAL: (PLD,)}

    def __post_init__(self):
        super().__post_init__()
        validate.non_negative(noise_multiplier=self.noise_multiplier)
        check_parts(batches_per_epoch=self.batches_per_epoch)
        validate.count(participations=self.participations, least=1)
        if self.participations > self.batches_per_epoch:
            raise ValueError(
                f"Expected participations <= {self.batches_per_epoch}, distinct steps"
                f" of an epoch, got {self.participations}."
            )

    @property
    def pads_batches(self) -> bool:
        """Whether a batch can have padding: not where all examples take part."""
        return self.participations < self.batches_per_epoch

    def _event(self, steps: int, noise_multiplier: float) -> dp_accounting.DpEvent:
        """Returns epochs, each of blocks of steps with one participation in each."""
        z, relation = float(noise_multiplier), self.neighboring_relation
        size, longer = divmod(self.batches_per_epoch, self.participations)
        blocks: list[dp_accounting.DpEvent] = []
        counts = {size: self.participations - longer, size + 1: longer}
        step = gaussian(noise_multiplier, relation)
        for n, count in counts.items():
            if count:
                block = step if n == 1 else RandomAllocationDpEvent(z, n, relation)
                blocks.append(dp_accounting.SelfComposedDpEvent(block, count))
        epoch = blocks[0] if len(blocks) == 1 else dp_accounting.ComposedDpEvent(blocks)
        epochs = math.ceil(steps / self.batches_per_epoch)
        return dp_accounting.SelfComposedDpEvent(epoch, epochs)

    def _draw(self, key: jax.Array, step: int | jax.Array, num_examples: int) -> Batch:
        epoch_key = jax.random.fold_in(key, step // self.batches_per_epoch)
        numbers = num_examples, self.batches_per_epoch, self.participations
        return allocated_batch(epoch_key, step % self.batches_per_epoch, *numbers)

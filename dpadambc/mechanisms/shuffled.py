"""Epochs over shuffled data, with no credit for the order."""

import dataclasses
import math

import dp_accounting
import jax
import jax.numpy as jnp

from dpadambc.core import validate
from dpadambc.core.accounting import PLD, RDP, gaussian
from dpadambc.core.clip import FLAT, ClipRule, NeighboringRelation
from dpadambc.core.sampling import Batch
from dpadambc.mechanisms import names
from dpadambc.mechanisms.mechanism import Mechanism

_REPLACE_ONE = NeighboringRelation.REPLACE_ONE
_REPLACE_SPECIAL = NeighboringRelation.REPLACE_SPECIAL


@names.explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class ShuffledGaussian(Mechanism):
    """The Gaussian mechanism on epochs over shuffled data: *not* Poisson sampling.

    An example takes part once in each epoch. The order gets no credit: epsilon is
    computed as if it were known, so an epoch costs as much as one step on the whole
    data set. Most published runs shuffle, and state the epsilon of Poisson sampling,
    which is far smaller. `RandomAllocationGaussian` has epochs too, in batches of
    random sizes, and a proof of an epsilon about that of Poisson sampling.

    The last, smaller batch of an epoch is dealt too. A loader that drops it has shorter
    epochs, so the same number of steps is of more of them: account for it with
    (num_examples // batch_size) * batch_size as `num_examples`.

    Adding or removing an example would re-deal all batches, so privacy is stated for
    replacing one example by another (or, REPLACE_SPECIAL, by one without gradient).

    Args:
      l2_clip_norm: C, positive.
      noise_multiplier: z, non-negative, in units of the sensitivity.
      batch_size: the number of examples in a step.
      num_examples: the size of the data set, the same for neighbors.
      iterations: the number of steps; an epoch that is begun counts in full.
      normalize_by: B, positive; usually `batch_size`.
      neighboring_relation: REPLACE_ONE or REPLACE_SPECIAL.
      clip_rule: the fraction of each gradient that is taken; see `clip_per_example`. No
        rule changes epsilon.

    Raises:
      TypeError: if a number is not a number, or a count not an int.
      ValueError: if a number is out of its range, or for another relation.

    Example:
      >>> import dpadambc
      >>> mechanism = dpadambc.ShuffledGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=2.0, batch_size=100,
      ...     num_examples=1_000, iterations=10, normalize_by=100)
      >>> round(mechanism.epsilon(target_delta=1e-5), 3)  # one epoch
      1.993
    """

    l2_clip_norm: float
    # A schedule would make the noise of an example depend on its place in the order.
    noise_multiplier: float  # pyright: ignore[reportIncompatibleVariableOverride]
    batch_size: int
    num_examples: int
    iterations: int
    normalize_by: float
    neighboring_relation: NeighboringRelation = _REPLACE_ONE
    clip_rule: ClipRule = FLAT

    # Adding or removing an example changes every batch of an epoch.
    relations = {_REPLACE_ONE: (PLD, RDP), _REPLACE_SPECIAL: (PLD, RDP)}
    deals_epochs = True

    def __post_init__(self):
        super().__post_init__()
        validate.count(batch_size=self.batch_size, least=1)
        validate.count(num_examples=self.num_examples, least=self.batch_size)
        validate.non_negative(noise_multiplier=self.noise_multiplier)

    @property
    def pads_batches(self) -> bool:
        """Whether a batch can have padding: the last one of an epoch."""
        return self.num_examples % self.batch_size > 0

    @property
    def batches_per_epoch(self) -> int:
        """The number of steps in an epoch, with the last, smaller batch."""
        return math.ceil(self.num_examples / self.batch_size)

    def _event(self, steps: int, noise_multiplier: float) -> dp_accounting.DpEvent:
        epoch = gaussian(noise_multiplier, self.neighboring_relation)
        epochs = math.ceil(steps / self.batches_per_epoch)
        return dp_accounting.SelfComposedDpEvent(epoch, epochs)

    def _draw(self, key: jax.Array, step: int | jax.Array, num_examples: int) -> Batch:
        per_epoch, size = self.batches_per_epoch, self.batch_size
        epoch_key = jax.random.fold_in(key, step // per_epoch)
        order = jax.random.permutation(epoch_key, num_examples).astype(jnp.int32)
        padding = (0, per_epoch * size - num_examples)
        batches = jnp.pad(order, padding, constant_values=-1).reshape(per_epoch, size)
        indices = batches[step % per_epoch]
        return Batch(indices, indices < 0, num_examples)

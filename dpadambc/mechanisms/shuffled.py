"""Epochs over shuffled data, with no credit for the order."""

import dataclasses
import math
from collections.abc import Iterator

import dp_accounting
import jax
import numpy as np

from dpadambc.core import accounting, validate
from dpadambc.core.clip import FLAT, ClipRule, NeighboringRelation
from dpadambc.core.mechanism import Mechanism
from dpadambc.core.sampling import Batch
from dpadambc.mechanisms import sampling

_REPLACE_ONE = NeighboringRelation.REPLACE_ONE
_REPLACE_SPECIAL = NeighboringRelation.REPLACE_SPECIAL


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
    replacing one by another (or, REPLACE_SPECIAL, by one without gradient).

    Args:
      l2_clip_norm: C, positive.
      noise_multiplier: z, non-negative, in units of the sensitivity.
      batch_size: the number of examples in a step.
      num_examples: the size of the data set, the same for neighbors.
      iterations: the number of steps; an epoch that is begun counts in full.
      normalize_by: B, positive; usually `batch_size`.
      neighboring_relation: REPLACE_ONE or REPLACE_SPECIAL.
      clip_rule: which share of each gradient is taken; see `clip_per_example`. No
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

    _relations = {_REPLACE_ONE: ("pld", "rdp"), _REPLACE_SPECIAL: ("pld", "rdp")}
    _refusal = "adding or removing an example changes every batch of an epoch."
    _deals_epochs = True

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
    def _largest_batch(self) -> int | None:
        return self.batch_size

    def _compositions(self, iterations: int) -> int:
        return math.ceil(iterations / math.ceil(self.num_examples / self.batch_size))

    def _step_event(
        self, noise_multiplier: float, accountant: accounting.Accountant
    ) -> dp_accounting.DpEvent:
        return self._gaussian(noise_multiplier, accountant)

    def _batches(self, rng: np.random.Generator, num_examples: int) -> Iterator[Batch]:
        return sampling.shuffled_batches(
            rng,
            num_examples=num_examples,
            batch_size=self.batch_size,
            iterations=self.iterations,
        )

    def _sample(self, key: jax.Array, num_examples: int) -> Batch:
        raise TypeError(
            "Expected a mechanism that draws each batch from a key, such as a"
            " PoissonGaussian, got a ShuffledGaussian, which deals all batches of an"
            " epoch from one order. Take them from its batches, on the host. For epochs"
            " on the device use a RandomAllocationGaussian."
        )

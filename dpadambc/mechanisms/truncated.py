"""Poisson sampling with a cap on the batch."""

import dataclasses

import dp_accounting
import jax
import jax.numpy as jnp

from dpadambc.core import validate
from dpadambc.core.accounting import PLD
from dpadambc.core.clip import NeighboringRelation
from dpadambc.core.sampling import Batch, selection_bits
from dpadambc.mechanisms import names
from dpadambc.mechanisms._truncated import TruncatedPoissonDpEvent
from dpadambc.mechanisms.poisson import PoissonGaussian

_REPLACE_ONE = NeighboringRelation.REPLACE_ONE
_REPLACE_SPECIAL = NeighboringRelation.REPLACE_SPECIAL


@names.explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class TruncatedPoissonGaussian(PoissonGaussian):
    """`PoissonGaussian` with batches cut to a random `truncated_batch_size`.

    Where more examples are drawn than that, a random subset of them takes part. A new
    example may then push out another, which costs a little privacy. The cost depends on
    the size of the data set, which is therefore taken as known, and privacy is stated
    for neighbors of the same size: one example replaced by one without gradient
    (REPLACE_SPECIAL), or by another.

    Args:
      l2_clip_norm: C, positive.
      noise_multiplier: z, non-negative, in units of the sensitivity; or a schedule.
      sampling_prob: q, in [0, 1].
      truncated_batch_size: the largest batch.
      num_examples: the size of the data set, the same for neighbors.
      iterations: the number of steps.
      normalize_by: B, positive.
      neighboring_relation: REPLACE_SPECIAL or REPLACE_ONE.
      clip_rule: the fraction of each gradient that is taken; see `clip_per_example`. No
        rule changes epsilon.

    Raises:
      TypeError: if a number is not a number, or a count not an int.
      ValueError: if a number is out of its range, or for another relation.

    Example:
      >>> import dpadambc
      >>> mechanism = dpadambc.TruncatedPoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.85, sampling_prob=0.02,
      ...     truncated_batch_size=1_050, num_examples=50_000, iterations=1_000,
      ...     normalize_by=1_000)
      >>> round(mechanism.epsilon(target_delta=1e-6), 2)
      1.86

    References:
      The theorem is in `mechanisms._truncated`. A looser one, which reveals whether a
      batch was cut: Ganesh, `Tighter Privacy Analysis for Truncated Poisson Sampling
      <https://arxiv.org/abs/2508.15089>`_, 2025
    """

    truncated_batch_size: int
    num_examples: int
    neighboring_relation: NeighboringRelation = _REPLACE_SPECIAL

    # Adding or removing an example changes the size that the cost of truncation depends
    # on, and there is no Rényi bound.
    relations = {_REPLACE_SPECIAL: (PLD,), _REPLACE_ONE: (PLD,)}
    draws_steps_alone = True

    def __post_init__(self):
        super().__post_init__()
        validate.count(truncated_batch_size=self.truncated_batch_size, least=1)
        validate.count(num_examples=self.num_examples, least=1)

    @property
    def pads_batches(self) -> bool:
        """Whether a batch can have padding: it can, whatever the probability is."""
        return True

    def _event(self, steps: int, noise_multiplier: float) -> dp_accounting.DpEvent:
        sampling = self.sampling_prob, self.truncated_batch_size, self.num_examples
        relation = self.neighboring_relation
        step = TruncatedPoissonDpEvent(noise_multiplier, *sampling, relation)
        return dp_accounting.SelfComposedDpEvent(step, steps)

    def _draw(self, key: jax.Array, step: int | jax.Array, num_examples: int) -> Batch:
        del step
        size = self.truncated_batch_size
        bits, selected = selection_bits(key, num_examples, self.sampling_prob)
        # The selected have the lowest words, in a random order among themselves.
        kept = min(size, num_examples)
        order = jnp.argsort(bits)[:kept]
        indices = jnp.where(selected[order], order, -1).astype(jnp.int32)
        indices = jnp.pad(indices, (0, size - kept), constant_values=-1)
        return Batch(indices, indices < 0, num_examples)

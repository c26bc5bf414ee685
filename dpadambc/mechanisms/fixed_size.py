"""Sampling without replacement: batches of one size."""

import dataclasses
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import optax
from dp_accounting import rdp

from dpadambc.core import validate
from dpadambc.core.accounting import PLD, RDP
from dpadambc.core.clip import FLAT, ClipRule, NeighboringRelation
from dpadambc.core.sampling import Batch
from dpadambc.mechanisms import names, replaced_terms
from dpadambc.mechanisms.mechanism import Mechanism

_REPLACE_ONE = NeighboringRelation.REPLACE_ONE


@dataclasses.dataclass(frozen=True)
class FixedSizeDpEvent(replaced_terms.ReplacedTermsDpEvent):
    """One step on a uniform subset, with one example replaced.

    Args:
      noise_multiplier: the noise over the sensitivity, 2 C / B.
      probs: the probabilities that the sample lacks the example, and has it.
      num_examples: the size of the data set.
      batch_size: the size of the subset.
    """

    num_examples: int = dataclasses.field(kw_only=True)
    batch_size: int = dataclasses.field(kw_only=True)

    def compose_into(self, accountant: Any, count: int) -> None:
        """Adds steps; by Rényi divergences with dp-accounting's bound, in its unit."""
        if not isinstance(accountant, rdp.RdpAccountant):
            return super().compose_into(accountant, count)
        step = dp_accounting.GaussianDpEvent(self.noise_multiplier)
        sizes = self.num_examples, self.batch_size
        sampled = dp_accounting.SampledWithoutReplacementDpEvent(*sizes, step)
        return accountant.compose(sampled, count)


@names.explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedSizeGaussian(Mechanism):
    """The Gaussian mechanism on a fresh uniform subset of fixed size at every step.

    Sampling without replacement keeps the size of the data set, so privacy is stated
    for replacing one example by another: the sensitivity is 2 C / B.

    Args:
      l2_clip_norm: C, positive.
      noise_multiplier: z, non-negative, in units of the sensitivity; or a schedule.
      batch_size: the number of examples in a step.
      num_examples: the size of the data set, the same for neighbors.
      iterations: the number of steps.
      normalize_by: B, positive; usually `batch_size`.
      neighboring_relation: REPLACE_ONE.
      clip_rule: the fraction of each gradient that is taken; see `clip_per_example`. No
        rule changes epsilon.

    Raises:
      TypeError: if a number is not a number, or a count not an int.
      ValueError: if a number is out of its range, or for another relation.

    Example:
      >>> import dpadambc
      >>> mechanism = dpadambc.FixedSizeGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=2.0, batch_size=100,
      ...     num_examples=1_000, iterations=1, normalize_by=100)
      >>> round(mechanism.epsilon(target_delta=1e-5), 3)
      0.369

    References:
      By "pld" the accounting is in `mechanisms.replaced_terms`. By "rdp": Wang et al.,
      `Subsampled Rényi Differential Privacy and Analytical Moments Accountant
      <https://arxiv.org/abs/1808.00087>`_, 2019
    """

    l2_clip_norm: float
    noise_multiplier: float | optax.Schedule
    batch_size: int
    num_examples: int
    iterations: int
    normalize_by: float
    neighboring_relation: NeighboringRelation = _REPLACE_ONE
    clip_rule: ClipRule = FLAT

    # A batch of fixed size changes when an example is added or removed.
    relations = {_REPLACE_ONE: (PLD, RDP)}
    draws_steps_alone = True

    def __post_init__(self):
        super().__post_init__()
        validate.count(batch_size=self.batch_size, least=1)
        validate.count(num_examples=self.num_examples, least=self.batch_size)

    @property
    def pads_batches(self) -> bool:
        """Whether a batch can have padding: it has none."""
        return False

    def _event(self, steps: int, noise_multiplier: float) -> dp_accounting.DpEvent:
        n, size = self.num_examples, self.batch_size
        losses = replaced_terms.without_replacement(noise_multiplier, 1, size, n)
        numbers = losses.noise_multiplier, losses.probs
        step = FixedSizeDpEvent(*numbers, num_examples=n, batch_size=size)
        return dp_accounting.SelfComposedDpEvent(step, steps)

    def _draw(self, key: jax.Array, step: int | jax.Array, num_examples: int) -> Batch:
        del step
        size = (self.batch_size,)
        indices = jax.random.choice(key, num_examples, size, replace=False)
        return Batch(indices.astype(jnp.int32), jnp.zeros(size, bool), num_examples)

"""Sampling without replacement: batches of one size."""

import dataclasses

import dp_accounting
import optax

from dpadambc.core import accounting
from dpadambc.core.clip import FLAT, ClipRule, NeighboringRelation
from dpadambc.core.sampled import FixedSizeSampled
from dpadambc.mechanisms import _replaced_terms

_REPLACE_ONE = NeighboringRelation.REPLACE_ONE


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedSizeGaussian(FixedSizeSampled):
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
      clip_rule: which share of each gradient is taken; see `clip_per_example`. No
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
      By "pld" the accounting is in `mechanisms._replaced_terms`. By "rdp": Wang et al.,
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

    _relations = {_REPLACE_ONE: ("pld", "rdp")}
    _refusal = "a batch of fixed size changes when an example is added or removed."

    def _step_event(
        self, noise_multiplier: float, accountant: accounting.Accountant
    ) -> dp_accounting.DpEvent:
        if accountant == "pld":
            return _replaced_terms.without_replacement(
                noise_multiplier,
                max_terms=1,
                batch_size=self.batch_size,
                num_terms=self.num_examples,
            )
        return dp_accounting.SampledWithoutReplacementDpEvent(
            self.num_examples,
            self.batch_size,
            self._gaussian(noise_multiplier, accountant),
        )

"""Random allocation: each example takes part in so many random steps of an epoch."""

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
from dpadambc.mechanisms import _allocation_sampling, sampling
from dpadambc.mechanisms._random_allocation import RandomAllocationDpEvent

_ADD_OR_REMOVE_ONE = NeighboringRelation.ADD_OR_REMOVE_ONE
_REPLACE_SPECIAL = NeighboringRelation.REPLACE_SPECIAL


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomAllocationGaussian(Mechanism):
    """The Gaussian mechanism on epochs that allocate examples to batches at random.

    In an epoch each example takes part in exactly `participations` steps, uniformly
    random among the `batches_per_epoch` and independently of the others: balls and
    bins. Batches have random sizes, unlike those of a shuffled data set, for which
    there is no such proof (`ShuffledGaussian`). At a small delta, epsilon is mostly
    below that of Poisson sampling, and every example takes part equally often.

    All batches of an epoch follow from one key. `sample_step` draws them on the device,
    as `training.fit` does, and `batches` on the host; `sample` is refused.

    Guarantees:
      * Epsilon is an upper bound in both directions, for steps that depend on earlier
        outputs and contributions of any norm up to C.
      * It is tight for one participation, up to the numerics, which cost less than 1 %;
        for several it is that of one participation in each of so many shorter epochs.
      * An epoch that is begun counts in full.

    Args:
      l2_clip_norm: C, positive.
      noise_multiplier: z, non-negative, in units of the sensitivity.
      batches_per_epoch: b, the number of steps in an epoch.
      participations: k, in how many steps of an epoch each example takes part.
      iterations: the number of steps.
      normalize_by: B, positive; usually `num_examples * participations /
        batches_per_epoch`, rounded. It does not change epsilon.
      neighboring_relation: ADD_OR_REMOVE_ONE or REPLACE_SPECIAL.
      clip_rule: which share of each gradient is taken; see `clip_per_example`. No
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

    _relations = {_ADD_OR_REMOVE_ONE: ("pld",), _REPLACE_SPECIAL: ("pld",)}
    _refusal = (
        "its privacy losses are those of an example that appears or vanishes; a"
        " replaced one moves its step from one side to the other, and there is no Rényi"
        " bound."
    )

    def __post_init__(self):
        super().__post_init__()
        validate.non_negative(noise_multiplier=self.noise_multiplier)
        _allocation_sampling.check(0, self.batches_per_epoch, self.participations)

    @property
    def pads_batches(self) -> bool:
        """Whether a batch can have padding: not where all examples take part."""
        return self.participations < self.batches_per_epoch

    def _compositions(self, iterations: int) -> int:
        return math.ceil(iterations / self.batches_per_epoch)

    def _step_event(
        self, noise_multiplier: float, accountant: accounting.Accountant
    ) -> dp_accounting.DpEvent:
        """An epoch: blocks of steps, with one participation in each."""
        relation = self.neighboring_relation
        size, longer = divmod(self.batches_per_epoch, self.participations)
        counts = {size: self.participations - longer, size + 1: longer}
        blocks: list[dp_accounting.DpEvent] = [
            dp_accounting.SelfComposedDpEvent(
                self._gaussian(noise_multiplier, accountant)
                if steps == 1
                else RandomAllocationDpEvent(float(noise_multiplier), steps, relation),
                count,
            )
            for steps, count in counts.items()
            if count
        ]
        return blocks[0] if len(blocks) == 1 else dp_accounting.ComposedDpEvent(blocks)

    def _batches(self, rng: np.random.Generator, num_examples: int) -> Iterator[Batch]:
        return sampling.random_allocation_batches(
            rng,
            num_examples=num_examples,
            batches_per_epoch=self.batches_per_epoch,
            participations=self.participations,
            iterations=self.iterations,
        )

    def _sample_step(
        self, run_key: jax.Array, step: int | jax.Array, num_examples: int
    ) -> Batch:
        return sampling.random_allocation_sample(
            run_key,
            step,
            num_examples=num_examples,
            batches_per_epoch=self.batches_per_epoch,
            participations=self.participations,
        )

    def _sample(self, key: jax.Array, num_examples: int) -> Batch:
        raise TypeError(
            "Expected sample_step(run_key, step), with one key for all steps, got"
            " sample(key): all batches of an epoch follow from one key, and with a key"
            " for each step an example would take part any number of times, which this"
            " epsilon does not cover. For independent steps use a PoissonGaussian."
        )

"""The Gaussian mechanism on batches: one frozen value for each way of sampling."""

import dataclasses
import math
from collections.abc import Iterator

import dp_accounting
import jax
import numpy as np
import optax

from dpadambc._core import validate
from dpadambc.clipping.flat import NeighboringRelation
from dpadambc.mechanisms import sampling
from dpadambc.mechanisms.base import Mechanism

_ADD_OR_REMOVE_ONE = NeighboringRelation.ADD_OR_REMOVE_ONE
_REPLACE_ONE = NeighboringRelation.REPLACE_ONE
_REPLACE_SPECIAL = NeighboringRelation.REPLACE_SPECIAL


def _gaussian(multiplier: float) -> dp_accounting.DpEvent:
    return dp_accounting.GaussianDpEvent(multiplier)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoissonGaussian(Mechanism):
    r"""The Poisson-subsampled Gaussian mechanism, `iterations` times: DP-SGD.

    At every step each example takes part independently with probability
    `sampling_prob`; gradients are clipped to `l2_clip_norm`, summed, divided by
    `normalize_by`; Gaussian noise of standard deviation

    .. math:: \sigma = z \Delta, \quad \Delta = C / B \text{ or } 2 C / B

    is added, with the noise multiplier z and the sensitivity Δ. Under
    ADD_OR_REMOVE_ONE the variance is the papers' Φ = (z C / B)².

    Args:
      l2_clip_norm: C, positive.
      noise_multiplier: z, non-negative, the noise in units of the sensitivity; or a
        schedule of the step, which makes `noise_stddev` a schedule.
      sampling_prob: q, in [0, 1].
      iterations: the number of steps.
      normalize_by: B, positive; usually `sampling_prob * num_examples`, rounded. It
        does not change epsilon.
      neighboring_relation: what two neighbouring datasets differ in.

    Raises:
      TypeError: if a number is not a number, or `iterations` not an int.
      ValueError: if a number is out of its range.

    Example:
      >>> import dpadambc
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.85, sampling_prob=1024 / 50_000,
      ...     iterations=3_360, normalize_by=1024)
      >>> round(mechanism.epsilon(target_delta=1e-5), 3)
      2.925
      >>> round(mechanism.noise_stddev, 7)
      0.0018066
      >>> mechanism = dpadambc.PoissonGaussian.calibrate(
      ...     target_epsilon=1.0, target_delta=1e-5, l2_clip_norm=1.0,
      ...     noise_multiplier=4.0, sampling_prob=0.02, normalize_by=1000)
      >>> mechanism.iterations
      2740

    References:
      Abadi et al., `Deep Learning with Differential Privacy
      <https://arxiv.org/abs/1607.00133>`_, 2016
    """

    l2_clip_norm: float
    noise_multiplier: float | optax.Schedule
    sampling_prob: float
    iterations: int
    normalize_by: float
    neighboring_relation: NeighboringRelation = _ADD_OR_REMOVE_ONE

    _solvable = ("noise_multiplier", "iterations", "sampling_prob")
    _relations = {
        _ADD_OR_REMOVE_ONE: ("pld", "rdp"),
        _REPLACE_ONE: ("pld",),
        _REPLACE_SPECIAL: ("pld", "rdp"),
    }
    _refusal = "no Rényi bound for Poisson sampling under replacement is at hand."

    def __post_init__(self):
        super().__post_init__()
        validate.probability(sampling_prob=self.sampling_prob)

    def _check_relation(self, accountant: str | None = None) -> None:
        # Without sampling there is nothing to refuse.
        super()._check_relation(None if self.sampling_prob == 1 else accountant)

    @property
    def pads_batches(self) -> bool:
        """Whether a batch can have padding: not where all examples take part."""
        return self.sampling_prob < 1

    def _step_event(self, multiplier: float) -> dp_accounting.DpEvent:
        gaussian = _gaussian(multiplier)
        if self.sampling_prob == 1:
            return gaussian
        return dp_accounting.PoissonSampledDpEvent(self.sampling_prob, gaussian)

    def batches(
        self, rng: np.random.Generator, *, num_examples: int
    ) -> Iterator[sampling.Batch]:
        """One Poisson batch for each iteration: see `sampling.poisson_batches`."""
        return sampling.poisson_batches(
            rng,
            num_examples=num_examples,
            sampling_prob=self.sampling_prob,
            iterations=self.iterations,
        )

    def sample(self, key: jax.Array, *, num_examples: int) -> sampling.Batch:
        """One Poisson batch on the device: see `sampling.poisson_sample`."""
        return sampling.poisson_sample(
            key, num_examples=num_examples, sampling_prob=self.sampling_prob
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TruncatedPoissonGaussian(Mechanism):
    """`PoissonGaussian` with batches cut to a random `truncated_batch_size`.

    Where more examples are drawn than that, a random subset of them takes part. An
    example that comes in may then push out another, which costs a little privacy. How
    often depends on the size of the data set, which is therefore taken as known, and
    privacy is stated for neighbours of the same size: one example replaced by one
    without gradient (REPLACE_SPECIAL), or by another.

    Args:
      l2_clip_norm: C, positive.
      noise_multiplier: z, non-negative, in units of the sensitivity; or a schedule.
      sampling_prob: q, in [0, 1].
      truncated_batch_size: the largest batch.
      num_examples: the size of the data set, the same for neighbours.
      iterations: the number of steps.
      normalize_by: B, positive.
      neighboring_relation: REPLACE_SPECIAL or REPLACE_ONE.

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
      2.59

    References:
      The accounting is dp-accounting's `TruncatedSubsampledGaussianDpEvent`: `Scaling
      Up DP Training <https://arxiv.org/abs/2508.15089>`_, 2025
    """

    l2_clip_norm: float
    noise_multiplier: float | optax.Schedule
    sampling_prob: float
    truncated_batch_size: int
    num_examples: int
    iterations: int
    normalize_by: float
    neighboring_relation: NeighboringRelation = _REPLACE_SPECIAL

    _solvable = ("noise_multiplier", "iterations", "sampling_prob")
    _relations = {
        _REPLACE_SPECIAL: ("pld",),
        _REPLACE_ONE: ("pld",),
    }
    _refusal = (
        "the cost of truncation depends on the size of the data set, which adding or"
        " removing an example would change, and no Rényi bound for it is at hand."
    )

    def __post_init__(self):
        super().__post_init__()
        validate.probability(sampling_prob=self.sampling_prob)
        validate.count(truncated_batch_size=self.truncated_batch_size, least=1)
        validate.count(num_examples=self.num_examples, least=1)

    def _step_event(self, multiplier: float) -> dp_accounting.DpEvent:
        return dp_accounting.TruncatedSubsampledGaussianDpEvent(
            self.num_examples, self.sampling_prob, self.truncated_batch_size, multiplier
        )

    def batches(self, rng: np.random.Generator) -> Iterator[sampling.Batch]:
        """One batch for each iteration: see `sampling.truncated_poisson_batches`."""
        return sampling.truncated_poisson_batches(
            rng,
            num_examples=self.num_examples,
            sampling_prob=self.sampling_prob,
            truncated_batch_size=self.truncated_batch_size,
            iterations=self.iterations,
        )

    def sample(self, key: jax.Array) -> sampling.Batch:
        """One batch on the device: see `sampling.truncated_poisson_sample`."""
        return sampling.truncated_poisson_sample(
            key,
            num_examples=self.num_examples,
            sampling_prob=self.sampling_prob,
            truncated_batch_size=self.truncated_batch_size,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedSizeGaussian(Mechanism):
    """The Gaussian mechanism on a fresh uniform subset of fixed size at every step.

    Sampling without replacement keeps the size of the data set, so privacy is stated
    for replacing one example by another: the sensitivity is 2 C / B.

    Args:
      l2_clip_norm: C, positive.
      noise_multiplier: z, non-negative, in units of the sensitivity; or a schedule.
      batch_size: the number of examples in a step.
      num_examples: the size of the data set, the same for neighbours.
      iterations: the number of steps.
      normalize_by: B, positive; usually `batch_size`.
      neighboring_relation: REPLACE_ONE.

    Raises:
      TypeError: if a number is not a number, or a count not an int.
      ValueError: if a number is out of its range, or for another relation.

    Example:
      >>> import dpadambc
      >>> mechanism = dpadambc.FixedSizeGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=2.0, batch_size=100,
      ...     num_examples=1_000, iterations=1, normalize_by=100)
      >>> round(mechanism.epsilon(target_delta=1e-5), 3)
      0.596

    References:
      Wang et al., `Subsampled Rényi Differential Privacy and Analytical Moments
      Accountant <https://arxiv.org/abs/1808.00087>`_, 2019
    """

    l2_clip_norm: float
    noise_multiplier: float | optax.Schedule
    batch_size: int
    num_examples: int
    iterations: int
    normalize_by: float
    neighboring_relation: NeighboringRelation = _REPLACE_ONE

    _relations = {_REPLACE_ONE: ("rdp",)}
    _refusal = (
        "a batch of fixed size does not stay one when an example is added or removed,"
        " and only the Rényi accountant knows sampling without replacement."
    )

    def __post_init__(self):
        super().__post_init__()
        validate.count(batch_size=self.batch_size, least=1)
        validate.count(num_examples=self.num_examples, least=self.batch_size)

    @property
    def pads_batches(self) -> bool:
        """Whether a batch can have padding: it has none."""
        return False

    def _step_event(self, multiplier: float) -> dp_accounting.DpEvent:
        return dp_accounting.SampledWithoutReplacementDpEvent(
            self.num_examples, self.batch_size, _gaussian(multiplier)
        )

    def batches(self, rng: np.random.Generator) -> Iterator[sampling.Batch]:
        """One batch for each iteration: see `sampling.fixed_size_batches`."""
        return sampling.fixed_size_batches(
            rng,
            num_examples=self.num_examples,
            batch_size=self.batch_size,
            iterations=self.iterations,
        )

    def sample(self, key: jax.Array) -> sampling.Batch:
        """One batch on the device: see `sampling.fixed_size_sample`."""
        return sampling.fixed_size_sample(
            key, num_examples=self.num_examples, batch_size=self.batch_size
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShuffledGaussian(Mechanism):
    """The Gaussian mechanism on epochs over shuffled data: *not* Poisson sampling.

    An example takes part once in each epoch. The order is given no credit: it is
    accounted for as if it were known, so an epoch costs what one step on the whole
    data set would. Most published runs shuffle, and state the epsilon of Poisson
    sampling, which is far smaller.

    Adding or removing an example would re-deal all batches, so privacy is stated for
    replacing one by another (or, REPLACE_SPECIAL, by one without gradient).

    Args:
      l2_clip_norm: C, positive.
      noise_multiplier: z, non-negative, in units of the sensitivity.
      batch_size: the number of examples in a step.
      num_examples: the size of the data set, the same for neighbours.
      iterations: the number of steps; an epoch that is begun counts in full.
      normalize_by: B, positive; usually `batch_size`.
      neighboring_relation: REPLACE_ONE or REPLACE_SPECIAL.

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

    _relations = {_REPLACE_ONE: ("pld", "rdp"), _REPLACE_SPECIAL: ("pld", "rdp")}
    _refusal = "adding or removing an example would re-deal every batch of an epoch."

    def __post_init__(self):
        super().__post_init__()
        validate.count(batch_size=self.batch_size, least=1)
        validate.count(num_examples=self.num_examples, least=self.batch_size)
        validate.non_negative(noise_multiplier=self.noise_multiplier)

    @property
    def pads_batches(self) -> bool:
        """Whether a batch can have padding: the last one of an epoch."""
        return self.num_examples % self.batch_size > 0

    def _uses(self, iterations: int) -> int:
        return math.ceil(iterations / math.ceil(self.num_examples / self.batch_size))

    def _step_event(self, multiplier: float) -> dp_accounting.DpEvent:
        return _gaussian(multiplier)

    def batches(self, rng: np.random.Generator) -> Iterator[sampling.Batch]:
        """One batch for each iteration: see `sampling.shuffled_batches`."""
        return sampling.shuffled_batches(
            rng,
            num_examples=self.num_examples,
            batch_size=self.batch_size,
            iterations=self.iterations,
        )

"""The public numbers of a private training run, in one frozen value.

The noise, the correction of the second moment and the accountant all read the same
value, so they cannot disagree. There is one class for each way of sampling.

Nothing private goes into a field. The size of the data set is private when an example
may be added or removed, so it is an argument where it is needed, except in mechanisms
whose privacy is stated for data sets of a known size.
"""

import dataclasses
import inspect
import math
from collections.abc import Iterator
from typing import Any, ClassVar, Self

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc import _validate, accounting, clipping, sampling
from dpadambc.clipping import NeighboringRelation

_ADD_OR_REMOVE_ONE = NeighboringRelation.ADD_OR_REMOVE_ONE
_REPLACE_ONE = NeighboringRelation.REPLACE_ONE
_REPLACE_SPECIAL = NeighboringRelation.REPLACE_SPECIAL


class Mechanism:
    """What all mechanisms share: a Gaussian on a clipped sum, step after step.

    Subclasses are frozen dataclasses with the fields annotated here.
    """

    l2_clip_norm: float
    noise_multiplier: float | optax.Schedule
    iterations: int
    normalize_by: float
    neighboring_relation: NeighboringRelation

    # Which fields `calibrate` can solve for, and who accounts for the sampling under
    # which relation: the tightest accountant first.
    _solvable: ClassVar[tuple[str, ...]] = ("noise_multiplier", "iterations")
    _relations: ClassVar[dict[NeighboringRelation, tuple[accounting.Accountant, ...]]]
    _refusal: ClassVar[str]

    def __post_init__(self):
        _validate.positive(l2_clip_norm=self.l2_clip_norm)
        _validate.positive(normalize_by=self.normalize_by)
        if not callable(self.noise_multiplier):
            _validate.non_negative(noise_multiplier=self.noise_multiplier)
        _validate.count(iterations=self.iterations)
        self._check_relation()

    def _check_relation(self, accountant: str | None = None) -> None:
        relation = self.neighboring_relation
        if not isinstance(relation, NeighboringRelation):
            raise TypeError(
                "Expected neighboring_relation to be a dpadambc.NeighboringRelation,"
                f" got {relation!r}."
            )
        accountants = self._relations.get(relation, ())
        if not accountants or (accountant and accountant not in accountants):
            supported = "; ".join(
                f"{r.name} ({', '.join(names)})" for r, names in self._relations.items()
            )
            what = relation.name + (f" by {accountant!r}" if accountant else "")
            raise ValueError(
                f"{type(self).__name__} cannot be accounted for under {what}:"
                f" {self._refusal} Supported: {supported}."
            )

    @property
    def _default_accountant(self) -> accounting.Accountant:
        return self._relations[self.neighboring_relation][0]

    @property
    def sensitivity(self) -> float:
        """L2 sensitivity of the clipped sum after division by `normalize_by`."""
        return clipping.sensitivity(
            self.l2_clip_norm,
            normalize_by=self.normalize_by,
            neighboring_relation=self.neighboring_relation,
        )

    @property
    def noise_stddev(self) -> float | optax.Schedule:
        """Standard deviation of the noise in the gradient that Adam sees.

        The noise multiplier times the sensitivity, a schedule if the multiplier is
        one. This value goes to `add_dp_noise` and to `scale_by_adam_bc`.
        """
        z, sensitivity = self.noise_multiplier, self.sensitivity
        if callable(z):
            return lambda step: jnp.asarray(z(step), float) * sensitivity
        return z * sensitivity

    @property
    def noise_variance(self) -> float | optax.Schedule:
        """The square of `noise_stddev`: the papers' Φ."""
        stddev = self.noise_stddev
        if callable(stddev):
            return lambda step: stddev(step) ** 2
        return stddev**2

    def _step_event(self, multiplier: float) -> dp_accounting.DpEvent:
        """One step. The multiplier is in the accountant's unit."""
        raise NotImplementedError

    def _uses(self, iterations: int) -> int:
        """How many times `_step_event` is composed in so many steps."""
        return iterations

    def dp_event(
        self,
        iterations: int | None = None,
        *,
        accountant: accounting.Accountant | None = None,
    ) -> dp_accounting.DpEvent:
        """What was run, as a dp-accounting event.

        Under REPLACE_ONE dp-accounting's accountants read a Gaussian's noise
        multiplier in two units: the PLD accountant relative to the clip norm, doubling
        the sensitivity itself, the RDP accountant relative to the sensitivity. Hence
        the argument; compose the event with that accountant and no other.

        Args:
          iterations: the number of steps taken; `self.iterations` by default.
          accountant: which accountant will read it, "pld" or "rdp"; the tightest that
            can, by default.

        Returns:
          A `dp_accounting.DpEvent`.

        Raises:
          ValueError: for an unknown accountant, or one that cannot account for the
            sampling under the neighbouring relation.
        """
        accountant = accountant or self._default_accountant
        accounting.check_accountant(accountant)
        self._check_relation(accountant)
        iterations = self.iterations if iterations is None else iterations
        _validate.count(iterations=iterations)
        # Of the sensitivity 2 C / B, the PLD accountant supplies the 2.
        sensitivity_seen = self.l2_clip_norm / self.normalize_by
        unit = self.sensitivity / sensitivity_seen if accountant == "pld" else 1.0
        if iterations == 0:
            return dp_accounting.NoOpDpEvent()
        return accounting.composed(
            lambda z: self._step_event(unit * z),
            self.noise_multiplier,
            self._uses(iterations),
        )

    def epsilon(
        self,
        target_delta: float,
        *,
        iterations: int | None = None,
        accountant: accounting.Accountant | None = None,
        num_examples: int | None = None,
    ) -> float:
        """The epsilon spent.

        Args:
          target_delta: the delta that goes with it, in (0, 1).
          iterations: the number of steps taken; `self.iterations` by default.
          accountant: "pld" (tight) or "rdp" (an upper bound, faster); by default "pld"
            where it can account for the sampling.
          num_examples: if given, used for a warning where delta is too large for it.

        Returns:
          Epsilon under `self.neighboring_relation`; infinity without noise, or where it
          is too large to compute (some 700).

        Raises:
          ValueError: for an unknown accountant, one that cannot account for the
            sampling under the neighbouring relation, or a delta outside (0, 1).
        """
        if num_examples is None:
            num_examples = getattr(self, "num_examples", None)
        accounting.check_delta(target_delta, num_examples)
        accountant = accountant or self._default_accountant
        return accounting.epsilon(
            self.dp_event(iterations, accountant=accountant),
            target_delta=target_delta,
            neighboring_relation=self.neighboring_relation,
            accountant=accountant,
        )

    @classmethod
    def calibrate(
        cls,
        *,
        target_epsilon: float,
        target_delta: float,
        accountant: accounting.Accountant | None = None,
        **public_numbers: Any,
    ) -> Self:
        """The mechanism that meets a target, solved for the one number left out.

        Args:
          target_epsilon: the epsilon to reach and not to exceed.
          target_delta: the delta that goes with it.
          accountant: "pld" (tight) or "rdp" (an upper bound); by default "pld" where it
            can account for the sampling.
          **public_numbers: the fields of the class, all but one of `noise_multiplier`,
            `iterations` and `sampling_prob` (where it has one). The field left out, or
            given as None, is solved for: the least noise, the most iterations or the
            largest probability. `num_examples` may be given to any class, for the
            warning of `epsilon`.

        Returns:
          A mechanism whose epsilon at `target_delta` is at most `target_epsilon`.

        Raises:
          TypeError: if not exactly one field is left out, or an unknown one is given.
          ValueError: if the target cannot be reached, or a number is out of its range.
        """
        if accountant is not None:
            accounting.check_accountant(accountant)
        accounting.check_delta(target_delta, public_numbers.get("num_examples"))
        if "num_examples" not in inspect.signature(cls).parameters:
            public_numbers.pop("num_examples", None)
        unknown = [x for x in cls._solvable if public_numbers.get(x) is None]
        if len(unknown) != 1:
            raise TypeError(
                f"Expected all but one of {', '.join(cls._solvable)} to be given, and"
                f" to solve for that one; missing: {', '.join(unknown) or 'none'}."
            )
        (name,) = unknown
        with_value = lambda x: cls(**{**public_numbers, name: x})
        trial = with_value(1)
        accountant = accountant or trial._default_accountant
        solution = accounting.calibrate(
            lambda x: with_value(x).dp_event(accountant=accountant),
            name,
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            neighboring_relation=trial.neighboring_relation,
            accountant=accountant,
        )
        return with_value(solution)


def _gaussian(multiplier: float) -> dp_accounting.DpEvent:
    return dp_accounting.GaussianDpEvent(multiplier)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubsampledGaussian(Mechanism):
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
      >>> mechanism = dpadambc.SubsampledGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.85, sampling_prob=1024 / 50_000,
      ...     iterations=3_360, normalize_by=1024)
      >>> round(mechanism.epsilon(target_delta=1e-5), 3)
      2.925
      >>> round(mechanism.noise_stddev, 7)
      0.0018066
      >>> mechanism = dpadambc.SubsampledGaussian.calibrate(
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
        _validate.probability(sampling_prob=self.sampling_prob)

    def _check_relation(self, accountant: str | None = None) -> None:
        # Without sampling there is nothing to refuse.
        super()._check_relation(None if self.sampling_prob == 1 else accountant)

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
class TruncatedSubsampledGaussian(Mechanism):
    """`SubsampledGaussian` with batches cut to a random `truncated_batch_size`.

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
      >>> mechanism = dpadambc.TruncatedSubsampledGaussian(
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
        _validate.probability(sampling_prob=self.sampling_prob)
        _validate.count(truncated_batch_size=self.truncated_batch_size, least=1)
        _validate.count(num_examples=self.num_examples, least=1)

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
class FixedSizeSampledGaussian(Mechanism):
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
      >>> mechanism = dpadambc.FixedSizeSampledGaussian(
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
        _validate.count(batch_size=self.batch_size, least=1)
        _validate.count(num_examples=self.num_examples, least=self.batch_size)

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
        _validate.count(batch_size=self.batch_size, least=1)
        _validate.count(num_examples=self.num_examples, least=self.batch_size)
        _validate.non_negative(noise_multiplier=self.noise_multiplier)

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

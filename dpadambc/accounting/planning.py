"""A plan: how much noise each budget and batch size takes, before any training."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from dpadambc.core.accounting import Accountant
from dpadambc.core.clip import NeighboringRelation
from dpadambc.core.mechanism import Mechanism, PoissonGaussian
from dpadambc.mechanisms.fixed_size import FixedSizeGaussian
from dpadambc.mechanisms.random_allocation import RandomAllocationGaussian
from dpadambc.mechanisms.shuffled import ShuffledGaussian

# The samplings that a plan compares: ways to draw batches that need no more numbers than it has.
SAMPLINGS: dict[str, type[Mechanism]] = {
    "poisson": PoissonGaussian,
    "random-allocation": RandomAllocationGaussian,
    "fixed-size": FixedSizeGaussian,
    "shuffled": ShuffledGaussian,
}
_REPLACE_ONE = NeighboringRelation.REPLACE_ONE


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedEpsilon:
    """The epsilon of one way to draw the batches, at the noise of a plan.

    Attributes:
      sampling: a name of `SAMPLINGS`.
      neighboring_relation: the relation of this epsilon. One for REPLACE_ONE is not
        to be compared with one for ADD_OR_REMOVE_ONE: there an example can move the sum
        twice as far.
      accountant: `accounting.PLD` or `accounting.RDP`.
      epsilon: at the delta of the plan; infinity where it is astronomical.
    """

    sampling: str
    neighboring_relation: NeighboringRelation
    accountant: Accountant
    epsilon: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One row of a plan.

    Attributes:
      target_epsilon: that was asked for.
      target_delta: that goes with it.
      batch_size: of each step; on average, where batches are drawn.
      epochs: how often an example takes part; on average likewise.
      num_examples: the size of the data set.
      mechanism: that meets the target, with `noise_multiplier`, `sampling_prob` and
        `iterations`; for a clip norm of 1.
      accountant: by which it does, `accounting.PLD` or `accounting.RDP`.
    """

    target_epsilon: float
    target_delta: float
    batch_size: int
    epochs: float
    num_examples: int
    mechanism: PoissonGaussian
    accountant: Accountant

    @property
    def noise_stddev(self) -> float:
        """Standard deviation of the noise in the mean gradient, per unit of clip norm.

        z C / B for C = 1: the noise that a coordinate of the gradient is up against.
        """
        return cast(float, self.mechanism.noise_stddev)

    def spent(
        self,
        sampling: str,
        neighboring_relation: NeighboringRelation,
        accountant: Accountant | None = None,
    ) -> PlannedEpsilon:
        """The epsilon that the same noise has where batches are drawn in another way.

        The noise keeps its standard deviation, and the run its epochs and batch size.
        Under REPLACE_ONE the noise multiplier is half as large, as the sensitivity is
        twice as large.

        Args:
          sampling: a name of `SAMPLINGS`.
          neighboring_relation: the difference of neighboring data sets; one that the
            mechanism of this sampling is stated for.
          accountant: `accounting.PLD` or `accounting.RDP`; the tightest by default.

        Returns:
          A `PlannedEpsilon`.

        Raises:
          ValueError: for an unknown sampling, or a relation or accountant that does not
            go with it.
        """
        if sampling not in SAMPLINGS:
            raise ValueError(
                f"Expected sampling to be one of {', '.join(SAMPLINGS)}, got"
                f" {sampling!r}."
            )
        of_noise = lambda z: SAMPLINGS[sampling].of_epochs(
            epochs=self.epochs,
            batch_size=self.batch_size,
            num_examples=self.num_examples,
            l2_clip_norm=self.mechanism.l2_clip_norm,
            noise_multiplier=z,
            neighboring_relation=neighboring_relation,
        )
        # Not noise_stddev, which is more where a rule of clipping takes a part.
        stddev = (
            cast(float, self.mechanism.noise_multiplier) * self.mechanism.sensitivity
        )
        mechanism = of_noise(stddev / of_noise(1.0).sensitivity)
        accountant = accountant or mechanism.accountants[0]
        return PlannedEpsilon(
            sampling=sampling,
            neighboring_relation=neighboring_relation,
            accountant=accountant,
            epsilon=mechanism.epsilon(self.target_delta, accountant=accountant),
        )

    def comparison(self) -> tuple[PlannedEpsilon, ...]:
        """Epsilon by every sampling, relation and accountant that is known for it.

        Returns:
          Rows of `PlannedEpsilon`. Of the relations in which an example goes, one:
          adding or removing it, or where the size of the data set is known,
          REPLACE_SPECIAL.
        """
        rows = []
        for sampling, cls in SAMPLINGS.items():
            goes = [r for r in cls.relations if r != _REPLACE_ONE]
            for relation in (*goes[:1], _REPLACE_ONE):
                for accountant in cls.relations.get(relation, ()):
                    rows.append(self.spent(sampling, relation, accountant))
        return tuple(rows)


def _each(numbers: Any) -> list[Any]:
    """Several numbers, or one."""
    return [numbers] if np.ndim(numbers) == 0 else list(numbers)


def plan(
    *,
    target_epsilons: float | Sequence[float],
    target_delta: float,
    batch_sizes: int | Sequence[int],
    epochs: float | Sequence[float],
    num_examples: int,
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    accountant: Accountant | None = None,
) -> list[PlannedRun]:
    """The least noise for each budget, batch size and number of epochs.

    Batches are drawn by Poisson sampling: `PlannedRun.comparison` has the epsilon of
    other ways. It uses nothing of the data but their number.

    Args:
      target_epsilons: each to be reached and not exceeded; a number or several.
      target_delta: well below 1 / num_examples.
      batch_sizes: the expected number of examples in a step; a number or several.
      epochs: how often an example takes part on average; a number or several. The steps
        are epochs * num_examples / batch_size, rounded up.
      num_examples: the size of the data set.
      neighboring_relation: the difference of neighboring data sets.
      accountant: `accounting.PLD` (tight) or `accounting.RDP` (an upper bound,
        faster); the tightest by default.

    Returns:
      A `PlannedRun` for each combination: by epochs, then epsilon, then batch size.

    Raises:
      TypeError: if a number is not a number.
      ValueError: if a target cannot be reached, or a number is out of its range.

    Example:
      >>> from dpadambc import accounting
      >>> rows = accounting.plan(
      ...     target_epsilons=[3.0], target_delta=1e-5, batch_sizes=[4096, 8192],
      ...     epochs=30, num_examples=60_000)
      >>> for row in rows:
      ...     z = row.mechanism.noise_multiplier
      ...     print(row.mechanism.iterations, f"{z:.2f} {row.noise_stddev:.5f}")
      440 2.18 0.00053
      220 2.99 0.00036
    """
    rows = []
    for passes, epsilon, batch_size in itertools.product(
        _each(epochs), _each(target_epsilons), _each(batch_sizes)
    ):
        numbers: dict[str, Any] = dict(batch_size=batch_size, num_examples=num_examples)
        mechanism = PoissonGaussian.calibrate(
            target_epsilon=epsilon,
            target_delta=target_delta,
            accountant=accountant,
            epochs=passes,
            l2_clip_norm=1.0,
            neighboring_relation=neighboring_relation,
            **numbers,
        )
        rows.append(
            PlannedRun(
                target_epsilon=epsilon,
                target_delta=target_delta,
                epochs=passes,
                mechanism=mechanism,
                accountant=accountant or mechanism.accountants[0],
                **numbers,
            )
        )
    return rows

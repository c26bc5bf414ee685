"""A plan: how much noise each budget and batch size takes, before any training."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from dpadambc.core.accounting import Accountant
from dpadambc.core.clip import NeighboringRelation
from dpadambc.mechanisms.poisson import PoissonGaussian


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One row of a plan.

    Attributes:
      target_epsilon: the epsilon asked for.
      target_delta: the delta that goes with it.
      batch_size: the batch size of each step; on average, where batches are drawn.
      epochs: how often an example takes part; likewise on average.
      num_examples: the size of the data set.
      mechanism: the mechanism that meets the target, with `noise_multiplier`,
        `sampling_prob` and `iterations`; for a clip norm of 1.
      accountant: the accountant of its epsilon, `accounting.PLD` or `accounting.RDP`.
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
        """The standard deviation of noise in the mean gradient, for a clip norm of 1.

        It is z C / B for C = 1: the noise to compare with a coordinate of the gradient.
        """
        return cast(float, self.mechanism.noise_stddev)


def _each(numbers: Any) -> list[Any]:
    """Lists several numbers, or one."""
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
    """Computes the least noise for each budget, batch size and number of epochs.

    Batches are drawn by Poisson sampling. The only fact of the data is their number.

    Args:
      target_epsilons: the epsilons to reach and not to exceed; a number or several.
      target_delta: the delta, well below 1 / num_examples.
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
    each = map(_each, (epochs, target_epsilons, batch_sizes))
    for passes, epsilon, batch_size in itertools.product(*each):
        numbers: dict[str, Any] = dict(
            target_epsilon=epsilon,
            target_delta=target_delta,
            batch_size=batch_size,
            epochs=passes,
            num_examples=num_examples,
        )
        mechanism = PoissonGaussian.calibrate(
            accountant=accountant,
            l2_clip_norm=1.0,
            neighboring_relation=neighboring_relation,
            **numbers,
        )
        used = accountant or mechanism.accountants[0]
        rows.append(PlannedRun(mechanism=mechanism, accountant=used, **numbers))
    return rows

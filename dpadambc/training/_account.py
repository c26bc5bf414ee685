"""What a run spends, on top of what earlier runs on the same people's data spent."""

import dataclasses
from typing import Any, TypeAlias

from dpadambc.mechanisms import accounting
from dpadambc.mechanisms.accounting import Spending
from dpadambc.mechanisms.base import Mechanism

Spent: TypeAlias = Any  # a Result, a Release, a Spending, a mechanism, or a list


def earlier(spent: Spent) -> Spending | None:
    """What `fit` is given as `spent`; None for nothing."""
    if spent is None:
        return None
    several = spent if type(spent) in (list, tuple) else [spent]
    return accounting.compose(several) if several else None


@dataclasses.dataclass(frozen=True)
class Account:
    """What a run has spent after so many steps, and with it the runs before it.

    Args:
      mechanism: of this run.
      target_delta: for epsilon.
      earlier: what was spent before it, if anything.
      name: a random one, by which a run that is given twice counts once.
    """

    mechanism: Mechanism
    target_delta: float
    earlier: Spending | None = None
    name: str | None = None

    def spending(self, iterations: int) -> Spending:
        """All runs, this one with so many steps."""
        own = Spending.of_run(self.mechanism, iterations, name=self.name)
        return own if self.earlier is None else accounting.compose([self.earlier, own])

    def epsilon(self, iterations: int) -> float:
        """Of all runs together."""
        if self.earlier is None:
            return self.mechanism.epsilon(self.target_delta, iterations=iterations)
        return self.spending(iterations).epsilon(self.target_delta)

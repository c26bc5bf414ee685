"""What a run spends, on top of what earlier runs on the same people's data spent."""

import dataclasses
import secrets
from typing import Any, TypeAlias

from dpadambc.core.mechanism import Mechanism
from dpadambc.core.spending import Spending, compose, run_of

Spent: TypeAlias = Any  # a Result, a Release, a Spending, a mechanism, or a list


def earlier(spent: Spent) -> Spending | None:
    """What `fit` is given as `spent`; None for nothing."""
    if spent is None:
        return None
    several = spent if type(spent) in (list, tuple) else [spent]
    return compose(several) if several else None


@dataclasses.dataclass(frozen=True)
class Account:
    """What a run has spent after so many steps, and with it the runs before it.

    Args:
      mechanism: of this run.
      target_delta: for epsilon.
      earlier: what was spent before it, if anything.
      parts: the random names of earlier calls of `fit` that the run is made of, each
        with the step at which it ended.
      name: of this call.
    """

    mechanism: Mechanism
    target_delta: float
    earlier: Spending | None = None
    parts: tuple[tuple[str, int], ...] = ()
    name: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))

    def parts_at(self, step: int) -> tuple[tuple[str, int], ...]:
        """The parts of the run after so many steps."""
        is_new = not self.parts or self.parts[-1][1] < step
        return (*self.parts, (self.name, step)) if is_new else self.parts

    def spending(self, iterations: int, taken: int | None = None) -> Spending:
        """All runs, this one counted with so many steps, of which some were taken."""
        parts = self.parts_at(iterations if taken is None else taken)
        own = Spending((run_of(self.mechanism, iterations, parts),))
        return own if self.earlier is None else compose([self.earlier, own])

    def epsilon(self, iterations: int) -> float:
        """Of all runs together."""
        if self.earlier is None:
            return self.mechanism.epsilon(self.target_delta, iterations=iterations)
        return self.spending(iterations).epsilon(self.target_delta)

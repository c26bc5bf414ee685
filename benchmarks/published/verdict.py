"""The rule that says whether a published number held; the page has it in words.

A number is an `Estimate`. Its reach is what rounding leaves open plus half of a 95 %
confidence interval (Student's t; of a difference, with Welch's degrees of freedom). The
error of fewer than three seeds is taken to be infinite.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Literal

import scipy.stats

Verdict = Literal["held", "not held", "open", "not comparable"]

CONFIDENCE = 0.95
LEAST_SEEDS = 3


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number and how far it can be trusted; an exact one has no error."""

    mean: float
    error: float = 0.0  # standard error of the mean
    dof: float = math.inf  # degrees of freedom of the error
    slack: float = 0.0  # what rounding leaves open, at most

    def __sub__(self, other: "Estimate") -> "Estimate":
        mean, slack = self.mean - other.mean, self.slack + other.slack
        error = math.hypot(self.error, other.error)
        if not 0 < error < math.inf:
            return Estimate(mean, error, 0.0 if error else math.inf, slack)
        # Welch and Satterthwaite.
        shares = ((e.error / error) ** 4 / e.dof for e in (self, other))
        return Estimate(mean, error, 1 / math.fsum(shares), slack)

    @property
    def reach(self) -> float:
        if self.error in (0, math.inf):
            return self.slack + self.error
        quantile = scipy.stats.t.ppf((1 + CONFIDENCE) / 2, self.dof)
        return self.slack + float(quantile) * self.error

    @property
    def sign(self) -> int:
        """0 if it is within reach of 0."""
        return 0 if abs(self.mean) <= self.reach else int(math.copysign(1, self.mean))


def measured(values: float | Sequence[float]) -> Estimate:
    """The mean over seeds, or a number that no chance is in."""
    if isinstance(values, float | int):
        return Estimate(float(values))
    mean = statistics.fmean(values)
    if len(values) < LEAST_SEEDS:
        return Estimate(mean, math.inf, 0)
    if len(set(values)) == 1 or math.isinf(mean):
        return Estimate(mean)
    error = statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean, error, len(values) - 1)


def rounding(printed: str) -> float:
    """Half a unit of the last printed digit."""
    digits, _, exponent = printed.lower().partition("e")
    decimals = len(digits.partition(".")[2])
    return 0.5 * 10.0 ** (int(exponent or 0) - decimals)


def printed(text: str, over: float = 0.0) -> Estimate:
    """A number as published, or "low to high"; it may be too large by `over`."""
    low, _, high = text.partition(" to ")
    least, most = float(low) - over, float(high or low)
    return Estimate((least + most) / 2, slack=rounding(low) + abs(most - least) / 2)


def of_runs(printed: Sequence[str], runs: int) -> Estimate:
    """A published mean; its deviation is taken to be the root of a mean square."""
    mean, stdev = printed
    error = float(stdev) / math.sqrt(runs - 1)
    return Estimate(float(mean), error, runs - 1, rounding(mean))


def value(published: Estimate, ours: Estimate) -> Verdict:
    difference = published - ours
    if math.isinf(difference.reach):
        return "open"
    return "held" if abs(difference.mean) <= difference.reach else "not held"


def bound(published: float, ours: Estimate) -> Verdict:
    return "held" if ours.mean <= published else "not held"


def order(published: Estimate, ours: Estimate) -> Verdict:
    if math.isfinite(ours.reach) and published.sign == ours.sign:
        return "held"
    may_be = value(published, ours) != "not held"
    return "open" if ours.sign == 0 and may_be else "not held"

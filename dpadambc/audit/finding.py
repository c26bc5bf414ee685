"""The outcome of a check: pass, fail or not tested, with its figure and its bound."""

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    A check passes if its figure is at most its bound. A check that cannot decide has
    `passed=None`: *not tested* is no pass.

    Attributes:
      check: the name of the check.
      passed: whether it passed; None if it was not tested.
      figure: the measured number, if there is one.
      bound: the largest figure that passes.
      sentence: the outcome in words.
      fails_if: the condition under which the check fails, with its power.
      parts: the findings of a check that makes several.

    Example:
      >>> from dpadambc import audit
      >>> finding = audit.Finding(
      ...     "sensitivity", False, figure=2.0, bound=1.0,
      ...     sentence="One example moves the sum by twice the bound.")
      >>> print(finding)
      FAIL        sensitivity: One example moves the sum by twice the bound.
    """

    check: str
    passed: bool | None
    figure: float | None
    bound: float | None
    sentence: str
    fails_if: str = ""
    parts: tuple["Finding", ...] = ()

    @property
    def word(self) -> str:
        """The word of the outcome: `pass`, `FAIL` or `not tested`."""
        return {True: "pass", False: "FAIL", None: "not tested"}[self.passed]

    def __str__(self) -> str:
        return f"{self.word:<11} {self.check}: {self.sentence}"


def within(
    check: str, figure: float, bound: float, sentence: str, fails_if: str = ""
) -> Finding:
    """Makes a finding that passes if the figure is a number and at most the bound."""
    passed = bool(figure <= bound)
    return Finding(check, passed, float(figure), float(bound), sentence, fails_if)


def not_tested(check: str, reason: str) -> Finding:
    """Makes the finding of a check that cannot decide."""
    return Finding(check, None, None, None, f"Not tested: {reason}")


def _excess(finding: Finding) -> float:
    """Returns the figure in units of the bound."""
    figure, bound = finding.figure or 0.0, finding.bound or 0.0
    if math.isnan(figure):
        return math.inf
    return figure / bound if bound else math.inf * figure if figure > 0 else 0.0


def combined(check: str, parts: Sequence[Finding]) -> Finding:
    """Combines findings: the result fails if one does, and passes if all do.

    Figure and bound come from the failed part that exceeds its bound by most, else from
    the first part that was not tested, else from the first. The sentence joins those of
    all parts that do not pass, or is that of the first if all do.
    """
    failed = [part for part in parts if part.passed is False]
    untested = [part for part in parts if part.passed is None]
    chosen = max(failed, key=_excess) if failed else (untested or parts)[0]
    outcome = chosen.passed, chosen.figure, chosen.bound
    sentence = " ".join(part.sentence for part in failed or untested or [chosen])
    fails_if = "; ".join(dict.fromkeys(x.fails_if for x in parts if x.fails_if))
    return Finding(check, *outcome, sentence, fails_if, tuple(parts))

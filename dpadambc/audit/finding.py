"""What a check found: pass, fail or not tested, with its figure and its bound."""

import dataclasses
import math
from collections.abc import Sequence

_WORDS = {True: "pass", False: "FAIL", None: "not tested"}


@dataclasses.dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    A check passes where its figure is at most its bound. A check that cannot tell has
    `passed=None`: *not tested* is no pass.

    Attributes:
      check: the name of the check.
      passed: whether it passed; None if it was not tested.
      figure: what was measured, if it is a number.
      bound: the largest figure that passes.
      sentence: the outcome in words.
      fails_if: what makes the check fail, with its power.
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
        """`pass`, `FAIL` or `not tested`."""
        return _WORDS[self.passed]

    def __str__(self) -> str:
        return f"{self.word:<11} {self.check}: {self.sentence}"


def within(
    check: str, figure: float, bound: float, sentence: str, fails_if: str = ""
) -> Finding:
    """A finding that passes where the figure is a number and at most the bound."""
    passed = bool(figure <= bound)
    return Finding(check, passed, float(figure), float(bound), sentence, fails_if)


def not_tested(check: str, reason: str) -> Finding:
    """A finding of a check that cannot tell."""
    return Finding(check, None, None, None, f"Not tested: {reason}")


def _excess(finding: Finding) -> float:
    """The figure in units of the bound."""
    figure, bound = finding.figure or 0.0, finding.bound or 0.0
    if math.isnan(figure):
        return math.inf
    return figure / bound if bound else math.inf * figure if figure > 0 else 0.0


def combined(check: str, parts: Sequence[Finding]) -> Finding:
    """One finding of several: it fails if one does, and passes if all do.

    Its figure, bound and sentence are those of the part that is furthest beyond its
    bound, or of the first if all pass; if it does not, the sentences of all that do
    not.
    """
    failed = [part for part in parts if part.passed is False]
    open_ = [part for part in parts if part.passed is None]
    chosen = max(failed, key=_excess) if failed else (open_ or parts)[0]
    told = failed or open_ or [chosen]
    return Finding(
        check,
        chosen.passed,
        chosen.figure,
        chosen.bound,
        " ".join(part.sentence for part in told),
        "; ".join(dict.fromkeys(part.fails_if for part in parts if part.fails_if)),
        tuple(parts),
    )

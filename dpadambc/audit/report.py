"""All checks of a pipeline, as one table."""

import dataclasses
import json
import math
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import Any

from dpadambc.audit import examined as _examined
from dpadambc.audit import later_steps as _later
from dpadambc.audit import noise_tests as _noise_tests
from dpadambc.audit import recorder as _recorder
from dpadambc.audit import steps as _steps
from dpadambc.audit.closed_over import closed_over
from dpadambc.audit.correction import correction, is_corrected
from dpadambc.audit.factored import factored
from dpadambc.audit.finding import Finding, combined, not_tested
from dpadambc.audit.isolation import of_loss, unknown
from dpadambc.audit.noise import without_crossings
from dpadambc.audit.pipeline import Pipeline
from dpadambc.audit.sampling import sampling
from dpadambc.audit.sensitivity import sensitivity
from dpadambc.audit.state import of_examined

CHECKS = (
    "sensitivity",
    "noise",
    "state",
    "isolation",
    "factored",
    "sampling",
    "correction",
)

__all__ = ["CHECKS", "Report", "run"]


@dataclasses.dataclass(frozen=True)
class Report:
    """What all checks found. Printed, it is a table.

    Attributes:
      findings: one for each check, in the order of the checks.
    """

    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool | None:
        """False if a check failed, None if none did and one was not made."""
        outcomes = [finding.passed for finding in self.findings]
        return False if False in outcomes else None if None in outcomes else True

    @property
    def exit_code(self) -> int:
        """0 if all passed, 1 if one failed, 3 if none did and one was not made."""
        return {True: 0, False: 1, None: 3}[self.passed]

    def as_dict(self) -> dict[str, Any]:
        """What `json.dumps` takes."""
        return {
            "passed": self.passed,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
        }

    def to_json(self) -> str:
        """The findings with all their parts; infinity is a string, as JSON has none."""
        return json.dumps(_finite(self.as_dict()), indent=2)

    def __str__(self) -> str:
        rows = [("check", "outcome", "figure", "at most")]
        rows += [
            (x.check, x.word, _number(x.figure), _number(x.bound))
            for x in self.findings
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row, finding in zip(rows, (None, *self.findings), strict=True):
            cells = [cell.ljust(n) for cell, n in zip(row, widths, strict=True)]
            lines.append("  ".join(cells).rstrip())
            for text in (finding.sentence, finding.fails_if) if finding else ():
                lines += textwrap.wrap(
                    text, 88, initial_indent="    ", subsequent_indent="    "
                )
        return "\n".join(lines)


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.4g}"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(x) for key, x in value.items()}
    if isinstance(value, tuple | list):
        return [_finite(x) for x in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def run(
    pipeline: Pipeline,
    *,
    checks: Sequence[str] = CHECKS,
    progress: Callable[[str], Any] | None = None,
) -> Report:
    """Makes all checks of a pipeline.

    A dozen tests are statistical, each with a nominal false-alarm rate of 1e-6 by its
    asymptotic distribution.

    The cost: it traces the step a few times, compiles it about six times, and takes
    some 150 gradients of its batch. It makes 4 to 4,096 short runs, until there are
    four million numbers of noise, and two runs of at most 512 steps.

    Args:
      pipeline: your own training.
      checks: some of `CHECKS`, by name; the quickest that say whether training is
        private at all are `("sensitivity", "noise")`. `correction` is left out by
        default where the optimizer has none, and `factored` where the step is described
        by its functions.
      progress: told of each check before it begins and after it ends, such as `print`.

    Returns:
      A `Report`.

    Raises:
      ValueError: for an unknown check, or none.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> from dpadambc import audit
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.1,
      ...     iterations=100, normalize_by=100)
      >>> x = jax.random.normal(jax.random.key(0), (1_000, 50))
      >>> pipeline = audit.Pipeline.of_fit(
      ...     lambda w, x: jnp.tanh(w @ x), jnp.zeros(50), (x,), mechanism,
      ...     dpadambc.adam_bc(0.1, mechanism.noise_stddev))
      >>> audit.run(pipeline).passed
      True
    """
    unknown = sorted(set(checks) - set(CHECKS))
    if unknown or not checks:
        raise ValueError(f"Expected checks among {CHECKS}, got {unknown or 'none'}.")
    tell = progress or (lambda text: None)
    findings, traced = [], _Traced(pipeline)
    for check in checks:
        if checks is CHECKS and traced.has_no(check):
            continue
        tell(f"{check} ...")
        start = time.perf_counter()
        try:
            finding = getattr(traced, check)()
        except (_steps.NotTraceable, _recorder.NotRecordable) as error:
            finding = not_tested(check, f"{error}")
        findings.append(finding)
        tell(f"{finding} ({time.perf_counter() - start:.1f} s)")
    return Report(tuple(findings))


class _Traced:
    """The checks, with one trace of the step for those that share it."""

    def __init__(self, pipeline: Pipeline):
        self._pipeline = pipeline
        self._found: _examined.Examined | Exception | None = None

    @property
    def _examined(self) -> _examined.Examined:
        if self._found is None:
            try:
                self._found = _examined.examine(self._pipeline)
            except (_steps.NotTraceable, _recorder.NotRecordable) as error:
                self._found = error
        if isinstance(self._found, Exception):
            raise self._found
        return self._found

    def has_no(self, check: str) -> bool:
        """Whether a step has nothing of what a check is about.

        An optimizer without `scale_by_adam_bc` has no correction, and a step that is
        described by its functions does not show gradients of single examples.
        """
        make, params = self._pipeline.make_optimizer, self._pipeline.params
        if check == "correction" and make is not None:
            return not is_corrected(make, params)
        return check == "factored" and self._pipeline.gradients_by is None

    def sensitivity(self) -> Finding:
        found = self._examined
        if not found.noise:
            return not_tested("sensitivity", "no noise is added to what examples make.")
        finding = sensitivity(
            found.before_noise,
            found.state,
            self._pipeline.batch,
            bound=found.bound,
            neighboring_relation=self._pipeline.mechanism.neighboring_relation,
        )
        figure, bound = finding.figure or 0.0, finding.bound or 0.0
        if finding.passed and figure < bound / 2:
            finding = dataclasses.replace(finding, passed=None)
        others = closed_over(found)
        return combined("sensitivity", [finding, others]) if others else finding

    def noise(self) -> Finding:
        found = self._examined
        if not found.noise:
            return without_crossings(found.followed)
        mechanism = self._pipeline.mechanism
        followed, neighbors = found.followed, found.neighbors
        tests = _noise_tests.all_tests(mechanism, followed, found.noise, found.moved)
        later = _later.later(
            *(found.steps, followed, mechanism, found.noise, neighbors),
            found.factor,
            found.everybody,
        )
        return combined("noise", [*tests, later])

    def state(self) -> Finding:
        return of_examined(self._examined)

    def isolation(self) -> Finding:
        pipeline = self._pipeline
        if pipeline.per_example is None:
            return unknown()
        return of_loss(pipeline.per_example, pipeline.params, pipeline.batch)

    def factored(self) -> Finding:
        return factored(self._pipeline)

    def sampling(self) -> Finding:
        pipeline = self._pipeline
        if pipeline.loader is None or pipeline.num_examples is None:
            return not_tested("sampling", "no loader shows the batches of your loop.")
        return sampling(
            pipeline.loader, pipeline.mechanism, num_examples=pipeline.num_examples
        )

    def correction(self) -> Finding:
        pipeline = self._pipeline
        if pipeline.make_optimizer is None:
            return not_tested("correction", "no optimizer is given.")
        return correction(pipeline.make_optimizer, pipeline.params, pipeline.mechanism)

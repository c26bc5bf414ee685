"""All checks of a pipeline, as one table."""

import dataclasses
import functools
import json
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import Any

from dpadambc.accounting.records import finite
from dpadambc.audit.correction import correction, is_corrected
from dpadambc.audit.finding import Finding, not_tested
from dpadambc.audit.noise_tests import noise_finding
from dpadambc.audit.per_example import factored, isolation
from dpadambc.audit.pipeline import Pipeline
from dpadambc.audit.recorder import NotRecordable
from dpadambc.audit.sampling import sampling
from dpadambc.audit.steps import NotTraceable
from dpadambc.audit.whole_step import WholeStep, state_finding, whole_step
from dpadambc.clipping.plan import aligned


@dataclasses.dataclass(frozen=True)
class Report:
    """The findings of all checks, which print as a table.

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
        """The exit code: 0 if all passed, 1 if one failed, 3 if one was not made."""
        return {True: 0, False: 1, None: 3}[self.passed]

    def to_json(self) -> str:
        """The findings with all their parts; infinity is a string, as JSON has none."""
        numbers = {"passed": self.passed, **dataclasses.asdict(self)}
        return json.dumps(finite(numbers), indent=2)

    def __str__(self) -> str:
        number = lambda x: "-" if x is None else f"{x:.4g}"
        row = lambda x: (x.check, x.word, number(x.figure), number(x.bound))
        titles = "check", "outcome", "figure", "at most"
        header, *table = aligned([titles, *map(row, self.findings)], num_left=4)
        lines = [header]
        for row, finding in zip(table, self.findings, strict=True):
            lines.append(row)
            for text in (finding.sentence, finding.fails_if):
                lines += textwrap.indent(textwrap.fill(text, 84), "    ").splitlines()
        return "\n".join(lines)


def _isolation(pipeline: Pipeline) -> Finding:
    if pipeline.per_example is None:
        return not_tested("isolation", "no function gives a value for each example.")
    try:
        return isolation(pipeline.per_example, pipeline.params, pipeline.batch)
    except ValueError as error:
        if "Expected loss_fn to see one example alone" not in str(error):
            raise
        return Finding("isolation", False, 1.0, 0.0, f"{error}")


def _sampling(pipeline: Pipeline) -> Finding:
    loader, num_examples = pipeline.loader, pipeline.num_examples
    if loader is None or num_examples is None:
        return not_tested("sampling", "no loader shows the batches of your loop.")
    return sampling(loader, pipeline.mechanism, num_examples=num_examples)


def _correction(pipeline: Pipeline) -> Finding:
    if pipeline.make_optimizer is None:
        return not_tested("correction", "no optimizer is given.")
    return correction(pipeline.make_optimizer, pipeline.params, pipeline.mechanism)


# Functions of a pipeline, and of its step, which is traced on first use.
_CHECKS: dict[str, Callable[[Pipeline, Callable[[], WholeStep]], Finding]] = {
    "sensitivity": lambda pipeline, step: step().sensitivity(),
    "noise": lambda pipeline, step: noise_finding(step().measured),
    "state": lambda pipeline, step: state_finding(step()),
    "isolation": lambda pipeline, step: _isolation(pipeline),
    "factored": lambda pipeline, step: factored(pipeline),
    "sampling": lambda pipeline, step: _sampling(pipeline),
    "correction": lambda pipeline, step: _correction(pipeline),
}
CHECKS = tuple(_CHECKS)


def _applies(check: str, pipeline: Pipeline) -> bool:
    """Returns whether a check applies to a step.

    An optimizer without `scale_by_adam_bc` has no correction, and a step that is
    described by its functions does not show per-example gradients.
    """
    make = pipeline.make_optimizer
    if check == "correction" and make is not None:
        return is_corrected(make, pipeline.params)
    return check != "factored" or pipeline.gradients_by is not None


def run(
    pipeline: Pipeline,
    *,
    checks: Sequence[str] = CHECKS,
    progress: Callable[[str], Any] | None = None,
) -> Report:
    """Makes all checks of a pipeline.

    A dozen tests are statistical, each with a nominal false-alarm rate of 1e-6 by its
    asymptotic distribution.

    The cost: it traces the step a few times, compiles it about six times, and computes
    some 150 gradients of its batch. It makes 4 to 4,096 short runs, until there are
    four million numbers of noise, and two runs of at most 512 steps.

    Args:
      pipeline: your own training.
      checks: some of `CHECKS`, by name; the quickest that show whether training is
        private at all are `("sensitivity", "noise")`. `correction` is left out by
        default if the optimizer has none, and `factored` if the step is described by
        its functions.
      progress: a function such as `print`, called with a line before and after each
        check.

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
    if checks is CHECKS:
        checks = [check for check in CHECKS if _applies(check, pipeline)]
    progress = progress or (lambda text: None)
    findings, step = [], functools.cache(lambda: whole_step(pipeline))
    for check in checks:
        progress(f"{check} ...")
        start = time.perf_counter()
        try:
            finding = _CHECKS[check](pipeline, step)
        except (NotTraceable, NotRecordable) as error:
            finding = not_tested(check, f"{error}")
        findings.append(finding)
        progress(f"{finding} ({time.perf_counter() - start:.1f} s)")
    return Report(tuple(findings))

"""The spending of several runs, in a form that JSON can hold."""

import importlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

from dpadambc.core import validate
from dpadambc.core.clip import NeighboringRelation
from dpadambc.core.spending import Run, Spending, class_name, public_numbers
from dpadambc.mechanisms.mechanism import Mechanism

_KIND, _STEPS, _LEVELS, _PARTS = "mechanism", "steps", "noise_multiplier", "parts"
_RELATION, _RULE = "neighboring_relation", "clip_rule"
# These folders have mechanisms too, and few processes need them.
_FOLDERS = "dpadambc.contrib", "dpadambc.graphs"


def spending_to_json(spending: Spending) -> list[dict[str, Any]]:
    """Records the mechanism's name and number of steps for every run.

    A schedule is recorded as its noise multipliers, each with its number of steps. A
    clip rule does not change epsilon, and is left out.

    Args:
      spending: the spending of one run or several.

    Returns:
      A list that `json.dumps` takes.

    Example:
      >>> import json
      >>> import dpadambc
      >>> from dpadambc import accounting
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=2.0, sampling_prob=0.1, iterations=100,
      ...     normalize_by=100)
      >>> spent = accounting.compose([mechanism])
      >>> text = json.dumps(accounting.spending_to_json(spent))
      >>> accounting.spending_from_json(json.loads(text)) == spent
      True
    """

    def of_run(run: Run) -> dict[str, Any]:
        numbers = {_STEPS: run.steps, **public_numbers(run.mechanism)}
        numbers.pop(_RULE, None)
        numbers[_LEVELS] = [list(level) for level in run.levels]
        parts = {_PARTS: [list(part) for part in run.parts]} if run.parts else {}
        return numbers | parts

    return [of_run(run) for run in spending.runs]


def finite(value: Any) -> Any:
    """Replaces infinity and NaN, which JSON does not have, by text."""
    if isinstance(value, dict):
        return {key: finite(x) for key, x in value.items()}
    if isinstance(value, tuple | list):
        return [finite(x) for x in value]
    is_finite = not isinstance(value, float) or math.isfinite(value)
    return value if is_finite else str(value)


def _kinds(kind: type[Mechanism] = Mechanism) -> Iterator[type[Mechanism]]:
    """Yields all mechanism classes of this process."""
    for below in kind.__subclasses__():
        yield below
        yield from _kinds(below)


def _run(found: dict[str, Any]) -> Run:
    needed = {_KIND, _STEPS, _LEVELS, _RELATION}
    if missing := needed - set(found):
        raise ValueError(f"Expected a run with {', '.join(sorted(missing))}: {found!r}")
    levels = tuple((z, n) for z, n in found[_LEVELS])
    for z, n in levels:
        validate.non_negative(noise_multiplier=z)
        validate.count(steps=n)
    if not levels or sum(n for _, n in levels) != found[_STEPS]:
        raise ValueError(
            f"Expected the steps of noise_multiplier to add up to {found[_STEPS]}, got"
            f" {levels}."
        )
    module, _, _ = found[_KIND].rpartition(".")
    if module in _FOLDERS:
        importlib.import_module(module)
    known = {class_name(kind): kind for kind in _kinds()}
    if found[_KIND] not in known:
        raise ValueError(
            f"Expected a mechanism that this process knows, got {found[_KIND]}. Import"
            " the module that defines it."
        )
    numbers = {k: v for k, v in found.items() if k not in needed | {_PARTS}}
    mechanism = cast(Any, known[found[_KIND]])(
        **numbers,
        noise_multiplier=levels[0][0],
        neighboring_relation=NeighboringRelation[found[_RELATION]],
    )
    return Run(mechanism, levels, tuple(map(tuple, found.get(_PARTS, ()))))


def spending_from_json(found: Sequence[dict[str, Any]]) -> Spending:
    """Reads the spending that `spending_to_json` wrote.

    Args:
      found: a list of dictionaries.

    Returns:
      A `Spending` that equals the one that was written.

    Raises:
      ValueError: if a mechanism is not known in this process, or a number is missing or
        out of its range.
      TypeError: if a mechanism has other numbers.

    Example:
      >>> import dpadambc
      >>> from dpadambc import accounting
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=2.0, sampling_prob=0.1, iterations=100,
      ...     normalize_by=100)
      >>> spent = accounting.compose([mechanism])
      >>> found = accounting.spending_from_json(accounting.spending_to_json(spent))
      >>> found == spent
      True
    """
    return Spending(tuple(map(_run, found)))

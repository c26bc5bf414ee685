"""Finds the number that meets a target epsilon; converts epochs to fields.

The search differs from dp-accounting's `calibrate_dp_mechanism` in its cost: it starts
on the side where accounting is cheap, on coarse grids, and takes a few fine ones at the
end. No answer exceeds its target.
"""

import contextlib
import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from dpadambc.accounting import roots
from dpadambc.core import validate
from dpadambc.mechanisms.names import IN_PLACE

# A target that epsilon jumps over is refused if it is missed by more than this.
_MISSED = 1e-3


@contextlib.contextmanager
def without_lines() -> Iterator[None]:
    """Hides what dp-accounting logs of Rényi orders that it leaves out."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@without_lines()
def solved(
    epsilon_of: Callable[..., float], unknown: str, target_epsilon: float
) -> float | int:
    """Returns the value of the unknown with which epsilon meets a target.

    Args:
      epsilon_of: epsilon as a function of the unknown; it takes the `tolerance` and
        the `enough` of `PrivacyLosses.on_fine_grid`.
      unknown: "noise_multiplier", "sampling_prob" or "iterations".
      target_epsilon: the epsilon to reach and not to exceed.
    """
    validate.positive(target_epsilon=target_epsilon)
    target_epsilon = float(target_epsilon)  # in double precision, for any input dtype
    # Far below the target, a rough epsilon is enough.
    enough = (1 - roots.ROUGHLY) * target_epsilon

    @functools.cache
    def ratio(x: float, **how: float) -> float:
        return epsilon_of(x, enough=enough, **how) / target_epsilon

    takes_steps = unknown == "iterations"
    grid = start, _, end = {  # from the side of little epsilon
        "noise_multiplier": (2.0**20, 0.25, 2.0**-40),
        "sampling_prob": (2.0**-24, 4.0, 1.0),
        "iterations": (1, 4, 2**30),
    }[unknown]
    if unknown == "noise_multiplier" and ratio(start) > 1:
        grid = start, _, _ = 2.0**30, 0.25, start
    if ratio(start) > 1:
        raise ValueError(
            f"Expected a target_epsilon that some {unknown} can reach, got"
            f" {target_epsilon:g}: it is {ratio(start) * target_epsilon:.3g} even at"
            f" {start:g}. Ask for more."
        )
    found = roots.solution(ratio, grid, takes_steps)
    beyond = math.ceil((1 + 2 * roots.ACCURACY) * found) + 1
    jumps = found != end and (not takes_steps or epsilon_of(beyond) == math.inf)
    if ratio(found) > 1 or (jumps and ratio(found) < 1 - _MISSED):
        if not takes_steps:
            beyond = min(found * grid[1] ** 0.01, max(start, end))
        low, high = (ratio(x) * target_epsilon for x in (found, beyond))
        raise ValueError(
            f"Expected a target_epsilon that some {unknown} meets, got"
            f" {target_epsilon:g}, over which epsilon jumps from {low:.3g} to"
            f" {high:.3g}. Ask for more, or take another accountant."
        )
    return found


def _exactly(number: float) -> Fraction:
    """Converts a float to the fraction that it is written as: 0.1 is a tenth."""
    return Fraction(repr(float(number)))


def _check_part(batch_size: Any, num_examples: Any) -> None:
    """Raises unless a batch of this size can be part of the data."""
    if num_examples is None:
        raise TypeError(f"Expected num_examples with {batch_size=}, got none.")
    validate.count(num_examples=num_examples, least=1)
    validate.positive(batch_size=batch_size)
    if not 1 <= batch_size <= num_examples:
        raise ValueError(
            f"Expected batch_size from 1 to {num_examples=}, got {batch_size!r}. A"
            " probability is sampling_prob."
        )


def as_fields(kind: Any, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the numbers that users think of to the fields of a mechanism.

    Args:
      kind: the class of the mechanism.
      numbers: some fields, and `epochs`, `batch_size` and `num_examples`; None counts
        as left out.
    """
    names = inspect.signature(kind).parameters
    given = {name: value for name, value in numbers.items() if value is not None}
    found = {k: v for k, v in given.items() if k in names or k not in IN_PLACE}
    follows: dict[str, Any] = {}
    per_epoch = Fraction(int(given.get("batches_per_epoch", 0)))
    if "batch_size" in given:
        batch_size: Any = given["batch_size"]
        num_examples: Any = given.get("num_examples")
        _check_part(batch_size, num_examples)
        found.setdefault("normalize_by", batch_size)
        rows = int(num_examples) * int(given.get("participations", 1))
        per_epoch = per_epoch or rows / _exactly(batch_size)
        if kind.deals_epochs or "batches_per_epoch" in names:
            per_epoch = Fraction(math.ceil(per_epoch))
        if "batches_per_epoch" in names:
            follows["batches_per_epoch"] = int(per_epoch)
        elif "sampling_prob" in names:
            follows["sampling_prob"] = batch_size / num_examples
    if "epochs" in given:
        validate.positive(epochs=given["epochs"])
        if not per_epoch:
            raise TypeError("Expected batch_size and num_examples, got only epochs.")
        follows["iterations"] = math.ceil(_exactly(given["epochs"]) * per_epoch)
    if twice := follows.keys() & found.keys():
        raise TypeError(
            f"Expected epochs and batch_size without {sorted(twice)}, got both."
        )
    return found | follows

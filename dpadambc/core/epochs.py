"""Epochs, batch size and number of examples, as the fields of a mechanism."""

import math
from collections.abc import Collection
from fractions import Fraction
from typing import Any

from dpadambc.core import validate


def _exactly(number: float) -> Fraction:
    """As it is written: 0.1 is a tenth."""
    return Fraction(repr(float(number)))


def _refuse_both(given: str, name: str, numbers: dict[str, Any]) -> None:
    if name in numbers:
        raise TypeError(
            f"Expected {given} in place of {name}, got {name}={numbers[name]!r} too."
            " Leave out one of them."
        )


def _check(numbers: dict[str, Any]) -> None:
    """Refuses an epoch or a batch that makes no sense by itself."""
    batch_size, num_examples = numbers.get("batch_size"), numbers.get("num_examples")
    if num_examples is not None:
        validate.count(num_examples=num_examples, least=1)
    if batch_size is not None:
        validate.positive(batch_size=batch_size)
        if batch_size < 1:
            raise ValueError(
                "Expected batch_size to be a number of examples, at least 1, got"
                f" {batch_size!r}. A probability is sampling_prob={batch_size!r}."
            )
        if num_examples is None:
            raise TypeError(
                f"Expected num_examples with batch_size, got batch_size={batch_size!r}"
                " alone: the sampling depends on their ratio."
            )
        if batch_size > num_examples:
            raise ValueError(
                f"Expected batch_size <= num_examples={num_examples}, got"
                f" batch_size={batch_size!r}."
            )
    if "epochs" in numbers:
        validate.positive(epochs=numbers["epochs"])
        _refuse_both("epochs", "iterations", numbers)
        if batch_size is None and "batches_per_epoch" not in numbers:
            raise TypeError(
                "Expected batch_size and num_examples with epochs: they say how many"
                " steps an epoch has. Give them, or iterations in place of epochs."
            )


def _steps_per_epoch(numbers: dict[str, Any], deals_epochs: bool) -> Fraction:
    if "batches_per_epoch" in numbers:
        return Fraction(int(numbers["batches_per_epoch"]))
    # Of Python, whose integers do not overflow.
    rows = int(numbers["num_examples"]) * int(numbers.get("participations", 1))
    steps = rows / _exactly(numbers["batch_size"])
    return Fraction(math.ceil(steps)) if deals_epochs else steps


def as_fields(
    names: Collection[str], numbers: dict[str, Any], *, deals_epochs: bool
) -> dict[str, Any]:
    """The numbers that users think of, as those of a mechanism.

    Args:
      names: the fields of the mechanism.
      numbers: some of them, and `epochs`, `batch_size` and `num_examples`; None is as
        good as left out.
      deals_epochs: whether an epoch deals all examples into batches, and so is a whole
        number of steps.
    """
    numbers = {name: value for name, value in numbers.items() if value is not None}
    _check(numbers)
    if "batch_size" in numbers:
        numbers.setdefault("normalize_by", numbers["batch_size"])
        if "batches_per_epoch" in names:
            _refuse_both("batch_size", "batches_per_epoch", numbers)
            steps = _steps_per_epoch(numbers, deals_epochs=True)
            numbers["batches_per_epoch"] = int(steps)
        elif "sampling_prob" in names:
            _refuse_both("batch_size", "sampling_prob", numbers)
            numbers["sampling_prob"] = numbers["batch_size"] / numbers["num_examples"]
    if "epochs" in numbers:
        steps = _steps_per_epoch(numbers, deals_epochs)
        numbers["iterations"] = math.ceil(_exactly(numbers.pop("epochs")) * steps)
    asked = {"batch_size", "num_examples"} - set(names)
    return {name: value for name, value in numbers.items() if name not in asked}

"""Noising coefficients: how much of which step's draws is in the noise of a step."""

import math
from collections.abc import Sequence

import numpy as np

from dpadambc.core import validate


def check(
    coefficients: Sequence[float], name: str = "noising_coefficients"
) -> tuple[float, ...]:
    """The coefficients as floats, of which the first is 1.

    Args:
      coefficients: of a lower-triangular Toeplitz matrix.
      name: of the argument.
    """
    if isinstance(coefficients, str) or not np.iterable(coefficients):
        raise TypeError(
            f"Expected {name} to be a sequence of numbers, such as (1.0, -0.9), got"
            f" {coefficients!r}."
        )
    for value in (found := tuple(coefficients)):
        number = validate.known_number(name, value)
        if number is None or not math.isfinite(number):
            raise ValueError(f"Expected finite {name}, got {found}.")
    found = tuple(float(x) for x in found)
    if found[:1] != (1.0,):
        raise ValueError(
            f"Expected {name} that begin with 1, the share of a step's own noise, got"
            f" {found}. Divide them by the first, which is a noise level."
        )
    return found

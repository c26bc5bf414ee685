"""Checks that an argument is a mechanism, for functions outside the core."""

from typing import Any

from dpadambc.core.mechanism import Mechanism


def check_mechanism(mechanism: Any) -> None:
    """Raises unless the argument is a mechanism."""
    if not isinstance(mechanism, Mechanism):
        raise TypeError(
            "Expected mechanism to be a dpadambc mechanism, such as a PoissonGaussian,"
            f" got {type(mechanism)}."
        )


def check_independent_noise(mechanism: Any) -> None:
    """Raises unless it is a mechanism whose noise is independent over steps."""
    check_mechanism(mechanism)
    if not mechanism.has_independent_noise:
        raise ValueError(
            "Expected mechanism to have independent noise in every step, got a"
            f" {type(mechanism).__name__}."
        )

"""Whether what is given as a mechanism is one."""

from typing import Any

from dpadambc.mechanisms.base import Mechanism


def is_mechanism(mechanism: Any) -> None:
    """Raises unless it is one."""
    if not isinstance(mechanism, Mechanism):
        raise TypeError(
            "Expected mechanism to be a dpadambc mechanism, such as a"
            f" PoissonGaussian, got {mechanism!r}."
        )

"""Whether what is given as a mechanism is one."""

from typing import Any

from dpadambc.core.mechanism import Mechanism


def is_mechanism(mechanism: Any) -> None:
    """Raises unless it is one."""
    if not isinstance(mechanism, Mechanism):
        raise TypeError(
            "Expected mechanism to be a dpadambc mechanism, such as a"
            f" PoissonGaussian, got {mechanism!r}."
        )


def has_independent_noise(mechanism: Any) -> None:
    """Raises unless it is a mechanism whose noise is independent over steps."""
    is_mechanism(mechanism)
    if not mechanism.has_independent_noise:
        raise ValueError(
            "Expected a mechanism with independent noise in every step, got a"
            f" {type(mechanism).__name__}, whose noise is correlated: the level of one"
            " step does not say what it hides, and these tests would take its"
            " correlation for an error."
        )

"""What a run has spent, and how far its budget goes."""

import dataclasses
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc import _validate
from dpadambc.mechanism import Mechanism


def affordable_iterations(
    mechanism: Mechanism, *, target_epsilon: float, target_delta: float
) -> int:
    """The most steps of a mechanism that stay within a budget.

    Args:
      mechanism: the public numbers.
      target_epsilon: not to be exceeded.
      target_delta: the delta that goes with it.

    Returns:
      A number of at most `mechanism.iterations`; 0 if not even one step is affordable.

    Raises:
      ValueError: if the target is negative, or delta not in (0, 1).

    Example:
      >>> import dpadambc
      >>> from dpadambc import training
      >>> mechanism = dpadambc.SubsampledGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=2.0, sampling_prob=0.02,
      ...     iterations=10_000, normalize_by=100)
      >>> training.affordable_iterations(
      ...     mechanism, target_epsilon=1.0, target_delta=1e-5)
      584
    """
    _validate.non_negative(target_epsilon=target_epsilon)

    def is_affordable(iterations: int) -> bool:
        spent = mechanism.epsilon(target_delta, iterations=iterations)
        return spent <= target_epsilon

    # Epsilon grows with the steps, so halving finds where it crosses the target.
    low, high = 0, mechanism.iterations
    if is_affordable(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_affordable(middle) else (low, middle)
    return low


def _number(field: Any, iterations: int) -> Any:
    """A field as JSON can hold it: a schedule as its values at every step."""
    if callable(field):
        values = np.asarray(jax.vmap(field)(jnp.arange(max(iterations, 1))), float)
        digest = hashlib.sha256(values.tobytes()).hexdigest()[:16]
        return f"a schedule from {values[0]:g} to {values[-1]:g} ({digest})"
    if isinstance(field, np.generic | np.ndarray | jax.Array):
        return field.item()
    return getattr(field, "name", field)


def public_numbers(mechanism: Mechanism) -> dict[str, Any]:
    """The mechanism as a ledger holds it: its class and every field."""
    fields = dataclasses.fields(mechanism)  # pyright: ignore[reportArgumentType]
    numbers = {
        f.name: _number(getattr(mechanism, f.name), mechanism.iterations)
        for f in fields
    }
    return {"mechanism": type(mechanism).__name__, **numbers}


def differences(recorded: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line for each number that is not the same."""
    missing = "nothing"
    return [
        f"{name}: {recorded.get(name, missing)} there, {now.get(name, missing)} here"
        for name in {**recorded, **now}
        if recorded.get(name, missing) != now.get(name, missing)
    ]

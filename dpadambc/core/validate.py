"""Checks of arguments, with one style of message.

Each check takes one keyword argument, whose name the message carries. A check tests a
number where its value is known. A number that JAX traces has a dtype only, which must
have at least 32 bits.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from dpadambc.core.leaves import summary
from dpadambc.engine import rounding


def _single(named: dict[str, Any]) -> tuple[str, Any]:
    ((name, value),) = named.items()
    return name, value


def known_number(name: str, value: Any) -> float | None:
    """Returns the value as a float, or None where JAX is tracing it."""
    try:
        array = np.asarray(value) if not isinstance(value, jax.Array) else value
        if isinstance(value, str | bytes | bool | np.bool_) or array.shape != ():
            raise TypeError
        return float(array)
    except jax.errors.ConcretizationTypeError:
        return None
    except (TypeError, ValueError):
        raise TypeError(f"Expected {name} as a number, got {summary(value)}.") from None


def full_precision(**named: Any) -> None:
    """Raises if a number has a dtype below 32 bits: 0.999 in bfloat16 is 1."""
    name, value = _single(named)
    dtype = getattr(value, "dtype", None)
    is_floating = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    if is_floating and jnp.finfo(dtype).bits < 32:
        raise TypeError(
            f"Expected {name} in at least float32, got {dtype}. With"
            " optax.inject_hyperparams, pass hyperparam_dtype=jnp.float32."
        )


def require(named: dict[str, Any], holds: Callable[[float], bool], expected: str):
    """Raises unless a condition holds for the number, if its value is known."""
    full_precision(**named)
    name, value = _single(named)
    number = known_number(name, value)
    if number is not None and not holds(number):
        raise ValueError(f"Expected {name} {expected}, got {name}={number:g}.")


def python_number(**named: Any) -> Any:
    """Converts an array of one number to a Python number; returns the rest as is."""
    full_precision(**named)
    _, value = _single(named)
    is_array = isinstance(value, np.generic | np.ndarray | jax.Array)
    is_known = is_array and not isinstance(value, core.Tracer)
    return value.item() if is_known and value.shape == () else value


def positive(**named: Any) -> None:
    """Raises unless the number is finite and greater than zero."""
    require(named, lambda x: 0 < x < math.inf, "to be positive and finite")


def positive_or_infinite(**named: Any) -> None:
    """Raises unless the number is greater than zero; infinity is allowed."""
    require(named, lambda x: x > 0, "to be positive")


def non_negative(**named: Any) -> None:
    """Raises unless the number is finite and at least zero."""
    require(named, lambda x: 0 <= x < math.inf, "to be non-negative and finite")


def probability(**named: Any) -> None:
    """Raises unless the number is in [0, 1]."""
    require(named, lambda x: 0 <= x <= 1, "in [0, 1]")


def open_unit_interval(**named: Any) -> None:
    """Raises unless the number is strictly between 0 and 1."""
    require(named, lambda x: 0 < x < 1, "in (0, 1)")


def count(*, least: int = 0, **named: Any) -> None:
    """Raises unless the value is a whole number of at least `least`."""
    name, value = _single(named)
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise TypeError(
            f"Expected {name} to be an int, got {summary(value)}. Give a whole number."
        )
    if value < least:
        raise ValueError(f"Expected {name} >= {least}, got {name}={value}.")


def function(**named: Any) -> None:
    """Raises unless the value is callable."""
    name, value = _single(named)
    if not callable(value):
        raise TypeError(f"Expected {name} to be a function, got {type(value)}.")


def transformation(**named: Any) -> None:
    """Raises unless the value is an Optax transformation, rather than its factory."""
    name, value = _single(named)
    if isinstance(value, type) or not {"init", "update"} <= {*dir(value)}:
        raise TypeError(f"Expected {name} such as optax.sgd(0.1), got {type(value)}.")


def typed_key(**named: Any) -> None:
    """Raises unless the value is one typed JAX key, such as from `jax.random.key`."""
    name, value = _single(named)
    dtype = getattr(value, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        got = dtype or type(value).__name__  # no value: it may be the seed
        raise TypeError(f"Expected {name} of training.secret_key(), got {got}.")
    if value.shape != ():
        raise ValueError(f"Expected {name} to be one key, got shape {value.shape}.")


def precision(precision: rounding.Precision) -> None:
    """Raises unless the precision is None or one that the clip has a bound for."""
    choices = rounding.CHOICES
    if precision is not None and precision not in choices:
        raise ValueError(
            "Expected precision None, jax.lax.Precision.HIGHEST or a"
            " jax.lax.DotAlgorithmPreset with a bound, got"
            f" {summary(precision)}. Choose among {', '.join(map(str, choices))}."
        )


def real_arrays(**named: Any) -> None:
    """Raises unless all leaves are arrays of real floating-point numbers."""
    name, tree = _single(named)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        dtype = getattr(leaf, "dtype", None)
        is_real = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
        if not is_real or jnp.finfo(dtype).bits < 16:
            raise TypeError(
                f"Expected {name}{jax.tree_util.keystr(path)} to be an array of real"
                " floating-point numbers of 16 bits or more, got"
                f" {dtype or type(leaf).__name__}. Give whole numbers by astype(float),"
                " a complex one as a pair, real part and imaginary part, and one that"
                " is not trained as another argument."
            )


def padding(is_padding_example: Any, size: int) -> None:
    """Raises unless the mask is a bool array with one entry per example."""
    dtype = getattr(is_padding_example, "dtype", type(is_padding_example))
    if dtype != jnp.bool_:
        raise TypeError(f"Expected is_padding_example of dtype bool, got {dtype}.")
    if (shape := is_padding_example.shape) != (size,):
        raise ValueError(f"Expected {size} rows of is_padding_example, got {shape}.")

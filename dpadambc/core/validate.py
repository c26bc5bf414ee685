"""Checks of what a caller passes in, with one style of message.

Each check takes one keyword argument, so that the message carries its name: what was
expected, what came and, where it helps, what to do. Numbers are checked when their
value is known. One that JAX is tracing has none; its dtype is checked, which must have
32 bits or more.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import core


def _single(named: dict[str, Any]) -> tuple[str, Any]:
    ((name, value),) = named.items()
    return name, value


def known_number(name: str, value: Any) -> float | None:
    """The value as a float, or None where JAX is tracing it."""
    try:
        array = np.asarray(value) if not isinstance(value, jax.Array) else value
        if isinstance(value, str | bytes) or array.shape != ():
            raise TypeError
        return float(array)
    except jax.errors.ConcretizationTypeError:
        return None
    except (TypeError, ValueError):
        raise TypeError(f"Expected {name} to be a number, got {value!r}.") from None


def _require(named: dict[str, Any], holds: Callable[[float], bool], expected: str):
    full_precision(**named)
    name, value = _single(named)
    number = known_number(name, value)
    if number is not None and not holds(number):
        raise ValueError(f"Expected {name} {expected}, got {name}={number:g}.")


def python_number(**named: Any) -> Any:
    """What is an array of one number, as that; anything else as it is."""
    full_precision(**named)
    _, value = _single(named)
    is_array = isinstance(value, np.generic | np.ndarray | jax.Array)
    if not is_array or isinstance(value, core.Tracer) or value.shape != ():
        return value
    return value.item()


def positive(**named: Any) -> None:
    """Finite and greater than zero."""
    _require(named, lambda x: 0 < x < math.inf, "to be positive and finite")


def positive_or_infinite(**named: Any) -> None:
    """Greater than zero; infinity is allowed."""
    _require(named, lambda x: x > 0, "to be positive")


def non_negative(**named: Any) -> None:
    """Finite and at least zero."""
    _require(named, lambda x: 0 <= x < math.inf, "to be non-negative and finite")


def probability(**named: Any) -> None:
    """Within [0, 1]."""
    _require(named, lambda x: 0 <= x <= 1, "in [0, 1]")


def open_unit_interval(**named: Any) -> None:
    """Strictly between 0 and 1."""
    _require(named, lambda x: 0 < x < 1, "in (0, 1)")


def decay(**named: Any) -> None:
    """Within [0, 1): the decay rate of a moving average."""
    _require(named, lambda x: 0 <= x < 1, "in [0, 1)")


def count(*, least: int = 0, **named: Any) -> None:
    """A whole number of at least `least`."""
    name, value = _single(named)
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        is_array = getattr(value, "shape", None) == () and hasattr(value, "astype")
        what = f" Give int({name})." if is_array else ""
        raise TypeError(f"Expected {name} to be an int, got {value!r}.{what}")
    if value < least:
        raise ValueError(f"Expected {name} >= {least}, got {name}={value}.")


def generator(**named: Any) -> None:
    """A generator of NumPy."""
    name, value = _single(named)
    if not isinstance(value, np.random.Generator):
        raise TypeError(
            f"Expected {name} to be a numpy.random.Generator, such as"
            f" numpy.random.default_rng(), got {type(value).__name__}."
        )


def whole(*, least: int, **named: Any) -> None:
    """As `count`, of a number that JAX may be tracing, or that is an array of it."""
    name, value = _single(named)
    if not isinstance(value, jax.Array):
        return count(least=least, **named)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"Expected {name} to be an int, got {value!r}.")
    _require(named, lambda x: x >= least, f">= {least}")


def one_of(choices: Sequence[str], **named: Any) -> None:
    """One of a few words."""
    name, value = _single(named)
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"Expected {name} to be one of {listed}, got {value!r}.")


def function(**named: Any) -> None:
    """What can be called."""
    name, value = _single(named)
    if not callable(value):
        raise TypeError(f"Expected {name} to be a function, got {value!r}.")


def of_private_gradient(optimizer: Any) -> None:
    """An Optax transformation, rather than its name or the function that makes it."""
    has = lambda name: callable(getattr(optimizer, name, None))
    if isinstance(optimizer, type) or not (has("init") and has("update")):
        raise TypeError(
            "Expected optimizer to be an Optax transformation of the private gradient,"
            " such as optax.adam(1e-3) or"
            " dpadambc.adam_bc(1e-3, mechanism.noise_stddev), got"
            f" {optimizer!r}."
        )


def full_precision(**named: Any) -> None:
    """Of at least 32 bits, where it has a dtype of its own.

    A bfloat16 standard deviation is off by up to 0.4 %, and with it the guarantee;
    0.999 in bfloat16 is 1. `optax.inject_hyperparams` makes such numbers when the
    parameters are in bfloat16.
    """
    name, value = _single(named)
    dtype = getattr(value, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return
    if jnp.finfo(dtype).bits < 32:
        raise TypeError(
            f"Expected {name} in at least float32, got {dtype}. With"
            " optax.inject_hyperparams, pass hyperparam_dtype=jnp.float32."
        )


def floating(**named: Any) -> None:
    """A floating dtype, or None."""
    name, value = _single(named)
    if isinstance(value, jax.Array):
        raise TypeError(
            f"Expected {name} to be a floating dtype, got an array of {value.dtype}."
            " optax.inject_hyperparams calls a dtype as if it were a schedule: give its"
            f" name, a string, or pass static_args={name!r}."
        )
    if value is not None and not jnp.issubdtype(jnp.dtype(value), jnp.floating):
        raise TypeError(
            f"Expected {name} to be a floating dtype, got {jnp.dtype(value)}."
        )


def typed_key(**named: Any) -> None:
    """One typed JAX key, as `jax.random.key` makes it."""
    name, value = _single(named)
    dtype = getattr(value, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        what = f"dtype {dtype}" if dtype is not None else repr(value)
        raise TypeError(
            f"Expected {name} to be a typed JAX key, got {what}. Take"
            " dpadambc.training.secret_key() for a run on protected data, and"
            " jax.random.key(seed) to try; jax.random.wrap_key_data wraps raw key data."
        )
    if value.shape != ():
        raise ValueError(
            f"Expected {name} to be one key of shape (), got shape {value.shape}."
        )


def real_floating(dtype: Any, name: str) -> None:
    """Of real floating-point numbers."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"Expected {name} to be floating, got {dtype}.")


def real_tree(tree: Any) -> None:
    """No complex number in any leaf."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating):
            raise TypeError(
                f"Expected gradients of real numbers, got {jnp.result_type(leaf)} at"
                f" {jax.tree_util.keystr(path) or 'the gradient'}. Train the real and"
                " the imaginary part as two parameters."
            )


def padding(is_padding_example: Any, batch_size: int) -> None:
    """A bool array, with one entry per example."""
    dtype = getattr(is_padding_example, "dtype", type(is_padding_example))
    if not hasattr(is_padding_example, "shape") or dtype != jnp.bool_:
        raise TypeError(
            "Expected is_padding_example to be a bool array, True where the example is"
            f" padding, got {dtype}."
        )
    if is_padding_example.shape != (batch_size,):
        raise ValueError(
            f"Expected is_padding_example of shape ({batch_size},), one entry per"
            f" example, got shape {is_padding_example.shape}."
        )


def sees_a_part(params: optax.Params | None) -> bool:
    """Whether `optax.masked` or `optax.multi_transform` hides some parameters."""
    is_hidden = lambda x: isinstance(x, optax.MaskedNode)
    return any(map(is_hidden, jax.tree.leaves(params, is_leaf=is_hidden)))

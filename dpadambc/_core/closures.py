"""What functions hold: to tell two that were not traced apart, and to say in what.

A program is told from another by a checksum, which says no more, and where nothing is
traced yet there is none. What a function computes is in its code, in its defaults, in
what it closes over and in the globals it names: of `optax.adam(1e-3)`, say, in the
closures of its stages.
"""

import functools
import hashlib
import inspect
import itertools
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from dpadambc._core import marks

_MOST_NAMED = 200  # numbers, of a program that has more
_MOST_VISITED = 10_000  # values
_MOST_NESTED = 100
# A program shows of them what they compute, and no derivative before one is taken.
_WITH_OWN_DERIVATIVE = jax.custom_vjp | jax.custom_jvp
# Whose functions are as they were when the process began.
_LIBRARIES = {"dpadambc", "flax", "jax", "numpy", "optax"}


def _parts(value: Any) -> dict[str, Any]:
    """What a function, a container or an object is made of, by name."""
    if isinstance(value, functools.partial):
        return {**_parts(value.args), **value.keywords, "": value.func}
    if isinstance(value, dict):
        return {str(name): x for name, x in value.items()}
    if isinstance(value, tuple | list):
        names = getattr(value, "_fields", map(str, range(len(value))))
        return dict(zip(names, value, strict=True))
    if isinstance(value, types.MethodType):
        return {"self": _used_by(value), "": value.__func__}
    if isinstance(value, types.FunctionType):
        return _held(value)
    if isinstance(value, _WITH_OWN_DERIVATIVE):
        rules = {name: _attribute(value, name) for name in ("fwd", "bwd", "jvp")}
        return rules | {"": _attribute(value, "fun")}
    if (wrapped := _attribute(value, "__wrapped__")) is not None:
        return {"": wrapped}
    return _fields(value)


def _attribute(value: Any, name: str) -> Any:
    try:
        return getattr(value, name, None)
    except Exception:  # noqa: BLE001 - an object may answer with whatever error
        return None


def _fields(value: Any) -> dict[str, Any]:
    """Of an object, in its dictionary or its slots."""
    slots = (vars(kind).get("__slots__", ()) for kind in type(value).__mro__)
    several = ((x,) if isinstance(x, str) else tuple(x) for x in slots)
    found = {x: _attribute(value, x) for x in itertools.chain(*several)}
    found |= _attribute(value, "__dict__") or {}
    # Flax numbers its modules, each anew, and says so to itself.
    is_of_flax = any(_package(kind) == "flax" for kind in type(value).__mro__)
    hidden = "_" if is_of_flax else "__"
    found = {name: x for name, x in found.items() if not name.startswith(hidden)}
    call = inspect.getattr_static(type(value), "__call__", None)
    return found | ({"": call} if isinstance(call, types.FunctionType) else {})


def _package(value: Any) -> str:
    return str(_attribute(value, "__module__")).partition(".")[0]


def _used_by(method: types.MethodType) -> Any:
    """The fields of an object that a method of it names, or those that it calls.

    Others, such as a count of epochs, may change from one run of a cell to the next.
    """
    owner, names = method.__self__, set()
    if isinstance(owner, tuple) or _package(method.__func__) in _LIBRARIES:
        return owner
    called = [method.__func__]
    while called:
        new = set(_names(called.pop())) - names
        names |= new
        called += [_attribute(type(owner), name) for name in sorted(new)]
    return {name: x for name, x in _fields(owner).items() if name in names}


def _names(function: Any) -> Iterator[str]:
    """The attributes and globals that are named in a function."""
    codes = [getattr(function, "__code__", None)]
    while codes:
        if isinstance(code := codes.pop(), types.CodeType):
            yield from code.co_names
            codes += code.co_consts


def _held(function: types.FunctionType) -> dict[str, Any]:
    """Defaults, what is closed over, and globals."""
    code, defaults = function.__code__, function.__defaults__ or ()
    last = code.co_varnames[: code.co_argcount][-len(defaults) or code.co_argcount :]
    found = dict(zip(last, defaults, strict=True)) | (function.__kwdefaults__ or {})
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if _is_filled(cell):
            found[name] = cell.cell_contents
    is_mine = _package(function) not in _LIBRARIES
    kinds = types.FunctionType | dict | list | tuple | _WITH_OWN_DERIVATIVE
    for name in _names(function):
        value = function.__globals__.get(name)
        if _is_number(value) or (is_mine and isinstance(value, kinds)):
            found.setdefault(name, value)
    return found


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_array(value: Any) -> bool:
    """One with numbers in it, or a number of NumPy."""
    if isinstance(value, jax.Array):
        return not (isinstance(value, core.Tracer) or value.is_deleted())
    return isinstance(value, np.ndarray | np.generic)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool | int | float):
        return True
    return _is_array(value) and (
        value.shape == ()
        and jnp.isrealobj(value)
        and jnp.issubdtype(value.dtype, np.number)
    )


def _words(code: types.CodeType) -> str:
    """What a function does, as far as its own code says it, wherever it is written."""
    inner = [_words(x) if hasattr(x, "co_code") else repr(x) for x in code.co_consts]
    return " ".join([code.co_code.hex(), *code.co_names, *inner])


def _float(value: Any) -> float | None:
    """A number, unless it is none or too large."""
    try:
        return float(value) if _is_number(value) else None
    except OverflowError:
        return None


def _text(value: Any) -> str | None:
    """What a value says that has no parts; None where it has some."""
    if isinstance(value, int):
        return f"{value:x}"  # of any length
    if _is_number(value):
        return str(value)
    if _is_array(value):
        has_numbers = jnp.issubdtype(value.dtype, np.number) and value.size
        return marks.of(value) if has_numbers else ""
    if isinstance(value, str | bytes):
        return repr(value)
    return value.__name__ if isinstance(value, type | types.ModuleType) else None


class _Walk:
    """Goes into everything once."""

    def __init__(self):
        self.found: dict[str, float] = {}
        self.content = hashlib.blake2b(digest_size=8)
        self.with_own_derivative: list[Any] = []
        self._seen: dict[int, Any] = {}  # kept, so that no other takes its place

    def visit(self, name: str, value: Any, depth: int = 0) -> None:
        """Adds the numbers in a value, and its content to the checksum."""
        if len(self.found) < _MOST_NAMED and (number := _float(value)) is not None:
            self.found[name] = number
        if (text := _text(value)) is not None:
            self._add(text)
        elif not isinstance(value, core.Tracer) and self._is_new(value, depth):
            self._add(type(value).__name__)
            if isinstance(value, _WITH_OWN_DERIVATIVE):
                self.with_own_derivative.append(value)
            if isinstance(code := _attribute(value, "__code__"), types.CodeType):
                self._add(_words(code))
            for part, inner in _parts(value).items():
                self.visit(f"{name}.{part}" if part else name, inner, depth + 1)

    def _add(self, text: str) -> None:
        self.content.update(f"{text}\n".encode())

    def _is_new(self, value: Any, depth: int) -> bool:
        is_new = id(value) not in self._seen
        self._seen[id(value)] = value
        return is_new and depth < _MOST_NESTED and len(self._seen) < _MOST_VISITED


def of(**named: Any) -> dict[str, float]:
    """The numbers in closures, fields and containers, each by the way that leads to it.

    Example:
      >>> import optax
      >>> from dpadambc._core import closures
      >>> closures.of(optimizer=optax.sgd(0.5))
      {'optimizer.update.update_fns.1.tx.update.step_size': -0.5}
    """
    return _walked(named).found


def checksum(**named: Any) -> str:
    """Of the code of functions and of what they hold.

    That is numbers, text, a few numbers of each array, and functions in turn.
    """
    return _walked(named).content.hexdigest()


def derivatives(**named: Any) -> str:
    """`checksum`, of the functions that have a derivative of their own."""
    return checksum(functions=_walked(named).with_own_derivative)


def _walked(named: dict[str, Any]) -> _Walk:
    walk = _Walk()
    for name, value in named.items():
        walk.visit(name, value)
    return walk

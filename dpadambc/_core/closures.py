"""The numbers of a program by name, to say which one differs between two runs.

A program is told from another by a checksum, which says no more. Its numbers are mostly
in closures: of `optax.adam(1e-3)`, say, in those of its stages. What is found here is
for a message; what tells runs apart is `fingerprint`, or, where nothing is traced yet,
the code of the functions that hold the numbers.
"""

import functools
import hashlib
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_MOST = 200  # numbers, of a program that has more
_LEAVES = (str, bytes, type, types.ModuleType, jax.Array, np.ndarray, np.generic)


def _parts(value: Any) -> dict[str, Any]:
    """What a function, a container or an object is made of, by name."""
    if isinstance(value, functools.partial):
        return {**_parts(value.args), **value.keywords, "": value.func}
    if isinstance(value, dict):
        return {str(name): x for name, x in value.items()}
    if isinstance(value, tuple | list):
        names = getattr(value, "_fields", map(str, range(len(value))))
        return dict(zip(names, value, strict=True))
    if hasattr(value, "__func__"):  # a bound method
        return {"self": value.__self__, "": value.__func__}
    if hasattr(value, "__wrapped__"):
        return {"": value.__wrapped__}
    if hasattr(value, "__code__"):
        cells = value.__closure__ or ()
        names = value.__code__.co_freevars
        found = {
            name: cell.cell_contents
            for name, cell in zip(names, cells, strict=True)
            if _is_filled(cell)
        }
        used = {n: value.__globals__.get(n) for n in value.__code__.co_names}
        found |= {name: x for name, x in used.items() if _is_number(x)}
        return found | (value.__kwdefaults__ or {})
    return dict(getattr(value, "__dict__", {}))


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_number(value: Any) -> bool:
    if isinstance(value, bool | int | float | np.floating | np.integer):
        return True
    return isinstance(value, jax.Array | np.ndarray) and (
        value.shape == ()
        and jnp.isrealobj(value)
        and jnp.issubdtype(value.dtype, np.number)
    )


def _words(code: types.CodeType) -> str:
    """What a function does, as far as its own code says it, wherever it is written."""
    inner = [_words(x) if hasattr(x, "co_code") else repr(x) for x in code.co_consts]
    return " ".join([code.co_code.hex(), *code.co_names, *inner])


class _Walk:
    """Goes into everything once."""

    def __init__(self):
        self.found: dict[str, float] = {}
        self.code = hashlib.blake2b(digest_size=8)
        self._seen: list[Any] = []  # kept, so that no other takes its place in memory

    def visit(self, name: str, value: Any) -> None:
        """Adds the numbers in a value."""
        if _is_number(value):
            self.found[name] = float(value)
        elif not isinstance(value, _LEAVES) and self._is_new(value):
            if isinstance(code := getattr(value, "__code__", None), types.CodeType):
                self.code.update(_words(code).encode())
            for part, inner in _parts(value).items():
                if len(self.found) < _MOST:
                    self.visit(f"{name}.{part}" if part else name, inner)

    def _is_new(self, value: Any) -> bool:
        is_new = not any(value is x for x in self._seen)
        self._seen.append(value)
        return is_new


def of(**named: Any) -> dict[str, float]:
    """The numbers in closures, fields and containers, each by the way that leads to it.

    Example:
      >>> import optax
      >>> from dpadambc._core import closures
      >>> closures.of(optimizer=optax.sgd(0.5))
      {'optimizer.update.update_fns.1.tx.update.step_size': -0.5}
    """
    return _walked(named).found


def functions(**named: Any) -> str:
    """A checksum of the code of these functions, and of those in their closures."""
    return _walked(named).code.hexdigest()


def _walked(named: dict[str, Any]) -> _Walk:
    walk = _Walk()
    for name, value in named.items():
        walk.visit(name, value)
    return walk

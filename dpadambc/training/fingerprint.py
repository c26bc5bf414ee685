"""What tells one run from another, so that none gets noise that was given before."""

import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def of_values(tree: Any) -> str:
    """Of all numbers in a tree, their shapes and their dtypes; keys are left out."""
    digest = hashlib.sha256(str(jax.tree.structure(tree)).encode())
    for leaf in jax.tree.leaves(tree):
        if _is_key(leaf):
            continue
        array = np.asarray(leaf)
        digest.update(f"{array.shape} {array.dtype}".encode())
        # As bytes: Python has no buffers of bfloat16.
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def _inner(value: Any) -> Iterator[tuple[jex.Jaxpr, list[Any]]]:
    """The programs among the parameters of an equation, each with its constants."""
    if isinstance(value, jex.ClosedJaxpr):
        yield value.jaxpr, list(value.consts)
    elif isinstance(value, jex.Jaxpr):
        yield value, []
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _inner(item)


def _constants(jaxpr: jex.Jaxpr, consts: list[Any]) -> Iterator[Any]:
    """The constants of a program and of all programs inside it."""
    yield from consts
    for equation in jaxpr.eqns:
        for atom in equation.invars:
            if isinstance(atom, jex.Literal):
                yield atom.val
        for inner, inner_consts in _inner(list(equation.params.values())):
            yield from _constants(inner, inner_consts)


def of_program(fun: Callable[..., Any], *args: Any) -> str:
    """Of a traced function: its operations and every constant in it."""
    traced = jax.make_jaxpr(fun)(*args)
    operations = re.sub(r"0x[0-9a-f]+", "", str(traced)).encode()
    constants = list(_constants(traced.jaxpr, list(traced.consts)))
    return of_values((np.frombuffer(operations, np.uint8), constants))

"""Checksums of what tells one run from another: of arrays, and of programs."""

import hashlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from dpadambc.core import keys
from dpadambc.engine import jaxprs

# Addresses, and the devices that an array is placed on. (Over how many a program sums,
# in `shard_map`, is no incident.)
_INCIDENTAL = (
    r"0x[0-9a-f]+"
    r"|\s(ctx|context)_mesh=Mesh\((?:[^()]|\([^()]*\))*\)"
    r"|(?<=NamedSharding\()mesh=Mesh\((?:[^()]|\([^()]*\))*\)"
)


def _essence(text: str) -> str:
    """A text without what changes from process to process, or with its line breaks.

    A space that parts two names stays: it may be all that does.
    """
    one_line = re.sub(r"\s+", " ", re.sub(_INCIDENTAL, "", text))
    return re.sub(r" ?([\[\](){}]) ?", r"\1", one_line)


def of_values(tree: Any) -> str:
    """Of all numbers in a tree, their shapes and their dtypes.

    It does not depend on the devices that have them.
    """
    digest = hashlib.sha256(_essence(str(jax.tree.structure(tree))).encode())
    for x in map(jnp.asarray, jax.tree.leaves(tree)):
        digest.update(f"{x.shape} {x.dtype}".encode())
        digest.update(np.asarray(keys.checksum(x)).tobytes())
    return digest.hexdigest()[:16]


def constants(traced: jex.ClosedJaxpr) -> Iterator[Any]:
    """The constants of a program and of all programs inside it."""
    yield from traced.consts
    for equation in traced.jaxpr.eqns:
        for atom in equation.invars:
            if isinstance(atom, jex.Literal):
                yield atom.val
        for inner in jaxprs.inner(equation):
            yield from constants(inner)


_CALLBACKS = frozenset({"pure_callback", "io_callback"})


def refuse_callbacks(jaxpr: jex.Jaxpr) -> None:
    """Raises for a program that calls back to the host, whose state it cannot show."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in _CALLBACKS:
            raise ValueError(
                "Expected a program that shows all that it computes, so that a"
                " checkpoint goes on with the same run, got a callback to the host"
                f" ({equation.primitive.name}). Compute its result beforehand, as data,"
                " or run without checkpoints."
            )
        for inner in jaxprs.inner(equation):
            refuse_callbacks(inner.jaxpr)


def of_traced(traced: jex.ClosedJaxpr) -> str:
    """Of a program: its operations and every constant in it.

    It does not depend on the devices: the same program on others differs by rounding.
    """
    values = of_values(list(constants(traced)))
    text = _essence(str(traced)) + values
    return hashlib.sha256(text.encode()).hexdigest()[:16]

"""What tells one run from another, so that none gets noise that was given before."""

import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from dpadambc._core import checksums, jaxprs

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
        digest.update(np.asarray(checksums.of_tree(x)).tobytes())
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


_CALLBACKS = {"pure_callback", "io_callback"}


def _refuse_callbacks(jaxpr: jex.Jaxpr) -> None:
    for equation in jaxpr.eqns:
        if equation.primitive.name in _CALLBACKS:
            raise ValueError(
                "Expected a loss whose program shows all that it computes, got a"
                f" callback to the host in it ({equation.primitive.name}). If that"
                " computes something else when the run goes on from its checkpoint,"
                " another gradient gets noise that was used before. Compute its result"
                " beforehand, as data, or run without checkpoints."
            )
        for inner in jaxprs.inner(equation):
            _refuse_callbacks(inner.jaxpr)


def of_traced(traced: jex.ClosedJaxpr) -> str:
    """Of a program: its operations and every constant in it.

    It does not depend on the devices: the same program on others differs by rounding.
    """
    values = of_values(list(constants(traced)))
    text = _essence(str(traced)) + values
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def of_program(fun: Callable[..., Any], *args: Any) -> str:
    """`of_traced`, of a function of these arguments.

    Raises:
      ValueError: if it calls back to the host, whose state it cannot show.
    """
    traced = jax.make_jaxpr(fun)(*args)
    _refuse_callbacks(traced.jaxpr)
    return of_traced(traced)

"""Checksums of what tells one run from another: of arrays, and of programs."""

import hashlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from dpadambc._core import jaxprs, threefry

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


def _words(x: Any) -> tuple[str, jax.Array]:
    """The name of a dtype and the numbers: of a key, the words that it is made of."""
    if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
        return str(jax.random.key_impl(x)), jax.random.key_data(x)
    array = jnp.asarray(x)
    return array.dtype.name, array


def _bits(x: jax.Array) -> jax.Array:
    """What an array is in memory, in words of 32 bits or in numbers of fewer."""
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    if jnp.issubdtype(x.dtype, jnp.floating):
        bits = jnp.finfo(x.dtype).bits
        x = jax.lax.bitcast_convert_type(x, f"uint{bits}")
    if x.itemsize > 4:
        x = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return x.astype(jnp.uint32)


@jax.jit
def _checksum(index: int, x: jax.Array) -> jax.Array:
    """Two words: a sum over what the generator makes of an array's elements.

    Each counter is an element and its position, so that any change of one shows. And a
    sum of integers is the same wherever the parts of an array are: nothing is gathered.
    """
    bits = _bits(x)
    key = jnp.uint32(index), jnp.uint32(bits.ndim)
    mixed = threefry.words(key, bits, threefry.positions(bits.shape))
    return jnp.stack([jnp.sum(word, dtype=jnp.uint32) for word in mixed])


def of_values(tree: Any) -> str:
    """Of all numbers in a tree, their shapes and their dtypes.

    It does not depend on the devices that have them.
    """
    digest = hashlib.sha256(_essence(str(jax.tree.structure(tree))).encode())
    for index, (dtype, x) in enumerate(map(_words, jax.tree.leaves(tree))):
        digest.update(f"{x.shape} {dtype}".encode())
        digest.update(np.asarray(_checksum(index, x)).tobytes())
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

"""What tells one run from another, so that none gets noise that was given before."""

import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from dpadambc import threefry


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


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
    """Of all numbers in a tree, their shapes and their dtypes; keys are left out.

    It does not depend on the devices that have them.
    """
    digest = hashlib.sha256(str(jax.tree.structure(tree)).encode())
    arrays = [jnp.asarray(x) for x in jax.tree.leaves(tree) if not _is_key(x)]
    for index, x in enumerate(arrays):
        digest.update(f"{x.shape} {x.dtype.name}".encode())
        digest.update(np.asarray(_checksum(index, x)).tobytes())
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


# Addresses, the devices of the run, and how the text is broken into lines.
_INCIDENTAL = r"0x[0-9a-f]+|(ctx_mesh=)?Mesh\((?:[^()]|\([^()]*\))*\)|\s+"


def of_program(fun: Callable[..., Any], *args: Any) -> str:
    """Of a traced function: its operations and every constant in it.

    It does not depend on the devices: the same program on others differs by rounding.
    """
    traced = jax.make_jaxpr(fun)(*args)
    operations = re.sub(_INCIDENTAL, "", str(traced))
    constants = of_values(list(_constants(traced.jaxpr, list(traced.consts))))
    return hashlib.sha256((operations + constants).encode()).hexdigest()[:16]

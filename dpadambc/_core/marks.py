"""What arrays are known by: a few of their numbers."""

import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dpadambc._core import explicit_mesh

_PLACES = 256
_MOST_NUMBERS = 2**22  # that are looked at: labels, or a table of a thousand rows


@functools.cache
def _places(size: int) -> np.ndarray:
    """Places in an array, far from each other and in no pattern of rows."""
    if size <= _PLACES:
        return np.arange(size)
    golden = (np.sqrt(5) - 1) / 2
    return (np.arange(_PLACES) * golden % 1 * size).astype(np.int64)


def _take(x: jax.Array, index: tuple[Any, ...]) -> jax.Array:
    take = lambda x, index: x[index]
    return explicit_mesh.automatic(take, PartitionSpec(), x, index)


def sample(x: jax.Array | np.ndarray) -> np.ndarray:
    """The numbers at those places, with nothing else moved to the host."""
    if not isinstance(x, jax.Array):
        return np.asarray(x).reshape(-1)[_places(x.size)]
    x = x.addressable_data(0) if x.is_fully_replicated else x
    devices, places = x.sharding.device_set, _places(x.size)
    if len(devices) == 1 and next(iter(devices)).platform == "cpu":
        return np.asarray(x).reshape(-1)[places]  # no copy
    replicated = None
    if isinstance(x.sharding, NamedSharding):
        replicated = NamedSharding(x.sharding.mesh, PartitionSpec())
    index = np.unravel_index(places, x.shape)
    return np.asarray(jax.jit(_take, out_shardings=replicated)(x, index))


def of(tree: Any, *, closely: bool = False) -> str:
    """What all arrays of a tree are known by together, keys excepted.

    `closely`, an array is known by all its numbers, if these are not too many.
    """
    found = hashlib.blake2b(digest_size=8)
    for x in jax.tree.leaves(tree):
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            found.update(f"{x.shape} {x.dtype}".encode())
            is_here = getattr(x, "is_fully_addressable", True)
            is_whole = closely and x.size <= _MOST_NUMBERS and is_here
            found.update((np.asarray(x) if is_whole else sample(x)).tobytes())
    return found.hexdigest()

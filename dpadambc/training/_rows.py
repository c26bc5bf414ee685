"""Rows of the data where none should be."""

import collections
import hashlib
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.training import _data

# Of fewer numbers, or where there are few of them, rows may well be equal by chance.
_LEAST_NUMBERS, _LEAST_ROWS = 8, 1_000
_MOST_ROWS = 2**17  # are compared, the first
_MOST_COPIES = 0.2  # of all rows; in census data a tenth are equal


def _checksums(leaf: Any) -> Iterator[bytes]:
    """A checksum of each row, as JAX has its numbers."""
    array = np.asarray(leaf)
    array = array.astype(jnp.result_type(leaf))
    if np.issubdtype(array.dtype, np.number):
        array = array + np.zeros([], array.dtype)  # no negative zero
    for row in np.ascontiguousarray(array.reshape(len(array), -1)):
        yield hashlib.blake2b(row.tobytes(), digest_size=16).digest()


def num_common(ours: list[Any], data: Any) -> int:
    """How many rows of ours are inputs: rows of the arrays with the largest ones."""
    leaves = jax.tree.leaves(data)
    size = lambda leaf: math.prod(jnp.shape(leaf)[1:])
    largest = max(map(size, leaves))
    kind = lambda leaf: (jnp.shape(leaf)[1:], jnp.result_type(leaf))
    inputs = [leaf for leaf in leaves if size(leaf) == largest]
    kinds = set(map(kind, inputs))
    comparable = [x for x in ours if jnp.ndim(x) and kind(x) in kinds]
    theirs: Mapping[Any, set[bytes]] = {}
    for leaf in inputs if comparable else []:
        theirs.setdefault(kind(leaf), set()).update(_checksums(leaf))
    return max(
        (sum(row in theirs[kind(x)] for row in _checksums(x)) for x in comparable),
        default=0,
    )


def _can_be_read(data: Any) -> bool:
    return not _data.is_source(data) and all(map(_data.is_here, jax.tree.leaves(data)))


def warn_of_shared(shared: Any, data: Any) -> None:
    """Warns of rows of the data in what the loss of every example has, or an update."""
    arrays = jax.tree.leaves(shared)
    if not (_can_be_read(data) and all(map(_data.is_here, arrays))):
        return
    # So few numbers may be anybody's.
    long = [x for x in arrays if np.prod(jnp.shape(x)[1:]) > 1]
    found = num_common(long, data)
    if found:
        warnings.warn(
            f"The loss of every example, or the optimizer, has {found} rows of the data"
            " in it, closed over or frozen: one person's row would change the gradients"
            " of all, or the update, which the noise is not for. Epsilon holds only if"
            " the loss of an example is of that example, and of what is public, alone,"
            " and the optimizer's update of the private gradient.",
            stacklevel=4,  # of the call of fit
        )


def warn_of_copies(data: Any) -> None:
    """Warns where many rows are equal: one person may be in all of them."""
    if not _can_be_read(data):
        return
    leaves = [x for x in jax.tree.leaves(data) if not _is_key(x)]
    rows = [x[:_MOST_ROWS] for x in leaves]
    num_rows = min(map(len, rows), default=0)
    numbers = sum(math.prod(jnp.shape(x)[1:]) for x in rows)
    if num_rows < _LEAST_ROWS or numbers < _LEAST_NUMBERS:
        return
    times = collections.Counter(zip(*map(_checksums, rows), strict=True))
    copies = num_rows - len(times)
    if copies > _MOST_COPIES * num_rows:
        warnings.warn(
            f"Expected each person in one row, got {copies} of {num_rows} rows that are"
            f" copies of others, one of them {max(times.values())} times. Is a minority"
            " repeated, or the whole data set? Epsilon is of one row, and for a person"
            " in several it is larger than said. To count some examples for more,"
            " multiply the loss of the others by less than one: clipping bounds it all"
            " the same, and takes off a factor above one.",
            stacklevel=4,  # of the call of fit
        )


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)

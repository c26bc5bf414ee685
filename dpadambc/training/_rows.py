"""Rows of the data where none should be."""

import hashlib
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.training import _data, _grouped

_LEAST_ROWS = 1_000  # among which copies are looked for
_MOST_COPIES = 0.2  # of all rows; in census data a tenth are equal
_BY_CHANCE = 0.1  # rows that are equal to a given one
_AT_ONCE = 2**23  # numbers that are read
_SAMPLED = 2**14  # rows, for how often numbers are equal


def _checksums(leaf: Any) -> Iterator[bytes]:
    """A checksum of each row, as JAX has its numbers."""
    array = np.asarray(leaf)
    array = array.astype(jnp.result_type(leaf))
    if np.issubdtype(array.dtype, np.number):
        array = array + np.zeros([], array.dtype)  # no negative zero
    for row in np.ascontiguousarray(array.reshape(len(array), -1)):
        yield hashlib.blake2b(row.tobytes(), digest_size=16).digest()


def num_common(ours: list[Any], data: Any) -> int:
    """How many rows of ours are inputs: rows of the arrays with the largest ones.

    Of the examples of users it is rows that are compared.
    """
    leaves = jax.tree.leaves(_grouped.rows_of(data))
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
    rows = [x for x in jax.tree.leaves(data) if math.prod(jnp.shape(x)[1:])]
    rows = [x for x in rows if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    num_rows = min(map(len, rows), default=0)
    if num_rows < _LEAST_ROWS:
        return
    _, times = np.unique(sum(_hashes(*x) for x in enumerate(rows)), return_counts=True)
    copies = num_rows - len(times)
    if copies > _MOST_COPIES * num_rows and not _are_equal_by_chance(rows):
        warnings.warn(
            f"Expected each person in one row, got {copies} of {num_rows} rows that are"
            f" copies of others, one of them {times.max()} times. Is a minority"
            " repeated, or the whole data set? Epsilon is of one row, and for a person"
            " in several it is larger than said. To count some examples for more,"
            " multiply the loss of the others by less than one: clipping bounds it all"
            " the same, and takes off a factor above one.",
            stacklevel=4,  # of the call of fit
        )


def _hashes(index: int, leaf: Any) -> np.ndarray:
    """A number of 64 bits for each row: random multiples of its words, added up.

    Those of several arrays, each with an index of its own, add up to one of all.
    """
    width = math.prod(jnp.shape(leaf)[1:])
    words = np.dtype(f"u{min(leaf.dtype.itemsize, 8)}")
    per_number = leaf.dtype.itemsize // words.itemsize
    factors = np.random.default_rng(index).integers(
        2**64, size=width * per_number, dtype=np.uint64
    )
    if all(device.platform == "cpu" for device in getattr(leaf, "devices", set)()):
        leaf = np.asarray(leaf)  # no copy
    several = max(1, _AT_ONCE // width)
    found = []
    for first in range(0, len(leaf), several):
        part = leaf if several >= len(leaf) else leaf[first : first + several]
        part = np.ascontiguousarray(part).reshape(len(part), width).view(words)
        found.append(part.astype(np.uint64) @ factors)
    return np.concatenate(found)


def _are_equal_by_chance(leaves: list[Any]) -> bool:
    """Whether so many people would have equal rows if their numbers were independent.

    Answers of yes and no to ten questions are those of others, in a thousand.
    """
    log_equal = math.log(len(leaves[0]))
    for leaf in leaves:
        sampled = np.asarray(leaf[:_SAMPLED])
        for column in sampled.reshape(len(sampled), -1).T:
            _, times = np.unique(column, return_counts=True)
            pairs = np.sum(times * (times - 1)) + 1  # of equal ones, or just none
            log_equal += math.log(pairs / len(column) ** 2)
    return log_equal > math.log(_BY_CHANCE)

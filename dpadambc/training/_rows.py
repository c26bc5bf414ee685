"""Rows of the data where none should be."""

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.gradients import preconditioning
from dpadambc.training import _data, _grouped

_LEAST_ROWS = 1_000  # among which copies are looked for
_MOST_COPIES = 0.2  # of all rows; in census data a tenth are equal
_BY_CHANCE = 0.1  # rows that are equal to a given one
_AT_ONCE = 2**23  # numbers that are read
_SAMPLED = 2**14  # rows, for how often numbers are equal
_HARDLY_EVER = -100.0  # the logarithm of the chance that two rows are equal
_MOST_STARTS = 1_000  # where rows that follow each other are looked for
_LOOKED_AT = 64  # rows, of which it is known whose they are
_MOST_COLUMNS = 512  # by which they are
_LEAST_DISTINCT = 0.8  # of all rows, where a row tells whose it is
_LEAST_OF_PARTS = 0.1  # of those of longer rows: ends of padded texts are alike


def _size(leaf: Any) -> int:
    return math.prod(jnp.shape(leaf)[1:])


def _is_bool(leaf: Any) -> bool:
    return jnp.result_type(leaf) == jnp.bool_


def _inputs(data: Any) -> list[tuple[str, Any]]:
    """The arrays with the largest rows, with their paths; masks only among masks."""
    named = jax.tree_util.tree_leaves_with_path(data)
    arrays = [(str(p), x) for p, x in named if jnp.ndim(x) and not _is_key(x)]
    largest = max((_size(x) for _, x in arrays), default=0)
    inputs = [(name, x) for name, x in arrays if _size(x) == largest]
    return [(name, x) for name, x in inputs if not _is_bool(x)] or inputs


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _coarser(x: Any, y: Any) -> np.dtype:
    """In which the numbers of both are equal, if they were before one was rounded."""
    types = [jnp.result_type(leaf) for leaf in (x, y)]
    floats = [t for t in types if jnp.issubdtype(t, jnp.floating)]
    return min(floats, key=lambda t: jnp.finfo(t).bits, default=np.dtype("int64"))


class _Rows(NamedTuple):
    """Rows of arrays, as they are compared.

    Attributes:
      numbers: one for each row.
      log_equal: the logarithm of how often two are equal by chance.
    """

    numbers: np.ndarray
    log_equal: float

    @classmethod
    def of(cls, leaves: Sequence[Any], kinds: Sequence[np.dtype]) -> "_Rows":
        """Of several arrays together, with numbers of these kinds."""
        pairs = list(zip(leaves, kinds, strict=True))
        each = [_hashes(i, leaf, kind) for i, (leaf, kind) in enumerate(pairs)]
        log_equal = sum(_log_equal(leaf, kind) for leaf, kind in pairs)
        return cls(np.sum(each, axis=0, dtype=np.uint64), log_equal)

    def num_equal(self, own: np.ndarray, varies: np.ndarray) -> int:
        """How many of these rows are among them, if not as many as chance has there.

        A row of equal numbers, such as zeros, is nobody's.
        """
        found = int(np.isin(own[varies], self.numbers).sum())
        log_pairs = math.log(max(len(own) * len(self.numbers), 1))
        by_chance = math.exp(self.log_equal + log_pairs)
        return found if found > by_chance / _BY_CHANCE else 0

    def has_in_order(self, own: np.ndarray) -> bool:
        """Whether these follow each other there too, and not by chance."""
        length, others = len(own), self.numbers
        if not length or length > len(others):
            return False
        kinds, times = np.unique(others, return_counts=True)
        places = np.minimum(np.searchsorted(kinds, own), len(kinds) - 1)
        if (kinds[places] != own).any():
            return False
        starts_by_chance = np.log(times[places] / len(others)).sum()
        if starts_by_chance + math.log(len(others)) > math.log(_BY_CHANCE):
            return False
        starts = np.arange(len(others) - length + 1)
        for i in range(length):
            if len(starts) <= _MOST_STARTS:
                break
            starts = starts[others[starts + i] == own[i]]
        return any(
            np.array_equal(others[i : i + length], own) for i in starts[:_MOST_STARTS]
        )


def _varies(leaf: Any) -> np.ndarray:
    """Which rows have different numbers; all do that have one."""
    rows = np.asarray(leaf).reshape(len(leaf), -1)
    return (rows != rows[:, :1]).any(1) | (rows.shape[1] == 1)


def _as_real(leaf: Any) -> Any:
    """A complex number as two."""
    if not jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating):
        return leaf
    return np.stack([np.real(leaf), np.imag(leaf)], axis=-1)


def num_common(ours: list[Any], data: Any) -> int:
    """How many rows of one of these arrays are inputs: rows of the largest arrays.

    Whatever their shape is, and if they were rounded since. Of the examples of users it
    is rows that are compared.
    """
    inputs = [_as_real(x) for _, x in _inputs(_grouped.rows_of(data))]
    of_input = functools.cache(lambda i, kind: _Rows.of([inputs[i]], [kind]))
    found = 0
    for x in ours:
        if not jnp.ndim(x) or not len(x) or _is_key(x):
            continue
        x = _as_real(x)
        for i, y in enumerate(inputs):
            if _size(x) == _size(y) and _is_bool(x) == _is_bool(y):
                kind = np.dtype(_coarser(x, y))
                own = _hashes(0, x, kind)
                found = max(found, of_input(i, kind).num_equal(own, _varies(x)))
    return found


def _num_together(own: dict[str, Any], others: dict[str, Any]) -> int:
    """How many rows of several arrays together are those of others."""
    if not own or own.keys() != others.keys():
        return 0
    if any(_size(own[name]) != _size(others[name]) for name in own):
        return 0
    if len(set(map(len, own.values()))) > 1:
        return 0
    names = sorted(own)
    kinds = [np.dtype(_coarser(own[name], others[name])) for name in names]
    numbers = _Rows.of([own[name] for name in names], kinds).numbers
    them = _Rows.of([others[name] for name in names], kinds)
    if them.has_in_order(numbers):
        return len(numbers)
    varies = np.any([_varies(x) for x in own.values()], axis=0)
    return them.num_equal(numbers, varies)


def _ungrouped(x: Any, width: int) -> Any:
    """An array whose rows hold several of this width, with a row for each."""
    size = _size(x)
    return x.reshape(-1, width) if size > width > 0 and size % width == 0 else x


def num_common_examples(ours: Any, data: Any) -> int:
    """The same of examples: whether one input is in the others, or all are together.

    One of ours may hold several, if a tenth are in the data: a score that is no mean
    over rows takes them so. Rows that chance may repeat are known if all follow each
    other as in the data.
    """
    ours, data = map(_grouped.rows_of, (ours, data))
    own, others = (
        {name: _as_real(x) for name, x in _inputs(tree)} for tree in (ours, data)
    )
    found = max(num_common(jax.tree.leaves(ours), data), _num_together(own, others))
    width = max(map(_size, others.values()), default=0)
    parts = {name: _ungrouped(x, width) for name, x in own.items()}
    if all(parts[name] is own[name] for name in own):
        return found
    of_parts = _num_together(parts, others)
    if width > 1:  # a number may be anybody's
        of_parts = max(of_parts, num_common(list(parts.values()), data))
    least = _LEAST_OF_PARTS * max(np.sum(_varies(x)) for x in parts.values())
    return max(found, of_parts) if of_parts > least else found


def a_few(data: Any) -> frozenset[int]:
    """A few rows of the largest arrays, those with the least numbers, by these.

    So they are the same in any order of the rows, and many of them in any large part.
    None where rows are equal by chance, as labels are, or in an order, as numbers of
    rows are, which those of other people have too.
    """
    if not _can_be_read(data):
        return frozenset()
    inputs = [_as_real(x) for _, x in _inputs(_grouped.rows_of(data))]
    inputs = [x for x in inputs if len(x) and _size(x) and tells_people_apart(x)]
    if not inputs:
        return frozenset()
    numbers = sum(_hashes_of_some(i, x) for i, x in enumerate(inputs))
    log_equal = sum(_log_equal(x, _kind(x)) for x in inputs)
    distinct = np.unique(numbers)
    are_equal = len(distinct) < _LEAST_DISTINCT * len(numbers)
    if are_equal or log_equal + math.log(len(numbers)) > math.log(_BY_CHANCE):
        return frozenset()
    return frozenset(distinct[:_LOOKED_AT].tolist())


def _kind(x: Any) -> np.dtype:
    is_float = jnp.issubdtype(jnp.result_type(x), jnp.floating)
    return np.dtype(np.float32 if is_float else np.int64)


def _hashes_of_some(index: int, leaf: Any) -> np.ndarray:
    """`_hashes` by some of the columns, a piece of the rows at a time."""
    leaf, width = _on_the_host(leaf), _size(leaf)
    places = np.linspace(0, width - 1, min(width, _MOST_COLUMNS)).astype(int)
    several = max(1, _AT_ONCE // width)
    pieces = (leaf[i : i + several] for i in range(0, len(leaf), several))
    rows = (np.asarray(x).reshape(len(x), width)[:, places] for x in pieces)
    return np.concatenate([_hashes(index, x, _kind(x)) for x in rows])


def _can_be_read(data: Any) -> bool:
    return not _data.is_source(data) and all(map(_data.is_here, jax.tree.leaves(data)))


def _num_in_a_column(ours: Any, data: Any) -> int:
    """How many numbers are those of a column of the data, such as labels, in order."""
    vectors = [x for x in ours if _size(x) == 1 and tells_people_apart(x)]
    if not vectors:
        return 0
    leaves = jax.tree.leaves(_grouped.rows_of(data))
    columns = [x for x in leaves if _size(x) == 1 and tells_people_apart(x)]
    of_column = functools.cache(lambda i, kind: _Rows.of([columns[i]], [kind]))
    found = 0
    for x in vectors:
        for i, column in enumerate(columns):
            kind = np.dtype(_coarser(x, column))
            if len(x) <= len(column) and of_column(i, kind).has_in_order(
                _hashes(0, x, kind)
            ):
                found = max(found, len(x))
    return found


def _on_the_host(x: Any) -> Any:
    """A view without a copy, where the device is a processor: no operation of JAX."""
    devices = getattr(x, "devices", set)()
    return np.asarray(x) if all(d.platform == "cpu" for d in devices) else x


def tells_people_apart(x: Any) -> bool:
    """Whether an array is hardly that of other people: its rows go up and down."""
    is_on_many = isinstance(x, jax.Array) and len(x.sharding.device_set) > 1
    kinds = jnp.bool_, jnp.integer, jnp.floating
    if is_on_many or not any(jnp.issubdtype(x.dtype, kind) for kind in kinds):
        return False
    x = _on_the_host(x)
    rows = np.linspace(0, len(x) - 1, min(len(x), _LOOKED_AT)).astype(int)
    steps = np.diff(np.asarray(x[rows], np.float64), axis=0)
    return bool((steps > 0).any() and (steps < 0).any()) and not _repeats(x)


def _repeats(x: Any) -> bool:
    """Whether some rows come again and again, as the hours of days do."""

    def has_period(rows, period):
        rows = np.asarray(rows).reshape(len(rows), -1)
        rows = rows[:, np.linspace(0, rows.shape[1] - 1, _LOOKED_AT).astype(int)]
        return np.array_equal(rows[period:], rows[:-period])

    first = x[: 4 * _LOOKED_AT]
    periods = range(1, min(_LOOKED_AT, len(first) // 2) + 1)
    return any(has_period(first, p) and has_period(x, p) for p in periods)


def warn_of_shared(shared: Any, data: Any) -> None:
    """Warns of rows of the data in what the loss of every example has, or an update."""
    arrays = jax.tree.leaves(shared)
    arrays += filter(_data.is_here, preconditioning._examples_behind(arrays))
    if not (_can_be_read(data) and all(map(_data.is_here, arrays))):
        return
    arrays = [x for x in arrays if jnp.ndim(x) and not _is_key(x)]
    # So few numbers may be anybody's, if they are not a column.
    long = [x for x in arrays if _size(x) > 1]
    found = num_common(long, data) or _num_in_a_column(arrays, data)
    if found:
        warnings.warn(
            f"The loss of every example, or the optimizer, has {found} rows of the data"
            " in it, closed over or frozen, or in what a preconditioner is made of: one"
            " person's row would change the gradients of all, or the update, which the"
            " noise is not for. Epsilon holds only if"
            " the loss of an example is of that example, and of what is public, alone,"
            " and the optimizer's update of the private gradient.",
            stacklevel=4,  # of the call of fit
        )


def warn_of_copies(data: Any) -> None:
    """Warns where many rows are equal: one person may be in all of them."""
    if not _can_be_read(data):
        return
    rows = [x for x in jax.tree.leaves(data) if math.prod(jnp.shape(x)[1:])]
    rows = [x for x in rows if not _is_key(x)]
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


def _hashes(index: int, leaf: Any, rounded: np.dtype | None = None) -> np.ndarray:
    """A number of 64 bits for each row: random multiples of its words, added up.

    Those of several arrays, each with an index of its own, add up to one of all.
    `rounded`, numbers are taken as this type has them: whole, or in float32.
    """
    width = _size(leaf)
    itemsize = leaf.dtype.itemsize
    if rounded is not None:
        itemsize = 8 if rounded == np.int64 else 4
    words = np.dtype(f"u{min(itemsize, 8)}")
    per_number = itemsize // words.itemsize
    factors = np.random.default_rng(index).integers(
        2**64, size=width * per_number, dtype=np.uint64
    )
    leaf = _on_the_host(leaf)
    several = max(1, _AT_ONCE // max(1, width))
    found = []
    for first in range(0, len(leaf), several):
        part = leaf if several >= len(leaf) else leaf[first : first + several]
        part = np.ascontiguousarray(part).reshape(len(part), width)
        if rounded is not None:
            part = _rounded(part, rounded)
        part = part.view(words)
        found.append(part.astype(np.uint64) @ factors)
    return np.concatenate(found)


def _rounded(numbers: np.ndarray, kind: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):
        found = numbers.astype(kind)
        if found.dtype == np.int64:
            return found
        return found.astype(np.float32) + np.float32(0)  # without negative zeros


def _are_equal_by_chance(leaves: list[Any]) -> bool:
    """Whether so many people would have equal rows if their numbers were independent.

    Answers of yes and no to ten questions are those of others, in a thousand.
    """
    log_equal = math.log(len(leaves[0])) + sum(map(_log_equal, leaves))
    return log_equal > math.log(_BY_CHANCE)


def _log_equal(leaf: Any, rounded: np.dtype | None = None) -> float:
    """The logarithm of how often two rows would be equal, column for column.

    `rounded`, as for `_hashes`. Of columns enough are looked at to know that it is
    hardly ever.
    """
    num_rows = min(_SAMPLED, max(2, _AT_ONCE // max(1, _size(leaf))))
    sampled = np.asarray(_on_the_host(leaf)[:num_rows])
    sampled = sampled.reshape(len(sampled), -1)
    if rounded is not None:
        sampled = _rounded(sampled, rounded)
    log_equal = 0.0
    # Neighbors are alike in images, and the first may all be blank.
    for place in np.random.default_rng(0).permutation(sampled.shape[1]):
        if log_equal < _HARDLY_EVER:
            break
        column = sampled[:, place]
        _, times = np.unique(column, return_counts=True)
        pairs = np.sum(times * (times - 1)) + 1  # of equal ones, or just none
        log_equal += math.log(pairs / len(column) ** 2)
    return log_equal

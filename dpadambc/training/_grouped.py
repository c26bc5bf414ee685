"""Which examples are all rows of a user, and of which arrays they were made.

What compares rows with rows looks into such examples. All that were made together are
known by the mask of their rows, with a column where all users have as many; a part of
them by its form: padding comes last, and is a copy of the first row.
"""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc._core import marks
from dpadambc.training import _data

_MOST_KNOWN = 2**10
# What the arrays were known by, by the mask, and a column if need be.
_SOURCES: collections.OrderedDict[str, set[str]] = collections.OrderedDict()


def remember(columns: Any, is_padding_row: Any, sources: set[str]) -> None:
    """That examples of these were made of arrays that are known by those."""
    found = dict.fromkeys(_names(columns, is_padding_row), sources)
    # Whatever becomes of the columns, their rows are those of users.
    for name, of in ({marks.of(is_padding_row, closely=True): set()} | found).items():
        _SOURCES.setdefault(name, set()).update(of)
        _SOURCES.move_to_end(name)
    while len(_SOURCES) > _MOST_KNOWN:
        _SOURCES.popitem(last=False)


def _names(columns: Any, is_padding_row: Any) -> set[str]:
    """By the mask alone, whatever becomes of the columns, if it tells users apart."""
    mask = marks.of(is_padding_row, closely=True)
    if not _data.is_here(is_padding_row):
        return {mask}
    rows = np.asarray(is_padding_row)
    if (rows != rows[:1]).any():
        return {mask}
    # Other people may have as many rows each.
    as_jax_has_them = lambda x: x.astype(jnp.result_type(x), copy=False)
    arrays = [as_jax_has_them(x) for x in jax.tree.leaves(columns) if not _is_key(x)]
    return {f"{mask} {marks.of(x, closely=True)}" for x in arrays}


def have_the_form(data: Any) -> bool:
    """Whether they end with a mask of rows, as a part of such examples does too."""
    mask = data[-1] if isinstance(data, tuple) and len(data) > 1 else None
    return getattr(mask, "ndim", 0) == 2 and jnp.result_type(mask) == jnp.bool_


def sources_of(data: Any) -> set[str]:
    """What the arrays are known by that `group_by_user` made these of, if it did."""
    if not have_the_form(data):
        return set()
    *columns, mask = data
    return set().union(*(_SOURCES.get(x, ()) for x in _names(columns, mask)))


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _is_padded_by_copies(data: Any) -> bool:
    """Whether some rows are padding, and come as those of `group_by_user` do."""
    *columns, mask = jax.tree.leaves(data)
    if not all(map(_data.is_here, [*columns, mask])):
        return False
    is_padding = np.asarray(mask)
    comes_last = (is_padding[:, :-1] <= is_padding[:, 1:]).all()
    if is_padding[:, :1].any() or not is_padding.any() or not comes_last:
        return False
    if any(jnp.shape(x)[:2] != is_padding.shape for x in columns):
        return False
    users, _ = np.nonzero(is_padding)
    arrays = [np.asarray(x) for x in columns if not _is_key(x)]
    return all(x[is_padding].tobytes() == x[users, 0].tobytes() for x in arrays)


def are_of_users(data: Any) -> bool:
    """Whether an example is all rows of a user."""
    if not have_the_form(data):
        return False
    is_known = marks.of(data[-1], closely=True) in _SOURCES
    return is_known or _is_padded_by_copies(data)


def are_known_of_users(data: Any) -> bool | None:
    """The same; None of a source, and where another mask of that form comes last."""
    if not jax.tree.leaves(data):
        return None
    return are_of_users(data) or (None if have_the_form(data) else False)


def rows_of(data: Any) -> Any:
    """With rows along axis 0, where an example is all rows of a user."""
    if not are_of_users(data):
        return data
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), data[:-1])

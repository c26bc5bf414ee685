"""Which runs of this process had the same data, so that a release can say of them.

The best of several runs is a choice, and all that are released add up. Neither is in
the epsilon of one.
"""

import collections
import warnings
from collections.abc import Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc._core import marks
from dpadambc.training import _grouped, _rows

_MOST_NUMBERS = 2**22  # of an array that is known in any form
_MOST_COMMON = 0.3  # of a few rows, by chance: in census data a tenth are equal


class Names(NamedTuple):
    """What the data of a run are known by.

    Attributes:
      own: all arrays together, and each alone.
      sources: the arrays that `group_by_user` made them of, if it did.
      are_of_users: whether an example is all rows of a user; None if nothing tells.
      few_rows: a few of their rows, the same ones in whatever order or part of them.
    """

    own: Set[str]
    sources: Set[str]
    are_of_users: bool | None
    few_rows: Set[int] = frozenset()

    def are_on_those_of(self, other: "Names") -> bool:
        """Whether many people of these data are in those of another run too."""
        if (self.own | self.sources) & (other.own | other.sources):
            return True
        fewer = min(len(self.few_rows), len(other.few_rows))
        return len(self.few_rows & other.few_rows) > _MOST_COMMON * fewer


# The key of each run, and the names of its data.
_RUNS: collections.deque[tuple[str, Names]] = collections.deque(maxlen=2**14)


def remember(data: Names, key: str) -> None:
    """That a run, or a search, of this key had these data."""
    _RUNS.append((key, data))


def others(key: str) -> set[str]:
    """The keys of others that had the data of the run of this key."""
    own = [data for name, data in _RUNS if name == key]
    return {name for data in own for name in others_on(data, key)}


def others_on(data: Names, key: str) -> set[str]:
    """The keys of others than this one that had any of these data."""
    return {name for name, had in _RUNS if data.are_on_those_of(had)} - {key}


def are_of_users(key: str) -> bool | None:
    """Whether an example of the run of this key was all rows of a user, if known."""
    return next((had.are_of_users for name, had in _RUNS if name == key), None)


def check_units(
    data: Names, keys: Set[str], of_files: Set[bool | None], *, stacklevel: int
) -> None:
    """That earlier runs had the same kind of example: rows, or all rows of a user.

    Raises if a run of these keys was on rows, and this one is on their users, or the
    other way round: no epsilon is of both. Warns if these and those of files differ in
    kind: each user may have had one row.
    """
    for name, had in _RUNS:
        of_users, of_rows = data.sources & had.own, had.sources & data.own
        if name in keys and (of_users or of_rows):
            earlier, now = ("rows", "users") if of_users else ("users", "rows")
            raise ValueError(
                "Expected spent= of runs that have one kind of example with this one,"
                f" got a run on {earlier} for one on their {now}: they have no"
                " common epsilon, for a user of several rows is one example in one of"
                " them and several in the other. Group the rows by user in all runs; or"
                " give spent=(), and state each epsilon with what it is of."
            )
    kinds = {are_of_users(key) for key in keys} | of_files
    if data.are_of_users is not None and (not data.are_of_users) in kinds:
        of_users, of_rows = "this run", "a run in spent="
        if not data.are_of_users:
            of_users, of_rows = of_rows, of_users
        warnings.warn(
            f"An example of {of_users} is all rows of a user, and one of {of_rows} is a"
            " single row: a user of several rows there spends more than epsilon says."
            " Group the rows by user in all runs, unless each user has one row there.",
            stacklevel=stacklevel + 1,
        )


def names_of_rows(data: Any) -> set[str]:
    """What arrays are known by that become examples of `group_by_user`."""
    as_jax_has_them = jax.tree.map(
        lambda x: x.astype(jnp.result_type(x), copy=False), data
    )
    return {marks.of(as_jax_has_them, closely=True)} | alone(data)


def names_of(data: Any, together: str) -> Names:
    """The names of arrays, given what they are known by together."""
    return Names(
        {together} | alone(data),
        _grouped.sources_of(data),
        _grouped.are_known_of_users(data),
        _rows.a_few(data),
    )


def alone(data: Any) -> set[str]:
    """What parts of arrays are known by.

    Labels are of the same people whatever was done to the features beside them, and
    features are with other labels, such as what an earlier model has left of them.
    """
    columns = data[:-1] if _grouped.have_the_form(data) else data
    each = [x for x in jax.tree.leaves(columns) if _rows.tells_people_apart(x)]
    return {marks.of(_as_numbers(x), closely=True) for x in each}


def _as_numbers(x: Any) -> Any:
    """In one form, whatever kind of numbers labels come as; what is large as it is."""
    if x.size > _MOST_NUMBERS:
        return jnp.asarray(x)
    return np.asarray(x).astype(np.float32).reshape(len(x), -1)

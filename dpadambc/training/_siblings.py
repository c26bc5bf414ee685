"""Which runs of this process had the same data, so that a release can say of them.

The best of several runs is a choice, and all that are released add up. Neither is in
the epsilon of one.
"""

import collections
from collections.abc import Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc._core import marks
from dpadambc.training import _grouped

_MOST_ROWS = 64  # that are looked at


class Names(NamedTuple):
    """What the data of a run are known by.

    Attributes:
      own: all arrays together, and each alone.
      sources: the arrays that `group_by_user` made them of, if it did.
    """

    own: Set[str]
    sources: Set[str]


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
    known = data.own | data.sources
    return {name for name, had in _RUNS if known & (had.own | had.sources)} - {key}


def refuse_other_units(data: Names, keys: Set[str]) -> None:
    """Raises if a run of these keys was on rows, and this one is on their users.

    Or the other way round: no epsilon is of both.
    """
    units = {"rows": "their users", "users": "their rows"}
    for name, had in _RUNS:
        of_users, of_rows = data.sources & had.own, had.sources & data.own
        if name in keys and (of_users or of_rows):
            earlier = "rows" if of_users else "users"
            raise ValueError(
                "Expected spent= of runs that have one kind of example with this one,"
                f" got a run on {earlier} for one on {units[earlier]}: they have no"
                " common epsilon, for a user of several rows is one example in one of"
                " them and several in the other. Group the rows by user in all runs; or"
                " give spent=(), and state each epsilon with what it is of."
            )


def names_of_rows(data: Any) -> set[str]:
    """What arrays are known by that become examples of `group_by_user`."""
    as_jax_has_them = jax.tree.map(
        lambda x: x.astype(jnp.result_type(x), copy=False), data
    )
    return {marks.of(as_jax_has_them, closely=True)} | alone(data)


def names_of(data: Any, together: str) -> Names:
    """The names of arrays, given what they are known by together."""
    return Names({together} | alone(data), _grouped.sources_of(data))


def alone(data: Any) -> set[str]:
    """What parts of arrays are known by.

    Labels are of the same people whatever was done to the features beside them, and
    features are with other labels, such as what an earlier model has left of them.
    """
    columns = data[:-1] if _grouped.have_the_form(data) else data
    each = [x for x in jax.tree.leaves(columns) if _tells_people_apart(x)]
    return {marks.of(jnp.asarray(x), closely=True) for x in each}


def _tells_people_apart(x: Any) -> bool:
    """Whether an array is hardly that of other people: its rows go up and down."""
    is_on_many = isinstance(x, jax.Array) and len(x.sharding.device_set) > 1
    kinds = jnp.bool_, jnp.integer, jnp.floating
    if is_on_many or not any(jnp.issubdtype(x.dtype, kind) for kind in kinds):
        return False
    rows = np.linspace(0, len(x) - 1, min(len(x), _MOST_ROWS)).astype(int)
    steps = np.diff(np.asarray(x[rows], np.float64), axis=0)
    return bool((steps > 0).any() and (steps < 0).any())

"""Which runs of this process had the same data, so that a release can say of them.

The best of several runs is a choice, and all that are released add up. Neither is in
the epsilon of one.
"""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc._core import marks
from dpadambc.training import _grouped

_MOST_ROWS = 64  # that are looked at
# What the data of a run are known by, and the name of its key.
_RUNS: collections.deque[tuple[str, str]] = collections.deque(maxlen=2**14)


def remember(data: set[str], key: str) -> None:
    """That a run, or a search, of this key had these data."""
    _RUNS.extend((name, key) for name in data)


def others(key: str) -> set[str]:
    """The keys of others that had the data of the run of this key."""
    return others_on({data for data, name in _RUNS if name == key}, key)


def others_on(data: set[str], key: str) -> set[str]:
    """The keys of others than this one that had any of these data."""
    return {name for known, name in _RUNS if known in data} - {key}


def names_of(data: Any) -> set[str]:
    """What parts of arrays are known by: each alone, and rows grouped by user.

    Labels are of the same people whatever was done to the features beside them, and
    features are with other labels, such as what an earlier model has left of them.
    """
    columns = data[:-1] if _grouped.have_the_form(data) else data
    each = [x for x in jax.tree.leaves(columns) if _tells_people_apart(x)]
    alone = {marks.of(jnp.asarray(x), closely=True) for x in each}
    return alone | _grouped.sources_of(data)


def _tells_people_apart(x: Any) -> bool:
    """Whether an array is hardly that of other people: its rows go up and down."""
    is_on_many = isinstance(x, jax.Array) and len(x.sharding.device_set) > 1
    kinds = jnp.bool_, jnp.integer, jnp.floating
    if is_on_many or not any(jnp.issubdtype(x.dtype, kind) for kind in kinds):
        return False
    rows = np.linspace(0, len(x) - 1, min(len(x), _MOST_ROWS)).astype(int)
    steps = np.diff(np.asarray(x[rows], np.float64), axis=0)
    return bool((steps > 0).any() and (steps < 0).any())

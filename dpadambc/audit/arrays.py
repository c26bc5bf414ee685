"""The only place where the audit looks into what the library keeps closed."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from dpadambc.core.clipped_sum import as_clipped_sum, materialize
from dpadambc.core.mechanism import Mechanism


def opened(tree: Any) -> Any:
    """The arrays of a tree, with those that are closed as open ones: *not private*."""
    return materialize(tree)


def flat(tree: Any) -> np.ndarray:
    """All numbers of a tree as one vector of doubles."""
    leaves = [np.ravel(np.asarray(x, float)) for x in jax.tree.leaves(opened(tree))]
    return np.concatenate(leaves or [[]])


def forms_of_sums(mechanism: Mechanism) -> Iterator[Callable[[Any], Any]]:
    """How an optimizer may take a clipped sum: as arrays, or closed, as clips give it.

    Each is a function of the arrays.
    """
    yield lambda arrays: arrays
    yield functools.partial(
        as_clipped_sum,
        l2_clip_norm=mechanism.l2_clip_norm,
        normalize_by=mechanism.normalize_by,
    )

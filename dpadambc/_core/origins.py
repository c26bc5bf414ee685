"""Which arrays private runs of this process have made, by a few of their numbers.

These are at places that depend on the size of an array alone. Noise is added to every
coordinate in every step, so they tell an array from where its run began, and from any
other.

It is a guard against forgetting, not against intent: an array that was changed since,
or saved and read by other means in another process, is not known.
"""

import collections
import dataclasses
import hashlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc._core import marks

_MOST_KNOWN = 2**18  # arrays and rounded copies, the latest
# As models are kept and shared; by their numbers, whatever type these are in later.
_ROUNDED = (jnp.bfloat16, np.float16)
_LEAST_ROUNDED = 16


def _mark(numbers: np.ndarray, size: int) -> bytes | None:
    """What so many numbers of an array say of it; None where they are all the same."""
    words = numbers.astype(np.float32).view(np.uint32)
    if (words == words[0]).all():
        return None
    content = size.to_bytes(8, "big") + words.tobytes()
    return hashlib.blake2b(content, digest_size=16).digest()


def marks_of(x: jax.Array) -> list[bytes]:
    """What an array is known by, whatever its shape: itself, then rounded copies."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.size < 2:
        return []
    numbers = marks.sample(x)
    # So few rounded numbers may be anybody's.
    kinds = _ROUNDED if x.size >= _LEAST_ROUNDED else ()
    with np.errstate(over="ignore"):
        copies = [numbers, *(numbers.astype(kind) for kind in kinds)]
        found = [_mark(copy, x.size) for copy in copies]
    return [mark for mark in found if mark is not None]


def marks_in(tree: Any) -> Iterator[tuple[str, bytes]]:
    """The path of each array in a tree, with all that it is known by."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        for mark in marks_of(x):
            yield jax.tree_util.keystr(path), mark


@dataclasses.dataclass(frozen=True)
class Known:
    """What an array is of.

    Attributes:
      text: for after "is what".
      spending: asked for what that spent, which may be known to nobody.
      key: the name of the run's key.
    """

    text: str
    spending: Callable[[], Any]
    key: str | None = None


_KNOWN: collections.OrderedDict[bytes, Known] = collections.OrderedDict()


def remember(mark: bytes, known: Known) -> None:
    """What the array is of that is known by this."""
    _KNOWN.pop(mark, None)
    _KNOWN[mark] = known
    while len(_KNOWN) > _MOST_KNOWN:
        _KNOWN.popitem(last=False)


def found(tree: Any) -> Iterator[tuple[str, Known]]:
    """The paths of those that a private run has made; rounded copies come last."""
    for path, mark in marks_in(tree):
        if mark in _KNOWN:
            yield path, _KNOWN[mark]


def warn_of_start(params: Any, *, stacklevel: int) -> None:
    """Warns of the first array that an earlier run of this process has made."""
    for name, known in found(params):
        warnings.warn(
            f"params{name} is what {known.text}, and the mechanism's epsilon leaves out"
            " what that spent: state that of both, accounting.compose([...]), unless"
            " nobody whose data it had is in these data.",
            stacklevel=stacklevel + 1,
        )
        return

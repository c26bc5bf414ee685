"""Which arrays came out of a private run, so that no later run forgets what they cost.

Parameters that a run has trained are a function of its data: a run that begins with
them spends on top of it, where the data are of the same people. What runs of this
process returned, and what `load_release` read, is known by a few numbers of each array,
at places that depend on its size alone. Noise is added to every coordinate in every
step, so those tell an array from where its run began, and from any other.

It is a guard against forgetting, not against intent: an array that was changed since,
or saved and read by other means in another process, is not known.
"""

import collections
import dataclasses
import functools
import hashlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc._core import marks
from dpadambc.mechanisms.accounting import Spending
from dpadambc.training import _account
from dpadambc.training._account import Account

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


def _marks_of(x: jax.Array) -> list[bytes]:
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


def _marks(tree: Any) -> Iterator[tuple[str, bytes]]:
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        for mark in _marks_of(x):
            yield jax.tree_util.keystr(path), mark


@dataclasses.dataclass(frozen=True)
class _Known:
    """What an array is of."""

    text: str
    spending: Callable[[], Spending | None]
    key: str | None = None


_KNOWN: collections.OrderedDict[bytes, _Known] = collections.OrderedDict()


def _remember(mark: bytes, known: _Known) -> None:
    _KNOWN.pop(mark, None)
    _KNOWN[mark] = known
    while len(_KNOWN) > _MOST_KNOWN:
        _KNOWN.popitem(last=False)


@dataclasses.dataclass(frozen=True)
class Origin:
    """A run that arrays come out of.

    Args:
      account: what it spends.
      key: the name of its key.
      start: what its parameters were known by before the first step.
    """

    account: Account
    key: str
    start: frozenset[bytes]

    def remember(self, tree: Any, iterations: int) -> None:
        """That this run has made these arrays in so many steps."""
        if not iterations:
            return
        kind = type(self.account.mechanism).__name__
        known = _Known(
            f"a run of {iterations} steps of {kind} has trained",
            functools.partial(self.account.spending, iterations),
            self.key,
        )
        self._remember(tree, known)

    def remember_search(self, tree: Any, spending: Callable[[], Spending]) -> None:
        """That a search has told these; `spending` raises where it is of no runs."""
        text = "a search over hyperparameters has trained"
        self._remember(tree, _Known(text, spending, self.key))

    def _remember(self, tree: Any, known: _Known) -> None:
        for _, mark in _marks(tree):
            if mark not in self.start:
                _remember(mark, known)

    def remember_copies(self, tree: Any, iterations: int) -> None:
        """The same, of what one of several processes may ask for alone."""
        here = [x for x in jax.tree.leaves(tree) if _is_here(x)]
        self.remember(here, iterations)


def _is_here(x: jax.Array) -> bool:
    return x.is_fully_addressable or x.is_fully_replicated


def remember_release(params: Any, spending: Spending | None) -> None:
    """That these parameters were read from a file of `save_release`."""
    known = _Known("was released by a private run", lambda: spending)
    for _, mark in _marks(params):
        _remember(mark, known)


def warn_of_start(params: Any, *, stacklevel: int) -> None:
    """Warns of the first array that an earlier run of this process has made."""
    made = ((name, _KNOWN[mark]) for name, mark in _marks(params) if mark in _KNOWN)
    for name, known in made:
        warnings.warn(
            f"params{name} is what {known.text}, and the mechanism's epsilon leaves out"
            " what that spent: state that of both, accounting.compose([...]), unless"
            " nobody whose data it had is in these data.",
            stacklevel=stacklevel + 1,
        )
        return


@dataclasses.dataclass(frozen=True)
class Start:
    """What a run is about to begin with.

    Args:
      account: with the earlier runs that are counted.
      is_told: whether anything was said of earlier runs, be it that there are none.
    """

    account: Account
    is_told: bool
    advice: str = (
        "Give its result, or a list of (mechanism, steps); or spent=() if nobody whose"
        " data it had is in these data."
    )

    def checked(self, params: Any, frozen: Any, closed_over: Any, key: str) -> Origin:
        """Raises if an earlier run returned it, and that run is not counted.

        Args:
          params: to train.
          frozen: what the loss has besides.
          closed_over: what is in the loss or the optimizer as a constant.
          key: the name of the run's key.

        Returns:
          The origin of what the run will return.
        """
        marks = [(f"params{path}", mark) for path, mark in _marks(params)]
        others = [(f"frozen{path}", mark) for path, mark in _marks(frozen)]
        constants = [jnp.asarray(x) for x in jax.tree.leaves(closed_over)]
        name = "an array that the loss or the optimizer closes over"
        others += [(name, mark) for _, mark in _marks(constants)]
        found: dict[str, _Known] = {}
        for name, mark in marks + others:
            if mark in _KNOWN:
                found.setdefault(name, _KNOWN[mark])  # itself before rounded copies
        for name, known in found.items():
            self._check(name, known, key)
        return Origin(self.account, key, frozenset(mark for _, mark in marks))

    def _check(self, name: str, known: _Known, key: str) -> None:
        if not self.is_told:
            raise ValueError(
                f"Expected spent= with the runs before this one, got none for {name},"
                f" which {known.text}: epsilon would leave out what that spent."
                f" {self.advice}"
            )
        if known.key == key:
            raise _account.same_key(f"the run that made {name}")
        if self.account.earlier is None:
            return
        spending = known.spending()
        if spending is not None and not self.account.earlier.includes(spending):
            warnings.warn(
                f"{name} is what {known.text}, and spent= does not have all of that:"
                f" expected {spending!r}, got {self.account.earlier!r}. Epsilon holds"
                " only for people who are in none of the omitted runs.",
                stacklevel=5,
            )

"""Which arrays came out of a private run, so that no later run forgets what they cost.

Parameters that a run has trained are a function of its data: a run that begins with
them spends on top of it, where the data are of the same people. Known is what runs of
this process returned, and what `load_release` read.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpadambc._core import origins
from dpadambc.mechanisms.accounting import Spending
from dpadambc.training import _account
from dpadambc.training._account import Account


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
        known = origins.Known(
            f"a run of {iterations} steps of {kind} has trained",
            functools.partial(self.account.spending, iterations),
            self.key,
        )
        self._remember(tree, known)

    def remember_search(self, tree: Any, spending: Callable[[], Spending]) -> None:
        """That a search has told these; `spending` raises where it is of no runs."""
        text = "a search over hyperparameters has trained"
        self._remember(tree, origins.Known(text, spending, self.key))

    def _remember(self, tree: Any, known: origins.Known) -> None:
        for _, mark in origins.marks_in(tree):
            if mark not in self.start:
                origins.remember(mark, known)

    def remember_copies(self, tree: Any, iterations: int) -> None:
        """The same, of what one of several processes may ask for alone."""
        here = [x for x in jax.tree.leaves(tree) if _is_here(x)]
        self.remember(here, iterations)


def _is_here(x: jax.Array) -> bool:
    return x.is_fully_addressable or x.is_fully_replicated


def remember_release(params: Any, spending: Spending | None) -> None:
    """That these parameters were read from a file of `save_release`."""
    known = origins.Known("was released by a private run", lambda: spending)
    for _, mark in origins.marks_in(params):
        origins.remember(mark, known)


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
        constants = [jnp.asarray(x) for x in jax.tree.leaves(closed_over)]
        of_constants = "an array that the loss or the optimizer closes over"
        several = [
            *((f"params{path}", known) for path, known in origins.found(params)),
            *((f"frozen{path}", known) for path, known in origins.found(frozen)),
            *((of_constants, known) for _, known in origins.found(constants)),
        ]
        first: dict[str, origins.Known] = {}
        for name, known in several:
            first.setdefault(name, known)  # itself before rounded copies
        for name, known in first.items():
            self._check(name, known, key)
        marks = frozenset(mark for _, mark in origins.marks_in(params))
        return Origin(self.account, key, marks)

    def _check(self, name: str, known: origins.Known, key: str) -> None:
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

"""What a run spends, on top of what earlier runs on the same people's data spent."""

import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax

from dpadambc._core import keys
from dpadambc.mechanisms import accounting
from dpadambc.mechanisms.accounting import Spending
from dpadambc.mechanisms.base import Mechanism

Spent: TypeAlias = Any  # a Result, a Spending, a mechanism, or a list: see `earlier`

# As `save_release` writes them, beside the parameters: the runs, and random names, of
# the file and of those that its run was told of.
SPENT, NAMES = "spent", "names"
# And whether an example was all rows of a user, or null.
OF_USERS = "examples_are_users"


def read(found: Any) -> Spending:
    """What a file has; it may name any mechanism of this library."""
    from dpadambc import graphs

    del graphs  # known from here on
    return Spending.from_json(found)


def _of_one(entry: Any) -> Any:
    """A `Result` has its own `spent`, and so has what `load_release` returns."""
    if not isinstance(entry, Mapping):
        return getattr(entry, SPENT, entry)
    if SPENT not in entry:
        raise ValueError(
            "Expected what load_release says of a model, with the runs that it is of,"
            f" got a dictionary of {', '.join(map(str, entry))}. Give a list of"
            " (mechanism, steps)."
        )
    return read(entry[SPENT])


def _several(spent: Any) -> list[Any] | tuple[Any, ...]:
    if spent is None:
        return ()
    return spent if type(spent) in (list, tuple) else [spent]


def earlier(spent: Any) -> Spending | None:
    """What `fit` is given as `spent`; None for nothing."""
    several = _several(spent)
    return accounting.compose(map(_of_one, several)) if several else None


def same_key(of_what: str) -> ValueError:
    """The error for a run that would draw what another has drawn."""
    return ValueError(
        f"Expected a key of its own for this run, got that of {of_what}: both would add"
        " the same noise, which is gone from their difference. Draw a new one, such as"
        " training.secret_key()."
    )


@dataclasses.dataclass(frozen=True)
class Told:
    """Which runs a run was told of.

    Attributes:
      keys: the names of the keys of those that are known by them, its own excepted.
      unnamed: how many others, of a list of mechanisms. On which data they were is not
        known.
      files: the names of the files, and of the searches, among them.
      of_users: what these say of whether an example was all rows of a user.
    """

    keys: frozenset[str] = frozenset()
    unnamed: int = 0
    files: frozenset[str] = frozenset()
    of_users: frozenset[bool | None] = frozenset()

    def __or__(self, other: "Told") -> "Told":
        """Both together."""
        return Told(
            self.keys | other.keys,
            self.unnamed + other.unnamed,
            self.files | other.files,
            self.of_users | other.of_users,
        )


# By the key of a run of this process.
_TOLD: dict[str, Told] = {}
# By the name of a search, or of a file that this process wrote: its run, and what that
# was told of.
_WRITTEN: dict[str, Told] = {}


def told(sampling_key: jax.Array) -> Told:
    """Which runs the run of this key was told of."""
    return _TOLD.get(keys.name_of(sampling_key), Told())


def _and_itself(sampling_key: jax.Array) -> Told:
    return told(sampling_key) | Told(frozenset([keys.name_of(sampling_key)]))


def wrote(name: str, sampling_key: jax.Array) -> None:
    """That a file of this name has the run of this key."""
    _WRITTEN[name] = _and_itself(sampling_key)


def searched(name: str, key: str) -> None:
    """That a search of this name has a key of this name."""
    _WRITTEN[name] = Told(frozenset([key]), files=frozenset([name]))


def _told_by_one(entry: Any) -> Told:
    state = getattr(entry, "state", None)
    if state is not None:
        return _and_itself(state.sampling_key)
    if hasattr(entry, "trials"):  # a search
        return _WRITTEN.get(entry.name, Told(unnamed=1))
    if isinstance(entry, Mapping) and NAMES in entry:
        # A file of another process has runs of this one by their files alone.
        written = [_WRITTEN.get(name, Told()) for name in entry[NAMES]]
        itself = Told(
            files=frozenset(entry[NAMES]), of_users=frozenset([entry.get(OF_USERS)])
        )
        return functools.reduce(operator.or_, written, itself)
    return Told(unnamed=len(accounting.compose([_of_one(entry)]).runs))


def _told_by(spent: Any) -> Told:
    return functools.reduce(operator.or_, map(_told_by_one, _several(spent)), Told())


def tell(spent: Any, sampling_key: jax.Array) -> Told:
    """What the run of this key was told of; raises if one of them has its key."""
    found = _told_by(spent)
    if keys.name_of(sampling_key) in found.keys:
        raise same_key("a run in spent=")
    _TOLD[keys.name_of(sampling_key)] = found
    return found


@dataclasses.dataclass(frozen=True)
class Account:
    """What a run has spent after so many steps, and with it the runs before it.

    Args:
      mechanism: of this run.
      target_delta: for epsilon.
      earlier: what was spent before it, if anything.
    """

    mechanism: Mechanism
    target_delta: float
    earlier: Spending | None = None

    def spending(self, iterations: int) -> Spending:
        """All runs, this one with so many steps."""
        before = [] if self.earlier is None else [self.earlier]
        return accounting.compose([*before, (self.mechanism, iterations)])

    def epsilon(self, iterations: int) -> float:
        """Of all runs together."""
        if self.earlier is None:
            return self.mechanism.epsilon(self.target_delta, iterations=iterations)
        return self.spending(iterations).epsilon(self.target_delta)

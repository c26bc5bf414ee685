"""What a run spends, on top of what earlier runs on the same people's data spent."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from dpadambc.mechanisms import accounting
from dpadambc.mechanisms.accounting import Spending
from dpadambc.mechanisms.base import Mechanism

Spent: TypeAlias = Any  # a Result, a Spending, a mechanism, or a list: see `earlier`

# As `save_release` writes it, beside the parameters.
SPENT = "spent"


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


# With which keys the runs of this process began that a run was told of: by its own.
_KEYS_BEFORE: dict[bytes, frozenset[bytes]] = {}


def _words(key: jax.Array) -> bytes:
    return np.asarray(jax.random.key_data(key)).tobytes()


def check_key(spent: Any, sampling_key: jax.Array) -> None:
    """Raises if a run in `spent`, or one before it, has the key of this one."""
    states = [getattr(entry, "state", None) for entry in _several(spent)]
    last = {_words(state.sampling_key) for state in states if state is not None}
    before = last.union(*(_KEYS_BEFORE.get(key, ()) for key in last))
    if _words(sampling_key) in before:
        raise same_key("a run in spent=")
    if before:
        _KEYS_BEFORE[_words(sampling_key)] = frozenset(before)


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

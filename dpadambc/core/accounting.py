"""Events of dp-accounting, in the unit of the accountant that reads them.

Under REPLACE_ONE the sensitivity is 2 C. dp-accounting's RDP accountant reads the noise
multiplier of a Gaussian in that unit. Its PLD accountant reads it in units of C, as
both do under other relations, and supplies the 2. So a Gaussian of this library has its
unit as a field. One of dp-accounting has none, and is read as it is.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Literal

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
from dp_accounting import NeighboringRelation, dp_event

from dpadambc.core import validate
from dpadambc.core.noise import schedule_at_step

Accountant = Literal["pld", "rdp"]
Unit = Literal["C", "2 C"]

_ACCOUNTANTS = ("pld", "rdp")

# A schedule with more levels than this is rounded down to so many.
_MOST_LEVELS = 64


def check_accountant(accountant: str) -> None:
    """Raises unless the name is known."""
    if accountant not in _ACCOUNTANTS:
        raise ValueError(
            f"Expected accountant to be one of {_ACCOUNTANTS}, got {accountant!r}."
        )


def check_delta(target_delta: float, num_examples: int | None = None) -> None:
    """Raises for a delta outside (0, 1), and for one of a whole example or more."""
    validate.open_unit_interval(target_delta=target_delta)
    if num_examples is not None and target_delta * num_examples >= 1:
        raise ValueError(
            f"Expected target_delta below 1 / num_examples = {1 / num_examples:.3g},"
            " since publishing a random example in full would be as private, got"
            f" {target_delta:g}. Ask for a delta well below that, such as"
            f" {0.1 / num_examples:.0e}."
        )


@dataclasses.dataclass(frozen=True, eq=False)
class GaussianDpEvent(dp_accounting.GaussianDpEvent):
    """One of dp-accounting with its unit, equal to one that has the same noise.

    Args:
      noise_multiplier: the standard deviation, in this unit.
      unit: "C", or "2 C".
    """

    noise_multiplier: float
    unit: Unit

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, dp_accounting.GaussianDpEvent):
            return NotImplemented
        own = self.noise_multiplier, self.unit
        return own == (other.noise_multiplier, getattr(other, "unit", self.unit))

    __hash__ = dp_accounting.GaussianDpEvent.__hash__

    def __reduce__(self):
        return type(self), (self.noise_multiplier, self.unit)

    def to_named_tuple(self) -> dp_event.DpEventNamedTuple:
        """That of dp-accounting, for which its readers know no unit."""
        return dp_accounting.GaussianDpEvent(self.noise_multiplier).to_named_tuple()


def _unit_of(accountant: Accountant, neighboring_relation: NeighboringRelation) -> Unit:
    """In what an accountant reads the noise of a Gaussian."""
    is_twice = neighboring_relation == NeighboringRelation.REPLACE_ONE
    return "2 C" if accountant == "rdp" and is_twice else "C"


def gaussian(
    noise_multiplier: float,
    neighboring_relation: NeighboringRelation,
    accountant: Accountant,
) -> GaussianDpEvent:
    """A Gaussian on the whole data set, in the unit that the accountant reads.

    Args:
      noise_multiplier: the standard deviation over the sensitivity.
      neighboring_relation: what two neighboring data sets differ in.
      accountant: which accountant will read it.

    Returns:
      The event, which keeps its unit in a composition, a copy or a pickle.
    """
    unit = _unit_of(accountant, neighboring_relation)
    is_twice = neighboring_relation == NeighboringRelation.REPLACE_ONE
    return GaussianDpEvent(noise_multiplier * (1 + (is_twice and unit == "C")), unit)


def _units(event: dp_accounting.DpEvent) -> Iterator[Unit]:
    """Those of all Gaussians in an event that have one."""
    if isinstance(event, GaussianDpEvent):
        yield event.unit
    for part in getattr(event, "events", ()):  # composed
        yield from _units(part)
    if inner := getattr(event, "event", None):  # composed with itself, or sampled
        yield from _units(inner)


def refusal(
    event: dp_accounting.DpEvent,
    accountant: Accountant,
    neighboring_relation: NeighboringRelation,
) -> str | None:
    """Why an accountant must not read an event, if it was made in another unit."""
    read = _unit_of(accountant, neighboring_relation)
    if made := set(_units(event)) - {read}:
        return (
            f"Expected an event with its noise in units of {read}, as {accountant!r}"
            f" reads it under {neighboring_relation.name}, got one in units of"
            f" {made.pop()}. Make it for this accountant, of a mechanism with this"
            f" relation: mechanism.dp_event(accountant={accountant!r})."
        )
    return None


def level_counts(schedule: optax.Schedule, iterations: int) -> dict[float, int]:
    """How many of the first `iterations` steps have which noise multiplier, at least.

    Equal steps are counted together. Where a schedule takes more than 64 values, each
    is first rounded *down* to one of 64 levels in geometric progression, so that the
    epsilon computed from them is an upper bound, and costs seconds.

    Args:
      schedule: the noise multiplier as a function of the step, counted from 0.
      iterations: the number of steps.

    Returns:
      A dictionary from noise multiplier to number of steps.

    Raises:
      ValueError: if the schedule has a negative value or one that is not finite.

    Example:
      >>> from dpadambc import accounting
      >>> accounting.level_counts(lambda step: 2.0 - (step >= 30), 100)
      {1.0: 70, 2.0: 30}
    """
    if iterations == 0:
        return {}
    at_steps = jax.vmap(functools.partial(schedule_at_step, schedule))
    values = np.asarray(at_steps(jnp.arange(iterations)), float)
    for value in (values.min(), values.max()):
        validate.non_negative(noise_multiplier=value)
    levels = np.unique(values)
    if levels[0] == 0:
        # One step without noise makes epsilon infinite, whatever the others do.
        return {0.0: iterations}
    if len(levels) > _MOST_LEVELS:
        levels = np.geomspace(levels[0], levels[-1], _MOST_LEVELS + 1)[:-1]
        levels[0] = values.min()
    index = np.searchsorted(levels, values, side="right") - 1
    counts = np.bincount(index, minlength=len(levels))
    return {float(z): int(n) for z, n in zip(levels, counts, strict=True) if n}


def composed(
    event_of: Callable[[float], dp_accounting.DpEvent],
    noise_multiplier: float | optax.Schedule,
    iterations: int,
) -> dp_accounting.DpEvent:
    """`iterations` steps of an event that depends on the noise multiplier."""
    if not callable(noise_multiplier):
        return dp_accounting.SelfComposedDpEvent(event_of(noise_multiplier), iterations)
    counts = level_counts(noise_multiplier, iterations)
    return dp_accounting.ComposedDpEvent(
        [dp_accounting.SelfComposedDpEvent(event_of(z), n) for z, n in counts.items()]
    )

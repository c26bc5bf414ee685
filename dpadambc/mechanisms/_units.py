"""In which unit an event has its noise, so that no accountant reads it in another.

Under REPLACE_ONE the sensitivity is 2 C. dp-accounting's RDP accountant reads the noise
multiplier of a Gaussian in that unit. Its PLD accountant reads it in units of C, as
both do under other relations, and supplies the 2. An event has no field for it: those
of this library are known by their identity, and of others nothing is known.
"""

import weakref
from collections.abc import Iterator
from typing import Literal

import dp_accounting
from dp_accounting import NeighboringRelation

Unit = Literal["C", "2 C"]
# By its id: the event, and its unit.
_MADE: dict[int, tuple[weakref.ref, Unit]] = {}


def unit_of(accountant: str, neighboring_relation: NeighboringRelation) -> Unit:
    """In what an accountant reads the noise of a Gaussian."""
    is_twice = neighboring_relation == NeighboringRelation.REPLACE_ONE
    return "2 C" if accountant == "rdp" and is_twice else "C"


def remember(event: dp_accounting.GaussianDpEvent, unit: Unit) -> None:
    """That this event was made in this unit."""
    name = id(event)
    forget = lambda _: _MADE.pop(name, None)
    _MADE[name] = weakref.ref(event, forget), unit


def _gaussians(event: dp_accounting.DpEvent) -> Iterator[dp_accounting.DpEvent]:
    if isinstance(event, dp_accounting.GaussianDpEvent):
        yield event
    elif isinstance(event, dp_accounting.ComposedDpEvent):
        for part in event.events:
            yield from _gaussians(part)
    elif inner := getattr(event, "event", None):  # composed with itself, or sampled
        yield from _gaussians(inner)


def refusal(
    event: dp_accounting.DpEvent,
    accountant: str,
    neighboring_relation: NeighboringRelation,
) -> str | None:
    """Why an accountant must not read an event, if it was made in another unit."""
    read = unit_of(accountant, neighboring_relation)
    for gaussian in _gaussians(event):
        _, made = _MADE.get(id(gaussian), (None, read))
        if made != read:
            return (
                f"Expected an event with its noise in units of {read}, as"
                f" {accountant!r} reads it under {neighboring_relation.name}, got one"
                f" in units of {made}. Make it for this accountant, of a mechanism"
                f" with this relation: mechanism.dp_event(accountant={accountant!r})."
            )
    return None

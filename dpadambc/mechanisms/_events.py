"""Events of dp-accounting, in the unit of the accountant that reads them."""

import functools
from collections.abc import Callable
from typing import Literal

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc._core import validate
from dpadambc.mechanisms import _units
from dpadambc.transforms import _noise_level

Accountant = Literal["pld", "rdp"]

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


def gaussian(
    noise_multiplier: float,
    neighboring_relation: dp_accounting.NeighboringRelation,
    accountant: Accountant,
) -> dp_accounting.GaussianDpEvent:
    """A Gaussian on the whole data set, in the unit that the accountant reads.

    Under REPLACE_ONE the sensitivity is 2 C. The RDP accountant reads the multiplier in
    that unit, the PLD accountant in units of C: it supplies the 2.
    """
    supplies_two = (
        accountant == "pld"
        and neighboring_relation == dp_accounting.NeighboringRelation.REPLACE_ONE
    )
    event = dp_accounting.GaussianDpEvent(noise_multiplier * (1 + supplies_two))
    _units.remember(event, _units.unit_of(accountant, neighboring_relation))
    return event


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
      >>> from dpadambc.mechanisms import accounting
      >>> accounting.level_counts(lambda step: 2.0 - (step >= 30), 100)
      {1.0: 70, 2.0: 30}
    """
    if iterations == 0:
        return {}
    at_steps = jax.vmap(functools.partial(_noise_level.of_schedule, schedule))
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

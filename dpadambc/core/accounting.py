"""Epsilon of a run, by dp-accounting.

A run is an event of dp-accounting. An `Accountant` reads it: `PLD`, by privacy loss
distributions, which are tight, or `RDP`, by Rényi divergences, an upper bound.

The noise multiplier of a Gaussian event is in units of C, as dp-accounting's PLD
accountant reads it: under REPLACE_ONE, where the sensitivity is 2 C, it supplies the 2.
Its RDP accountant reads it in units of the sensitivity there. `RDP` translates.
"""

import abc
import dataclasses
import functools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
from dp_accounting import DpEvent, GaussianDpEvent, NeighboringRelation, pld, rdp
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from dpadambc.core import validate

# A schedule with more levels than this is rounded down to so many.
_MOST_LEVELS = 64
# The largest exponent: its exponential is finite.
_LARGEST_EXPONENT = 700.0
# The coarsest grid of losses, and the relative error of epsilon that a grid may leave.
_COARSEST, _TOLERANCE = 1e-2, 3e-4
# A grid of one step, or of all, has no more losses than this: some 100 MB in all.
_MOST_LOSSES = 3e5
# Each composition by FFT takes less than this off delta by rounding: six times the most
# that `benchmarks.accounting.rounding` finds, in random runs of up to a million steps.
_ROUNDING = 4e-16
# A delta below this for each step is of the size of such rounding.
_RARE_DELTA = 1e-14
# How many epsilons are cached.
_MOST_KNOWN = 4096


def check_delta(target_delta: float, num_examples: int | None = None) -> None:
    """Raises for a delta outside (0, 1), or of 1 / num_examples or more."""
    validate.open_unit_interval(target_delta=target_delta)
    if num_examples is None:
        return
    validate.count(num_examples=num_examples)
    if target_delta * num_examples >= 1:
        raise ValueError(
            f"Expected target_delta below 1 / num_examples = {1 / num_examples:.3g},"
            f" got {target_delta:g}. Ask for {0.1 / num_examples:.0e} or less."
        )


def gaussian(noise_multiplier: float, relation: NeighboringRelation) -> GaussianDpEvent:
    """Returns the Gaussian mechanism without subsampling.

    Args:
      noise_multiplier: the standard deviation over the sensitivity.
      relation: the difference of two neighboring data sets.
    """
    clip_norms = 1 + (relation == NeighboringRelation.REPLACE_ONE)
    return GaussianDpEvent(noise_multiplier * clip_norms)


class OwnDpEvent(DpEvent, abc.ABC):
    """Gaussian steps that dp-accounting does not know: they compose themselves.

    Attributes:
      noise_multiplier: the noise over the sensitivity.
    """

    noise_multiplier: float

    @property
    @abc.abstractmethod
    def rate(self) -> float:
        """The probability that a step uses the example that differs."""

    @abc.abstractmethod
    def compose_into(self, accountant: Any, count: int) -> None:
        """Adds `count` of these steps to one of dp-accounting's accountants.

        Raises:
          dp_accounting.UnsupportedEventError: if the accountant is of another kind, or
            has no bound under its neighboring relation.
        """


def steps_of(event: DpEvent, count: int = 1) -> Iterator[tuple[DpEvent, int]]:
    """Yields the single steps of a composition, each with its number of times."""
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        yield from steps_of(event.event, count * event.count)
    elif isinstance(event, dp_accounting.ComposedDpEvent):
        for part in event.events:
            yield from steps_of(part, count)
    elif count and not isinstance(event, dp_accounting.NoOpDpEvent):
        yield event, count


def events_in(event: DpEvent) -> Iterator[DpEvent]:
    """Yields the steps of an event, and the events that are sampled in them."""
    for step, _ in steps_of(event):
        yield step
        if inner := getattr(step, "event", None):
            yield from events_in(inner)


class _Count(int):
    """A number of steps, to which dp-accounting raises the size of a distribution.

    It compares that power, which may have a million digits, with the size of a memory.
    A power that no memory holds is infinite here; all others are exact.
    """

    def __rpow__(self, size: Any, modulus: None = None) -> float:
        if type(size) is not int:
            return NotImplemented
        return math.inf if size > 1 and self > 64 else size ** int(self)


_NOISY = (GaussianDpEvent, dp_accounting.TruncatedSubsampledGaussianDpEvent, OwnDpEvent)


def _loss_and_rate(step: DpEvent) -> tuple[float, float]:
    """Estimates the privacy loss of a step that uses the example, and its probability.

    It ignores amplification, and is precise enough to reject absurdly large budgets.
    """
    rate: Any = getattr(step, "sampling_probability", getattr(step, "rate", 1.0))
    if isinstance(step, dp_accounting.SampledWithoutReplacementDpEvent):
        rate = step.sample_size / step.source_dataset_size
    noisy = (x for x in events_in(step) if isinstance(x, _NOISY))
    z = min((x.noise_multiplier for x in noisy), default=math.inf)
    with np.errstate(divide="ignore"):
        loss = float(0.5 / np.square(np.float64(z)))  # of a Gaussian moved by one
    return (loss, rate) if rate else (0.0, 0.0)


def _range_of_losses(step: DpEvent) -> float:
    """Estimates the distance between the largest and the least loss of one step."""
    loss, rate = _loss_and_rate(step)
    # A Gaussian whose mean moves by one: its loss is loss + sqrt(2 loss) Z, cut at ten
    # deviations. A mixture with a Gaussian that did not move has a smaller range.
    largest = loss + 10 * math.sqrt(2 * loss)
    if rate == 1 or largest > _LARGEST_EXPONENT:
        return 2 * largest
    return 2 * math.log1p(rate * math.expm1(largest))


class Accountant(abc.ABC):
    """A method to compute epsilon: `PLD` or `RDP`, and no other.

    Attributes:
      name: "pld" or "rdp".
      largest_loss: epsilon counts as infinite where the privacy loss of a step, or the
        mean loss of all steps, exceeds this.
    """

    name: ClassVar[str]
    largest_loss: ClassVar[float]

    def __repr__(self) -> str:
        return f"accounting.{self.name.upper()}"

    @abc.abstractmethod
    def bound(self, event: DpEvent, *args: Any, **how: float) -> float:
        """Bounds epsilon from above: see `PrivacyLosses.on_fine_grid`."""

    def translated(self, step: DpEvent, relation: NeighboringRelation) -> DpEvent:
        """Returns a step in the units of dp-accounting's accountant."""
        del relation
        return step

    def composed(self, event: DpEvent, accountant: Any) -> Any:
        """Adds all steps of an event to dp-accounting's accountant, and returns it.

        Args:
          event: the run, its noise in units of C.
          accountant: a fresh accountant of dp-accounting, of this kind.

        Raises:
          ValueError: if it cannot account for the event under its relation.
        """
        relation = accountant.neighboring_relation
        try:
            for step, count in steps_of(event):
                if isinstance(step, OwnDpEvent):
                    step.compose_into(accountant, _Count(count))
                else:
                    accountant.compose(self.translated(step, relation), _Count(count))
        except dp_accounting.UnsupportedEventError as error:
            got = f"under {relation.name}, got {self}: {error}"
            raise ValueError(f"Expected an accountant for {event!r} {got}") from error
        return accountant

    def epsilon(
        self, event: DpEvent, target_delta: float, relation: Any, **how: float
    ) -> float:
        """Returns the epsilon that an event spends: see `accounting.epsilon`."""
        if self.is_astronomical(event):
            return math.inf
        delta = float(target_delta)  # in double precision, whatever it is in
        try:
            # An event class without its own `__eq__` may compare equal to other events.
            if all("__eq__" in vars(type(x)) for x in events_in(event)):
                return _known_bound(
                    self, tuple(steps_of(event)), relation, delta, **how
                )
        except TypeError:  # it has no hash
            pass
        return self.bound(event, relation, delta, **how)

    def is_astronomical(self, event: DpEvent) -> bool:
        """Returns whether epsilon is infinite, or too large to be worth computing."""
        losses = [(*_loss_and_rate(step), count) for step, count in steps_of(event)]
        mean = sum(loss * rate * count for loss, rate, count in losses)
        return max([mean, *(loss for loss, _, _ in losses)]) > self.largest_loss


@functools.lru_cache(_MOST_KNOWN)
def _known_bound(accountant: Accountant, steps: Any, *args: Any, **how: float) -> float:
    """Returns the bound of an event with these steps, computed once."""
    parts: Any = [dp_accounting.SelfComposedDpEvent(*step) for step in steps]
    return accountant.bound(dp_accounting.ComposedDpEvent(parts), *args, **how)


class Bound(NamedTuple):
    """A distribution on a grid, and the epsilon that it gives."""

    losses: PrivacyLossDistribution
    epsilon: float  # at the target delta
    interval: float  # of the grid


@dataclasses.dataclass(frozen=True, repr=False)
class PrivacyLosses(Accountant):
    """An accountant by privacy loss distributions: tight."""

    name = "pld"
    # Beyond this loss the distribution would not fit into memory.
    largest_loss = 2e4

    def bound(self, event: DpEvent, *args: Any, **how: float) -> float:
        """Bounds epsilon on a grid that is fine enough."""
        return self.on_fine_grid(event, *args, **how).epsilon

    def on_fine_grid(
        self,
        event: DpEvent,
        relation: NeighboringRelation,
        target_delta: float,
        tolerance: float = _TOLERANCE,
        enough: float = 0.0,
    ) -> Bound:
        """Returns the distribution that gives epsilon to a relative tolerance.

        Every grid gives an upper bound, whose error falls with the square of the
        interval. Two grids tell the error, and so the interval that is fine enough.

        Args:
          event: the run.
          relation: the difference of two neighboring data sets.
          target_delta: at which epsilon counts.
          tolerance: the relative tolerance of epsilon.
          enough: an epsilon that need not be known better once it is not exceeded.
        """
        ranges = (_range_of_losses(step) for step, _ in steps_of(event))
        finest = max(ranges, default=0.0) / _MOST_LOSSES
        left = target_delta - rounding_of(event)

        def on(interval):
            losses = self.composed(event, pld.PLDAccountant(relation, interval))._pld
            epsilon = losses.get_epsilon_for_delta(left) if left > 0 else math.inf
            return Bound(losses, float(epsilon), interval)

        bound, shrink = on(max(_COARSEST, finest)), 0.25
        while enough < bound.epsilon < math.inf:
            sizes = bound.losses._pmf_remove.size, bound.losses._pmf_add.size
            composed = max(sizes) * bound.interval / _MOST_LOSSES
            interval = max(bound.interval * shrink, finest, composed)
            if interval >= 0.9 * bound.interval:
                break
            last, bound = bound, on(interval)
            ratio = (last.interval / bound.interval) ** 2
            error = (last.epsilon - bound.epsilon) / (ratio - 1)
            allowed = tolerance * bound.epsilon + 1e-6
            if error <= allowed:
                break
            # Somewhat finer than the error says, for one that falls more slowly.
            shrink = max(0.7 * math.sqrt(allowed / error), 1 / 8)
        return bound


@dataclasses.dataclass(frozen=True, repr=False)
class RenyiDivergences(Accountant):
    """An accountant by Rényi divergences: an upper bound, and faster."""

    name = "rdp"
    largest_loss = sys.float_info.max  # it knows no grid

    def translated(self, step: DpEvent, relation: NeighboringRelation) -> DpEvent:
        """Rescales a step to the sensitivity, which is 2 C under REPLACE_ONE."""
        if relation != NeighboringRelation.REPLACE_ONE:
            return step
        if type(step) is GaussianDpEvent:
            return GaussianDpEvent(step.noise_multiplier / 2)
        raise dp_accounting.UnsupportedEventError(f"No Rényi bound for {step!r}.")

    def bound(self, event: DpEvent, relation: Any, delta: float, **how: float) -> float:
        """Bounds epsilon, exactly at each order, for any tolerance."""
        del how
        accountant = self.composed(event, rdp.RdpAccountant(None, relation))
        return float(accountant.get_epsilon(delta))


PLD = PrivacyLosses()
RDP = RenyiDivergences()


def check_accountant(accountant: Any) -> None:
    """Raises unless it is `PLD` or `RDP`."""
    if accountant not in (PLD, RDP):
        expected = "accounting.PLD or accounting.RDP"
        raise TypeError(f"Expected accountant {expected}, got {accountant!r}.")


def rounding_of(event: DpEvent) -> float:
    """Bounds the part of any delta that rounding in the composition may remove."""
    return _ROUNDING * sum(count for _, count in steps_of(event))


def least_epsilon(
    event: DpEvent, accountants: Sequence[Accountant], target_delta: float, **how: Any
) -> float:
    """Returns epsilon by the first accountant, or the least of all at a tiny delta.

    `PLD` spends a part of delta on rounding, and Rényi divergences have none.

    Args:
      event: the run.
      accountants: the accountants that can read the event, the tightest first.
      target_delta: the delta that goes with it.
      **how: the relation, and the tolerance, for `Accountant.epsilon`.
    """
    for accountant in accountants:
        check_accountant(accountant)
    is_rare = target_delta <= _RARE_DELTA / _ROUNDING * rounding_of(event)
    used = accountants if is_rare else accountants[:1]
    return min(x.epsilon(event, target_delta, **how) for x in used)


def levels_of(
    noise_multiplier: float | optax.Schedule, iterations: int
) -> dict[float, int]:
    """Counts how many of the first `iterations` steps have each noise multiplier.

    Counts equal steps together. Where a schedule takes more than 64 values, each is
    first rounded *down* to one of 64 levels in geometric progression, so that the
    epsilon computed from them is an upper bound, and costs seconds.

    Args:
      noise_multiplier: a number, or a function of the step, counted from 0.
      iterations: the number of steps; for none, the first level counts 0.

    Raises:
      ValueError: if the schedule has a negative value or one that is not finite.

    Example:
      >>> from dpadambc.core.accounting import levels_of
      >>> levels_of(lambda step: 2.0 - (step >= 30), 100)
      {1.0: 70, 2.0: 30}
    """
    if not callable(noise_multiplier):
        return {float(noise_multiplier): iterations}
    at_steps: Any = jax.vmap(noise_multiplier)
    if iterations == 0:
        return {float(at_steps(jnp.arange(1))[0]): 0}
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

"""Epsilon of what was run, by dp-accounting.

A run is an event of dp-accounting. An `Accountant` reads it: `PLD`, by privacy loss
distributions, which are tight, or `RDP`, by Rényi divergences, an upper bound.

Under REPLACE_ONE the sensitivity is 2 C. dp-accounting's RDP accountant reads the noise
multiplier of a Gaussian in that unit. Its PLD accountant reads it in units of C, as
both do under other relations, and supplies the 2. So a Gaussian of this library has its
unit as a field. One of dp-accounting has none, and is read as it is.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
from dp_accounting import NeighboringRelation, dp_event, pld, rdp
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from dpadambc.core import noise_level, validate

Unit = Literal["C", "2 C"]

# A schedule with more levels than this is rounded down to so many.
_MOST_LEVELS = 64
# PLD says that epsilon is infinite where the privacy loss of a step, or the mean of
# all, is beyond this: it means nothing, and its distribution would not fit into memory.
_LARGEST_LOSS = 2e4
# Its exponential is a number.
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
# How many epsilons are kept.
_MOST_KNOWN = 4096


def check_delta(target_delta: float, num_examples: int | None = None) -> None:
    """Raises for a delta outside (0, 1), and for one of a whole example or more."""
    validate.open_unit_interval(target_delta=target_delta)
    if num_examples is not None and target_delta * num_examples >= 1:
        raise ValueError(
            f"Expected target_delta below 1 / num_examples = {1 / num_examples:.3g},"
            " since publishing a random example in full would be as private, got"
            f" {target_delta:g}. Ask for one well below that, such as"
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


class ReadableDpEvent(dp_accounting.DpEvent, abc.ABC):
    """An event that dp-accounting does not know, with the numbers to account for it.

    A Gaussian step with a public noise multiplier, which affects a neighbor at a rate.

    Attributes:
      noise_multiplier: the noise over the sensitivity.
      neighboring_relation: the relation that the event is stated for. Accountants of
        another relation refuse it. None is for all relations.
    """

    noise_multiplier: float
    neighboring_relation: NeighboringRelation | None = None

    @property
    @abc.abstractmethod
    def rate(self) -> float:
        """The probability that a step affects what two neighbors differ in."""

    @abc.abstractmethod
    def privacy_losses(self, interval: float) -> PrivacyLossDistribution:
        """The distribution of the privacy loss of one step, from above, on a grid."""

    @abc.abstractmethod
    def renyi_divergences(self, orders: np.ndarray) -> np.ndarray:
        """An upper bound on the Rényi divergence of one step at each order."""


def steps_of(
    event: dp_accounting.DpEvent, count: int = 1
) -> Iterator[tuple[dp_accounting.DpEvent, int]]:
    """The single steps of a composition, each with how often it is taken."""
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        yield from steps_of(event.event, count * event.count)
    elif isinstance(event, dp_accounting.ComposedDpEvent):
        for part in event.events:
            yield from steps_of(part, count)
    elif count and not isinstance(event, dp_accounting.NoOpDpEvent):
        yield event, count


def events_in(event: dp_accounting.DpEvent) -> Iterator[dp_accounting.DpEvent]:
    """The steps of an event, and the events that are sampled in them."""
    for step, _ in steps_of(event):
        yield step
        if inner := getattr(step, "event", None):
            yield from events_in(inner)


_NOISED = (
    dp_accounting.GaussianDpEvent,
    dp_accounting.TruncatedSubsampledGaussianDpEvent,
    ReadableDpEvent,
)


def _loss_and_rate(step: dp_accounting.DpEvent) -> tuple[float, float]:
    """About the privacy loss of a step that hits, and the rate at which it does.

    There is no amplification in it: enough to tell what is astronomical.
    """
    rate: Any = getattr(step, "sampling_probability", getattr(step, "rate", 1.0))
    if isinstance(step, dp_accounting.SampledWithoutReplacementDpEvent):
        rate = step.sample_size / step.source_dataset_size
    noised = [x for x in events_in(step) if isinstance(x, _NOISED)]
    z = min((x.noise_multiplier for x in noised), default=math.inf)
    with np.errstate(divide="ignore"):
        loss = float(0.5 / np.square(np.float64(z)))  # of a Gaussian moved by one
    return (loss, rate) if rate else (0.0, 0.0)


def _range_of_losses(step: dp_accounting.DpEvent) -> float:
    """About how far the largest and the least loss of one step are apart."""
    loss, rate = _loss_and_rate(step)
    # Of a Gaussian whose mean moves by one, nine deviations to both sides and more;
    # of a mixture with what did not move, less.
    largest = loss + 10 * math.sqrt(2 * loss)
    if rate == 1 or largest > _LARGEST_EXPONENT:
        return 2 * largest
    return 2 * math.log1p(rate * math.expm1(largest))


class Accountant(abc.ABC):
    """Computes epsilon: one of the values `PLD` and `RDP`, and no other.

    Attributes:
      name: "pld" or "rdp".
    """

    name: ClassVar[str]

    def __repr__(self) -> str:
        return f"accounting.{self.name.upper()}"

    @abc.abstractmethod
    def make(self, relation: NeighboringRelation, *options: Any) -> Any:
        """dp-accounting's accountant, on a grid of losses or at Rényi orders."""

    @abc.abstractmethod
    def add(self, accountant: Any, step: ReadableDpEvent, count: int) -> None:
        """Composes a step that dp-accounting does not know."""

    @abc.abstractmethod
    def is_beyond(self, largest_loss: float, mean_loss: float) -> bool:
        """Whether losses are so large that epsilon counts as infinite."""

    @abc.abstractmethod
    def bound(self, event: dp_accounting.DpEvent, *how: Any) -> float:
        """Epsilon from above: see `PrivacyLosses.on_fine_grid`."""

    def unit(self, relation: NeighboringRelation) -> Unit:
        """In what it reads the noise of a Gaussian."""
        is_twice = relation == NeighboringRelation.REPLACE_ONE
        return "2 C" if self.name == "rdp" and is_twice else "C"

    def gaussian(
        self, noise_multiplier: float, relation: NeighboringRelation
    ) -> GaussianDpEvent:
        """A Gaussian on the whole data set, in the unit that this accountant reads.

        Args:
          noise_multiplier: the standard deviation over the sensitivity.
          relation: what two neighboring data sets differ in.
        """
        unit = self.unit(relation)
        is_twice = relation == NeighboringRelation.REPLACE_ONE and unit == "C"
        return GaussianDpEvent(noise_multiplier * (1 + is_twice), unit)

    def check(self, event: dp_accounting.DpEvent, relation: NeighboringRelation):
        """Raises for an event of another relation, or in another accountant's unit."""
        read = self.unit(relation)
        for found in events_in(event):
            own = getattr(found, "neighboring_relation", None)
            if isinstance(found, ReadableDpEvent) and own not in (None, relation):
                raise ValueError(
                    f"Expected neighboring_relation {own.name}, which this event is"
                    f" stated for, got {relation.name}."
                )
            if isinstance(found, GaussianDpEvent) and found.unit != read:
                raise ValueError(
                    f"Expected an event with its noise in units of {read}, as {self!r}"
                    f" reads it under {relation.name}, got one in units of"
                    f" {found.unit}. Make it by mechanism.dp_event(accountant=...)."
                )

    def compose(
        self, event: dp_accounting.DpEvent, relation: NeighboringRelation, *options: Any
    ) -> Any:
        """dp-accounting's accountant, with all steps of an event composed.

        Args:
          event: what was run, in the unit that this accountant reads.
          relation: what two neighboring data sets differ in.
          *options: the interval of the grid of losses, or the Rényi orders.

        Raises:
          ValueError: if it cannot account for the event under this relation.
        """
        self.check(event, relation)
        accountant = self.make(relation, *options)
        try:
            for step, count in steps_of(event):
                if isinstance(step, ReadableDpEvent):
                    self.add(accountant, step, count)
                else:
                    accountant.compose(step, count)
        except dp_accounting.UnsupportedEventError as error:
            raise ValueError(
                f"Expected an event that {self!r} can account for under"
                f" {relation.name}, got {event!r}: {error}"
            ) from error
        return accountant

    def epsilon(
        self,
        event: dp_accounting.DpEvent,
        *,
        target_delta: float,
        neighboring_relation: NeighboringRelation,
        tolerance: float = _TOLERANCE,
        enough: float = 0.0,
    ) -> float:
        """The epsilon that an event spends: see the function `epsilon`."""
        if self.is_astronomical(event):
            return math.inf
        # In double precision, whatever delta is in.
        how = neighboring_relation, float(target_delta), tolerance, enough
        try:
            # An event without an equality of its own may be equal to others than it.
            if all("__eq__" in vars(type(x)) for x in events_in(event)):
                return _known_bound(self, tuple(steps_of(event)), *how)
        except TypeError:  # it has no hash
            pass
        return self.bound(event, *how)

    def is_astronomical(self, event: dp_accounting.DpEvent) -> bool:
        """Whether epsilon is infinite, or so large that it is not worth computing."""
        losses = [(*_loss_and_rate(step), count) for step, count in steps_of(event)]
        largest = max((loss for loss, _, _ in losses), default=0.0)
        return self.is_beyond(largest, sum(x * rate * n for x, rate, n in losses))


@functools.lru_cache(_MOST_KNOWN)
def _known_bound(accountant: Accountant, steps: Any, *how: Any) -> float:
    """The bound of an event with these steps, computed once."""
    parts = [dp_accounting.SelfComposedDpEvent(step, count) for step, count in steps]
    return accountant.bound(dp_accounting.ComposedDpEvent(parts), *how)


class Bound(NamedTuple):
    """A distribution on a grid, and the epsilon that it gives."""

    losses: PrivacyLossDistribution
    epsilon: float  # at the target delta
    interval: float  # of the grid


@dataclasses.dataclass(frozen=True, repr=False)
class PrivacyLosses(Accountant):
    """By privacy loss distributions: tight."""

    name = "pld"

    def make(self, relation: NeighboringRelation, *options: Any) -> Any:
        """With the interval of the grid."""
        return pld.PLDAccountant(relation, *options)

    def add(self, accountant: Any, step: ReadableDpEvent, count: int) -> None:
        """By the privacy losses of the step."""
        if step.rate == 0:
            return
        losses = step.privacy_losses(accountant._value_discretization_interval)
        # Where the grid holds hardly any mass, bounds on its tails overflow.
        with np.errstate(over="ignore", divide="ignore"):
            accountant._pld = accountant._pld.compose(losses.self_compose(count))

    def is_beyond(self, largest_loss: float, mean_loss: float) -> bool:
        """Whether the grid would not fit into memory."""
        return max(largest_loss, mean_loss) > _LARGEST_LOSS

    def bound(self, event: dp_accounting.DpEvent, *how: Any) -> float:
        """On a grid that is fine enough."""
        return self.on_fine_grid(event, *how).epsilon

    def on_fine_grid(
        self,
        event: dp_accounting.DpEvent,
        relation: NeighboringRelation,
        target_delta: float,
        tolerance: float = _TOLERANCE,
        enough: float = 0.0,
    ) -> Bound:
        """The distribution with which epsilon is known to a relative tolerance.

        Every grid gives an upper bound, whose error falls with the square of the
        interval. Two grids tell the error, and so the interval that is fine enough.

        Args:
          event: what was run.
          relation: what two neighboring data sets differ in.
          target_delta: at which epsilon counts.
          tolerance: of epsilon.
          enough: an epsilon that need not be known better once it is not exceeded.
        """
        ranges = (_range_of_losses(step) for step, _ in steps_of(event))
        finest = max(ranges, default=0.0) / _MOST_LOSSES
        left = target_delta - rounding_of(event)

        def on(interval):
            losses = self.compose(event, relation, interval)._pld
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
    """By Rényi divergences: an upper bound, and faster."""

    name = "rdp"

    def make(self, relation: NeighboringRelation, *options: Any) -> Any:
        """At the Rényi orders."""
        return rdp.RdpAccountant(*(options or (None,)), relation)

    def add(self, accountant: Any, step: ReadableDpEvent, count: int) -> None:
        """By the Rényi divergences of the step."""
        if step.rate > 0:
            accountant._rdp += count * step.renyi_divergences(accountant._orders)

    def is_beyond(self, largest_loss: float, mean_loss: float) -> bool:
        """Whether there is no noise: it knows no grid."""
        return largest_loss == math.inf

    def bound(self, event: dp_accounting.DpEvent, *how: Any) -> float:
        """Exact at each order; how well an epsilon is to be known is no matter."""
        relation, target_delta, *_ = how
        return float(self.compose(event, relation).get_epsilon(target_delta))


PLD = PrivacyLosses()
RDP = RenyiDivergences()


def check_accountant(accountant: Any) -> None:
    """Raises unless it is one of the two values."""
    if accountant not in (PLD, RDP):
        raise TypeError(
            "Expected accountant to be accounting.PLD or accounting.RDP, got"
            f" {accountant!r}."
        )


def rounding_of(event: dp_accounting.DpEvent) -> float:
    """The most that rounding in the composition may have taken off any delta."""
    return _ROUNDING * sum(count for _, count in steps_of(event))


def epsilon(
    event: dp_accounting.DpEvent,
    *,
    target_delta: float,
    neighboring_relation: NeighboringRelation,
    accountant: Accountant = PLD,
) -> float:
    """The epsilon that an event spends.

    The epsilon of an event that is frozen and has a hash, as all of this library and
    most of dp-accounting have, is computed once for one relation and delta.

    Args:
      event: what was run, in the unit that the accountant reads (see
        `Mechanism.dp_event`).
      target_delta: the delta that goes with it, in (0, 1).
      neighboring_relation: what two neighboring data sets differ in.
      accountant: `accounting.PLD` (tight) or `accounting.RDP` (an upper bound, faster).

    Returns:
      Epsilon; infinity without noise, or where it is too large to compute: beyond some
      700, and in any case where the noise is below 0.005 of what it has to hide. By
      `PLD` it is infinite too where delta is below 4e-16 for each step, which is spent
      on rounding.

    Raises:
      TypeError: for another accountant.
      ValueError: for a delta outside (0, 1), or an event that the accountant cannot
        account for under this relation.

    Example:
      >>> import dp_accounting
      >>> from dpadambc import accounting
      >>> relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
      >>> event = dp_accounting.GaussianDpEvent(2.0)
      >>> round(accounting.epsilon(
      ...     event, target_delta=1e-5, neighboring_relation=relation), 3)
      1.993
    """
    check_accountant(accountant)
    check_delta(target_delta)
    return accountant.epsilon(
        event, target_delta=target_delta, neighboring_relation=neighboring_relation
    )


def least_epsilon(
    event_for: Callable[[Accountant], dp_accounting.DpEvent],
    accountants: Sequence[Accountant],
    *,
    target_delta: float,
    **how: Any,
) -> float:
    """Epsilon by the first accountant; by the least of all at a tiny delta.

    `PLD` spends a part of delta on rounding, and Rényi divergences have none.

    Args:
      event_for: an accountant, in its unit.
      accountants: that can read the event, the tightest first.
      target_delta: the delta that goes with it.
      **how: the relation, and the tolerance, for `Accountant.epsilon`.
    """
    first, *others = accountants
    event = event_for(first)
    spent = first.epsilon(event, target_delta=target_delta, **how)
    if others and target_delta <= _RARE_DELTA / _ROUNDING * rounding_of(event):
        rest = (
            x.epsilon(event_for(x), target_delta=target_delta, **how) for x in others
        )
        spent = min(spent, *rest)
    return spent


def level_counts(schedule: optax.Schedule, iterations: int) -> dict[float, int]:
    """How many of the first `iterations` steps have which noise multiplier, at least.

    Equal steps are counted together. Where a schedule takes more than 64 values, each
    is first rounded *down* to one of 64 levels in geometric progression, so that the
    epsilon computed from them is an upper bound, and costs seconds.

    Args:
      schedule: the noise multiplier as a function of the step, counted from 0.
      iterations: the number of steps.

    Raises:
      ValueError: if the schedule has a negative value or one that is not finite.

    Example:
      >>> from dpadambc.core.accounting import level_counts
      >>> level_counts(lambda step: 2.0 - (step >= 30), 100)
      {1.0: 70, 2.0: 30}
    """
    if iterations == 0:
        return {}
    at_steps = jax.vmap(functools.partial(noise_level.of_schedule, schedule))
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

"""Epsilon of an event, and the parameter that meets a target, by dp-accounting."""

import abc
import functools
import logging
import math
import warnings
from collections.abc import Callable
from typing import Literal

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.optimize
from dp_accounting import pld, rdp

from dpadambc._core import validate

Accountant = Literal["pld", "rdp"]

_ACCOUNTANTS = ("pld", "rdp")

# The largest grid of privacy losses: some seconds, and less than a gigabyte.
_MOST_LOSSES = 10**6

# Epsilon counts as infinite where the privacy loss of a step, or the mean of all, is
# beyond this: it means nothing, and its distribution would not fit into memory.
_LARGEST_LOSS = 2e4

# A schedule with more levels than this is rounded down to so many.
_MOST_LEVELS = 64


def check_accountant(accountant: str) -> None:
    """Raises unless the name is known."""
    if accountant not in _ACCOUNTANTS:
        raise ValueError(
            f"Expected accountant to be one of {_ACCOUNTANTS}, got {accountant!r}."
        )


def check_delta(target_delta: float, num_examples: int | None = None) -> None:
    """Raises for a delta outside (0, 1); warns for one of a whole example or more."""
    validate.open_unit_interval(target_delta=target_delta)
    if num_examples is not None and target_delta * num_examples >= 1:
        warnings.warn(
            f"target_delta={target_delta:g} is at least 1 / num_examples ="
            f" {1 / num_examples:.3g}: publishing a random example in full would be as"
            " private. Ask for a delta well below that, such as"
            f" {0.1 / num_examples:.0e}.",
            stacklevel=3,
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
    return dp_accounting.GaussianDpEvent(noise_multiplier * (1 + supplies_two))


class ReadableDpEvent(dp_accounting.DpEvent, abc.ABC):
    """An event that dp-accounting does not know, with what its accountants need of it.

    A Gaussian step with a public noise multiplier, which affects a neighbor at a rate.
    """

    noise_multiplier: float

    @property
    @abc.abstractmethod
    def rate(self) -> float:
        """The probability that a step affects what two neighbors differ in."""

    @abc.abstractmethod
    def privacy_losses(
        self, interval: float
    ) -> pld.privacy_loss_distribution.PrivacyLossDistribution:
        """The distribution of the privacy loss of one step, from above, on a grid."""

    @abc.abstractmethod
    def renyi_divergences(self, orders: np.ndarray) -> np.ndarray:
        """An upper bound on the Rényi divergence of one step at each order."""


class PLDAccountant(pld.PLDAccountant):
    """dp-accounting's accountant, which reads a `ReadableDpEvent` too."""

    def _maybe_compose(
        self, event: dp_accounting.DpEvent, count: int, do_compose: bool
    ) -> dp_accounting.PrivacyAccountant.CompositionErrorDetails | None:
        if not isinstance(event, ReadableDpEvent):
            return super()._maybe_compose(event, count, do_compose)
        if not do_compose or event.rate == 0:
            return None
        if event.noise_multiplier == 0:
            self._contains_non_dp_event = True
            return None
        step = event.privacy_losses(self._value_discretization_interval)
        # Where the grid holds hardly any mass, bounds on its tails overflow.
        with np.errstate(over="ignore", divide="ignore"):
            self._pld = self._pld.compose(step.self_compose(count))
        return None


class RdpAccountant(rdp.RdpAccountant):
    """dp-accounting's accountant, which reads a `ReadableDpEvent` too."""

    def _maybe_compose(
        self, event: dp_accounting.DpEvent, count: int, do_compose: bool
    ) -> dp_accounting.PrivacyAccountant.CompositionErrorDetails | None:
        if not isinstance(event, ReadableDpEvent):
            return super()._maybe_compose(event, count, do_compose)
        if do_compose and event.rate > 0:
            without_noise = event.noise_multiplier == 0
            step = np.inf if without_noise else event.renyi_divergences(self._orders)
            self._rdp += count * step
        return None


class _QuietOrders(logging.Filter):
    """Drops dp-accounting's notes that a Rényi order did not converge.

    It leaves that order out of a minimum over many, so the bound stands.
    """

    def filter(self, record):
        return "failed to converge" not in record.getMessage()


def _epsilon_by(
    accountant: dp_accounting.PrivacyAccountant,
    event: dp_accounting.DpEvent,
    target_delta: float,
) -> float:
    logger, quiet = logging.getLogger("absl"), _QuietOrders()
    logger.addFilter(quiet)
    try:
        return float(accountant.compose(event).get_epsilon(target_delta))
    finally:
        logger.removeFilter(quiet)


def gaussian_loss(noise_multiplier: float) -> float:
    """The mean privacy loss of a Gaussian whose mean moves by one."""
    with np.errstate(divide="ignore"):
        return float(0.5 / np.square(np.float64(noise_multiplier)))


def _losses(event: dp_accounting.DpEvent) -> tuple[float, float]:
    """About the largest privacy loss of one step, and the mean of all together.

    Of sampling they have the rate at which it hits, and no amplification: enough to
    tell what is astronomical.
    """
    if isinstance(event, dp_accounting.GaussianDpEvent):
        loss = gaussian_loss(event.noise_multiplier)
        return loss, loss
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        largest, mean = _losses(event.event)
        return largest, mean * event.count if event.count else 0.0
    if isinstance(event, dp_accounting.ComposedDpEvent):
        largest, means = zip(*map(_losses, event.events), strict=True)
        return max(largest), sum(means)
    if isinstance(event, ReadableDpEvent):
        loss, rate = gaussian_loss(event.noise_multiplier), event.rate
    elif isinstance(event, dp_accounting.TruncatedSubsampledGaussianDpEvent):
        loss = gaussian_loss(event.noise_multiplier)
        rate = event.sampling_probability
    elif isinstance(event, dp_accounting.PoissonSampledDpEvent):
        loss, rate = _losses(event.event)[0], event.sampling_probability
    elif isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent):
        loss = _losses(event.event)[0]
        rate = event.sample_size / event.source_dataset_size
    else:
        return 0.0, 0.0
    return (loss, rate * loss) if rate else (0.0, 0.0)


def _is_astronomical(event: dp_accounting.DpEvent, accountant: Accountant) -> bool:
    """Whether epsilon is infinite, or so large that it is not worth computing."""
    largest, mean = _losses(event)
    if accountant == "rdp":  # which knows no grid
        return largest == math.inf
    return max(largest, mean) > _LARGEST_LOSS


def _pld_epsilon(
    event: dp_accounting.DpEvent,
    target_delta: float,
    neighboring_relation: dp_accounting.NeighboringRelation,
) -> float:
    """Epsilon on a grid of privacy losses as fine as it needs to be.

    Every grid gives an upper bound, and a finer one a tighter bound at ten times the
    cost. So the grid is refined until that changes the bound by less than 0.5 %, or
    1e-4.
    """

    def on_grid(interval):
        accountant = PLDAccountant(neighboring_relation, interval)
        return _epsilon_by(accountant, event, target_delta)

    interval, bound = 1e-2, math.inf
    while True:
        last = bound
        try:
            bound = on_grid(interval)
        except MemoryError:
            if last == math.inf:
                raise
            return last
        if bound in (0, math.inf) or last - bound < 5e-3 * bound + 1e-4:
            return min(last, bound)
        interval /= 10
        if bound > _MOST_LOSSES * interval:
            return bound


@functools.lru_cache(maxsize=256)
def _epsilon(
    event: dp_accounting.DpEvent,
    target_delta: float,
    neighboring_relation: dp_accounting.NeighboringRelation,
    accountant: Accountant,
) -> float:
    """What `epsilon` returns, remembered: one run asks for the same several times."""
    if _is_astronomical(event, accountant):
        return math.inf
    try:
        if accountant == "pld":
            return _pld_epsilon(event, target_delta, neighboring_relation)
        by_orders = RdpAccountant(neighboring_relation=neighboring_relation)
        return _epsilon_by(by_orders, event, target_delta)
    except dp_accounting.UnsupportedEventError as error:
        raise ValueError(
            f"The {accountant!r} accountant cannot account for this sampling under"
            f" {neighboring_relation.name}: {error}"
        ) from error


def epsilon(
    event: dp_accounting.DpEvent,
    *,
    target_delta: float,
    neighboring_relation: dp_accounting.NeighboringRelation,
    accountant: Accountant = "pld",
) -> float:
    """The epsilon that an event spends.

    Args:
      event: what was run, in the unit that the accountant reads (see
        `PoissonGaussian.dp_event`).
      target_delta: the delta that goes with it, in (0, 1).
      neighboring_relation: what two neighboring datasets differ in.
      accountant: "pld" (privacy loss distributions, tight) or "rdp" (Rényi, an upper
        bound, faster).

    Returns:
      Epsilon; infinity without noise, or where it is too large to compute: beyond some
      700, and in any case where the noise is below 0.005 of what it has to hide.

    Raises:
      ValueError: for an unknown accountant, a delta outside (0, 1), or an event that
        the accountant cannot account for under this relation.

    Example:
      >>> import dp_accounting
      >>> from dpadambc.mechanisms import accounting
      >>> relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
      >>> event = dp_accounting.GaussianDpEvent(2.0)
      >>> round(accounting.epsilon(
      ...     event, target_delta=1e-5, neighboring_relation=relation), 3)
      1.993
    """
    check_accountant(accountant)
    check_delta(target_delta)
    # An event with a list in it has no hash: the composition of several.
    compute = _epsilon if _has_hash(event) else _epsilon.__wrapped__
    return compute(event, target_delta, neighboring_relation, accountant)


def _has_hash(event: dp_accounting.DpEvent) -> bool:
    try:
        hash(event)
    except TypeError:
        return False
    return True


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
    values = np.asarray(jax.vmap(schedule)(jnp.arange(iterations)), float)
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


def _bracket(
    gap: Callable[[float], float], start: float, factor: float, end: float
) -> tuple[float, float]:
    """The last of start, start * factor, ... before a positive gap, and the next.

    The search comes from the side of little epsilon, where accounting is cheap; at
    the other end it can take more memory than there is.
    """
    while start != end and gap(start * factor) <= 0:
        start *= factor
    return start, start * factor if start != end else end


def _solve(gap: Callable[[float], float], good: float, bad: float) -> float:
    """A number near the sign change of the gap, to four digits, on the good side."""
    solution = scipy.optimize.root_scalar(
        lambda x: gap(math.exp(x)), bracket=(math.log(good), math.log(bad)), xtol=5e-5
    )
    x = solution.root
    while gap(math.exp(x)) > 0:
        x += 1e-4 * math.copysign(1, good - bad)
    return math.exp(x)


def last_affordable(
    is_affordable: Callable[[int], bool], affordable: int, too_many: int
) -> int:
    """The last number of steps that is affordable, between one that is and one not."""
    while too_many - affordable > 1:
        middle = (affordable + too_many) // 2
        if is_affordable(middle):
            affordable = middle
        else:
            too_many = middle
    return affordable


# The parameter's grid of trial values, from the side of little epsilon.
_GRIDS = {
    "noise_multiplier": (2.0**14, 0.5, 2.0**-10),
    "sampling_prob": (2.0**-24, 2.0, 1.0),
    "iterations": (1, 2, 2**30),
}


def calibrate(
    event_of: Callable[..., dp_accounting.DpEvent],
    unknown: str,
    *,
    target_epsilon: float,
    target_delta: float,
    neighboring_relation: dp_accounting.NeighboringRelation,
    accountant: Accountant = "pld",
) -> float | int:
    """Solves for one parameter of an event.

    Args:
      event_of: the event as a function of the unknown.
      unknown: "noise_multiplier", "sampling_prob" or "iterations".
      target_epsilon: the epsilon to reach and not to exceed; positive.
      target_delta: in (0, 1).
      neighboring_relation: what two neighboring datasets differ in.
      accountant: "pld" or "rdp".

    Returns:
      The least noise multiplier or the largest sampling probability, to four digits,
      or the largest number of iterations. Its epsilon never exceeds the target.

    Raises:
      ValueError: if the target cannot be reached.

    Example:
      >>> import dp_accounting
      >>> from dpadambc.mechanisms import accounting
      >>> z = accounting.calibrate(
      ...     dp_accounting.GaussianDpEvent, "noise_multiplier",
      ...     target_epsilon=1.0, target_delta=1e-5,
      ...     neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
      >>> round(z, 2)
      3.73
    """
    validate.positive(target_epsilon=target_epsilon)

    @functools.cache
    def gap(x):
        spent = epsilon(
            event_of(x),
            target_delta=target_delta,
            neighboring_relation=neighboring_relation,
            accountant=accountant,
        )
        # Bounded, since the search cannot use infinity.
        return min(spent, 2 * target_epsilon + 1) - target_epsilon

    start, factor, end = _GRIDS[unknown]
    if gap(start) > 0:
        raise ValueError(
            f"target_epsilon={target_epsilon:g} at target_delta={target_delta:g}"
            f" cannot be reached by choosing {unknown}: it is exceeded even at"
            f" {start:g}."
        )
    good, bad = _bracket(gap, start, factor, end)
    if good == bad:
        return good
    if unknown == "iterations":
        return last_affordable(lambda n: gap(n) <= 0, round(good), round(bad))
    return _solve(gap, good, bad)

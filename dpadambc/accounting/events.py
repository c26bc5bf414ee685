"""The epsilon of an event, and the number of an event that meets a target."""

from collections.abc import Callable

import dp_accounting
from dp_accounting import NeighboringRelation

from dpadambc.accounting.calibrate import solved
from dpadambc.core.accounting import PLD, Accountant, check_accountant, check_delta


def epsilon(
    event: dp_accounting.DpEvent,
    *,
    target_delta: float,
    neighboring_relation: NeighboringRelation,
    accountant: Accountant = PLD,
) -> float:
    """Returns the epsilon that an event spends.

    The epsilon of an event that is frozen and has a hash, as all events of this library
    and most of dp-accounting are, is computed once for one relation and delta.

    Args:
      event: the run, its noise in units of the clip norm (see
        `Mechanism.dp_event`).
      target_delta: the delta that goes with it, in (0, 1).
      neighboring_relation: the difference of two neighboring data sets.
      accountant: `accounting.PLD` (tight) or `accounting.RDP` (an upper bound, faster).

    Returns:
      Epsilon; infinity without noise, or where it is too large to compute: beyond some
      700, and in any case where the noise is below 0.005 of the sensitivity. By
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
    return accountant.epsilon(event, target_delta, neighboring_relation)


def calibrate(
    event_of: Callable[..., dp_accounting.DpEvent],
    unknown: str,
    *,
    target_epsilon: float,
    target_delta: float,
    neighboring_relation: NeighboringRelation,
    accountant: Accountant = PLD,
) -> float | int:
    """Solves for one parameter of an event.

    Args:
      event_of: the event as a function of the unknown.
      unknown: "noise_multiplier", "sampling_prob" or "iterations".
      target_epsilon: the epsilon to reach and not to exceed; positive.
      target_delta: the delta, in (0, 1).
      neighboring_relation: the difference of two neighboring data sets.
      accountant: `accounting.PLD` or `accounting.RDP`.

    Returns:
      The least noise multiplier, the largest sampling probability or the largest
      number of iterations, to four digits. Its epsilon never exceeds the target.

    Raises:
      TypeError: for another accountant.
      ValueError: if the target cannot be reached.

    Example:
      >>> import dp_accounting
      >>> from dpadambc import accounting
      >>> z = accounting.calibrate(
      ...     dp_accounting.GaussianDpEvent, "noise_multiplier",
      ...     target_epsilon=1.0, target_delta=1e-5,
      ...     neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
      >>> round(z, 2)
      3.73
    """
    check_accountant(accountant)
    check_delta(target_delta)

    def epsilon_of(x: float, **how: float) -> float:
        event = event_of(x)
        return accountant.epsilon(event, target_delta, neighboring_relation, **how)

    return solved(epsilon_of, unknown, target_epsilon)

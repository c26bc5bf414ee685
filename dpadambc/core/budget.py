"""How far a budget goes."""

from dpadambc.core import calibrate, validate
from dpadambc.core.account import Account, Spent, earlier
from dpadambc.core.mechanism import Mechanism


def affordable_iterations(
    mechanism: Mechanism,
    *,
    target_epsilon: float,
    target_delta: float,
    spent: Spent = None,
) -> int:
    """The most steps of a mechanism that stay within a budget.

    Args:
      mechanism: the public numbers.
      target_epsilon: not to be exceeded.
      target_delta: the delta that goes with it.
      spent: what earlier runs have spent of the budget, as for `fit`.

    Returns:
      The number of steps, at most `mechanism.iterations`: never more than the budget
      allows, and fewer by one in 10,000 at most; 0 if not even one is affordable.

    Raises:
      ValueError: if the target is negative, delta not in (0, 1), or what was spent is
        under another neighboring relation.

    Example:
      >>> import dpadambc
      >>> from dpadambc import training
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=2.0, sampling_prob=0.02,
      ...     iterations=10_000, normalize_by=100)
      >>> training.affordable_iterations(
      ...     mechanism, target_epsilon=1.0, target_delta=1e-5)
      584
    """
    validate.non_negative(target_epsilon=target_epsilon)
    account = Account(mechanism, target_delta, earlier(spent))
    target_epsilon = float(target_epsilon)
    # Bounded, since the search cannot use infinity.
    gap = lambda n: min(account.epsilon(n) - target_epsilon, target_epsilon + 1)
    if gap(mechanism.iterations) <= 0:
        return mechanism.iterations
    if gap(0) >= 0:
        return 0
    return calibrate.last_affordable(gap, 0, mechanism.iterations)

"""The number of steps that a budget allows."""

from dpadambc.accounting.roots import last_affordable
from dpadambc.core import validate
from dpadambc.core.mechanism import Mechanism
from dpadambc.core.spending import Spending, compose


def affordable_iterations(
    mechanism: Mechanism,
    *,
    target_epsilon: float,
    target_delta: float,
    spent: Spending | None = None,
) -> int:
    """Returns the most steps of a mechanism that stay within a budget.

    Args:
      mechanism: the public numbers.
      target_epsilon: the epsilon not to exceed.
      target_delta: the delta that goes with it.
      spent: the spending of earlier runs, as `compose` returns it.

    Returns:
      The number of steps, at most `mechanism.iterations`: never more than the budget
      allows, and fewer by one in 10,000 at most; 0 if not even one is affordable.

    Raises:
      ValueError: if the target is negative, delta not in (0, 1), or the spending is
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

    def gap(steps: int) -> float:
        runs = [(mechanism, steps)] if spent is None else [spent, (mechanism, steps)]
        epsilon = compose(runs).epsilon(target_delta)
        # Bounded, since the search cannot use infinity.
        return min(epsilon - float(target_epsilon), float(target_epsilon) + 1)

    if gap(mechanism.iterations) <= 0:
        return mechanism.iterations
    return 0 if gap(0) >= 0 else last_affordable(gap, 0, mechanism.iterations)

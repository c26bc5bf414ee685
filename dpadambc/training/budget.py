"""How far a budget goes."""

from dpadambc._core import validate
from dpadambc.mechanisms import _search
from dpadambc.mechanisms.base import Mechanism


def affordable_iterations(
    mechanism: Mechanism, *, target_epsilon: float, target_delta: float
) -> int:
    """The most steps of a mechanism that stay within a budget.

    Args:
      mechanism: the public numbers.
      target_epsilon: not to be exceeded.
      target_delta: the delta that goes with it.

    Returns:
      At most `mechanism.iterations`, to four digits and never too many; 0 if not even
      one step is affordable.

    Raises:
      ValueError: if the target is negative, or delta not in (0, 1).

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

    def gap(iterations: int) -> float:
        spent = mechanism.epsilon(target_delta, iterations=iterations)
        return min(spent - target_epsilon, target_epsilon + 1)

    if gap(mechanism.iterations) <= 0:
        return mechanism.iterations
    return _search.last_affordable(gap, 0, mechanism.iterations)

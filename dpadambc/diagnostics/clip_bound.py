"""The clip norm of the next step, which moves in some runs."""

from typing import Any

import jax
import jax.numpy as jnp

from dpadambc.contrib.moving_bound import MovingBoundState
from dpadambc.core import check
from dpadambc.core.mechanism import Mechanism


def clip_bound(mechanism: Mechanism, state: Any) -> jax.Array:
    """The bound on one example's gradient in the next step.

    Works under `jax.jit` and inside `jax.lax.scan`, which stacks the bounds of a run.

    Guarantees:
      * *Private*: a bound that moves does so by noised numbers, which the mechanism's
        epsilon covers; a fixed bound is public.

    Args:
      mechanism: of the run.
      state: of `privatize`, of an optimizer that has it inside, or a `TrainState` or
        the result of `training.fit`.

    Returns:
      The bound, shape (), in the unit of the gradients before the clip. Over
      `mechanism.l2_clip_norm` it is the unit of the private gradient of a mechanism
      with a moving bound.

    Raises:
      TypeError: if `mechanism` is no mechanism.
      ValueError: if the state has several moving bounds.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> from dpadambc import diagnostics
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=0.5, noise_multiplier=1.0, sampling_prob=0.1, iterations=9,
      ...     normalize_by=100)
      >>> tx = dpadambc.dp_adam_bc(0.1, mechanism, key=jax.random.key(0))
      >>> float(diagnostics.clip_bound(mechanism, tx.init(jnp.zeros(3))))
      0.5
    """
    check.is_mechanism(mechanism)
    is_bound = lambda node: isinstance(node, MovingBoundState)
    bounds = list(filter(is_bound, jax.tree.leaves(state, is_leaf=is_bound)))
    if len(bounds) > 1:
        raise ValueError(
            f"Expected state of one run, got {len(bounds)} moving bounds. Look at each"
            " run alone."
        )
    bound = bounds[0].l2_clip_norm if bounds else mechanism.l2_clip_norm
    return jnp.asarray(bound, jnp.float32)

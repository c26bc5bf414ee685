"""By which rule a run clips, and where its bound is now."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from dpadambc.clipping import rules
from dpadambc.contrib.moving_bound import MovingBoundState
from dpadambc.core import check
from dpadambc.core.mechanism import Mechanism


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("l2_clip_norm", "relative_to_start"),
    meta_fields=("rule",),
)
@dataclasses.dataclass(frozen=True)
class ClipBound:
    """How the next step clips; printed, it is a line.

    Attributes:
      rule: of the mechanism.
      l2_clip_norm: the bound on one example's gradient in the next step. shape=().
      relative_to_start: the bound over the first one; one if it does not move.
        shape=().
    """

    rule: rules.ClipRule
    l2_clip_norm: jax.Array
    relative_to_start: jax.Array

    def __str__(self) -> str:
        bound = f"{self.rule!r} at {float(self.l2_clip_norm):.4g}"
        if not self.rule._moves:
            return f"{bound}, which stays"
        return f"{bound}, {float(self.relative_to_start):.3g} of the first"


def clip_bound(mechanism: Mechanism, state: Any) -> ClipBound:
    """By which rule the next step clips, and at which bound.

    Works under `jax.jit` and inside `jax.lax.scan`, which stacks the bounds of a run.

    Guarantees:
      * *Private*: a bound that moves does so by what the noise has hidden, which the
        mechanism's epsilon covers; a bound that stays, and the rule, are public.

    Args:
      mechanism: of the run.
      state: of `privatize`, of an optimizer that has it inside, or a `TrainState` or
        the result of `training.fit`.

    Returns:
      A `ClipBound`. Its `l2_clip_norm` is in the unit of the gradients before the clip;
      what comes out of a rule that moves is in units of the first bound.

    Raises:
      TypeError: if `mechanism` is no mechanism.
      ValueError: if the state is not of a run with the mechanism's rule, or has several
        bounds that move.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> from dpadambc import clipping, diagnostics
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=0.5, noise_multiplier=1.0, sampling_prob=0.1, iterations=9,
      ...     normalize_by=100, clip_rule=contrib.SlackClipping())
      >>> tx = dpadambc.dp_adam_bc(0.1, mechanism, key=jax.random.key(0))
      >>> found = diagnostics.clip_bound(mechanism, tx.init(jnp.zeros(3)))
      >>> type(found.rule).__name__, float(found.l2_clip_norm)
      ('SlackClipping', 0.5)
    """
    check.is_mechanism(mechanism)
    rule, first = mechanism.clip_rule, mechanism.l2_clip_norm
    is_bound = lambda node: isinstance(node, MovingBoundState)
    bounds = list(filter(is_bound, jax.tree.leaves(state, is_leaf=is_bound)))
    if len(bounds) != rule._moves:
        raise ValueError(
            f"Expected the state of one run with {rule!r}, got one with {len(bounds)}"
            " bounds that move. Give the state of a run with this mechanism."
        )
    bound = bounds[0].l2_clip_norm if bounds else jnp.asarray(first, jnp.float32)
    return ClipBound(rule, bound, bound / first)

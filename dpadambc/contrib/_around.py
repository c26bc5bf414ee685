"""The noise inside a transformation that divides gradients before their clip."""

from typing import Any

import jax

from dpadambc.contrib.moving_bound import MovingBoundState
from dpadambc.core.noise import AddDPNoiseState


def check_noise(inner_state: Any) -> None:
    """Raises unless the state has noise in it, on a sum clipped at a fixed bound.

    Divisors are made of private gradients. Without noise no epsilon would cover them,
    and with a moving bound they would be in another unit in each step.
    """
    has = lambda kind: any(
        isinstance(node, kind)
        for node in jax.tree.leaves(
            inner_state, is_leaf=lambda node: isinstance(node, kind)
        )
    )
    if has(MovingBoundState):
        raise ValueError(
            "Expected private_gradient of a mechanism with a fixed bound, got one that"
            " moves. Give a mechanism without quantile or slack clipping."
        )
    if not has(AddDPNoiseState):
        raise ValueError(
            "Expected private_gradient with add_dp_noise in it, got one without noise."
            " Give dpadambc.privatize(mechanism, key=key)."
        )

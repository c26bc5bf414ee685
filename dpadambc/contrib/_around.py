"""What may stand inside a transformation that comes before the clip."""

from typing import Any

import jax

from dpadambc.contrib.moving_bound import MovingBoundState
from dpadambc.core.noise import AddDPNoiseState


def refuse_other_things(private_gradient: Any) -> None:
    """Raises unless it is a transformation."""
    has = lambda name: callable(getattr(private_gradient, name, None))
    if not (has("init") and has("update")):
        raise TypeError(
            "Expected private_gradient to be an Optax transformation, such as"
            f" dpadambc.privatize(mechanism, key=key), got {private_gradient!r}."
        )


def check(inner_state: Any) -> None:
    """Raises unless some noise is added in it, to what is clipped at a fixed bound."""
    has = lambda kind: any(
        isinstance(node, kind)
        for node in jax.tree.leaves(
            inner_state, is_leaf=lambda node: isinstance(node, kind)
        )
    )
    if has(MovingBoundState):
        raise ValueError(
            "Expected a mechanism with a fixed bound, got one whose clip_rule moves it:"
            " gradients come out in units of the bound, and would be divided by moments"
            " in other units. Give it clip_rule=clipping.Flat(), say."
        )
    if not has(AddDPNoiseState):
        raise ValueError(
            "Expected a transformation that clips gradients and adds noise to their"
            " sum, got one without add_dp_noise: gradients would be divided by what"
            " examples made without noise, which no epsilon covers. Give it"
            " dpadambc.privatize(mechanism, key=key)."
        )

"""How much of a moving average is settled after some steps."""

import jax
import jax.numpy as jnp

Number = jax.typing.ArrayLike


def settled(decay: Number, count: Number) -> jax.Array:
    """1 - decay ** count, without the rounding of 1 - decay."""
    return -jnp.expm1(count * jnp.log1p(-(1 - decay)))

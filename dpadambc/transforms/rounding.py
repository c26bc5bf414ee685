"""Stochastic rounding to low-precision parameters, so that small steps add up."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpadambc.core import keys, validate
from dpadambc.core.arrays import at_least_float32

_DTYPES = tuple(
    map(jnp.dtype, (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2))
)


class RoundStochasticallyState(NamedTuple):
    """The state of `round_stochastically`.

    Attributes:
      key_data: the words of a key, which reveals none of the noise. uint32.
    """

    key_data: jax.Array


def stochastic_round(
    key: jax.Array, x: jax.Array, dtype: jax.typing.DTypeLike
) -> jax.Array:
    r"""Rounds each number to one of its two neighbors, the nearer more likely.

    The expectation is the number itself: :math:`\mathbb{E}[\mathrm{round}(x)] = x`. A
    number without a neighbor on both sides, beyond the largest one or not finite, is
    rounded as usual, and so are numbers below 1.2e-38 on hardware without denormals.

    Args:
      key: a typed key.
      x: an array in float32 or more.
      dtype: bfloat16, float16, float8_e4m3fn or float8_e5m2.

    Returns:
      An array of that dtype.

    Raises:
      ValueError: if the dtype is another.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dpadambc.transforms import rounding
      >>> x = jnp.full(10_000, 1.001)  # the neighbors are 1 and 1.0078
      >>> rounded = rounding.stochastic_round(jax.random.key(0), x, jnp.bfloat16)
      >>> print(jnp.unique(rounded), f"{rounded.astype(jnp.float32).mean():.4f}")
      [1 1.00781] 1.0010
    """
    if jnp.dtype(dtype) not in _DTYPES:
        raise ValueError(
            f"Expected a dtype among {', '.join(map(str, _DTYPES))}, got {dtype}."
        )
    info = jnp.finfo(dtype)
    near = x.astype(dtype)
    if info.bits == 16:
        # Compilers for accelerators remove a cast that is followed by its inverse.
        near = jax.lax.reduce_precision(near, info.nexp, info.nmant)
    largest = info.max
    far = jnp.nextafter(near, jnp.where(x > near.astype(x.dtype), largest, -largest))
    gap, rest = (n.astype(x.dtype) - near.astype(x.dtype) for n in (far, x))
    chosen = jax.random.uniform(key, x.shape, x.dtype) * jnp.abs(gap) < jnp.abs(rest)
    return jnp.where(chosen, far, near)


def round_stochastically(*, key: jax.Array) -> optax.GradientTransformation:
    r"""Makes updates that `optax.apply_updates` adds to parameters without rounding.

    Parameters in bfloat16 have three digits. Rounding to the nearest drops every step
    smaller than half of the last digit, and most steps of private training are. Random
    rounding moves the parameter by the step on average, without the memory of a float32
    copy of the parameters.

    Chain it last, after the learning rate. It is post-processing, so it costs no
    privacy, even if its key is published.

    Guarantees:
      * The expectation of the new parameter is the old one plus the update.
      * Parameters in float32 and more get the incoming updates.
      * The key may be that of the noise: the draws here repeat none of it.

    Args:
      key: a typed JAX key.

    Returns:
      An Optax transformation. Its updates are in at least float32.

    Raises:
      TypeError: if `key` is not a typed key.
      ValueError: if `update` is not given the parameters.

    Example:
      >>> import functools, jax, jax.numpy as jnp, optax
      >>> import dpadambc
      >>> tx = optax.chain(
      ...     optax.sgd(1e-4), dpadambc.round_stochastically(key=jax.random.key(0)))
      >>> params = jnp.ones(10_000, jnp.bfloat16)
      >>> updates, _ = tx.update(jnp.ones(10_000), tx.init(params), params)
      >>> moved = optax.apply_updates(params, updates).astype(jnp.float32) - 1
      >>> print(f"{moved.mean():.1g}, in steps of {moved.min():.1g}")
      -0.0001, in steps of -0.004

    References:
      Zamirai et al., `Revisiting BFloat16 Training <https://arxiv.org/abs/2010.06192>`_,
      2020
    """
    validate.typed_key(key=key)

    def init_fn(params):
        del params
        own_key = keys.of_domain(key, "round_stochastically")
        return RoundStochasticallyState(jax.random.key_data(own_key))

    def update_fn(updates, state, params=None):
        if params is None:
            raise ValueError(
                "Expected params, to whose dtype to round, got None. Call"
                " update(updates, state, params)."
            )
        kind = jax.random.key_impl(key)
        state_key = jax.random.wrap_key_data(state.key_data, impl=kind)
        next_key, step_key = jax.random.split(state_key)

        def round_leaf(key, update, param):
            full = at_least_float32(jnp.result_type(param))
            if jnp.result_type(param) == full:
                return update
            new = param.astype(full) + update.astype(full)
            new = stochastic_round(key, new, param.dtype)
            return new.astype(full) - param.astype(full)

        structure = jax.tree.structure(updates)
        per_leaf = structure.unflatten(keys.of_leaves(step_key, updates))
        updates = jax.tree.map(round_leaf, per_leaf, updates, params)
        return updates, RoundStochasticallyState(jax.random.key_data(next_key))

    return optax.GradientTransformation(init_fn, update_fn)

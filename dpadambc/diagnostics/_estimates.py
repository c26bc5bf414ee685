"""Adam's moments, found in the state of any optimizer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpadambc.core.noise import NoiseStddev, stddev_per_leaf
from dpadambc.transforms import second_moment
from dpadambc.transforms.moments import ScaleByAdamBCState


class CleanMoments(NamedTuple):
    """The moments of gradients before the noise, *not private*; see `not_private`."""

    count: jax.Array  # shape=(), dtype=int32
    mu: optax.Updates
    nu: optax.Updates


class Estimates(NamedTuple):
    """The moments of one parameter, and the numbers that turn them into an update."""

    mu: jax.Array  # shape of the parameter, like nu
    nu: jax.Array
    count: jax.Array  # at least 1, shape=() like the rest
    noise_variance: jax.Array  # averaged like nu_hat
    variance_floor: jax.Array
    b1: jax.typing.ArrayLike
    b2: jax.typing.ArrayLike
    eps: jax.typing.ArrayLike
    eps_root: jax.typing.ArrayLike
    correction: jax.typing.ArrayLike
    is_corrected: jax.typing.ArrayLike


def _adam_states(opt_state: optax.OptState) -> list[Any]:
    """Returns every state of Adam in a tree."""
    kinds = ScaleByAdamBCState, optax.ScaleByAdamState, CleanMoments
    is_known = lambda node: isinstance(node, kinds)
    states = list(filter(is_known, jax.tree.leaves(opt_state, is_leaf=is_known)))
    if any(isinstance(state, CleanMoments) for state in states):
        raise ValueError(
            "Expected opt_state of an optimizer, got moments of gradients before the"
            " noise, which are not private. Give them to not_private.snapshot."
        )
    if not states:
        raise ValueError(
            "Expected opt_state with both moments of Adam, such as that of dp_adam or"
            " optax.adam, got none. SGD has no moments, and RMSProp no first moment."
        )
    return states


def _noise_variances_of_plain_adam(
    state: Any, noise_stddev: NoiseStddev | None, b2: Any
) -> list[Any]:
    """Returns the noise variance in each nu_hat, which the state does not hold."""
    levels = jax.tree_util.tree_leaves_with_path(noise_stddev)
    if not levels or any(callable(level) for _, level in levels):
        raise ValueError(
            "Expected noise_stddev of plain Adam to be a number or a tree prefix of"
            f" numbers, got {noise_stddev!r}. Give mechanism.noise_stddev."
        )
    variances = []
    for path, nu in jax.tree_util.tree_leaves_with_path(state.nu):
        found = [level for start, level in levels if path[: len(start)] == start]
        if not found:
            raise ValueError(
                "Expected noise_stddev with a number for"
                f" {jax.tree_util.keystr(path)}, got {noise_stddev!r}."
            )
        # nu weighs squares by 1 - b2, but nu_hat divides by 1 minus b2 in its dtype.
        rounding = (1 - b2) / (1 - jnp.asarray(b2, nu.dtype))
        variances.append(found[0] ** 2 * rounding)
    return variances


def find(
    opt_state: optax.OptState,
    *,
    noise_stddev: NoiseStddev | None,
    variance_floor: jax.typing.ArrayLike | second_moment.RelativeFloor,
    b2: jax.typing.ArrayLike,
    **numbers: Any,
) -> tuple[jax.Array, dict[str, Estimates]]:
    """Returns the number of steps, and the estimates of every parameter by its path.

    Args:
      opt_state: the state of any optimizer that contains Adam's.
      noise_stddev: the noise level for plain Adam; a corrected state holds its own.
      variance_floor: the floor of the correction.
      b2: the decay rate of the second moment.
      **numbers: the other numbers of `Estimates` that a state does not hold.
    """
    states, found = _adam_states(opt_state), {}
    for state in states:
        count = jnp.maximum(state.count, 1)
        if is_corrected := isinstance(state, ScaleByAdamBCState):
            level = optax.tree.bias_correction(state.noise_variance, b2, count)
            variances = jax.tree.leaves(stddev_per_leaf(level, state.nu))
        else:
            variances = _noise_variances_of_plain_adam(state, noise_stddev, b2)
        moments = jax.tree_util.tree_leaves_with_path(state.mu)
        rows = zip(moments, jax.tree.leaves(state.nu), variances, strict=True)
        for (path, mu), nu, variance in rows:
            name = jax.tree_util.keystr(path) or "params"
            if name in found:
                raise ValueError(
                    "Expected opt_state with one second moment for each parameter, got"
                    f" two of {name}. Give the state of one of the optimizers."
                )
            variance = jnp.asarray(variance, float)
            floor = second_moment.floor_at(variance_floor, variance, b2, count)
            own = mu, nu, count, variance, floor
            numbers |= {"b2": b2, "is_corrected": is_corrected}
            found[name] = Estimates(*own, **numbers)
    found = {name: row for name, row in found.items() if row.mu.size}
    if not found:
        raise ValueError("Expected opt_state of parameters with coordinates, got none.")
    return jnp.stack([state.count for state in states]).max(), found

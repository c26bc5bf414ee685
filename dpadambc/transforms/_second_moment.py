"""What every correction does with its second moment: average, subtract, floor."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpadambc.core import validate
from dpadambc.core.noise import NoiseStddev, stddev_at_step, stddev_of, stddev_per_leaf
from dpadambc.transforms.dtypes import check_real
from dpadambc.transforms.second_moment import RelativeFloor, corrected_second_moment


def checked(
    noise_stddev: NoiseStddev,
    variance_floor: jax.typing.ArrayLike | RelativeFloor,
    correction: jax.typing.ArrayLike,
) -> Any:
    """The level of the noise; raises unless these can be numbers of a correction."""
    level = stddev_of(noise_stddev)
    validate.non_negative(correction=correction)
    if not isinstance(variance_floor, RelativeFloor):
        validate.non_negative(variance_floor=variance_floor)
    return level


def init_noise_variance(noise_stddev: NoiseStddev, params: Any) -> Any:
    """Zeros, one for each level of noise."""
    stddev_per_leaf(noise_stddev, params)
    return jax.tree.map(lambda _: jnp.zeros([], float), noise_stddev)


def arriving(updates: optax.Updates, nu: optax.Updates) -> optax.Updates:
    """The noised gradient in the dtype of its second moment."""
    check_real(updates)
    return optax.tree.cast_like(updates, nu)


def updated(
    updates: optax.Updates,
    state: Any,
    noise_stddev: NoiseStddev,
    b2: jax.typing.ArrayLike,
) -> tuple[jax.Array, optax.Updates, Any]:
    """Count, second moment and noise variance of a state, after one more gradient."""
    stddev = stddev_at_step(noise_stddev, state.count)
    nu = optax.tree.update_moment_per_elem_norm(updates, state.nu, b2, 2)
    noise_variance = optax.tree.update_moment(stddev, state.noise_variance, b2, 2)
    return jnp.asarray(optax.safe_increment(state.count)), nu, noise_variance


def rescaled(
    updates: optax.Updates,
    nu: optax.Updates,
    noise_variance: Any,
    *,
    b2: jax.typing.ArrayLike,
    count: jax.Array,
    variance_floor: jax.typing.ArrayLike | RelativeFloor,
    correction: jax.typing.ArrayLike,
) -> optax.Updates:
    """The updates over the root of the corrected second moment."""
    nu_hat = optax.tree.bias_correction(nu, b2, count)
    noise_hat = optax.tree.bias_correction(noise_variance, b2, count)

    def rescale(u, v, phi):
        floor = floor_at(variance_floor, phi, b2, count)
        denominator = jnp.sqrt(corrected_second_moment(v, correction * phi, floor))
        return jnp.where(denominator > 0, u / denominator, 0)

    levels = stddev_per_leaf(noise_hat, nu_hat)
    return jax.tree.map(rescale, updates, nu_hat, levels)


def floor_at(
    variance_floor: jax.typing.ArrayLike | RelativeFloor,
    noise_variance: jax.typing.ArrayLike,
    b2: jax.typing.ArrayLike,
    count: jax.typing.ArrayLike,
) -> jax.Array:
    """The floor in force after `count` steps."""
    if isinstance(variance_floor, RelativeFloor):
        return variance_floor.variance(noise_variance, b2, count)
    return jnp.asarray(variance_floor, float)

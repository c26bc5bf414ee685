"""Adafactor of a private gradient, corrected."""

import jax
import optax

from dpadambc.contrib.adafactor import scale_by_adafactor_bc
from dpadambc.core import validate
from dpadambc.core.noise import NoiseStddev
from dpadambc.optimizers import _chains
from dpadambc.transforms.second_moment import RelativeFloor


def adafactor_bc(
    learning_rate: optax.ScalarOrSchedule,
    noise_stddev: NoiseStddev,
    *,
    decay_rate: jax.typing.ArrayLike = 0.8,
    min_dim_size_to_factor: int = 128,
    clipping_threshold: jax.typing.ArrayLike = 1.0,
    multiply_by_parameter_scale: bool = True,
    variance_floor: jax.typing.ArrayLike | RelativeFloor = RelativeFloor(1.0),
    correction: jax.typing.ArrayLike = 1.0,
) -> optax.GradientTransformationExtraArgs:
    """Adafactor on a private gradient, with the noise out of its second moments.

    Use it in place of `optax.adafactor`: see `adam_bc`.

    Args:
      learning_rate: a number or a schedule: relative to the size of a parameter, where
        it is multiplied by that.
      noise_stddev: of the noise in the incoming gradient; see `adam_bc`.
      decay_rate: the exponent of the moving averages; see `scale_by_adafactor_bc`.
      min_dim_size_to_factor: the least second largest axis of what is factored.
      clipping_threshold: the largest root mean square of the update of one parameter,
        before the learning rate. It is not the clip for privacy, which comes before the
        noise.
      multiply_by_parameter_scale: whether the update of a parameter is multiplied by
        the root mean square of it, or 1e-3 if that is less.
      variance_floor: least corrected second moment, absolute or a `RelativeFloor`; see
        `scale_by_adafactor_bc`.
      correction: the share of the noise variance that is subtracted; 0 is the control
        with the floor alone.

    Returns:
      An Optax transformation.

    Raises:
      ValueError: as `scale_by_adafactor_bc`, or if the threshold is not positive.
      TypeError: as `scale_by_adafactor_bc`.

    Example:
      >>> import jax.numpy as jnp
      >>> from dpadambc import optimizers
      >>> optimizer = contrib.adafactor_bc(0.1, noise_stddev=0.3)
      >>> params = jnp.array([2.0, -2.0])
      >>> private_gradient = jnp.array([0.5, 0.4])
      >>> updates, state = optimizer.update(
      ...     private_gradient, optimizer.init(params), params)
      >>> print(updates.round(2))
      [-0.21 -0.19]

    References:
      See `scale_by_adafactor_bc`.
    """
    validate.positive(clipping_threshold=clipping_threshold)
    by_size = optax.scale_by_param_block_rms() if multiply_by_parameter_scale else None
    return optax.chain(
        scale_by_adafactor_bc(
            noise_stddev,
            decay_rate=decay_rate,
            min_dim_size_to_factor=min_dim_size_to_factor,
            variance_floor=variance_floor,
            correction=correction,
        ),
        optax.clip_by_block_rms(clipping_threshold),
        by_size or optax.identity(),
        *_chains.stepping(learning_rate),
    )

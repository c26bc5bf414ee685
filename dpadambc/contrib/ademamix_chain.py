"""AdEMAMix of a private gradient, corrected."""

import jax
import optax

from dpadambc.contrib.ademamix import scale_by_ademamix_bc
from dpadambc.core.noise import NoiseStddev
from dpadambc.optimizers import _chains
from dpadambc.transforms.second_moment import RelativeFloor


def ademamix_bc(
    learning_rate: optax.ScalarOrSchedule,
    noise_stddev: NoiseStddev,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    b3: optax.ScalarOrSchedule = 0.9999,
    alpha: optax.ScalarOrSchedule = 5.0,
    *,
    variance_floor: jax.typing.ArrayLike | RelativeFloor = RelativeFloor(1.0),
    correction: jax.typing.ArrayLike = 1.0,
    mu_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """AdEMAMix on a private gradient, with the noise out of its second moment.

    Use it in place of `optax.contrib.ademamix`: see `adam_bc`. For weight decay, chain
    `add_decoupled_weight_decay` between `scale_by_ademamix_bc` and the learning rate.

    Args:
      learning_rate: a number or a schedule.
      noise_stddev: of the noise in the incoming gradient; see `adam_bc`.
      b1: decay rate of the fast first moment.
      b2: decay rate of the second moment.
      b3: decay rate of the slow first moment, a number or a schedule. The default
        suits 10,000 steps and more; see `scale_by_ademamix_bc`.
      alpha: weight of the slow first moment, a number or a schedule.
      variance_floor: least corrected second moment, absolute or a `RelativeFloor`;
        see `scale_by_adam_bc`. Tune it together with the learning rate.
      correction: the share of the noise variance that is subtracted; 0 is the control
        with the floor alone.
      mu_dtype: of both first moments between steps; at least float32 by default.

    Returns:
      An Optax transformation.

    Raises:
      ValueError: as `scale_by_ademamix_bc`.
      TypeError: as `scale_by_ademamix_bc`.

    Example:
      >>> import jax.numpy as jnp
      >>> from dpadambc import optimizers
      >>> optimizer = contrib.ademamix_bc(0.1, noise_stddev=0.3, b3=0.9)
      >>> params = jnp.zeros(2)
      >>> private_gradient = jnp.array([0.5, 0.2])
      >>> updates, state = optimizer.update(
      ...     private_gradient, optimizer.init(params), params)
      >>> print(updates.round(2))
      [-0.19 -0.08]

    References:
      See `scale_by_ademamix_bc`.
    """
    return optax.chain(
        scale_by_ademamix_bc(
            noise_stddev,
            b1=b1,
            b2=b2,
            b3=b3,
            alpha=alpha,
            variance_floor=variance_floor,
            correction=correction,
            mu_dtype=mu_dtype,
        ),
        *_chains.stepping(learning_rate),
    )

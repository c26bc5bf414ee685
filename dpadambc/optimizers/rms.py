"""RMSProp, of a private gradient and behind one, corrected."""

import jax
import optax

from dpadambc.core.mechanism import Mechanism
from dpadambc.core.noise import NoiseStddev
from dpadambc.optimizers import _chains
from dpadambc.transforms.rms import scale_by_rms_bc
from dpadambc.transforms.second_moment import RelativeFloor


def rms_bc(
    learning_rate: optax.ScalarOrSchedule,
    noise_stddev: NoiseStddev,
    decay: jax.typing.ArrayLike = 0.9,
    *,
    variance_floor: jax.typing.ArrayLike | RelativeFloor = RelativeFloor(1.0),
    correction: jax.typing.ArrayLike = 1.0,
) -> optax.GradientTransformationExtraArgs:
    """RMSProp on a private gradient, with the noise out of its second moment.

    Use it in place of `optax.rmsprop`: see `adam_bc`.

    Args:
      learning_rate: a number or a schedule.
      noise_stddev: of the noise in the incoming gradient; see `adam_bc`.
      decay: decay rate of the second moment.
      variance_floor: least corrected second moment, absolute or a `RelativeFloor`;
        see `scale_by_adam_bc`. Tune it together with the learning rate.
      correction: the share of the noise variance that is subtracted; 0 is the control
        with the floor alone.

    Returns:
      An Optax transformation.

    Raises:
      ValueError: as `scale_by_rms_bc`.
      TypeError: as `scale_by_rms_bc`.

    Example:
      >>> import jax.numpy as jnp
      >>> import dpadambc
      >>> optimizer = dpadambc.rms_bc(0.1, noise_stddev=0.3)
      >>> params = jnp.zeros(2)
      >>> private_gradient = jnp.array([0.5, 0.2])
      >>> updates, state = optimizer.update(
      ...     private_gradient, optimizer.init(params), params)
      >>> print(updates.round(3))
      [-0.125 -0.056]

    References:
      See `scale_by_rms_bc`.
    """
    return optax.chain(
        scale_by_rms_bc(
            noise_stddev,
            decay=decay,
            variance_floor=variance_floor,
            correction=correction,
        ),
        *_chains.stepping(learning_rate),
    )


def dp_rms_bc(
    learning_rate: optax.ScalarOrSchedule,
    mechanism: Mechanism,
    *,
    key: jax.Array,
    decay: float = 0.9,
    variance_floor: jax.typing.ArrayLike | RelativeFloor = RelativeFloor(1.0),
    correction: jax.typing.ArrayLike = 1.0,
) -> optax.GradientTransformationExtraArgs:
    """DP-RMSProp with the noise variance taken out of the second moment.

    The uncorrected one is `optax.chain(privatize(mechanism, key=key),
    optax.rmsprop(learning_rate, bias_correction=True))`.

    Args:
      learning_rate: a number or a schedule.
      mechanism: the public numbers, such as a `PoissonGaussian`.
      key: a typed key for the noise; a new one for each run.
      decay: decay rate of the second moment.
      variance_floor: least corrected second moment; see `rms_bc`.
      correction: the share of the noise variance that is subtracted; see `rms_bc`.

    Returns:
      An Optax transformation; see `dp_sgd`.

    Raises:
      TypeError: if `mechanism` is no mechanism, or `key` no typed key.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=0.0, sampling_prob=1.0,
      ...     iterations=1, normalize_by=2)
      >>> optimizer = dpadambc.dp_rms_bc(1.0, mechanism, key=jax.random.key(0))
      >>> params, x = jnp.zeros(2), jnp.array([[0.8, 0.1], [0.6, 0.3]])
      >>> gradients = dpadambc.per_example_grad(lambda w, x: w @ x)(params, x)
      >>> updates, _ = optimizer.update(gradients, optimizer.init(params), params)
      >>> print(updates.round(1))
      [-1. -1.]

    References:
      See `scale_by_rms_bc`.
    """
    return _chains.private_chain(
        learning_rate,
        mechanism,
        key,
        scale_by_rms_bc(
            _chains.level(mechanism),
            decay=decay,
            variance_floor=variance_floor,
            correction=correction,
        ),
    )

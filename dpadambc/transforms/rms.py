"""RMSProp, with the variance of the noise subtracted from its second moment."""

from typing import Any, NamedTuple

import jax
import optax

from dpadambc.core.noise import NoiseStddev, stddev_of
from dpadambc.transforms.dtypes import check_decay
from dpadambc.transforms.second_moment import NoiseCorrection, RelativeFloor


class ScaleByRmsBCState(NamedTuple):
    """The state of `scale_by_rms_bc`: a moving average of noised gradients only.

    Attributes:
      count: the number of steps. shape=(), int32.
      nu: the second moment, noise included.
      noise_variance: one scalar for each level of noise, averaged as nu is.
    """

    count: jax.Array
    nu: optax.Updates
    noise_variance: Any


def scale_by_rms_bc(
    noise_stddev: NoiseStddev,
    *,
    decay: jax.typing.ArrayLike = 0.9,
    variance_floor: jax.typing.ArrayLike | RelativeFloor = RelativeFloor(1.0),
    correction: jax.typing.ArrayLike = 1.0,
) -> optax.GradientTransformation:
    r"""Rescales by RMSProp's rule, corrected for the noise in the second moment.

    This is `scale_by_adam_bc` without a first moment, and without the memory for one:

    .. math::

      v_t &= \beta v_{t-1} + (1 - \beta) g_t^2, & \hat v &= v_t / (1 - \beta^t) \\
      \Phi_t &= \beta \Phi_{t-1} + (1 - \beta) \sigma_t^2,
        & \hat \Phi &= \Phi_t / (1 - \beta^t) \\
      u_t &= g_t / \sqrt{\max(\hat v - \hat \Phi, \gamma')}

    RMSProp's decay of 0.9 averages about ten squares, which resolve 32 % of
    :math:`\Phi`; 0.999 resolves 3 %.

    Guarantees:
      * The state is computed from the input and from public numbers alone: behind
        `add_dp_noise` it is as private as the noised gradients.
      * The second moment and the updates are in at least float32.
      * The updates are those of `scale_by_adam_bc(b1=0, b2=decay)`.

    Args:
      noise_stddev: :math:`\sigma`, the standard deviation of the noise in the incoming
        gradient; see `scale_by_adam_bc`.
      decay: :math:`\beta`, the decay rate of second moment and noise variance.
      variance_floor: :math:`\gamma'`, a number or a `RelativeFloor`.
      correction: the share of :math:`\hat \Phi` that is subtracted; see
        `scale_by_adam_bc`.

    Returns:
      An Optax transformation.

    Raises:
      ValueError: if the decay rate is outside [0, 1), or a noise level, the floor or
        the correction is negative or not finite.
      TypeError: if a number has less than float32, or a gradient is complex.

    Example:
      >>> import jax.numpy as jnp
      >>> import dpadambc
      >>> params = jnp.zeros(2)
      >>> rms_bc = dpadambc.scale_by_rms_bc(noise_stddev=0.3)
      >>> updates, state = rms_bc.update(jnp.array([0.5, 0.2]), rms_bc.init(params))
      >>> print(updates.round(2))
      [1.25 0.56]

    References:
      Tieleman and Hinton, *RMSProp*, 2012, in the form of `optax.scale_by_rms` with
      `bias_correction`; the correction of
      `DP-AdamBC <https://arxiv.org/abs/2312.14334>`_, 2024
    """
    check_decay(decay=decay)
    corrected = NoiseCorrection(stddev_of(noise_stddev), variance_floor, correction)
    start, move = lambda zeros: (), lambda updates, *_: (updates, ())
    return corrected.transformation(ScaleByRmsBCState, decay, start, move)

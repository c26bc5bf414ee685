"""Adam, with the variance of the noise subtracted from its second moment."""

from typing import Any, NamedTuple

import jax
import optax

from dpadambc.core.noise import NoiseStddev, stddev_of
from dpadambc.transforms.dtypes import check_decay, check_floating_dtype
from dpadambc.transforms.second_moment import NoiseCorrection, RelativeFloor


class ScaleByAdamBCState(NamedTuple):
    """The state of `scale_by_adam_bc`: moving averages of noised gradients only.

    Attributes:
      count: the number of steps. shape=(), int32.
      mu: the first moment.
      nu: the second moment, noise included.
      noise_variance: one scalar for each level of noise, averaged as nu is.
    """

    count: jax.Array
    mu: optax.Updates
    nu: optax.Updates
    noise_variance: Any


def scale_by_adam_bc(
    noise_stddev: NoiseStddev,
    *,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    variance_floor: jax.typing.ArrayLike | RelativeFloor = RelativeFloor(1.0),
    correction: jax.typing.ArrayLike = 1.0,
    nesterov: bool = False,
    mu_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformation:
    r"""Rescales by Adam's rule, corrected for the noise in the second moment.

    Noise of variance :math:`\Phi = \sigma^2` adds :math:`\Phi` to the mean of every
    squared gradient. The correction subtracts it:

    .. math::

      m_t &= b_1 m_{t-1} + (1 - b_1) g_t, & \hat m &= m_t / (1 - b_1^t) \\
      v_t &= b_2 v_{t-1} + (1 - b_2) g_t^2, & \hat v &= v_t / (1 - b_2^t) \\
      \Phi_t &= b_2 \Phi_{t-1} + (1 - b_2) \sigma_t^2,
        & \hat \Phi &= \Phi_t / (1 - b_2^t) \\
      u_t &= \hat m / \sqrt{\max(\hat v - \hat \Phi, \gamma')}

    The noise variance goes through the same moving average as the second moment, so
    :math:`\mathbb{E}[\hat v - \hat \Phi]` is the clean second moment for any schedule
    of the noise. A stage between the noise and this one changes the level to give here:
    :math:`\sigma / \sqrt k` inside `optax.MultiSteps(..., k)`, :math:`c \sigma` after
    `optax.scale(c)`. `audit` measures whether the level is right.

    Guarantees:
      * The state is computed from the input and from public numbers alone: behind
        `add_dp_noise` it is as private as the noised gradients.
      * The second moment and the updates are in at least float32.
      * Without noise and floor this is `optax.scale_by_adam(eps=0)`, except that a
        coordinate whose gradients were all zero gets 0 instead of NaN.

    Args:
      noise_stddev: :math:`\sigma`, the level of the noise in the incoming gradient: a
        mechanism, a number, a schedule, or a tree prefix. No noise is added here.
      b1: the decay rate of the first moment.
      b2: the decay rate of the second moment and of the noise variance.
      variance_floor: :math:`\gamma'`, a `RelativeFloor`, or a number in the unit of the
        squared gradient, as in the papers. It takes the place of Adam's eps.
      correction: the share of :math:`\hat \Phi` that is subtracted; 0 is the control,
        with the floor alone.
      nesterov: whether the first moment looks one step ahead, as in NAdam.
      mu_dtype: the dtype of the first moment between steps; at least float32 by
        default.

    Returns:
      An Optax transformation.

    Raises:
      ValueError: if a decay rate is outside [0, 1), or a noise level, the floor or the
        correction is negative or not finite.
      TypeError: if a number has less than float32, if `mu_dtype` is not floating, or a
        gradient is complex.

    Example:
      >>> import jax.numpy as jnp
      >>> import dpadambc
      >>> adam_bc = dpadambc.scale_by_adam_bc(noise_stddev=0.3)
      >>> state = adam_bc.init(jnp.zeros(2))
      >>> updates, state = adam_bc.update(jnp.array([0.5, 0.2]), state)
      >>> print(updates.round(2))  # squared: 0.25 and 0.04, against a noise of 0.09
      [1.25 0.56]

    References:
      Tang et al., `DP-AdamBC: Your DP-Adam Is Actually DP-SGD (Unless You Apply Bias
      Correction) <https://arxiv.org/abs/2312.14334>`_, 2024, Algorithm 1
    """
    check_decay(b1=b1)
    check_decay(b2=b2)
    corrected = NoiseCorrection(stddev_of(noise_stddev), variance_floor, correction)
    check_floating_dtype(mu_dtype=mu_dtype)

    def move(updates, state, count):
        # Cast first: b1 would be rounded to the dtype of mu, 0.999 in bfloat16 to 1.
        mu = optax.tree.cast_like(state.mu, updates)
        mu = optax.tree.update_moment(updates, mu, b1, 1)
        mu_hat = optax.tree.bias_correction(mu, b1, count)
        if nesterov:  # as NAdam: b1 m_t / (1 - b1^(t+1)) + (1 - b1) g_t / (1 - b1^t)
            ahead = optax.tree.bias_correction(mu, b1, optax.safe_increment(count))
            now = optax.tree.bias_correction(updates, b1, count)
            mu_hat = optax.tree.update_moment(now, ahead, b1, 1)
        return mu_hat, (mu,)

    start = lambda zeros: (optax.tree.cast(zeros, mu_dtype),)
    return corrected.transformation(ScaleByAdamBCState, b2, start, move)

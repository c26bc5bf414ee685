"""Adam's moments, with the variance of the noise taken out of the second."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpadambc.core import validate
from dpadambc.core.noise import NoiseStddev
from dpadambc.transforms import _second_moment
from dpadambc.transforms.dtypes import check_floating_dtype, wide_zeros_like
from dpadambc.transforms.second_moment import RelativeFloor


class ScaleByAdamBCState(NamedTuple):
    """State of `scale_by_adam_bc`: moving averages of noised gradients only.

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
    squared gradient. Where it dominates, Adam's denominator is the same for all
    coordinates and Adam becomes SGD with momentum. The correction subtracts it:

    .. math::

      m_t &= b_1 m_{t-1} + (1 - b_1) g_t, & \hat m &= m_t / (1 - b_1^t) \\
      v_t &= b_2 v_{t-1} + (1 - b_2) g_t^2, & \hat v &= v_t / (1 - b_2^t) \\
      \Phi_t &= b_2 \Phi_{t-1} + (1 - b_2) \sigma_t^2,
        & \hat \Phi &= \Phi_t / (1 - b_2^t) \\
      u_t &= \hat m / \sqrt{\max(\hat v - \hat \Phi, \gamma')}

    The noise variance goes through the same moving average as the second moment, so
    that :math:`\mathbb{E}[\hat v - \hat \Phi]` is the clean second moment also when
    the noise level changes, by a schedule or by `optax.inject_hyperparams`. For
    constant noise :math:`\hat \Phi = \sigma^2`, the published rule.

    About half of the coordinates without signal fall below the floor
    :math:`\gamma'`, whatever it is, and move by :math:`\hat m / \sqrt{\gamma'}`: the
    floor is a second learning rate. The papers give an absolute number, tuned for each
    task (1e-9 to 5e-8 for CIFAR-10, 1e-9 for SNLI, 7e-9 for QNLI), which means nothing
    for another noise level. The default is therefore relative to the noise: one
    standard deviation of :math:`\hat v` under noise alone (`RelativeFloor`). It keeps
    its meaning when the batch size, the clip norm or epsilon changes. It bounds the
    steps of coordinates without signal to :math:`(2(1-b_2)/(1+b_2))^{-1/4}` times those
    of plain DP-Adam (5.6 for b2 = 0.999), and to less while :math:`\hat v` is still
    settling.

    The input must be the noised gradient itself. A stage between the noise and this one
    changes the variance to subtract, and then `noise_stddev` must be the level of the
    noise that arrives here: :math:`\sigma / \sqrt k` inside `optax.MultiSteps(..., k)`,
    which averages k gradients; :math:`c \sigma` behind `optax.scale(c)`; for an average
    of decay b, :math:`\sigma \sqrt{(1-b)/(1+b)}` once it has settled. `audit` measures
    whether the level is right.

    Guarantees:
      * The state is computed from what comes in and from public numbers alone: behind
        `add_dp_noise` it is as private as the noised gradients.
      * The second moment is kept in at least float32 whatever the dtype of the
        parameters, since :math:`\hat v - \hat \Phi` is a small difference; updates are
        in at least float32.
      * Without noise, or with `correction=0`, and with floor 0 this is
        `optax.scale_by_adam(eps=0)`, except that a coordinate whose gradients were all
        zero gets 0 instead of NaN, and for what `mu_dtype` rounds.

    Args:
      noise_stddev: :math:`\sigma`, the standard deviation of the noise in the gradient
        that comes in, *the same value that `add_dp_noise` was given*: a mechanism, a
        number, a schedule, or a tree prefix. It is taken out; nothing is added here.
      b1: decay rate of the first moment.
      b2: decay rate of the second moment and of the noise variance.
      variance_floor: :math:`\gamma'`, either a number (the papers' absolute floor, in
        the unit of the squared gradient; it takes the place of Adam's eps, which is
        not used) or a `RelativeFloor`.
      correction: the share of :math:`\hat \Phi` that is subtracted. 1 is the published
        rule; 0 is the control for it, with the same floor and nothing subtracted.
      nesterov: whether the first moment looks one step ahead, as in NAdam:
        :math:`\hat m = b_1 m_t / (1 - b_1^{t+1}) + (1 - b_1) g_t / (1 - b_1^t)`.
      mu_dtype: of the first moment between steps, such as `jnp.bfloat16` to save
        memory; at least float32, as the second moment, by default. Optax rounds b1 to
        it too, to 1 where it is 0.999 in bfloat16; here it stays what it is.

    Returns:
      An Optax transformation.

    Raises:
      ValueError: if a decay rate is outside [0, 1), or a noise level, the floor or the
        correction is negative or not finite.
      TypeError: if a number is not a number, or was rounded to less than float32, if
        `mu_dtype` is not floating, or a gradient is complex.

    Example:
      >>> import jax.numpy as jnp
      >>> import dpadambc
      >>> params = jnp.zeros(2)
      >>> adam_bc = dpadambc.scale_by_adam_bc(noise_stddev=0.3)
      >>> state = adam_bc.init(params)
      >>> updates, state = adam_bc.update(jnp.array([0.5, 0.2]), state, params)
      >>> print(updates.round(2))  # squared: 0.25 and 0.04, against a noise of 0.09
      [1.25 0.56]

    References:
      Tang et al., `DP-AdamBC: Your DP-Adam Is Actually DP-SGD (Unless You Apply Bias
      Correction) <https://arxiv.org/abs/2312.14334>`_, 2024, Algorithm 1
    """
    noise_stddev = _second_moment.checked(noise_stddev, variance_floor, correction)
    check_floating_dtype(mu_dtype=mu_dtype)
    validate.decay(b1=b1)
    validate.decay(b2=b2)

    def init_fn(params):
        zeros = wide_zeros_like(params)
        return ScaleByAdamBCState(
            count=jnp.zeros([], jnp.int32),
            mu=optax.tree.cast(zeros, mu_dtype),
            nu=optax.tree.zeros_like(zeros),
            noise_variance=_second_moment.init_noise_variance(noise_stddev, params),
        )

    def update_fn(updates, state, params=None):
        del params
        updates = _second_moment.arriving(updates, state.nu)
        # A decay rate is rounded with what it multiplies: 0.999 in bfloat16 is 1.
        before = optax.tree.cast_like(state.mu, updates)
        mu = optax.tree.update_moment(updates, before, b1, 1)
        count, nu, noise_variance = _second_moment.updated(
            updates, state, noise_stddev, b2
        )
        mu_hat = optax.tree.bias_correction(mu, b1, count)
        if nesterov:
            ahead = optax.tree.bias_correction(mu, b1, optax.safe_increment(count))
            now = optax.tree.bias_correction(updates, b1, count)
            mu_hat = optax.tree.update_moment(now, ahead, b1, 1)
        updates = _second_moment.rescaled(
            mu_hat,
            nu,
            noise_variance,
            b2=b2,
            count=count,
            variance_floor=variance_floor,
            correction=correction,
        )
        kept = optax.tree.cast_like((mu, nu, noise_variance), tuple(state[1:]))
        return updates, ScaleByAdamBCState(count, *kept)

    return optax.GradientTransformation(init_fn, update_fn)

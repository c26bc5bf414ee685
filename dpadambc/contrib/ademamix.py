"""AdEMAMix, with the variance of the noise subtracted from its second moment.

The rule is that of `optax.contrib.scale_by_ademamix`, and tests compare the two.
Whether it agrees with the paper's text is not verified. The correction is that of
DP-AdamBC.
"""

from typing import Any, NamedTuple

import jax
import optax

from dpadambc.core import validate
from dpadambc.core.noise import NoiseStddev, stddev_of
from dpadambc.transforms.dtypes import check_decay, check_floating_dtype, descent
from dpadambc.transforms.second_moment import NoiseCorrection, RelativeFloor


class ScaleByAdemamixBCState(NamedTuple):
    """The state of `scale_by_ademamix_bc`: moving averages of noised gradients only.

    Attributes:
      count: the number of steps. shape=(), int32.
      m1: the fast first moment.
      m2: the slow first moment.
      nu: the second moment, noise included.
      noise_variance: one scalar for each level of noise, averaged as nu is.
    """

    count: jax.Array
    m1: optax.Updates
    m2: optax.Updates
    nu: optax.Updates
    noise_variance: Any


def scale_by_ademamix_bc(
    noise_stddev: NoiseStddev,
    *,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    b3: optax.ScalarOrSchedule = 0.9999,
    alpha: optax.ScalarOrSchedule = 6.0,
    variance_floor: jax.typing.ArrayLike | RelativeFloor = RelativeFloor(1.0),
    correction: jax.typing.ArrayLike = 1.0,
    mu_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformation:
    r"""Rescales by AdEMAMix's rule, corrected for the noise in the second moment.

    This is `scale_by_adam_bc` with a second, slow first moment that averages over more
    steps:

    .. math::

      m_{1,t} &= b_1 m_{1,t-1} + (1 - b_1) g_t, & \hat m_1 &= m_{1,t} / (1 - b_1^t) \\
      m_{2,t} &= b_3 m_{2,t-1} + (1 - b_3) g_t \\
      u_t &= (\hat m_1 + \alpha m_{2,t}) / \sqrt{\max(\hat v - \hat \Phi, \gamma')}

    As in Optax, :math:`m_2` starts at zero and is not corrected for that: it holds
    :math:`1 - b_3^t` of a constant gradient, a tenth after 1,000 steps of the default.
    Choose b3 by the number of steps. In the limit the slow moment keeps
    :math:`\sqrt{(1 - b_3) / (1 + b_3)}` of the noise :math:`\sigma`: 0.7 % for the
    default, against 23 % in the fast one.

    Guarantees:
      * The state is computed from the input and from public numbers alone: behind
        `add_dp_noise` it is as private as the noised gradients.
      * The second moment and the updates are in at least float32.
      * With `alpha=0` the updates are those of `scale_by_adam_bc`. Without noise and
        floor they are those of `optax.contrib.scale_by_ademamix(eps=0)`, except that a
        coordinate whose gradients were all zero gets 0 instead of NaN.

    Args:
      noise_stddev: :math:`\sigma`, the level in the gradient; see `scale_by_adam_bc`.
      b1: the decay rate of the fast first moment.
      b2: the decay rate of the second moment and of the noise variance.
      b3: the decay rate of the slow first moment, a number or a schedule.
      alpha: the weight of the slow first moment, a number or a schedule.
      variance_floor: :math:`\gamma'`, a number or a `RelativeFloor`.
      correction: the share of :math:`\hat \Phi` that is subtracted.
      mu_dtype: the dtype of both first moments between steps; at least float32 by
        default. In bfloat16 the slow one loses every step that changes it by less than
        0.2 %.

    Returns:
      An Optax transformation.

    Raises:
      ValueError: if a number is out of its range.
      TypeError: if a number has less than float32, or a gradient is complex.

    Example:
      >>> import jax.numpy as jnp
      >>> from dpadambc import contrib
      >>> params = jnp.zeros(2)
      >>> ademamix = contrib.scale_by_ademamix_bc(noise_stddev=0.3, b3=0.9)
      >>> state = ademamix.init(params)
      >>> updates, state = ademamix.update(jnp.array([0.5, 0.2]), state, params)
      >>> print(updates.round(2))  # 1 + 6 / 10 times those of `scale_by_adam_bc`
      [2.  0.9]

    References:
      Pagliardini et al., `The AdEMAMix Optimizer: Better, Faster, Older
      <https://arxiv.org/abs/2409.03137>`_, 2024; the correction of
      `DP-AdamBC <https://arxiv.org/abs/2312.14334>`_, 2024
    """
    check_decay(b1=b1)
    check_decay(b2=b2)
    if not callable(b3):
        check_decay(b3=b3)
    if not callable(alpha):
        validate.non_negative(alpha=alpha)
    corrected = NoiseCorrection(stddev_of(noise_stddev), variance_floor, correction)
    check_floating_dtype(mu_dtype=mu_dtype)

    def start(zeros):
        both = zeros, optax.tree.zeros_like(zeros)
        return optax.tree.cast(both, mu_dtype)

    def move(updates, state, count):
        slow = b3(state.count) if callable(b3) else b3
        weight = alpha(state.count) if callable(alpha) else alpha
        # Cast first: a decay rate would be rounded to the dtype of the moments.
        m1, m2 = (optax.tree.cast_like(m, updates) for m in (state.m1, state.m2))
        m1 = optax.tree.update_moment(updates, m1, b1, 1)
        m2 = optax.tree.update_moment(updates, m2, slow, 1)
        m1_hat = optax.tree.bias_correction(m1, b1, count)
        return optax.tree.add_scale(m1_hat, weight, m2), (m1, m2)

    return corrected.transformation(ScaleByAdemamixBCState, b2, start, move)


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
    """Makes AdEMAMix for a private gradient, without the noise in its second moment.

    Use it in place of `optax.contrib.ademamix`. For weight decay, chain
    `add_decoupled_weight_decay` between `scale_by_ademamix_bc` and the learning rate.

    Args:
      learning_rate: a number or a schedule.
      noise_stddev: the level of the noise in the incoming gradient; see `adam_bc`.
      b1: the decay rate of the fast first moment.
      b2: the decay rate of the second moment.
      b3: the decay rate of the slow first moment, a number or a schedule. The default
        suits 10,000 steps and more; see `scale_by_ademamix_bc`.
      alpha: the weight of the slow first moment, a number or a schedule.
      variance_floor: the least corrected second moment, absolute or a `RelativeFloor`.
      correction: the share of the noise variance that is subtracted.
      mu_dtype: the dtype of both first moments between steps; at least float32 by
        default.

    Returns:
      An Optax transformation of the private gradient.

    Raises:
      ValueError: as `scale_by_ademamix_bc`.
      TypeError: as `scale_by_ademamix_bc`.

    Example:
      >>> import jax.numpy as jnp
      >>> from dpadambc import contrib
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
    numbers: dict[str, Any] = dict(b1=b1, b2=b2, b3=b3, alpha=alpha, mu_dtype=mu_dtype)
    floor: dict[str, Any] = dict(variance_floor=variance_floor, correction=correction)
    ademamix = scale_by_ademamix_bc(noise_stddev, **numbers, **floor)
    return descent(learning_rate, ademamix)

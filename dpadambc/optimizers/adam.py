"""Adam, of a private gradient and behind one, plain and corrected."""

import jax
import optax

from dpadambc.core.mechanism import Mechanism
from dpadambc.core.noise import NoiseStddev
from dpadambc.optimizers import _chains
from dpadambc.transforms.moments import scale_by_adam_bc
from dpadambc.transforms.second_moment import RelativeFloor


def adam_bc(
    learning_rate: optax.ScalarOrSchedule,
    noise_stddev: NoiseStddev,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    *,
    variance_floor: jax.typing.ArrayLike | RelativeFloor = RelativeFloor(1.0),
    correction: jax.typing.ArrayLike = 1.0,
    nesterov: bool = False,
    mu_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam on a private gradient, with the noise variance out of its second moment.

    Use it in place of `optax.adam`: in `training.fit`, behind `privatize`, or behind
    `add_dp_noise`. It takes the private gradient as it comes.

    Args:
      learning_rate: a number or a schedule.
      noise_stddev: of the noise in the incoming gradient. Directly behind `privatize`
        it is `mechanism.noise_stddev`; `scale_by_adam_bc` says what a stage in between
        changes. It is taken out of the second moment; no noise is added here.
      b1: decay rate of the first moment.
      b2: decay rate of the second moment.
      variance_floor: least corrected second moment, absolute or a `RelativeFloor`;
        see `scale_by_adam_bc`. Tune it together with the learning rate.
      correction: the share of the noise variance that is subtracted; 0 is the control
        with the floor alone.
      nesterov: whether the first moment looks one step ahead, as in NAdam.
      mu_dtype: of the first moment between steps; at least float32 by default.

    Returns:
      An Optax transformation.

    Raises:
      ValueError: as `scale_by_adam_bc`.
      TypeError: as `scale_by_adam_bc`.

    Example:
      >>> import jax.numpy as jnp
      >>> import dpadambc
      >>> optimizer = dpadambc.adam_bc(0.1, noise_stddev=0.3)
      >>> params = jnp.zeros(2)
      >>> private_gradient = jnp.array([0.5, 0.2])
      >>> updates, state = optimizer.update(
      ...     private_gradient, optimizer.init(params), params)
      >>> print(updates.round(3))
      [-0.125 -0.056]

    References:
      Tang et al., `DP-AdamBC <https://arxiv.org/abs/2312.14334>`_, 2024, Algorithm 1
    """
    return optax.chain(
        scale_by_adam_bc(
            noise_stddev,
            b1=b1,
            b2=b2,
            variance_floor=variance_floor,
            correction=correction,
            nesterov=nesterov,
            mu_dtype=mu_dtype,
        ),
        *_chains.stepping(learning_rate),
    )


def dp_adam(
    learning_rate: optax.ScalarOrSchedule,
    mechanism: Mechanism,
    *,
    key: jax.Array,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    nesterov: bool = False,
    mu_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """DP-Adam: Adam on the private gradient, uncorrected.

    Where the noise dominates the second moment, this is DP-SGD with momentum: see
    `dp_adam_bc`.

    Args:
      learning_rate: a number or a schedule.
      mechanism: the public numbers, such as a `PoissonGaussian`.
      key: a typed key for the noise; a new one for each run.
      b1: decay rate of the first moment.
      b2: decay rate of the second moment.
      eps: added outside the square root.
      eps_root: added inside the square root.
      nesterov: whether the first moment looks one step ahead, as in NAdam.
      mu_dtype: of the first moment between steps; at least float32 by default.

    Returns:
      An Optax transformation; see `dp_sgd`.

    Raises:
      TypeError: if `mechanism` is no mechanism, or `key` no typed key.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=0.5, sampling_prob=1.0,
      ...     iterations=1, normalize_by=2)
      >>> optimizer = dpadambc.dp_adam(1.0, mechanism, key=jax.random.key(3))
      >>> params, x = jnp.zeros(2), jnp.array([[0.8, 0.1], [0.6, 0.3]])
      >>> gradients = dpadambc.per_example_grad(lambda w, x: w @ x)(params, x)
      >>> updates, _ = optimizer.update(gradients, optimizer.init(params), params)
      >>> print(updates.round(1))
      [-1. -1.]

    References:
      Li et al., `Large Language Models Can Be Strong Differentially Private Learners
      <https://arxiv.org/abs/2110.05679>`_, 2022
    """
    return _chains.private_chain(
        learning_rate,
        mechanism,
        key,
        _chains.scale_by_adam(b1, b2, eps, eps_root, nesterov, mu_dtype),
    )


def dp_adam_bc(
    learning_rate: optax.ScalarOrSchedule,
    mechanism: Mechanism,
    *,
    key: jax.Array,
    b1: float = 0.9,
    b2: float = 0.999,
    variance_floor: jax.typing.ArrayLike | RelativeFloor = RelativeFloor(1.0),
    correction: jax.typing.ArrayLike = 1.0,
    nesterov: bool = False,
    mu_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """DP-AdamBC: Adam with the noise variance taken out of the second moment.

    Args:
      learning_rate: a number or a schedule.
      mechanism: the public numbers, such as a `PoissonGaussian`.
      key: a typed key for the noise; a new one for each run.
      b1: decay rate of the first moment.
      b2: decay rate of the second moment.
      variance_floor: least corrected second moment, absolute or a `RelativeFloor`;
        see `scale_by_adam_bc`. Tune it together with the learning rate.
      correction: the share of the noise variance that is subtracted; 0 is the control
        with the floor alone.
      nesterov: whether the first moment looks one step ahead, as in NAdam.
      mu_dtype: of the first moment between steps; at least float32 by default.

    Returns:
      An Optax transformation; see `dp_sgd`.

    Raises:
      TypeError: if `mechanism` is no mechanism, or `key` no typed key.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=0.5, sampling_prob=1.0,
      ...     iterations=1, normalize_by=2)
      >>> optimizer = dpadambc.dp_adam_bc(1.0, mechanism, key=jax.random.key(3))
      >>> params, x = jnp.zeros(2), jnp.array([[0.8, 0.1], [0.6, 0.3]])
      >>> gradients = dpadambc.per_example_grad(lambda w, x: w @ x)(params, x)
      >>> updates, _ = optimizer.update(gradients, optimizer.init(params), params)
      >>> updates.shape
      (2,)

    References:
      Tang et al., `DP-AdamBC <https://arxiv.org/abs/2312.14334>`_, 2024, Algorithm 1
    """
    return _chains.private_chain(
        learning_rate,
        mechanism,
        key,
        scale_by_adam_bc(
            _chains.level(mechanism),
            b1=b1,
            b2=b2,
            variance_floor=variance_floor,
            correction=correction,
            nesterov=nesterov,
            mu_dtype=mu_dtype,
        ),
    )

"""Adam with decoupled weight decay, plain and corrected."""

import jax
import optax

from dpadambc.core.mechanism import Mechanism
from dpadambc.core.noise import NoiseStddev
from dpadambc.optimizers import _chains
from dpadambc.transforms.decay import add_decoupled_weight_decay
from dpadambc.transforms.moments import scale_by_adam_bc
from dpadambc.transforms.second_moment import RelativeFloor


def adamw_bc(
    learning_rate: optax.ScalarOrSchedule,
    noise_stddev: NoiseStddev,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    *,
    variance_floor: jax.typing.ArrayLike | RelativeFloor = RelativeFloor(1.0),
    correction: jax.typing.ArrayLike = 1.0,
    nesterov: bool = False,
    mu_dtype: jax.typing.DTypeLike | None = None,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: _chains.Mask | None = None,
) -> optax.GradientTransformationExtraArgs:
    """`adam_bc` with decoupled weight decay.

    Args:
      learning_rate: a number or a schedule.
      noise_stddev: of the noise in the incoming gradient; see `adam_bc`.
      b1: decay rate of the first moment.
      b2: decay rate of the second moment.
      variance_floor: least corrected second moment; see `adam_bc`.
      correction: the share of the noise variance that is subtracted; 0 is the control
        with the floor alone.
      nesterov: whether the first moment looks one step ahead, as in NAdam.
      mu_dtype: of the first moment between steps; at least float32 by default.
      weight_decay: see `add_decoupled_weight_decay`.
      mask: where decay applies; everywhere by default.

    Returns:
      An Optax transformation.

    Raises:
      ValueError: as `scale_by_adam_bc`.
      TypeError: as `scale_by_adam_bc`.

    Example:
      >>> import jax.numpy as jnp
      >>> import dpadambc
      >>> optimizer = dpadambc.adamw_bc(0.1, noise_stddev=0.3, weight_decay=0.5)
      >>> params = jnp.ones(2)
      >>> private_gradient = jnp.array([0.6, 0.2])
      >>> updates, state = optimizer.update(
      ...     private_gradient, optimizer.init(params), params)
      >>> print(updates.round(2))  # with a decay of 0.1 * 0.5 * params
      [-0.17 -0.11]

    References:
      `DP-AdamW <https://arxiv.org/abs/2511.07843>`_, 2025, Algorithm 2
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
        add_decoupled_weight_decay(weight_decay, mask=mask),
        *_chains.stepping(learning_rate),
    )


def dp_adamw(
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
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: _chains.Mask | None = None,
) -> optax.GradientTransformationExtraArgs:
    """DP-AdamW: `dp_adam` with decoupled weight decay.

    The paper's Algorithm 1 adds its constant inside the root (`eps_root`). Its code
    adds it outside (`eps`). The two differ where the second moment is as small as 1e-8.

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
      weight_decay: see `add_decoupled_weight_decay`.
      mask: where decay applies; everywhere by default.

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
      >>> optimizer = dpadambc.dp_adamw(
      ...     1.0, mechanism, key=jax.random.key(3), weight_decay=0.5)
      >>> params, x = jnp.ones(2), jnp.array([[0.8, 0.1], [0.6, 0.3]])
      >>> gradients = dpadambc.per_example_grad(lambda w, x: w @ x)(params, x)
      >>> updates, _ = optimizer.update(gradients, optimizer.init(params), params)
      >>> print(updates.round(1))
      [-1.5 -1.5]

    References:
      `DP-AdamW <https://arxiv.org/abs/2511.07843>`_, 2025, Algorithm 1
    """
    return _chains.private_chain(
        learning_rate,
        mechanism,
        key,
        _chains.scale_by_adam(b1, b2, eps, eps_root, nesterov, mu_dtype),
        add_decoupled_weight_decay(weight_decay, mask=mask),
    )


def dp_adamw_bc(
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
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: _chains.Mask | None = None,
) -> optax.GradientTransformationExtraArgs:
    """DP-AdamW-BC: `dp_adam_bc` with decoupled weight decay.

    Args:
      learning_rate: a number or a schedule.
      mechanism: the public numbers, such as a `PoissonGaussian`.
      key: a typed key for the noise; a new one for each run.
      b1: decay rate of the first moment.
      b2: decay rate of the second moment.
      variance_floor: least corrected second moment; see `dp_adam_bc`.
      correction: the share of the noise variance that is subtracted; 0 is the control
        with the floor alone.
      nesterov: whether the first moment looks one step ahead, as in NAdam.
      mu_dtype: of the first moment between steps; at least float32 by default.
      weight_decay: see `add_decoupled_weight_decay`.
      mask: where decay applies; everywhere by default.

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
      >>> optimizer = dpadambc.dp_adamw_bc(
      ...     1.0, mechanism, key=jax.random.key(3), weight_decay=0.5)
      >>> params, x = jnp.ones(2), jnp.array([[0.8, 0.1], [0.6, 0.3]])
      >>> gradients = dpadambc.per_example_grad(lambda w, x: w @ x)(params, x)
      >>> updates, _ = optimizer.update(gradients, optimizer.init(params), params)
      >>> updates.shape
      (2,)

    References:
      `DP-AdamW <https://arxiv.org/abs/2511.07843>`_, 2025, Algorithm 2
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
        add_decoupled_weight_decay(weight_decay, mask=mask),
    )

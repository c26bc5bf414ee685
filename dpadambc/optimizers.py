"""The full optimizers: chains, and nothing else.

Of the private gradient, beside `optax.adam` and `optax.adamw`, `adam_bc` and `adamw_bc`
take the learning rate and the level of its noise. The others begin with `privatize`,
and take the learning rate, the mechanism and the key of the noise:

================ =====================================================================
optimizer        update of the parameters, with the private gradient g
================ =====================================================================
`dp_sgd`         η g, with heavy-ball momentum where asked for
`dp_adam`        η m̂ / (√(v̂ + eps_root) + eps)
`dp_adam_bc`      η m̂ / √max(v̂ − Φ̂, variance_floor), as `adam_bc`
`dp_adamw`       η (m̂ / (√(v̂ + eps_root) + eps) + λ θ)
`dp_adamw_bc`    η (m̂ / √max(v̂ − Φ̂, variance_floor) + λ θ), as `adamw_bc`
================ =====================================================================

Updates have the dtype of the parameters; all that comes before, the moments too, is in
at least float32. For a gradient that `clipped_grad` has clipped and summed already,
chain `add_dp_noise` with an optimizer of the private gradient.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpadambc._core import precision, validate
from dpadambc.mechanisms import _check
from dpadambc.mechanisms.base import Mechanism
from dpadambc.mechanisms.private_gradient import privatize
from dpadambc.transforms import _noise_level
from dpadambc.transforms.decay import add_decoupled_weight_decay
from dpadambc.transforms.moments import scale_by_adam_bc
from dpadambc.transforms.second_moment import RelativeFloor

Mask = Any | Callable[[optax.Params], Any]

__all__ = [
    "adam_bc",
    "adamw_bc",
    "dp_adam",
    "dp_adam_bc",
    "dp_adamw",
    "dp_adamw_bc",
    "dp_sgd",
]


def _private_chain(
    learning_rate: optax.ScalarOrSchedule,
    mechanism: Mechanism,
    key: jax.Array,
    *stages: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """The private gradient, then the stages, then the step."""
    return optax.chain(
        privatize(mechanism, key=key), *stages, *_stepping(learning_rate)
    )


def _stepping(
    learning_rate: optax.ScalarOrSchedule,
) -> tuple[optax.GradientTransformation, ...]:
    """The learning rate, and updates in the dtype of the parameters."""

    def cast(updates, params):
        if params is None:
            return updates
        return jax.tree.map(lambda u, p: u.astype(jnp.result_type(p)), updates, params)

    return optax.scale_by_learning_rate(learning_rate), optax.stateless(cast)


def _scale_by_adam(b1, b2, eps, eps_root) -> optax.GradientTransformation:
    """Optax's, with its arguments checked and its moments in at least float32."""
    validate.decay(b1=b1)
    validate.decay(b2=b2)
    validate.non_negative(eps=eps)
    validate.non_negative(eps_root=eps_root)
    return precision.with_wide_state(optax.scale_by_adam(b1, b2, eps, eps_root))


def _level(mechanism: Mechanism) -> _noise_level.NoiseStddev:
    """Of the noise that the mechanism adds."""
    _check.is_mechanism(mechanism)
    return mechanism.noise_stddev


def adam_bc(
    learning_rate: optax.ScalarOrSchedule,
    noise_stddev: _noise_level.NoiseStddev,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    *,
    variance_floor: jax.typing.ArrayLike | RelativeFloor = RelativeFloor(1.0),
) -> optax.GradientTransformationExtraArgs:
    """Adam on a private gradient, with the noise variance out of its second moment.

    It stands where `optax.adam` may stand: in `training.fit`, behind `privatize`, or
    behind `add_dp_noise`. What is private it takes as it comes.

    Args:
      learning_rate: a number or a schedule.
      noise_stddev: of the noise in the gradient that comes in, `mechanism.noise_stddev`
        if it comes as it left `privatize`; see `scale_by_adam_bc` for what stands
        between.
      b1: decay rate of the first moment.
      b2: decay rate of the second moment.
      variance_floor: least corrected second moment, absolute or a `RelativeFloor`;
        see `scale_by_adam_bc`. Tune it together with the learning rate.

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
        scale_by_adam_bc(noise_stddev, b1=b1, b2=b2, variance_floor=variance_floor),
        *_stepping(learning_rate),
    )


def adamw_bc(
    learning_rate: optax.ScalarOrSchedule,
    noise_stddev: _noise_level.NoiseStddev,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    *,
    variance_floor: jax.typing.ArrayLike | RelativeFloor = RelativeFloor(1.0),
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Mask | None = None,
) -> optax.GradientTransformationExtraArgs:
    """`adam_bc` with decoupled weight decay.

    Args:
      learning_rate: a number or a schedule.
      noise_stddev: of the noise in the gradient that comes in; see `adam_bc`.
      b1: decay rate of the first moment.
      b2: decay rate of the second moment.
      variance_floor: least corrected second moment; see `adam_bc`.
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
        scale_by_adam_bc(noise_stddev, b1=b1, b2=b2, variance_floor=variance_floor),
        add_decoupled_weight_decay(weight_decay, mask=mask),
        *_stepping(learning_rate),
    )


def dp_sgd(
    learning_rate: optax.ScalarOrSchedule,
    mechanism: Mechanism,
    *,
    key: jax.Array,
    momentum: float | None = None,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""DP-SGD: clip, add noise, step.

    .. math:: b_t = \mu b_{t-1} + \tilde g_t, \quad
        \theta_t = \theta_{t-1} - \eta_t b_t

    Args:
      learning_rate: :math:`\eta`, a number or a schedule.
      mechanism: the public numbers, such as a `PoissonGaussian`.
      key: a typed key for the noise; a new one for each run.
      momentum: :math:`\mu`, without dampening; none by default.
      nesterov: whether momentum is Nesterov's.

    Returns:
      An Optax transformation of per-example gradients; see `privatize` for its masks.

    Raises:
      TypeError: if `mechanism` is none, or `key` not a typed key.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=0.0, sampling_prob=1.0,
      ...     iterations=1, normalize_by=2)
      >>> optimizer = dpadambc.dp_sgd(0.5, mechanism, key=jax.random.key(0))
      >>> params, x = jnp.zeros(2), jnp.array([[0.6, 0.8], [3.0, 4.0]])
      >>> gradients = dpadambc.per_example_grad(lambda w, x: w @ x)(params, x)
      >>> updates, _ = optimizer.update(gradients, optimizer.init(params), params)
      >>> print(updates.round(3))
      [-0.3 -0.4]

    References:
      Abadi et al., `Deep Learning with Differential Privacy
      <https://arxiv.org/abs/1607.00133>`_, 2016
    """
    stages = []
    if momentum is not None:
        validate.decay(momentum=momentum)
        stages = [precision.with_wide_state(optax.trace(momentum, nesterov))]
    return _private_chain(learning_rate, mechanism, key, *stages)


def dp_adam(
    learning_rate: optax.ScalarOrSchedule,
    mechanism: Mechanism,
    *,
    key: jax.Array,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """DP-Adam: Adam on the private gradient, uncorrected.

    The noise dominates its second moment, which makes it DP-SGD with momentum: see
    `dp_adam_bc`.

    Args:
      learning_rate: a number or a schedule.
      mechanism: the public numbers, such as a `PoissonGaussian`.
      key: a typed key for the noise; a new one for each run.
      b1: decay rate of the first moment.
      b2: decay rate of the second moment.
      eps: added outside the square root.
      eps_root: added inside the square root.

    Returns:
      An Optax transformation; see `dp_sgd`.

    Raises:
      TypeError: if `mechanism` is none, or `key` not a typed key.

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
    return _private_chain(
        learning_rate,
        mechanism,
        key,
        _scale_by_adam(b1, b2, eps, eps_root),
    )


def dp_adam_bc(
    learning_rate: optax.ScalarOrSchedule,
    mechanism: Mechanism,
    *,
    key: jax.Array,
    b1: float = 0.9,
    b2: float = 0.999,
    variance_floor: jax.typing.ArrayLike | RelativeFloor = RelativeFloor(1.0),
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

    Returns:
      An Optax transformation; see `dp_sgd`.

    Raises:
      TypeError: if `mechanism` is none, or `key` not a typed key.

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
      >>> print(updates.round(1))  # of `dp_adam`: [-1. -1.]
      [-1.  -0.2]

    References:
      Tang et al., `DP-AdamBC <https://arxiv.org/abs/2312.14334>`_, 2024, Algorithm 1
    """
    return _private_chain(
        learning_rate,
        mechanism,
        key,
        scale_by_adam_bc(
            _level(mechanism), b1=b1, b2=b2, variance_floor=variance_floor
        ),
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
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Mask | None = None,
) -> optax.GradientTransformationExtraArgs:
    """DP-AdamW: `dp_adam` with decoupled weight decay.

    The paper's Algorithm 1 has its constant inside the root (`eps_root`), its code
    outside (`eps`), and they differ where the second moment is as small as 1e-8.

    Args:
      learning_rate: a number or a schedule.
      mechanism: the public numbers, such as a `PoissonGaussian`.
      key: a typed key for the noise; a new one for each run.
      b1: decay rate of the first moment.
      b2: decay rate of the second moment.
      eps: added outside the square root.
      eps_root: added inside the square root.
      weight_decay: see `add_decoupled_weight_decay`.
      mask: where decay applies; everywhere by default.

    Returns:
      An Optax transformation; see `dp_sgd`.

    Raises:
      TypeError: if `mechanism` is none, or `key` not a typed key.

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
    return _private_chain(
        learning_rate,
        mechanism,
        key,
        _scale_by_adam(b1, b2, eps, eps_root),
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
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Mask | None = None,
) -> optax.GradientTransformationExtraArgs:
    """DP-AdamW-BC: `dp_adam_bc` with decoupled weight decay.

    Args:
      learning_rate: a number or a schedule.
      mechanism: the public numbers, such as a `PoissonGaussian`.
      key: a typed key for the noise; a new one for each run.
      b1: decay rate of the first moment.
      b2: decay rate of the second moment.
      variance_floor: least corrected second moment; see `dp_adam_bc`.
      weight_decay: see `add_decoupled_weight_decay`.
      mask: where decay applies; everywhere by default.

    Returns:
      An Optax transformation; see `dp_sgd`.

    Raises:
      TypeError: if `mechanism` is none, or `key` not a typed key.

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
      >>> print(updates.round(1))
      [-1.5 -0.7]

    References:
      `DP-AdamW <https://arxiv.org/abs/2511.07843>`_, 2025, Algorithm 2
    """
    return _private_chain(
        learning_rate,
        mechanism,
        key,
        scale_by_adam_bc(
            _level(mechanism), b1=b1, b2=b2, variance_floor=variance_floor
        ),
        add_decoupled_weight_decay(weight_decay, mask=mask),
    )

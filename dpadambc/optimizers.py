"""The full private optimizers: chains, and nothing else.

Each takes the learning rate, the mechanism and the key of the noise:

================ =====================================================================
optimizer        update of the parameters, with the private gradient g
================ =====================================================================
`dp_sgd`         η g, with heavy-ball momentum where asked for
`dp_adam`        η m̂ / (√(v̂ + eps_root) + eps)
`dp_adambc`      η m̂ / √max(v̂ − Φ̂, variance_floor)
`dp_adamw`       η (m̂ / (√(v̂ + eps_root) + eps) + λ θ)
`dp_adamw_bc`    η (m̂ / √max(v̂ − Φ̂, variance_floor) + λ θ)
================ =====================================================================

They take per-example gradients; with `pre_clipped=True`, gradients that
`dpadambc.clipped_grad` has clipped and summed already. Updates have the dtype of the
parameters; all that comes before, the moments too, is in at least float32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpadambc import _validate, precision
from dpadambc.clipping import clip_per_example
from dpadambc.decay import add_decoupled_weight_decay
from dpadambc.mechanism import Mechanism
from dpadambc.moments import RelativeFloor, scale_by_adam_bc
from dpadambc.noise import add_dp_noise

Mask = Any | Callable[[optax.Params], Any]


def _refuse_late_padding() -> optax.GradientTransformationExtraArgs:
    """Raises where padding is masked after the sum, which is too late."""

    def update_fn(updates, state, params=None, **extra_args):
        del params
        if extra_args.get("is_padding_example") is not None:
            raise ValueError(
                "Expected is_padding_example to be given to the clipped gradient"
                " function: with pre_clipped=True the examples are summed already."
            )
        return updates, state

    return optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), update_fn
    )


def _check_mechanism(mechanism: Mechanism) -> None:
    if not isinstance(mechanism, Mechanism):
        raise TypeError(
            "Expected mechanism to be a dpadambc mechanism, such as a"
            f" SubsampledGaussian, got {mechanism!r}."
        )


def _private_chain(
    learning_rate: optax.ScalarOrSchedule,
    mechanism: Mechanism,
    key: jax.Array,
    pre_clipped: bool,
    *stages: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Clip and add noise as the mechanism says, then the stages, then step."""
    _check_mechanism(mechanism)
    clip = clip_per_example(mechanism.l2_clip_norm, normalize_by=mechanism.normalize_by)
    return optax.chain(
        _refuse_late_padding() if pre_clipped else clip,
        add_dp_noise(mechanism.noise_stddev, key=key),
        *stages,
        optax.scale_by_learning_rate(learning_rate),
        _cast_like_params(),
    )


def _scale_by_adam(b1, b2, eps, eps_root) -> optax.GradientTransformation:
    """Optax's, with its arguments checked and its moments in at least float32."""
    _validate.decay(b1=b1)
    _validate.decay(b2=b2)
    _validate.non_negative(eps=eps)
    _validate.non_negative(eps_root=eps_root)
    return _at_least_float32(optax.scale_by_adam(b1, b2, eps, eps_root))


def _scale_by_corrected_adam(
    mechanism, b1, b2, variance_floor
) -> optax.GradientTransformation:
    """The correction for the noise that the mechanism adds."""
    _check_mechanism(mechanism)
    return scale_by_adam_bc(
        mechanism.noise_stddev, b1=b1, b2=b2, variance_floor=variance_floor
    )


def _at_least_float32(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same transformation, with state as for parameters in at least float32."""

    def init_fn(params):
        widen = lambda p: jnp.asarray(p, precision.at_least_float32(jnp.result_type(p)))
        return tx.init(jax.tree.map(widen, params))

    return optax.GradientTransformation(init_fn, tx.update)


def _cast_like_params() -> optax.GradientTransformation:
    """Updates in the dtype of the parameters."""

    def cast(updates, params):
        if params is None:
            return updates
        return jax.tree.map(lambda u, p: u.astype(jnp.result_type(p)), updates, params)

    return optax.stateless(cast)


def dp_sgd(
    learning_rate: optax.ScalarOrSchedule,
    mechanism: Mechanism,
    *,
    key: jax.Array,
    momentum: float | None = None,
    nesterov: bool = False,
    pre_clipped: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""DP-SGD: clip, add noise, step.

    .. math:: b_t = \mu b_{t-1} + \tilde g_t, \quad
        \theta_t = \theta_{t-1} - \eta_t b_t

    Args:
      learning_rate: :math:`\eta`, a number or a schedule.
      mechanism: the public numbers, such as a `SubsampledGaussian`.
      key: a typed key for the noise; a new one for each run.
      momentum: :math:`\mu`, without dampening; none by default.
      nesterov: whether momentum is Nesterov's.
      pre_clipped: whether gradients come clipped and summed, from `clipped_grad`.

    Returns:
      An Optax transformation, to be called as `update(gradients, state, params)`, and
      with `is_padding_example` where a batch is padded.

    Raises:
      TypeError: if `mechanism` is none, or `key` not a typed key.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> mechanism = dpadambc.SubsampledGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=0.0, sampling_prob=1.0,
      ...     iterations=1, normalize_by=2)
      >>> optimizer = dpadambc.dp_sgd(0.5, mechanism, key=jax.random.key(0))
      >>> params, gradients = jnp.zeros(2), jnp.array([[0.6, 0.8], [3.0, 4.0]])
      >>> updates, _ = optimizer.update(gradients, optimizer.init(params), params)
      >>> print(updates.round(3))
      [-0.3 -0.4]

    References:
      Abadi et al., `Deep Learning with Differential Privacy
      <https://arxiv.org/abs/1607.00133>`_, 2016
    """
    stages = []
    if momentum is not None:
        _validate.decay(momentum=momentum)
        stages = [_at_least_float32(optax.trace(momentum, nesterov))]
    return _private_chain(learning_rate, mechanism, key, pre_clipped, *stages)


def dp_adam(
    learning_rate: optax.ScalarOrSchedule,
    mechanism: Mechanism,
    *,
    key: jax.Array,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    pre_clipped: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """DP-Adam: Adam on the private gradient, uncorrected.

    The noise dominates its second moment, which makes it DP-SGD with momentum: see
    `dp_adambc`.

    Args:
      learning_rate: a number or a schedule.
      mechanism: the public numbers, such as a `SubsampledGaussian`.
      key: a typed key for the noise; a new one for each run.
      b1: decay rate of the first moment.
      b2: decay rate of the second moment.
      eps: added outside the square root.
      eps_root: added inside the square root.
      pre_clipped: whether gradients come clipped and summed, from `clipped_grad`.

    Returns:
      An Optax transformation; see `dp_sgd`.

    Raises:
      TypeError: if `mechanism` is none, or `key` not a typed key.

    References:
      Li et al., `Large Language Models Can Be Strong Differentially Private Learners
      <https://arxiv.org/abs/2110.05679>`_, 2022
    """
    return _private_chain(
        learning_rate,
        mechanism,
        key,
        pre_clipped,
        _scale_by_adam(b1, b2, eps, eps_root),
    )


def dp_adambc(
    learning_rate: optax.ScalarOrSchedule,
    mechanism: Mechanism,
    *,
    key: jax.Array,
    b1: float = 0.9,
    b2: float = 0.999,
    variance_floor: jax.typing.ArrayLike | RelativeFloor = RelativeFloor(1.0),
    pre_clipped: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """DP-AdamBC: Adam with the noise variance taken out of the second moment.

    Args:
      learning_rate: a number or a schedule.
      mechanism: the public numbers, such as a `SubsampledGaussian`.
      key: a typed key for the noise; a new one for each run.
      b1: decay rate of the first moment.
      b2: decay rate of the second moment.
      variance_floor: least corrected second moment, absolute or a `RelativeFloor`;
        see `scale_by_adam_bc`. Tune it together with the learning rate.
      pre_clipped: whether gradients come clipped and summed, from `clipped_grad`.

    Returns:
      An Optax transformation; see `dp_sgd`.

    Raises:
      TypeError: if `mechanism` is none, or `key` not a typed key.

    References:
      Tang et al., `DP-AdamBC <https://arxiv.org/abs/2312.14334>`_, 2024, Algorithm 1
    """
    return _private_chain(
        learning_rate,
        mechanism,
        key,
        pre_clipped,
        _scale_by_corrected_adam(mechanism, b1, b2, variance_floor),
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
    pre_clipped: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """DP-AdamW: `dp_adam` with decoupled weight decay.

    The paper's Algorithm 1 has its constant inside the root (`eps_root`), its code
    outside (`eps`), and they differ where the second moment is as small as 1e-8.

    Args:
      learning_rate: a number or a schedule.
      mechanism: the public numbers, such as a `SubsampledGaussian`.
      key: a typed key for the noise; a new one for each run.
      b1: decay rate of the first moment.
      b2: decay rate of the second moment.
      eps: added outside the square root.
      eps_root: added inside the square root.
      weight_decay: see `add_decoupled_weight_decay`.
      mask: where decay applies; everywhere by default.
      pre_clipped: whether gradients come clipped and summed, from `clipped_grad`.

    Returns:
      An Optax transformation; see `dp_sgd`.

    Raises:
      TypeError: if `mechanism` is none, or `key` not a typed key.

    References:
      `DP-AdamW <https://arxiv.org/abs/2511.07843>`_, 2025, Algorithm 1
    """
    return _private_chain(
        learning_rate,
        mechanism,
        key,
        pre_clipped,
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
    pre_clipped: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """DP-AdamW-BC: `dp_adambc` with decoupled weight decay.

    Args:
      learning_rate: a number or a schedule.
      mechanism: the public numbers, such as a `SubsampledGaussian`.
      key: a typed key for the noise; a new one for each run.
      b1: decay rate of the first moment.
      b2: decay rate of the second moment.
      variance_floor: least corrected second moment; see `dp_adambc`.
      weight_decay: see `add_decoupled_weight_decay`.
      mask: where decay applies; everywhere by default.
      pre_clipped: whether gradients come clipped and summed, from `clipped_grad`.

    Returns:
      An Optax transformation; see `dp_sgd`.

    Raises:
      TypeError: if `mechanism` is none, or `key` not a typed key.

    References:
      `DP-AdamW <https://arxiv.org/abs/2511.07843>`_, 2025, Algorithm 2
    """
    return _private_chain(
        learning_rate,
        mechanism,
        key,
        pre_clipped,
        _scale_by_corrected_adam(mechanism, b1, b2, variance_floor),
        add_decoupled_weight_decay(weight_decay, mask=mask),
    )

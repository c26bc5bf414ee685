"""The optimizers of the papers, each a chain of Optax transformations.

`recipe` is the one to start with: a mechanism and Adam, from public numbers alone.

`adam_bc`, `adamw_bc` and `rms_bc` take the private gradient, like `optax.adam`,
`optax.adamw` and `optax.rmsprop`. The others start with `privatize` and take
per-example gradients. With the private gradient g, they update the parameters by:

============== =======================================================================
optimizer      update
============== =======================================================================
`dp_sgd`       η g, with momentum if asked for
`dp_adam`      η m̂ / (√(v̂ + eps_root) + eps)
`dp_adam_bc`   η m̂ / √max(v̂ − Φ̂, variance_floor), as `adam_bc`
`dp_adamw`     η (m̂ / (√(v̂ + eps_root) + eps) + λ θ)
`dp_adamw_bc`  η (m̂ / √max(v̂ − Φ̂, variance_floor) + λ θ), as `adamw_bc`
`rms_bc`       η g / √max(v̂ − Φ̂, variance_floor)
============== =======================================================================

Updates have the dtype of the parameters; everything before them, moments included, is
in at least float32. For any other optimizer, write the chain:
``optax.chain(privatize(mechanism, key=key), optax.lion(1e-4))``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from dpadambc.clipping.rules import Automatic
from dpadambc.core.mechanism import Mechanism
from dpadambc.core.noise import NoiseStddev
from dpadambc.core.privatize import privatize
from dpadambc.mechanisms.names import explained
from dpadambc.mechanisms.poisson import PoissonGaussian
from dpadambc.transforms import dtypes
from dpadambc.transforms.adam import scale_by_adam
from dpadambc.transforms.decay import add_decoupled_weight_decay
from dpadambc.transforms.moments import scale_by_adam_bc
from dpadambc.transforms.rms import scale_by_rms_bc
from dpadambc.transforms.second_moment import RelativeFloor

Mask = Any | Callable[[optax.Params], Any]


class Recipe(NamedTuple):
    """The value of `recipe`: the arguments of `training.fit` between data and key.

    Attributes:
      mechanism: Poisson batches, AUTO-S, and the least noise for the target.
      optimizer: Adam, on the private gradient.
    """

    mechanism: PoissonGaussian
    optimizer: optax.GradientTransformation


@explained
def recipe(
    learning_rate: optax.ScalarOrSchedule,
    *,
    target_epsilon: float,
    target_delta: float,
    num_examples: int,
    batch_size: float,
    epochs: float,
) -> Recipe:
    """Returns AUTO-S and Adam, the settings to start with, from public numbers alone.

    AUTO-S scales every gradient to nearly one, so there is no clip norm to choose. Take
    the largest batch that the time allows, and search for the learning rate alone, at
    one epsilon: the best one is nearly the best at others. The guide on settings says
    where to begin, and the guide on optimizers on which tasks it was measured.

    Args:
      learning_rate: the learning rate of Adam, a number or a schedule.
      target_epsilon: the epsilon of the run, under ADD_OR_REMOVE_ONE.
      target_delta: the delta of epsilon; well below one over the number of examples.
      num_examples: the number of training examples.
      batch_size: the expected batch size.
      epochs: how often each example is drawn on average.

    Returns:
      A `Recipe`.

    Raises:
      ValueError: if the target cannot be reached, or a number is out of its range.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> x = jax.random.normal(jax.random.key(0), (1_000, 3))
      >>> data = x, x @ jnp.array([1.0, -2.0, 3.0])
      >>> recipe = dpadambc.recipe(
      ...     0.05, target_epsilon=3.0, target_delta=1e-5, num_examples=1_000,
      ...     batch_size=200, epochs=40)
      >>> result = dpadambc.training.fit(
      ...     lambda w, x, y: (w @ x - y) ** 2, jnp.zeros(3), data, *recipe,
      ...     key=jax.random.key(1), target_delta=1e-5, steps_per_call=50)
      >>> print(result.params.round(0), f"{result.epsilon:.2f}")
      [ 1. -2.  3.] 3.00

    References:
      Bu et al., `Automatic Clipping: Differentially Private Deep Learning Made Easier
      and Stronger <https://arxiv.org/abs/2206.07136>`_, 2023
    """
    dtypes.check_learning_rate(learning_rate)
    mechanism = PoissonGaussian.calibrate(
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        num_examples=num_examples,
        batch_size=batch_size,
        epochs=epochs,
        clip_rule=Automatic(),
        l2_clip_norm=1.0,
    )
    return Recipe(mechanism, optax.adam(learning_rate))


def _scale_by_adam_bc(
    noise_stddev: NoiseStddev, *adam: Any
) -> optax.GradientTransformation:
    """Makes the corrected Adam from its numbers, in the order of the signatures."""
    names = "b1", "b2", "variance_floor", "correction", "nesterov", "mu_dtype"
    return scale_by_adam_bc(noise_stddev, **dict(zip(names, adam, strict=True)))


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
    """Makes Adam for a private gradient, with the noise variance subtracted from v̂.

    Use it in place of `optax.adam`: in `training.fit`, or after `privatize` or
    `add_dp_noise`.

    Args:
      learning_rate: a number or a schedule.
      noise_stddev: the level of the noise in the incoming gradient, a mechanism or its
        `noise_stddev`; see `scale_by_adam_bc`. It is subtracted; no noise is added.
      b1: the decay rate of the first moment.
      b2: the decay rate of the second moment.
      variance_floor: the least corrected second moment, absolute or a `RelativeFloor`.
        Tune it together with the learning rate.
      correction: the share of the noise variance that is subtracted; 0 is the control
        with the floor alone.
      nesterov: whether the first moment looks one step ahead, as in NAdam.
      mu_dtype: the dtype of the first moment between steps; at least float32 by
        default.

    Returns:
      An Optax transformation of the private gradient.

    Raises:
      ValueError: if a number is out of its range; see `scale_by_adam_bc`.
      TypeError: if a number has less than float32, or a gradient is complex.

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
    adam = b1, b2, variance_floor, correction, nesterov, mu_dtype
    return dtypes.descent(learning_rate, _scale_by_adam_bc(noise_stddev, *adam))


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
    mask: Mask | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Makes `adam_bc` with decoupled weight decay.

    Args:
      learning_rate: a number or a schedule.
      noise_stddev: the level of the noise in the incoming gradient, a mechanism or its
        `noise_stddev`; see `scale_by_adam_bc`. It is subtracted; no noise is added.
      b1: the decay rate of the first moment.
      b2: the decay rate of the second moment.
      variance_floor: the least corrected second moment, absolute or a `RelativeFloor`.
        Tune it together with the learning rate.
      correction: the share of the noise variance that is subtracted; 0 is the control
        with the floor alone.
      nesterov: whether the first moment looks one step ahead, as in NAdam.
      mu_dtype: the dtype of the first moment between steps; at least float32 by
        default.
      weight_decay: a number or a schedule; see `add_decoupled_weight_decay`.
      mask: where decay applies; everywhere by default.

    Returns:
      An Optax transformation of the private gradient.

    Raises:
      ValueError: if a number is out of its range; see `scale_by_adam_bc`.
      TypeError: if a number has less than float32, or a gradient is complex.

    Example:
      >>> import jax.numpy as jnp
      >>> import dpadambc
      >>> optimizer = dpadambc.adamw_bc(0.1, noise_stddev=0.3, weight_decay=0.5)
      >>> params = jnp.ones(2)
      >>> private_gradient = jnp.array([0.5, 0.2])
      >>> updates, state = optimizer.update(
      ...     private_gradient, optimizer.init(params), params)
      >>> print(updates.round(2))  # with a decay of 0.1 * 0.5 * params
      [-0.17 -0.11]

    References:
      `DP-AdamW <https://arxiv.org/abs/2511.07843>`_, 2025, Algorithm 2
    """
    adam = b1, b2, variance_floor, correction, nesterov, mu_dtype
    decay = add_decoupled_weight_decay(weight_decay, mask=mask)
    return dtypes.descent(learning_rate, _scale_by_adam_bc(noise_stddev, *adam), decay)


def rms_bc(
    learning_rate: optax.ScalarOrSchedule,
    noise_stddev: NoiseStddev,
    decay: jax.typing.ArrayLike = 0.9,
    *,
    variance_floor: jax.typing.ArrayLike | RelativeFloor = RelativeFloor(1.0),
    correction: jax.typing.ArrayLike = 1.0,
) -> optax.GradientTransformationExtraArgs:
    """Makes RMSProp for a private gradient, with the noise variance subtracted from v̂.

    Use it in place of `optax.rmsprop`; see `adam_bc`.

    Args:
      learning_rate: a number or a schedule.
      noise_stddev: the level of the noise in the incoming gradient, a mechanism or its
        `noise_stddev`; see `scale_by_adam_bc`. It is subtracted; no noise is added.
      decay: the decay rate of the second moment.
      variance_floor: the least corrected second moment, absolute or a `RelativeFloor`.
        Tune it together with the learning rate.
      correction: the share of the noise variance that is subtracted; 0 is the control
        with the floor alone.

    Returns:
      An Optax transformation of the private gradient.

    Raises:
      ValueError: if a number is out of its range; see `scale_by_rms_bc`.
      TypeError: if a number has less than float32, or a gradient is complex.

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
    floor: dict[str, Any] = dict(variance_floor=variance_floor, correction=correction)
    rms = scale_by_rms_bc(noise_stddev, decay=decay, **floor)
    return dtypes.descent(learning_rate, rms)


def dp_sgd(
    learning_rate: optax.ScalarOrSchedule,
    mechanism: Mechanism,
    *,
    key: jax.Array,
    momentum: jax.typing.ArrayLike | None = None,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Makes DP-SGD: clip, add noise, step.

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
      TypeError: if `mechanism` is no mechanism, or `key` no typed key.
      ValueError: if a number is out of its range.

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
    if momentum is not None:
        dtypes.check_decay(momentum=momentum)
    dtypes.check_learning_rate(learning_rate)
    private = privatize(mechanism, key=key)
    sgd = dtypes.with_wide_state(optax.sgd(learning_rate, momentum, nesterov))
    return optax.chain(private, sgd, dtypes.cast_to_params())


def dp_adam(
    learning_rate: optax.ScalarOrSchedule,
    mechanism: Mechanism,
    *,
    key: jax.Array,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    nesterov: bool = False,
    mu_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Makes DP-Adam: Adam on the private gradient, uncorrected.

    Where the noise dominates the second moment, this is DP-SGD with momentum: see
    `dp_adam_bc`.

    Args:
      learning_rate: a number or a schedule.
      mechanism: the public numbers, such as a `PoissonGaussian`.
      key: a typed key for the noise; a new one for each run.
      b1: the decay rate of the first moment.
      b2: the decay rate of the second moment.
      eps: a constant added outside the square root.
      eps_root: a constant added inside the square root.
      nesterov: whether the first moment looks one step ahead, as in NAdam.
      mu_dtype: the dtype of the first moment between steps; at least float32 by
        default.

    Returns:
      An Optax transformation of per-example gradients; see `privatize` for its masks.

    Raises:
      TypeError: if `mechanism` is no mechanism, or `key` no typed key.
      ValueError: if a number is out of its range.

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
    private = privatize(mechanism, key=key)
    adam = scale_by_adam(b1, b2, eps, eps_root, nesterov, mu_dtype)
    return dtypes.descent(learning_rate, private, adam)


def dp_adam_bc(
    learning_rate: optax.ScalarOrSchedule,
    mechanism: Mechanism,
    *,
    key: jax.Array,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    variance_floor: jax.typing.ArrayLike | RelativeFloor = RelativeFloor(1.0),
    correction: jax.typing.ArrayLike = 1.0,
    nesterov: bool = False,
    mu_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Makes DP-AdamBC: Adam with the noise variance subtracted from the second moment.

    Args:
      learning_rate: a number or a schedule.
      mechanism: the public numbers, such as a `PoissonGaussian`.
      key: a typed key for the noise; a new one for each run.
      b1: the decay rate of the first moment.
      b2: the decay rate of the second moment.
      variance_floor: the least corrected second moment, absolute or a `RelativeFloor`.
        Tune it together with the learning rate.
      correction: the share of the noise variance that is subtracted; 0 is the control
        with the floor alone.
      nesterov: whether the first moment looks one step ahead, as in NAdam.
      mu_dtype: the dtype of the first moment between steps; at least float32 by
        default.

    Returns:
      An Optax transformation of per-example gradients; see `privatize` for its masks.

    Raises:
      TypeError: if `mechanism` is no mechanism, or `key` no typed key.
      ValueError: if a number is out of its range.

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
    private = privatize(mechanism, key=key)
    adam = b1, b2, variance_floor, correction, nesterov, mu_dtype
    adam_bc = _scale_by_adam_bc(mechanism, *adam)
    return optax.chain(private, dtypes.descent(learning_rate, adam_bc))


def dp_adamw(
    learning_rate: optax.ScalarOrSchedule,
    mechanism: Mechanism,
    *,
    key: jax.Array,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    nesterov: bool = False,
    mu_dtype: jax.typing.DTypeLike | None = None,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Mask | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Makes DP-AdamW: `dp_adam` with decoupled weight decay.

    The paper's Algorithm 1 adds its constant inside the root (`eps_root`), its code
    outside (`eps`). The two differ where the second moment is as small as 1e-8.

    Args:
      learning_rate: a number or a schedule.
      mechanism: the public numbers, such as a `PoissonGaussian`.
      key: a typed key for the noise; a new one for each run.
      b1: the decay rate of the first moment.
      b2: the decay rate of the second moment.
      eps: a constant added outside the square root.
      eps_root: a constant added inside the square root.
      nesterov: whether the first moment looks one step ahead, as in NAdam.
      mu_dtype: the dtype of the first moment between steps; at least float32 by
        default.
      weight_decay: a number or a schedule; see `add_decoupled_weight_decay`.
      mask: where decay applies; everywhere by default.

    Returns:
      An Optax transformation of per-example gradients; see `privatize` for its masks.

    Raises:
      TypeError: if `mechanism` is no mechanism, or `key` no typed key.
      ValueError: if a number is out of its range.

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
    private = privatize(mechanism, key=key)
    adam = scale_by_adam(b1, b2, eps, eps_root, nesterov, mu_dtype)
    decay = add_decoupled_weight_decay(weight_decay, mask=mask)
    return dtypes.descent(learning_rate, private, adam, decay)


def dp_adamw_bc(
    learning_rate: optax.ScalarOrSchedule,
    mechanism: Mechanism,
    *,
    key: jax.Array,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    variance_floor: jax.typing.ArrayLike | RelativeFloor = RelativeFloor(1.0),
    correction: jax.typing.ArrayLike = 1.0,
    nesterov: bool = False,
    mu_dtype: jax.typing.DTypeLike | None = None,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Mask | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Makes DP-AdamW-BC: `dp_adam_bc` with decoupled weight decay.

    Args:
      learning_rate: a number or a schedule.
      mechanism: the public numbers, such as a `PoissonGaussian`.
      key: a typed key for the noise; a new one for each run.
      b1: the decay rate of the first moment.
      b2: the decay rate of the second moment.
      variance_floor: the least corrected second moment, absolute or a `RelativeFloor`.
        Tune it together with the learning rate.
      correction: the share of the noise variance that is subtracted; 0 is the control
        with the floor alone.
      nesterov: whether the first moment looks one step ahead, as in NAdam.
      mu_dtype: the dtype of the first moment between steps; at least float32 by
        default.
      weight_decay: a number or a schedule; see `add_decoupled_weight_decay`.
      mask: where decay applies; everywhere by default.

    Returns:
      An Optax transformation of per-example gradients; see `privatize` for its masks.

    Raises:
      TypeError: if `mechanism` is no mechanism, or `key` no typed key.
      ValueError: if a number is out of its range.

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
    private = privatize(mechanism, key=key)
    adam = b1, b2, variance_floor, correction, nesterov, mu_dtype
    decay = add_decoupled_weight_decay(weight_decay, mask=mask)
    stages = _scale_by_adam_bc(mechanism, *adam), decay
    return optax.chain(private, dtypes.descent(learning_rate, *stages))

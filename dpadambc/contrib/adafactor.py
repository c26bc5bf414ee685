r"""Adafactor's factored second moment, with the variance of the noise subtracted.

The rule is that of `optax.scale_by_factored_rms`, and tests compare the two. Whether it
agrees with the paper's text is not verified. The idea of the correction is that of
DP-AdamBC; its form for rows and columns is derived here.

Adafactor keeps the mean of :math:`g^2` over each row and over each column of a matrix,
and takes the matrix of rank one with these means for the second moment. Noise of
variance :math:`\Phi` and mean zero adds :math:`\Phi` to every square, and so to every
mean of squares: with :math:`\tilde g = g + z`,

.. math::
  \mathbb{E} \frac1n \sum_j \tilde g_{ij}^2
    = \frac1n \sum_j (g_{ij}^2 + 2 g_{ij} \mathbb{E} z_{ij} + \mathbb{E} z_{ij}^2)
    = \frac1n \sum_j g_{ij}^2 + \Phi

A moving average is linear, so subtract the average of :math:`\Phi` with the same
weights from the rows and from the columns, *before* their product. Afterwards would be
wrong: :math:`(r_i + \Phi)(c_j + \Phi) / (\bar r + \Phi) - \Phi` is not :math:`r_i c_j /
\bar r`, but
:math:`r_i c_j / \bar r + \Phi (r_i - \bar r)(\bar r - c_j) / (\bar r (\bar r + \Phi))`.

Under noise alone a row spreads by :math:`\Phi \sqrt{2 S_t / n}` about :math:`\Phi`, for
n columns and :math:`S_t = \sum_i w_i^2` of the weights of the moving average: it is a
mean of n independent squares, each of variance :math:`2 \Phi^2`. That is :math:`\sqrt
n` finer than the resolution of Adam's second moment with weights of the same
:math:`S_t`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpadambc.core import validate
from dpadambc.core.noise import NoiseStddev, stddev_at_step, stddev_of, stddev_per_leaf
from dpadambc.transforms import second_moment
from dpadambc.transforms.dtypes import check_real, descent, wide_zeros_like
from dpadambc.transforms.second_moment import NoiseCorrection, RelativeFloor


class FactoredMoment(NamedTuple):
    """Means of the squared gradient of one parameter over rows and over columns.

    Attributes:
      row: the mean over the largest axis, with the shape of the others.
      column: the mean over the second largest axis, with the shape of the others.
    """

    row: jax.Array
    column: jax.Array


class ScaleByAdafactorBCState(NamedTuple):
    """The state of `scale_by_adafactor_bc`: moving averages of noised gradients only.

    Attributes:
      count: the number of steps. shape=(), int32.
      squared_weights: the sum of the squared weights of the averages. shape=().
      nu: a `FactoredMoment` or an array for each parameter.
      noise_variance: one scalar for each level of noise, averaged as nu is.
    """

    count: jax.Array
    squared_weights: jax.Array
    nu: Any
    noise_variance: Any


_Axes = tuple[int, int] | None


def _axes(shape: tuple[int, ...], min_dim_size: int) -> _Axes:
    """The largest axis and the second largest, or None if that is a small one."""
    order = sorted(range(len(shape)), key=shape.__getitem__)
    if len(shape) < 2 or shape[order[-2]] < min_dim_size:
        return None
    return order[-1], order[-2]


def _mean_squares(g: jax.Array, min_dim_size: int) -> jax.Array | FactoredMoment:
    """Squares a gradient, or computes the means of squares over rows and columns."""
    axes = _axes(g.shape, min_dim_size)
    if axes is None:
        return jnp.square(g)
    return FactoredMoment(*(jnp.mean(jnp.square(g), axis) for axis in axes))


def _corrected(
    nu: Any, phi: jax.Array, floor: jax.Array, shape: tuple[int, ...], axes: _Axes
) -> jax.Array:
    """The second moment of each coordinate without the noise, floored."""
    own = lambda x: second_moment.corrected_second_moment(x, phi, floor)
    if axes is None:
        return own(nu)
    row, column = (jnp.expand_dims(own(x), i) for x, i in zip(nu, axes, strict=True))
    mean = jnp.mean(row, axes[1], keepdims=True)
    # Divide first: a product of two second moments may underflow in float32.
    share = jnp.where(mean > 0, row / mean, 0)
    product = jnp.broadcast_to(share * column, shape)
    return jnp.maximum(product, floor).astype(product.dtype)


def scale_by_adafactor_bc(
    noise_stddev: NoiseStddev,
    *,
    decay_rate: jax.typing.ArrayLike = 0.8,
    min_dim_size_to_factor: int = 128,
    variance_floor: jax.typing.ArrayLike | RelativeFloor = RelativeFloor(1.0),
    correction: jax.typing.ArrayLike = 1.0,
) -> optax.GradientTransformation:
    r"""Rescales by Adafactor's rule, corrected for the noise in rows and columns.

    .. math::

      \beta_t &= 1 - t^{-0.8} \\
      r_t &= \beta_t r_{t-1} + (1 - \beta_t) \mathrm{mean}_j\, g_t^2, \qquad
      c_t = \beta_t c_{t-1} + (1 - \beta_t) \mathrm{mean}_i\, g_t^2 \\
      \Phi_t &= \beta_t \Phi_{t-1} + (1 - \beta_t) \sigma_t^2 \\
      \hat r &= \max(r_t - \Phi_t, \gamma'), \qquad
      \hat c = \max(c_t - \Phi_t, \gamma') \\
      u_t &= g_t / \sqrt{\max(\hat r \hat c^\top / \mathrm{mean}\, \hat r, \gamma')}

    The weights of the averages sum to one from the first step on. The error of the
    rank-one approximation stays. Parameters without two axes of at least
    `min_dim_size_to_factor` keep a second moment for each coordinate. There is no first
    moment, so the noise of a step reaches the update undamped; an `optax.ema` behind
    this stage damps it.

    Guarantees:
      * The state is computed from the input and from public numbers alone: behind
        `add_dp_noise` it is as private as the noised gradients.
      * The averages and the updates are in at least float32.
      * Without noise and floor the updates are those of
        `optax.scale_by_factored_rms(epsilon=0)`, except that a coordinate whose
        gradients were all zero gets 0 instead of NaN.

    Args:
      noise_stddev: :math:`\sigma`, the level in the gradient; see `scale_by_adam_bc`.
      decay_rate: the exponent, positive. 1 gives the plain mean over all steps.
      min_dim_size_to_factor: the least second largest axis of a factored parameter.
      variance_floor: :math:`\gamma'`, a number, or a `RelativeFloor` in units of the
        resolution of the parameter's averages.
      correction: the share of :math:`\Phi_t` that is subtracted.

    Returns:
      An Optax transformation.

    Raises:
      ValueError: if a number is out of its range.
      TypeError: if a number has less than float32, or a gradient is complex.

    Example:
      >>> import jax.numpy as jnp
      >>> from dpadambc import contrib
      >>> adafactor = contrib.scale_by_adafactor_bc(
      ...     noise_stddev=0.3, min_dim_size_to_factor=2, variance_floor=0.01)
      >>> params = jnp.zeros((2, 2))
      >>> gradient = jnp.array([[0.5, 0.5], [0.4, 0.4]])
      >>> updates, _ = adafactor.update(gradient, adafactor.init(params))
      >>> print(updates.round(2))  # less noise: rows of 0.16 and 0.07, columns of 0.115
      [[1.25 1.25]
       [1.51 1.51]]

    References:
      Shazeer and Stern, `Adafactor: Adaptive Learning Rates with Sublinear Memory Cost
      <https://arxiv.org/abs/1804.04235>`_, 2018; the correction of
      `DP-AdamBC <https://arxiv.org/abs/2312.14334>`_, 2024
    """
    noise_stddev = stddev_of(noise_stddev)
    validate.positive(decay_rate=decay_rate)
    if isinstance(min_dim_size_to_factor, jax.Array):
        raise TypeError(
            "Expected min_dim_size_to_factor to be an int, got an array. With"
            " optax.inject_hyperparams, pass static_args='min_dim_size_to_factor'."
        )
    validate.count(min_dim_size_to_factor=min_dim_size_to_factor, least=1)
    corrected = NoiseCorrection(noise_stddev, variance_floor, correction)
    is_factored = lambda x: isinstance(x, FactoredMoment)

    def init_fn(params):
        def zeros(p):
            squares = _mean_squares(wide_zeros_like(p), min_dim_size_to_factor)
            return jax.tree.map(jnp.zeros_like, squares)

        count, squared_weights = jnp.zeros([], jnp.int32), jnp.zeros([])
        nu, noise_variance = jax.tree.map(zeros, params), corrected.init(params)
        return ScaleByAdafactorBCState(count, squared_weights, nu, noise_variance)

    def update_fn(updates, state, params=None):
        del params
        check_real(updates)
        like = lambda nu, g: g.astype(nu.row.dtype if is_factored(nu) else nu.dtype)
        updates = jax.tree.map(like, state.nu, updates, is_leaf=is_factored)
        count = jnp.asarray(optax.safe_increment(state.count))
        new = 1 / jnp.power(count.astype(float), decay_rate)

        average = lambda old, x: (old + new * (x - old)).astype(old.dtype)
        mean_squares = lambda g: _mean_squares(g, min_dim_size_to_factor)
        nu = jax.tree.map(average, state.nu, jax.tree.map(mean_squares, updates))
        stddev = stddev_at_step(noise_stddev, state.count)
        variance = jax.tree.map(jnp.square, stddev)
        noise_variance = jax.tree.map(average, state.noise_variance, variance)
        squared_weights = (1 - new) ** 2 * state.squared_weights + new**2

        def scale(g, nu, phi):
            axes = _axes(g.shape, min_dim_size_to_factor)
            size = g.shape[axes[1]] if axes else 1
            if isinstance(variance_floor, RelativeFloor):
                spread = phi * jnp.sqrt(2 * squared_weights / size)
                floor = variance_floor.factor * spread
            else:
                floor = jnp.asarray(variance_floor, float)
            root = jnp.sqrt(_corrected(nu, correction * phi, floor, g.shape, axes))
            return jnp.where(root > 0, g / root, 0)

        levels = stddev_per_leaf(noise_variance, updates)
        squared_weights = squared_weights.astype(state.squared_weights.dtype)
        kept = count, squared_weights, nu, noise_variance
        return jax.tree.map(scale, updates, nu, levels), ScaleByAdafactorBCState(*kept)

    return optax.GradientTransformation(init_fn, update_fn)


def adafactor_bc(
    learning_rate: optax.ScalarOrSchedule,
    noise_stddev: NoiseStddev,
    *,
    decay_rate: jax.typing.ArrayLike = 0.8,
    min_dim_size_to_factor: int = 128,
    clipping_threshold: jax.typing.ArrayLike = 1.0,
    multiply_by_parameter_scale: bool = True,
    variance_floor: jax.typing.ArrayLike | RelativeFloor = RelativeFloor(1.0),
    correction: jax.typing.ArrayLike = 1.0,
) -> optax.GradientTransformationExtraArgs:
    """Makes Adafactor for a private gradient, without the noise in its second moments.

    Use it in place of `optax.adafactor`; see `adam_bc`.

    Args:
      learning_rate: a number or a schedule; relative to the size of a parameter if
        `multiply_by_parameter_scale`.
      noise_stddev: the level of the noise in the incoming gradient; see `adam_bc`.
      decay_rate: the exponent of the moving averages; see `scale_by_adafactor_bc`.
      min_dim_size_to_factor: the least second largest axis of a factored parameter.
      clipping_threshold: the largest root mean square of the update of one parameter,
        before the learning rate. It is not the clip norm of the mechanism.
      multiply_by_parameter_scale: whether the update of a parameter is multiplied by
        its root mean square, or by 1e-3 if that is less.
      variance_floor: the least corrected second moment, absolute or a `RelativeFloor`.
      correction: the share of the noise variance that is subtracted.

    Returns:
      An Optax transformation of the private gradient.

    Raises:
      ValueError: as `scale_by_adafactor_bc`, or if the threshold is not positive.
      TypeError: as `scale_by_adafactor_bc`.

    Example:
      >>> import jax.numpy as jnp
      >>> from dpadambc import contrib
      >>> optimizer = contrib.adafactor_bc(0.1, noise_stddev=0.3)
      >>> params = jnp.array([2.0, -2.0])
      >>> private_gradient = jnp.array([0.5, 0.4])
      >>> updates, state = optimizer.update(
      ...     private_gradient, optimizer.init(params), params)
      >>> print(updates.round(2))
      [-0.21 -0.19]

    References:
      See `scale_by_adafactor_bc`.
    """
    validate.positive(clipping_threshold=clipping_threshold)
    by_size = optax.scale_by_param_block_rms() if multiply_by_parameter_scale else None
    floor: dict[str, Any] = dict(variance_floor=variance_floor, correction=correction)
    least = min_dim_size_to_factor
    numbers: dict[str, Any] = dict(decay_rate=decay_rate, min_dim_size_to_factor=least)
    adafactor = scale_by_adafactor_bc(noise_stddev, **numbers, **floor)
    clip = optax.clip_by_block_rms(clipping_threshold)
    return descent(learning_rate, adafactor, clip, by_size or optax.identity())

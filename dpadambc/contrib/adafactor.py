r"""Adafactor's factored second moment, with the variance of the noise taken out.

Of a matrix, Adafactor keeps the mean of :math:`g^2` over each row and over each column,
and takes the matrix of rank one with these means for the second moment. Noise of
variance :math:`\Phi` and mean zero adds :math:`\Phi` to every square, and so to every
mean of squares: with :math:`\tilde g = g + z`,

.. math::
  \mathbb{E} \frac1n \sum_j \tilde g_{ij}^2
    = \frac1n \sum_j (g_{ij}^2 + 2 g_{ij} \mathbb{E} z_{ij} + \mathbb{E} z_{ij}^2)
    = \frac1n \sum_j g_{ij}^2 + \Phi

A moving average is linear, so the average of :math:`\Phi` with the same weights is what
is to be subtracted from the rows and from the columns. It must be subtracted *before*
the product: :math:`(r_i + \Phi)(c_j + \Phi) / (\bar r + \Phi) - \Phi`, which is what
subtracting it afterwards gives, is not :math:`r_i c_j / \bar r`, but
:math:`r_i c_j / \bar r + \Phi (r_i - \bar r)(\bar r - c_j) / (\bar r (\bar r + \Phi))`.

Under noise alone a row spreads by :math:`\Phi \sqrt{2 S_t / n}` about :math:`\Phi`, for
n columns and :math:`S_t = \sum_i w_i^2` of the weights of the moving average: it is a
mean of n independent squares, each of variance :math:`2 \Phi^2`. That is :math:`\sqrt
n` finer than what Adam's second moment resolves, with weights of the same :math:`S_t`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpadambc.core import validate
from dpadambc.core.noise import NoiseStddev, stddev_at_step, stddev_per_leaf
from dpadambc.transforms import _second_moment
from dpadambc.transforms.dtypes import wide_zeros_like
from dpadambc.transforms.second_moment import RelativeFloor, corrected_second_moment


class FactoredMoment(NamedTuple):
    """Averages of the squared gradient of one parameter over an axis each.

    Attributes:
      row: shape=that of the parameter without its largest axis.
      column: shape=that of the parameter without its second largest axis.
    """

    row: jax.Array
    column: jax.Array


class ScaleByAdafactorBCState(NamedTuple):
    """State of `scale_by_adafactor_bc`: moving averages of noised gradients only.

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


def _check_size(min_dim_size_to_factor: Any) -> None:
    if isinstance(min_dim_size_to_factor, jax.Array):
        raise TypeError(
            "Expected min_dim_size_to_factor to be an int, got an array: the shapes of"
            " the state depend on it. With optax.inject_hyperparams, pass"
            " static_args='min_dim_size_to_factor'."
        )
    validate.count(min_dim_size_to_factor=min_dim_size_to_factor, least=1)


def _is_factored(x: Any) -> bool:
    return isinstance(x, FactoredMoment)


def _axes(shape: tuple[int, ...], min_dim_size: int) -> tuple[int, int] | None:
    """The largest axis and the second largest, or None if that is a small one."""
    order = sorted(range(len(shape)), key=shape.__getitem__)
    if len(shape) < 2 or shape[order[-2]] < min_dim_size:
        return None
    return order[-1], order[-2]


def _squares(g: jax.Array, min_dim_size: int) -> jax.Array | FactoredMoment:
    """What of the square of a gradient is averaged over time."""
    axes = _axes(g.shape, min_dim_size)
    if axes is None:
        return jnp.square(g)
    return FactoredMoment(*(jnp.mean(jnp.square(g), axis) for axis in axes))


def _product(
    nu: FactoredMoment, shape: tuple[int, ...], axes: tuple[int, int]
) -> jax.Array:
    """The matrix of rank one whose means are those of the rows and columns."""
    largest, second = axes
    row = jnp.expand_dims(nu.row, largest)
    mean = jnp.mean(row, second, keepdims=True)
    # The quotient first: a product of two second moments may be less than float32 has.
    share = jnp.where(mean > 0, row / mean, 0)
    return jnp.broadcast_to(share * jnp.expand_dims(nu.column, second), shape)


def _corrected(
    nu: Any,
    noise_variance: jax.Array,
    floor: jax.Array,
    shape: tuple[int, ...],
    axes: tuple[int, int] | None,
) -> jax.Array:
    """The second moment of each coordinate without the noise, floored."""
    if axes is None:
        return corrected_second_moment(nu, noise_variance, floor)
    means = (corrected_second_moment(x, noise_variance, floor) for x in nu)
    product = _product(FactoredMoment(*means), shape, axes)
    return jnp.maximum(product, floor).astype(product.dtype)


def _floor(
    variance_floor: jax.typing.ArrayLike | RelativeFloor,
    noise_variance: jax.Array,
    squared_weights: jax.Array,
    size: int,
) -> jax.Array:
    """The floor on averages of the squares of so many coordinates."""
    if isinstance(variance_floor, RelativeFloor):
        resolved = noise_variance * jnp.sqrt(2 * squared_weights / size)
        return variance_floor.factor * resolved
    return jnp.asarray(variance_floor, float)


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

    The weights of the averages sum to one from the first step on, so there is no
    division by :math:`1 - \beta^t`. :math:`\mathbb{E}[r_t - \Phi_t]` and
    :math:`\mathbb{E}[c_t - \Phi_t]` are the means of the clean squares, at any schedule
    of the noise: this module's docstring has the proof. The error of Adafactor's
    rank-one approximation stays as it is. Parameters with fewer than two axes of
    `min_dim_size_to_factor` keep a second moment for each coordinate.

    Advice. The floor is needed less than in `scale_by_adam_bc`, since the mean of n
    squares is finer by :math:`\sqrt n`, and a `RelativeFloor` is less by that: by the
    shorter of rows and columns. It is the floor of the product too, which is less than
    its factors where a quiet row meets a quiet column: without it such a coordinate,
    all noise, would take the longest steps. Without a first moment, the memory is that
    of SGD, but the noise of a step reaches the update undamped. An `optax.ema` behind
    this may be worth its memory: with one it ranks 5th of 19 methods in the equal
    trials of `benchmarks/methods`. Compare it with `correction=0`, the control.

    Guarantees:
      * The state is computed from what comes in and from public numbers alone: behind
        `add_dp_noise` it is as private as the noised gradients.
      * The averages are kept in at least float32; updates are in at least float32.
      * Without noise and with floor 0 the updates are those of
        `optax.scale_by_factored_rms(epsilon=0)`, except that a coordinate whose
        gradients were all zero gets 0 instead of NaN.

    Args:
      noise_stddev: :math:`\sigma`, the standard deviation of the noise in the gradient
        that comes in, *the same value that `add_dp_noise` was given*; see
        `scale_by_adam_bc`.
      decay_rate: the exponent, 0.8 above: positive. 1 is the plain mean over all
        steps.
      min_dim_size_to_factor: the least second largest axis of what is factored.
      variance_floor: :math:`\gamma'`, a number, or a `RelativeFloor` in units of what
        the averages of the parameter can resolve.
      correction: the share of :math:`\Phi_t` that is subtracted; see
        `scale_by_adam_bc`.

    Returns:
      An Optax transformation.

    Raises:
      ValueError: if the decay rate is not positive, or a noise level, the floor or the
        correction is negative or not finite.
      TypeError: if a number is not a number, or was rounded to less than float32, or a
        gradient is complex.

    Example:
      >>> import jax.numpy as jnp
      >>> from dpadambc import transforms
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
      <https://arxiv.org/abs/1804.04235>`_, 2018, in the form of
      `optax.scale_by_factored_rms`; the idea of the correction is that of
      `DP-AdamBC <https://arxiv.org/abs/2312.14334>`_, 2024
    """
    noise_stddev = _second_moment.checked(noise_stddev, variance_floor, correction)
    validate.positive(decay_rate=decay_rate)
    _check_size(min_dim_size_to_factor)

    def init_fn(params):
        def zeros(p):
            squares = _squares(wide_zeros_like(p), min_dim_size_to_factor)
            return jax.tree.map(jnp.zeros_like, squares)

        return ScaleByAdafactorBCState(
            count=jnp.zeros([], jnp.int32),
            squared_weights=jnp.zeros([], float),
            nu=jax.tree.map(zeros, params),
            noise_variance=_second_moment.init_noise_variance(noise_stddev, params),
        )

    def update_fn(updates, state, params=None):
        del params
        of_dtype = lambda nu: nu.row if _is_factored(nu) else nu
        like = jax.tree.map(of_dtype, state.nu, is_leaf=_is_factored)
        updates = _second_moment.arriving(updates, like)
        count = jnp.asarray(optax.safe_increment(state.count))
        new = 1 / jnp.power(count.astype(float), decay_rate)

        def averaged(old, x):
            return (old + new * (x - old)).astype(old.dtype)

        stddev = stddev_at_step(noise_stddev, state.count)
        noise_variance = jax.tree.map(
            averaged, state.noise_variance, jax.tree.map(jnp.square, stddev)
        )
        squares = lambda g: _squares(g, min_dim_size_to_factor)
        nu = jax.tree.map(averaged, state.nu, jax.tree.map(squares, updates))
        squared_weights = (1 - new) ** 2 * state.squared_weights + new**2

        def rescaled(g, nu, phi):
            axes = _axes(g.shape, min_dim_size_to_factor)
            size = g.shape[axes[1]] if axes else 1
            floor = _floor(variance_floor, phi, squared_weights, size)
            root = jnp.sqrt(_corrected(nu, correction * phi, floor, g.shape, axes))
            return jnp.where(root > 0, g / root, 0)

        levels = stddev_per_leaf(noise_variance, updates)
        return jax.tree.map(rescaled, updates, nu, levels), ScaleByAdafactorBCState(
            count=count,
            squared_weights=squared_weights.astype(state.squared_weights.dtype),
            nu=nu,
            noise_variance=noise_variance,
        )

    return optax.GradientTransformation(init_fn, update_fn)

"""A linear filter of private gradients over the steps: DOPPLER's low pass.

A filter after the noise is post-processing, so it costs no privacy. The gain of 3 to 10
points over optimizers without a filter is the paper's claim. It is not verified here;
in one independent comparison the filter alone never helped. The agreement of the code
with the paper's text is not verified either.

Momentum and Adam's first moment are low passes already, so the baseline for a filter is
a tuned b1. A filter that remembers longer than the gradient keeps its direction delays
it, and large batches have less noise to filter.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.signal

from dpadambc.core.arrays import widen
from dpadambc.core.noise import NoiseStddev, stddev_of
from dpadambc.transforms.dtypes import check_real, wide_zeros_like

# The steps within which a filter must settle, and the remainder allowed by then.
_MOST_STEPS = 1 << 16
_LEFT = 1e-9


class LowPassState(NamedTuple):
    """The state of `low_pass`: sums of private gradients only.

    Attributes:
      delays: the filter's memory, as many trees as its order.
      delays_of_one: the same for a gradient that is always one, each of shape ().
    """

    delays: tuple[optax.Updates, ...]
    delays_of_one: tuple[jax.Array, ...]


def impulse_response(numerator: Any, denominator: Any, steps: int) -> np.ndarray:
    r"""Computes the output of a linear filter for a one and zeros after it.

    .. math:: y_t = \sum_{k \ge 0} b_k x_{t-k} - \sum_{k \ge 1} a_k y_{t-k}
        = \sum_{j \ge 0} d_j x_{t-j}

    Args:
      numerator: :math:`b_0, b_1, \ldots`
      denominator: :math:`1, a_1, a_2, \ldots`, as in `scipy.signal`.
      steps: the number of coefficients.

    Returns:
      :math:`d_0, d_1, \ldots`, shape (steps,), float64, on the host.

    Example:
      >>> from dpadambc.contrib import filtering
      >>> print(filtering.impulse_response((0.5,), (1.0, -0.5), 4))
      [0.5    0.25   0.125  0.0625]
    """
    impulse = np.arange(steps + 1) == 0  # SciPy filters no empty array
    return np.asarray(scipy.signal.lfilter(numerator, denominator, impulse))[:steps]


def _coefficients(numerator: Any, denominator: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the coefficients on the host; raises for invalid ones."""
    try:
        b, a = (np.asarray(x, float) for x in (numerator, denominator))
    except jax.errors.TracerArrayConversionError:
        raise TypeError(
            "Expected numerator and denominator to be known numbers, got a traced"
            " array. With optax.inject_hyperparams, give tuples, or pass"
            " static_args=('numerator', 'denominator')."
        ) from None
    for name, x in (("numerator", b), ("denominator", a)):
        if x.ndim != 1 or not x.size or not np.isfinite(x).all():
            raise ValueError(f"Expected {name} to be finite numbers, got {x.tolist()}.")
    if a[0] != 1:
        raise ValueError(
            f"Expected denominator to begin with 1, got {a.tolist()}. Divide numerator"
            " and denominator by the first, as scipy.signal does."
        )
    return b, a


def _responses(b: np.ndarray, a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Computes the responses to an impulse and to a constant one, until they settle."""
    steps = 4 * (a.size + b.size)
    while True:
        impulse = impulse_response(b, a, steps)
        largest = np.max(np.abs(impulse))
        if np.max(np.abs(impulse[steps // 2 :])) <= _LEFT * largest < np.inf:
            break
        if steps >= _MOST_STEPS or not largest < 1e9:
            raise ValueError(
                "Expected numerator and denominator of a filter whose response dies out"
                f" within {_MOST_STEPS // 2} steps, got {b.tolist()} and {a.tolist()}."
                " The roots of the denominator must have absolute values below 1."
            )
        steps *= 2
    impulse = impulse[: 1 + np.flatnonzero(np.abs(impulse) >= _LEFT * largest)[-1]]
    constant = np.cumsum(impulse)
    if constant.min() <= 1e-6 * constant[-1] or constant[-1] <= 0:
        raise ValueError(
            "Expected numerator and denominator of a filter whose response to a"
            f" constant is positive in every step, got {constant.min():g} in step"
            f" {constant.argmin()}. The output is divided by it."
        )
    return impulse, constant


def low_pass(
    numerator: Sequence[float], denominator: Sequence[float] = (1.0,)
) -> optax.GradientTransformation:
    r"""Filters private gradients over the steps, and corrects for the start: DOPPLER.

    Gradients change slowly from step to step, and their noise is independent. So an
    average over steps keeps most of the gradient and little of the noise. Any linear
    filter is such an average,

    .. math::

      y_t &= \sum_{k \ge 0} b_k \tilde g_{t-k} - \sum_{k \ge 1} a_k y_{t-k} \\
      c_t &= \sum_{k = 0}^{t} b_k - \sum_{k \ge 1} a_k c_{t-k}, \qquad
      \hat g_t = y_t / c_t

    from :math:`y = c = 0`. Dividing by :math:`c_t`, the filter's response to a gradient
    of one, leaves a constant gradient as it is from the first step on. With
    ``(1 - b,), (1.0, -b)`` it is `optax.ema(b)`; ``scipy.signal.butter(1, 0.1)``
    designs another.

    Chain it after the noise. Before the noise, a sum would depend on the examples of
    all earlier steps, which the epsilon of one step does not cover. A correction after
    it needs the level `low_pass_noise_stddev` and a floor for the correlation over
    steps, `RelativeFloor(3.1)` for an average of decay 0.9.

    Guarantees:
      * The state and the output are linear in the input: behind `add_dp_noise` they are
        post-processing of the noised gradients, as private as these.
      * The sums and the updates are in at least float32.
      * For each parameter the state holds as many arrays as the order of the filter.
      * A filter that does not settle, or whose :math:`c_t` is not positive at every
        step, is refused.

    Args:
      numerator: :math:`b_0, b_1, \ldots`, numbers known on the host.
      denominator: :math:`1, a_1, a_2, \ldots`, as in `scipy.signal`.

    Returns:
      An Optax transformation.

    Raises:
      ValueError: if a coefficient is not finite, or the filter is refused.
      TypeError: if coefficients are traced, or a gradient is complex.

    Example:
      >>> import jax.numpy as jnp
      >>> from dpadambc import contrib
      >>> tx = contrib.low_pass((0.25, 0.25), (1.0, -0.5))
      >>> state = tx.init(jnp.zeros(2))
      >>> for gradient in (jnp.array([1.0, 1.0]), jnp.array([1.0, -1.0])):
      ...     filtered, state = tx.update(gradient, state)
      ...     print(filtered.round(1))
      [1. 1.]
      [1.  0.2]

    References:
      Zhang et al., `DOPPLER <https://arxiv.org/abs/2408.13460>`_, 2024; a correction
      that knows the filter is also in `FIBER <https://arxiv.org/abs/2605.03425>`_, 2026
    """
    b, a = _coefficients(numerator, denominator)
    _responses(b, a)
    order = max(b.size, a.size) - 1
    b, a = (np.pad(x, (0, order + 1 - x.size)).tolist() for x in (b, a))

    def init_fn(params):
        zeros = tuple(wide_zeros_like(params) for _ in range(order))
        return LowPassState(zeros, tuple(jnp.zeros([]) for _ in range(order)))

    def filter_step(x, delays):
        # The transposed form stores as many sums as the order, not past inputs and
        # outputs.
        first = lambda x, *delay: sum(delay, b[0] * x)
        y = jax.tree.map(first, x, *delays[:1])
        sums = []
        for k in range(1, order + 1):
            of_step = lambda x, y, *later, k=k: sum(later, b[k] * x - a[k] * y)
            sums.append(jax.tree.map(of_step, x, y, *delays[k : k + 1]))
        return y, tuple(sums)

    def update_fn(updates, state, params=None):
        del params
        check_real(updates)
        one, of_one = filter_step(jnp.ones([]), state.delays_of_one)
        y, delays = filter_step(jax.tree.map(widen, updates), state.delays)
        means = jax.tree.map(lambda y: (y / one).astype(y.dtype), y)
        return means, optax.tree.cast_like(LowPassState(delays, of_one), state)

    return optax.GradientTransformation(init_fn, update_fn)


def low_pass_noise_stddev(
    noise_stddev: NoiseStddev,
    numerator: Sequence[float],
    denominator: Sequence[float] = (1.0,),
) -> Any:
    r"""Computes the noise level after a filter, as a schedule for a correction.

    .. math:: \sigma'_t = \frac{1}{c_t} \sqrt{\sum_{j \le t} d_j^2 \sigma_{t-j}^2}

    with the impulse response d of the filter and :math:`c_t = \sum_{j \le t} d_j`.
    Corrections such as `scale_by_adam_bc` average the squares of these levels as they
    average the squared gradients, so the mean that they subtract stays exact. The noise
    that enters must be independent over steps, as that of `add_dp_noise` is.

    Args:
      noise_stddev: :math:`\sigma`, the level in the gradient that enters the filter: a
        number, a schedule, or a tree prefix.
      numerator: the numerator of the filter; see `low_pass`.
      denominator: the denominator of the filter.

    Returns:
      A schedule of the step, counted from 0, or a tree prefix of such.

    Raises:
      ValueError: as `low_pass`, or if a level is negative or not finite.
      TypeError: as `low_pass`.

    Example:
      >>> import dpadambc
      >>> from dpadambc import contrib
      >>> filter = (0.1,), (1.0, -0.9)
      >>> level = contrib.low_pass_noise_stddev(1.0, *filter)
      >>> print(f"{level(0):.3f} {level(9):.3f} {level(1_000):.3f}")
      1.000 0.330 0.229
      >>> adam_bc = dpadambc.scale_by_adam_bc(
      ...     level, variance_floor=dpadambc.RelativeFloor(3.1))

    References:
      See `low_pass`.
    """
    noise_stddev = stddev_of(noise_stddev)
    impulse, constant = _responses(*_coefficients(numerator, denominator))
    last = impulse.size - 1

    def behind(level):
        def schedule(count):
            steps = count - np.arange(impulse.size)
            of_step: Any = jax.vmap(level)(steps) if callable(level) else level
            before = jnp.where(steps >= 0, jnp.square(of_step), 0)
            total = jnp.sum(jnp.square(jnp.asarray(impulse, float)) * before)
            held = jnp.asarray(constant, float)[jnp.minimum(count, last)]
            return jnp.sqrt(total) / held

        return schedule

    return jax.tree.map(behind, noise_stddev)

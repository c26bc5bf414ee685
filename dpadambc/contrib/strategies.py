r"""Strategies of correlated noise: lower-triangular Toeplitz matrices, by coefficients.

The noise of step t is :math:`\sum_j d_j z_{t-j}` with independent z. In matrices, over
all steps, that is :math:`D z` with the Toeplitz matrix D of the *noising coefficients*
d. The output, :math:`G + D z`, is :math:`D (C G + z)` with the *strategy* :math:`C =
D^{-1}`: post-processing of a Gaussian mechanism on :math:`C G`. It stays so when
gradients depend on earlier outputs, since C is lower-triangular (Denisov et al.). So
the sensitivity of C measures how much the noise hides.

*The sensitivity.* An example takes part in the steps of a pattern P, with contributions
of norm one at most. Its move in C G has the squared norm

.. math:: \sum_{i,j \in P} (C^\top C)_{ij} \langle u_i, u_j \rangle
    \le \sum_{i,j \in P} (|C|^\top |C|)_{ij}.

Let :math:`m_0 \ge m_1 \ge \dots` be the least non-increasing sequence above the
:math:`|c_l|`, M its matrix over n steps, and i < j two steps. Then

.. math:: (|C|^\top |C|)_{ij} \le (M^\top M)_{ij} = \sum_{l < n - j} m_l m_{l + j - i},

which grows when j comes earlier, by more terms, and when the two come closer, by
greater ones. In a pattern with at least s steps from one participation to the next, the
a-th of them (from 0) is at step a s or later, and the b-th at least (b - a) s after it.
So no pattern has more than 0, s, 2s, ..., as often as that fits, which is the bound. It
is attained where the c are non-negative and do not increase, since then M = C. Where
the columns of that pattern do not overlap, because s is at least the number of non-zero
coefficients, all inner products are zero, and :math:`|c|` takes the place of m. ∎

References:
  * Denisov et al., `Improved Differential Privacy for SGD via Optimal Private Linear
    Operators on Adaptive Streams <https://arxiv.org/abs/2202.08312>`_, 2022
  * Kalinin and Lampert, `Banded Square Root Matrix Factorization for Differentially
    Private Model Training <https://arxiv.org/abs/2405.13763>`_, 2024: that pattern
  * Kalinin et al., `Back to Square Roots <https://arxiv.org/abs/2505.12128>`_, 2025:
    the banded inverse square root
  * Kalinin et al., `DP-λCGD <https://arxiv.org/abs/2601.22334>`_, 2026: one step back
"""

import functools
import math
from collections.abc import Sequence

import numpy as np

from dpadambc.contrib.filtering import impulse_response
from dpadambc.core import validate

__all__ = [
    "banded_inverse_square_root",
    "banded_square_root",
    "coefficients_of_inverse",
    "sensitivity",
]


def checked(
    coefficients: Sequence[float], name: str = "noising_coefficients"
) -> tuple[float, ...]:
    """Returns the coefficients as floats; raises unless the first is 1.

    Args:
      coefficients: the coefficients of a lower-triangular Toeplitz matrix.
      name: the name of the argument.
    """
    if isinstance(coefficients, str) or not np.iterable(coefficients):
        raise TypeError(
            f"Expected {name} to be a sequence of numbers, such as (1.0, -0.9), got"
            f" {coefficients!r}."
        )
    for value in (found := tuple(coefficients)):
        number = validate.known_number(name, value)
        if number is None or not math.isfinite(number):
            raise ValueError(f"Expected finite {name}, got {found}.")
    found = tuple(float(x) for x in found)
    if found[:1] != (1.0,):
        raise ValueError(
            f"Expected {name} that begin with 1, the share of a step's own noise, got"
            f" {found}. Divide them by the first, which is a noise level."
        )
    return found


def banded_inverse_square_root(bandwidth: int) -> tuple[float, ...]:
    r"""Computes the noising coefficients of BISR: of :math:`\sqrt{1 - x}`, cut off.

    The matrix of prefix sums has the generating function 1 / (1 - x). Its square root
    is the strategy whose prefix sums have nearly the least error, and the inverse of
    that has the coefficients here. Cut, they need the noise of `bandwidth` steps.

    Args:
      bandwidth: the number of coefficients, at least 1; one is independent noise.

    Returns:
      Floats, of which the first is 1 and all others are negative, with a positive sum.

    Raises:
      TypeError: if `bandwidth` is not an int.
      ValueError: if it is less than 1.

    Example:
      >>> from dpadambc.contrib import strategies
      >>> strategies.banded_inverse_square_root(4)
      (1.0, -0.5, -0.125, -0.0625)

    References:
      Kalinin et al., `Back to Square Roots: An Optimal Bound on the Matrix
      Factorization Error for Multi-Epoch Differentially Private SGD
      <https://arxiv.org/abs/2505.12128>`_, 2025
    """
    validate.count(bandwidth=bandwidth, least=1)
    later = np.arange(1, bandwidth)
    return tuple(np.cumprod([1.0, *(1 - 1.5 / later)]).tolist())


def banded_square_root(bands: int) -> tuple[float, ...]:
    r"""Computes the strategy coefficients of BSR: of :math:`1 / \sqrt{1 - x}`, cut off.

    It is the square root of the matrix of prefix sums as in
    `banded_inverse_square_root`, but here the strategy itself is banded, and not its
    inverse, as `BandedGaussian` needs it.

    Args:
      bands: the number of coefficients, at least 1; one is independent noise.

    Returns:
      Floats, of which the first is 1; they are positive and decrease.

    Raises:
      TypeError: if `bands` is not an int.
      ValueError: if it is less than 1.

    Example:
      >>> from dpadambc.contrib import strategies
      >>> strategies.banded_square_root(4)
      (1.0, 0.5, 0.375, 0.3125)

    References:
      Kalinin and Lampert, `Banded Square Root Matrix Factorization for Differentially
      Private Model Training <https://arxiv.org/abs/2405.13763>`_, 2024
    """
    validate.count(bands=bands, least=1)
    later = np.arange(1, bands)
    return tuple(np.cumprod([1.0, *(1 - 0.5 / later)]).tolist())


def coefficients_of_inverse(
    coefficients: Sequence[float], iterations: int
) -> tuple[float, ...]:
    r"""Computes the first coefficients of the inverse: those of C, from those of D.

    .. math:: c_0 = 1, \quad c_t = -\sum_{j=1}^t d_j c_{t-j}

    Args:
      coefficients: the coefficients of a lower-triangular Toeplitz matrix; the first is
        1.
      iterations: the number of rows of the matrix, and of coefficients to return.

    Returns:
      Floats, computed in double precision.

    Raises:
      TypeError: if a coefficient is not a number, or `iterations` not an int.
      ValueError: if the first is not 1, or one is not finite.

    Example:
      >>> from dpadambc.contrib import strategies
      >>> strategies.coefficients_of_inverse((1.0, -0.5), 4)
      (1.0, 0.5, 0.25, 0.125)
    """
    validate.count(iterations=iterations)
    return _inverse(checked(coefficients), int(iterations))


@functools.lru_cache(maxsize=8)
def _inverse(d: tuple[float, ...], iterations: int) -> tuple[float, ...]:
    return tuple(impulse_response([1.0], d, iterations).tolist())


def sensitivity(
    coefficients: Sequence[float], iterations: int, *, separation: int | None = None
) -> float:
    """Computes the L2 sensitivity of a strategy, for contributions of norm one.

    Guarantees:
      * It bounds the change by an example that takes part in any steps with at least
        `separation` steps from one to the next, and with any contributions of norm at
        most one.
      * It is attained where the strategy's coefficients are non-negative and do not
        increase, as those of `banded_inverse_square_root` and of (1, -λ).
      * More iterations never have a smaller sensitivity.

    Args:
      coefficients: the coefficients of the strategy C, not of its inverse; see
        `coefficients_of_inverse`. Missing ones are zero.
      iterations: the number of steps.
      separation: the least number of steps from one participation of an example to its
        next, at least 1. By default it takes part once.

    Returns:
      The sensitivity; infinity if a coefficient is not finite.

    Raises:
      TypeError: if a number is not a number, or a count not an int.
      ValueError: if a number is out of its range.

    Example:
      >>> from dpadambc.contrib import strategies
      >>> once = strategies.sensitivity((1.0, 0.75), 8)
      >>> four_times = strategies.sensitivity((1.0, 0.75), 8, separation=2)
      >>> once, four_times
      (1.25, 2.5)
    """
    validate.count(iterations=iterations)
    separation = max(iterations, 1) if separation is None else separation
    validate.count(separation=separation, least=1)
    c = np.zeros(iterations)
    c[: len(coefficients)] = np.abs(coefficients[:iterations])
    if not np.isfinite(c).all():
        return math.inf
    overlap = separation < len(np.trim_zeros(c, "b"))
    bound = np.maximum.accumulate(c[::-1])[::-1] if overlap else c
    columns = np.zeros(-(-iterations // separation) * separation)
    columns[:iterations] = bound
    # Row t of the sum of columns 0, s, 2s, ...: the bounds of t, t - s, t - 2s, ...
    moved = columns.reshape(-1, separation).cumsum(axis=0).ravel()[:iterations]
    return float(np.linalg.norm(moved))

r"""Release noised sums on a public grid, so that epsilon holds for the bits.

*Why.* Of the float32 normal numbers z of `jax.random.normal` there are 2^23. In
:math:`s + \sigma z` the holes between them stay where a sum s is 0: one release tells
which sums were 0, and no epsilon holds. Here it is

.. math:: y = g \left\lfloor \frac{s + \sigma Z}{g} + \frac12 \right\rfloor,

with g the power of two for which :math:`2^8 \le \sigma / g < 2^9`.

*Ideal.* With a real normal number Z, y is a function of :math:`s + \sigma Z` that does
not depend on the data: post-processing of the Gaussian mechanism, whose epsilon and
composition hold as they are. g adds at most :math:`g^2 / 12 < 1.3 \cdot 10^{-6}
\sigma^2` to the variance. Later stages are post-processing too: a rounding to the dtype
of s, and an optimizer.

*Computed.* Let :math:`u = s / g`, :math:`i = \lfloor u \rfloor` and f = u - i, which
are exact in float64, and :math:`y = g (i + \lfloor f + \sigma z / g + 1/2 \rfloor)`,
with z of `core.normals`. A value of y is a cell of z, of width
:math:`g / \sigma > 2^{-9}`.

1. An end of a cell is wrong by at most :math:`e = 2 \cdot 10^{-14}` in z, for
   :math:`|z| \le 11`. Of these the quantile takes :math:`8 \cdot 10^{-15}`
   (`tests/core/normals_test.py`), and the product and two sums, which round to
   :math:`2^{-53}` of at most :math:`|z| \sigma / g + 2`, less than :math:`4 \cdot
   10^{-15}`.
2. The words are :math:`2^{128}` equal atoms at equal distances. Each end of a cell, on
   each side of zero, shifts at most one atom.

So the probability :math:`\tilde P` of a cell is that of the ideal, P, within
:math:`2 e \varphi_{\max} + 4 \cdot 2^{-128}`, where P is at least
:math:`2^{-9} \varphi_{\min}`, and :math:`\varphi_{\max} \le 1.05 \varphi_{\min}`
within a cell:

.. math:: |\tilde P / P - 1| \le \eta(z) = 2.2 \cdot 10^{-11} + 2^{-117} / \varphi(z)
    \le b = 4 \cdot 10^{-9} \quad (|z| \le 11),

and the mean of :math:`\eta^2` is at most :math:`v = 5 \cdot 10^{-22}`. A number lies
beyond 11 with probability :math:`4 \cdot 10^{-28}`.

*All numbers.* Let n be the number of all coordinates in all steps. Given those before,
the logarithm of :math:`\tilde P / P` has a mean of at most v and a mean square of at
most v, and it is at most b. By Freedman's inequality its sum is at most

.. math:: a = n v + \sqrt{2 n v L} + \tfrac23 b L, \quad L = \log(1 / \delta_1),

but with probability :math:`\delta_0 = \delta_1 + 4 \cdot 10^{-28} n`, and so is that of
:math:`P / \tilde P`. With ideal outputs between computed ones of both data sets,
:math:`(\varepsilon, \delta)` becomes :math:`(\varepsilon + 2 a, e^a \delta +
(1 + e^{a + \varepsilon}) \delta_0)`. For :math:`n = 10^{12}` and :math:`\delta_1 =
10^{-20}` that is a = 2.1e-4 and :math:`\delta_0` = 4e-16: epsilon 3 is 3.0004.

*Not covered.* The sum: one example may move a float32 sum by some 2e-7 C more than C.
The generator: its words are taken for random. Noise that steps share (`contrib`): its
draws are these, and it is released on the grid, but a and the rounding of its state
are those of independent noise.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.core import arrays, validate

_EXPONENT = np.int64(0x7FF0000000000000)


def cost_of_bits(num_numbers: float) -> tuple[float, float]:
    r"""Bounds the log ratio of released probabilities to those of real normal numbers.

    Args:
      num_numbers: the number of all coordinates in all steps together.

    Returns:
      a, and the probability :math:`\delta_0` with which the logarithm of the ratio of
      probabilities is more than a. An (epsilon, delta) becomes (epsilon + 2 a,
      e^a delta + (1 + e^(a + epsilon)) delta_0): see this module for the proof.

    Example:
      >>> from dpadambc import accounting
      >>> a, delta_0 = accounting.cost_of_bits(1e12)  # 1e8 parameters, 1e4 steps
      >>> print(f"{a:.1e} {delta_0:.1e}")
      2.1e-04 4.0e-16
    """
    validate.non_negative(num_numbers=num_numbers)
    delta_1, mean_square, largest = 1e-20, 5e-22, 4e-9
    log, variance = math.log(1 / delta_1), mean_square * num_numbers
    a = variance + math.sqrt(2 * variance * log) + 2 / 3 * largest * log
    return a, delta_1 + 4e-28 * num_numbers


@functools.partial(jax.jit, inline=False)
def add_on_grid(
    noise: jax.Array, summed: jax.Array, noise_stddev: jax.Array
) -> jax.Array:
    """Adds noise to a sum, and rounds to the grid of the level.

    Not inlined: `audit` recognizes the addition by the name of this function.

    Args:
      noise: the noise, in float64, with `jax.enable_x64`.
      summed: the sum, of any floating dtype.
      noise_stddev: the level: a number, or one for each element. A sum with the level 0
        stays as it is.

    Returns:
      An array of at least float32, of the dtype of the sum if that is float64.
    """
    level, wide = (x.astype(jnp.float64) for x in (noise_stddev, summed))
    # The bits of the exponent alone: the largest power of two up to the level.
    exponent = jax.lax.bitcast_convert_type(level, jnp.int64) & _EXPONENT
    step = jax.lax.bitcast_convert_type(exponent, jnp.float64) * 2.0**-8
    units = wide / step
    whole = jnp.floor(units)
    rounded = step * (whole + jnp.floor(units - whole + noise / step + 0.5))
    # A level of NaN, from a state that has lost its key, must show in the result.
    noised = jnp.where(level > 0, rounded, wide + noise)
    return noised.astype(arrays.at_least_float32(summed.dtype))

r"""How far the moments lie from what they are on average.

Consistency (Proposition 2 of arXiv 2312.14334), as it is true. With the weights
:math:`w_i = b_2^{t-i} (1 - b_2) / (1 - b_2^t)` of :math:`\hat v`,

.. math::
  \hat v - \Phi - \hat v^{clean} = \sum_{i \le t} w_i (2 g_i z_i + z_i^2 - \Phi)

The noise of a step is independent of its gradient and of all steps before, so the terms
are martingale differences of variance :math:`2 \Phi^2 + 4 \Phi\, \mathbb{E} g_i^2`: the
cross term has :math:`\mathbb{E} z^3 = 0`. For :math:`|g_i| \le G`

.. math::
  \mathbb{E} (\hat v - \Phi - \hat v^{clean})^2 \le (2 \Phi^2 + 4 \Phi G^2) \sum w_i^2,
  \qquad \max\Big(\frac1t, \frac{1 - b_2}{1 + b_2}\Big) \le \sum w_i^2
  \le \frac1t + \frac{1 - b_2}{1 + b_2}

with equality on the left for constant :math:`|g_i| = G`. The corrected moment therefore
converges to the clean one, in mean square, if and only if t grows *and* b2 tends to 1,
at the rate :math:`1/\sqrt t + \sqrt{1 - b_2}`. At a fixed b2 it is unbiased and never
consistent: it keeps the spread that `second_moment_spread` gives in the limit. The
clean gradients must be bounded; they need not be stationary. Under a floor the limit is
the larger of the clean moment and the floor. The update converges only if b1 tends to 1
too: at a fixed b1 the first moment keeps its `first_moment_spread`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.theory._decay import Number, settled
from dpadambc.core import validate
from dpadambc.transforms.dtypes import check_decay
from dpadambc.transforms.second_moment import moving_average_spread


def first_moment_spread(
    noise_variance: Number, b1: Number = 0.9, count: Number = math.inf
) -> jax.Array:
    r"""The standard deviation of :math:`\hat m` under noise alone.

    .. math::
      \sqrt{\Phi \frac{1 - b_1}{1 + b_1} \cdot \frac{1 + b_1^t}{1 - b_1^t}}

    Exact for every t: all of :math:`\sqrt\Phi` at the first step, and 0.2294 of it in
    the limit, for b1 = 0.9.

    Args:
      noise_variance: :math:`\Phi`.
      b1: decay rate of the first moment.
      count: the number of steps t, the limit by default.

    Returns:
      The standard deviation, in the unit of the gradient.

    Example:
      >>> from benchmarks import theory
      >>> print(theory.first_moment_spread(1.0).round(4))
      0.2294
    """
    return jnp.sqrt(noise_variance) * moving_average_spread(b1, count)


def second_moment_spread(
    noise_variance: Number,
    b2: Number = 0.999,
    count: Number = math.inf,
    gradient: Number = 0.0,
) -> jax.Array:
    r"""The standard deviation of :math:`\hat v` due to noise: what it can resolve.

    .. math::
      \sqrt{(2 \Phi^2 + 4 \Phi g^2)
        \frac{1 - b_2}{1 + b_2} \cdot \frac{1 + b_2^t}{1 - b_2^t}}

    Exact for every t, for constant noise and gradients of constant size. Under noise
    alone it is 141 % of :math:`\Phi` at the first step, 8 % at step 300 and 3 % in the
    limit, for b2 = 0.999. `RelativeFloor` is in these units. It vanishes only as t
    grows and b2 tends to 1: this module's docstring has the proof.

    Args:
      noise_variance: :math:`\Phi`.
      b2: decay rate of the second moment.
      count: the number of steps t, the limit by default.
      gradient: :math:`g`, the absolute clean gradient of every step, zero by default.
        For gradients that vary, a bound on them gives a bound on the spread.

    Returns:
      The standard deviation, in the unit of the squared gradient.

    Example:
      >>> from benchmarks import theory
      >>> print(theory.second_moment_spread(1.0).round(4))
      0.0316

    References:
      `DP-AdamBC <https://arxiv.org/abs/2312.14334>`_, Proposition 2, corrected
    """
    noise_variance = jnp.asarray(noise_variance)
    # Not the root of a product, which may be less than float32 can hold.
    of_one = jnp.sqrt(2 * noise_variance + 4 * jnp.square(gradient))
    return jnp.sqrt(noise_variance) * of_one * moving_average_spread(b2, count)


def second_moment_deviation(
    noise_variance: Number,
    count: Number,
    *,
    b2: float = 0.999,
    alpha: float = 0.05,
    gradient_bound: Number | None = None,
) -> jax.Array:
    r"""How far :math:`\hat v - \Phi` lies from the clean moment, with high probability.

    With probability :math:`1 - \alpha` at least, for one coordinate at one step,
    :math:`|\hat v - \Phi - \hat v^{clean}| \le \xi`,

    .. math::
      \xi = \frac{1 - b_2}{1 - b_2^t}
        \max\Big(\sqrt{2 \nu^2 \ln\tfrac{2}{\alpha}},\ 2 b \ln\tfrac{2}{\alpha}\Big),
      \quad \nu^2 = (4 \Phi^2 + 8 G^2 \Phi) \frac{1 - b_2^{2t}}{1 - b_2^2},
      \quad b = 4 \Phi

    Each step adds :math:`2 g z + z^2 - \Phi`. For
    :math:`|\lambda| \le 1 / (4 \Phi)` the logarithm of its moment generating function
    is at most :math:`\lambda^2 (2 \Phi^2 + 4 g^2 \Phi)`, whatever noise g depends on
    from before, so the weighted sum is sub-exponential with :math:`(\nu, b)` and
    Bernstein's inequality gives the two branches.

    Proposition 3 prints :math:`\nu = 4 \Phi \sqrt{\cdot}`, which is this for
    :math:`G = \sqrt{1.5\,\Phi}`, so it is proved for gradients below 1.2 standard
    deviations of the noise, and false for much larger ones. Where many steps count it
    is loose by a factor of two, and by four with the default G where gradients are
    small; at the first step, and the default alpha, by ten. The spread under noise
    alone is `second_moment_spread`.

    Proposition 4 assumes nothing of the gradients but that they are clipped: it is this
    with G the clip norm over B times the largest batch size, or C where no batch
    exceeds B. Its printed :math:`\nu = 2 (\Phi + \sigma C^2 / B) \sqrt{\cdot}` is too
    small, by :math:`\sqrt 2` where :math:`C \gg \sqrt\Phi`: the bound on the moment
    generating function fails at :math:`\lambda = 1 / (4 \Phi)`. Far above
    :math:`\Phi`, it is of little use.

    A bound that is always smaller, by a factor of up to :math:`\sqrt 2` in the first
    branch and of up to four in the second, where few steps count, is
    :math:`\sqrt{2 \ln(2/\alpha)}` times `second_moment_spread` with `gradient=G`, plus
    :math:`2 \Phi \ln(2/\alpha) (1 - b_2) / (1 - b_2^t)`. For that logarithm is also at
    most :math:`\lambda^2 (\Phi^2 + 2 g^2 \Phi) / (1 - 2 \Phi |\lambda|)`, which makes
    the sum sub-gamma.

    As a floor: a corrected moment above :math:`\xi` differs from zero at the level
    :math:`\alpha`.

    Args:
      noise_variance: :math:`\Phi`, positive.
      count: the number of steps t.
      b2: decay rate of the second moment.
      alpha: the probability of a larger deviation.
      gradient_bound: :math:`G`, a bound on the absolute clean gradient of the
        coordinate in all steps; :math:`\sqrt{1.5\,\Phi}`, as published, by default.

    Returns:
      :math:`\xi`, in the unit of the squared gradient.

    Raises:
      ValueError: if alpha is not in (0, 1), b2 not in [0, 1), or the noise variance not
        positive.

    Example:
      >>> from benchmarks import theory
      >>> print(f"{theory.second_moment_deviation(1.5625e-4**2, 10_000):.4e}")
      5.9330e-09

    References:
      `DP-AdamBC <https://arxiv.org/abs/2312.14334>`_, Propositions 3 and 4, corrected
    """
    validate.open_unit_interval(alpha=alpha)
    check_decay(b2=b2)
    if jnp.ndim(noise_variance) == 0:
        validate.positive(noise_variance=noise_variance)
    if gradient_bound is None:
        gradient_bound = jnp.sqrt(1.5 * noise_variance)
    # In units of the noise variance, whose square may be less than float32 can hold.
    bound = jnp.square(gradient_bound) / noise_variance
    nu = jnp.sqrt((4 + 8 * bound) * settled(b2**2, count) / settled(b2**2, 1))
    log = math.log(2 / alpha)
    deviation = jnp.maximum(math.sqrt(2 * log) * nu, 8 * log)
    return jnp.asarray(noise_variance) * deviation * settled(b2, 1) / settled(b2, count)


def noise_bound(
    noise_stddev: Number, num_coordinates: int, iterations: int, alpha: float = 0.05
) -> Any:
    r"""What no coordinate of the noise exceeds in a whole run, with high probability.

    .. math:: \sigma \sqrt{2 \ln(2 d T / \alpha)}

    by a union bound over :math:`d T` draws.

    Args:
      noise_stddev: :math:`\sigma`, the largest of the run.
      num_coordinates: :math:`d`.
      iterations: :math:`T`.
      alpha: the probability that any draw is larger.

    Returns:
      A number in the unit of the gradient.

    Raises:
      ValueError: if alpha is not in (0, 1), there is no coordinate or no step, or the
        noise is negative.

    Example:
      >>> from benchmarks import theory
      >>> print(round(theory.noise_bound(1.0, 1_000_000, 1_000), 2))
      6.99
    """
    if jnp.ndim(noise_stddev) == 0:
        validate.non_negative(noise_stddev=noise_stddev)
    validate.count(num_coordinates=num_coordinates, least=1)
    validate.count(iterations=iterations, least=1)
    validate.open_unit_interval(alpha=alpha)
    return noise_stddev * math.sqrt(
        2 * math.log(2 * num_coordinates * iterations / alpha)
    )

r"""A bound that follows a quantile of the norms, by a noised count in each step.

*Proof that each step is a Gaussian mechanism of noise multiplier z on one sum of
vectors.* Give each example the vector
:math:`v_i = (u \, g_i' / C_t, \; s \, 2 b_i)`, with its clipped gradient
:math:`g_i'`, :math:`u = z / z_g` and :math:`s = z / z_b`. As
:math:`\lVert g_i' \rVert \le C_t`, :math:`|2 b_i| \le 1` and :math:`u^2 + s^2 = 1`, no
vector is longer than 1. The release is a function of :math:`\sum_i v_i` with noise of
standard deviation :math:`z k` in every coordinate: divide the first part by
:math:`u B / C_0` and the noise is :math:`z_g \Delta`; divide the last by 2 s, and it is
:math:`\sigma_b`. For accounting it is the sum of clipped gradients with C = 1: adding
or removing an example moves it by 1, padding has the vector zero, and replacing moves
it by 2. The terms of a node are as many examples. :math:`C_t` is a function of earlier
releases alone: given these it is a constant, and steps compose adaptively. ∎

*Price.* The mechanism itself pays for the count: its z and its epsilon cover gradient
and count together, and the noise in the gradient is a little more,

.. math:: z_g = (z^{-2} - z_b^{-2})^{-1/2}, \qquad z_b = 2 \sigma_b / k

where :math:`k = \Delta B / C_0` is the number of examples that neighbors differ in: 1,
or 2 under REPLACE_ONE, and more for a node in several terms. At B = 1,000, z = 1 and
the usual 0.05 it is 0.005 % more.

*Units.* A gradient that was clipped at :math:`C_t` is divided by :math:`C_t / C_0`. So
its sensitivity, its noise and the Φ of a correction are the same in every step. In the
paper the update shrinks with the bound; here it does not, so that the learning rate of
SGD is a step in units of the clip norm, and that of Adam keeps its meaning.
"""

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp

from dpadambc.contrib.moving_bound import MovingBound
from dpadambc.core import validate
from dpadambc.mechanisms.mechanism import Mechanism


@dataclasses.dataclass(frozen=True)
class QuantileClipping(MovingBound):
    r"""A moving bound, with a given fraction of the norms within it.

    .. math::

      C_{t+1} &= C_t \exp(-\eta (\tilde f_t - \gamma)) \\
      \tilde f_t &= \frac12 + \frac1B \Bigl(
        \sum_i b_i + \mathcal{N}(0, \sigma_b^2) \Bigr), \qquad
        b_i = \tfrac12 \text{ if } \lVert g_i \rVert \le C_t, \text{ else }
        -\tfrac12 \\
      \tilde g_t &= \frac{C_0}{C_t} \cdot \frac1B
        \sum_i g_i \min(1, C_t / \lVert g_i \rVert)
        + \mathcal{N}(0, z_g^2 \Delta^2 I)

    with :math:`C_0` = `mechanism.l2_clip_norm`, B = `normalize_by`, Δ the sensitivity,
    η = `learning_rate`, γ = `target_quantile` and :math:`\sigma_b / B` =
    `fraction_stddev`. It is a mechanism with the batches and the epsilon of another
    one, whose `clip_rule` applies at the bound.

    Guarantees:
      * Each step is a Gaussian mechanism of noise multiplier z: this module has the
        proof, :math:`z_g` and the units; z is below :math:`z_b`, and no schedule.
      * An example whose norm is zero or not finite has no vote, as padding has none.

    The fraction is of B: with n examples in a batch, the bound goes to the quantile
    :math:`1/2 + (\gamma - 1/2) B / n`.

    Args:
      mechanism: the mechanism that draws the batches, with independent noise.
      target_quantile: γ, in (0, 1).
      learning_rate: η, positive.
      fraction_stddev: the standard deviation of the noise in the fraction, in (0, 1).

    Raises:
      ValueError: if a number is out of its range.

    Example:
      >>> import dpadambc, jax, jax.numpy as jnp
      >>> from dpadambc import contrib
      >>> mechanism = contrib.QuantileClipping(dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=1.0, iterations=40,
      ...     normalize_by=100))
      >>> f"{mechanism.noise_stddev:.6f}"  # instead of 0.01
      '0.010050'
      >>> private = dpadambc.privatize(mechanism, key=jax.random.key(0))
      >>> params = jnp.zeros(2)
      >>> grads = dpadambc.as_per_example(
      ...     5 * jax.random.normal(jax.random.key(1), (100, 2)),
      ...     is_padding_example=jnp.zeros(100, bool))
      >>> state = private.init(params)
      >>> for _ in range(40):
      ...     _, state = private.update(grads, state, params)
      >>> norms = dpadambc.per_example_norms(grads)
      >>> f"{state.l2_clip_norm:.0f}, median {jnp.median(norms):.0f}"
      '6, median 6'

    References:
      Andrew et al., `Differentially Private Learning with Adaptive Clipping
      <https://arxiv.org/abs/1905.03871>`_, 2021. The formula of :math:`z_g` was checked
      against the public code of TensorFlow Federated; the units are not the paper's,
      and its experiments were not repeated.
    """

    mechanism: Mechanism
    target_quantile: float = 0.5
    learning_rate: float = 0.2
    fraction_stddev: float = 0.05

    def __post_init__(self):
        validate.open_unit_interval(target_quantile=self.target_quantile)
        validate.open_unit_interval(fraction_stddev=self.fraction_stddev)
        super().__post_init__()

    @property
    def gradient_multiplier(self) -> float:
        """z_g, the noise multiplier of the gradient."""
        if callable(self.noise_multiplier):
            raise ValueError(
                "Expected a number as noise_multiplier with QuantileClipping, got a"
                " schedule: the noise of its count would have to follow it. Give"
                " SlackClipping, which has no noise of its own."
            )
        changed = self.sensitivity / self.l2_clip_norm
        of_count = 2 * self.fraction_stddev / changed
        z = float(self.noise_multiplier)
        if z >= of_count:
            raise ValueError(
                f"Expected a noise_multiplier below {of_count:g}, that of the count of"
                f" QuantileClipping, got {z:g}: the count alone would spend more than"
                " the mechanism says. Give a larger fraction_stddev, or make"
                " normalize_by the size of a batch; each means more noise in the count."
            )
        return z / (1 - (z / of_count) ** 2) ** 0.5

    def unit(self) -> jax.Array:
        """Returns the factor of the count in the sum: see `MovingBound.unit`."""
        of_count = self.fraction_stddev * self.normalize_by
        unit = cast(float, self.noise_stddev) / of_count
        # Without noise there is no privacy, so any number is right.
        return jnp.where(unit > 0, unit, 1.0)

    def indicator(
        self, norm: jax.Array, used: jax.Array, l2_clip_norm: jax.Array
    ) -> jax.Array:
        """Returns b: one half within the bound, minus one half beyond it."""
        del used
        return jnp.where(norm <= l2_clip_norm, 0.5, -0.5).astype(norm.dtype)

    def error(self, mean: jax.Array) -> jax.Array:
        """Computes the difference of the fraction from the target."""
        return 0.5 + mean - self.target_quantile

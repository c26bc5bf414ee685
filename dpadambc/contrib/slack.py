r"""A bound that follows the slack that short gradients leave below it, at no price.

*Proof that it costs nothing.* Give each example the vector
:math:`v_i = (g_i' / C_t, s_i)`. It is no longer than 1, whatever the gradient: a
clipped gradient that is shorter than the bound leaves room that is paid for, and the
slack fits into it. The release is a function of :math:`\sum_i v_i` with noise of
standard deviation z k in every coordinate: a sum of clipped gradients with C = 1, as
far as accounting goes. :math:`C_t` is a function of earlier releases alone: given these
it is a constant, and steps compose adaptively. ∎
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dpadambc.contrib.moving_bound import MovingBound
from dpadambc.core import validate
from dpadambc.mechanisms.mechanism import Mechanism


@dataclasses.dataclass(frozen=True)
class SlackClipping(MovingBound):
    r"""A moving bound, with the mean slack of the gradients at a target.

    .. math::

      s_i &= \sqrt{1 - \lVert g_i' \rVert^2 / C_t^2} \\
      \tilde s_t &= \frac1B \Bigl(
        \sum_i s_i + \mathcal{N}(0, z^2 k^2) \Bigr) \\
      C_{t+1} &= C_t \exp(-\eta (\tilde s_t - s)) \\
      \tilde g_t &= \frac{C_0}{C_t} \cdot \frac1B
        \sum_i g_i' + \mathcal{N}(0, z^2 \Delta^2 I)

    with :math:`g_i'` the gradient clipped at :math:`C_t`, :math:`C_0` =
    `mechanism.l2_clip_norm`, B = `normalize_by`, z and Δ the mechanism's noise
    multiplier and sensitivity, and k = Δ B / C₀: the examples that neighbors differ in,
    1, or 2 under REPLACE_ONE, and more for a node in several terms. Of the
    arguments η = `learning_rate` and s = `target_slack`. A gradient at the bound has no
    slack, a short one has all of it. The gradient comes out in units of the bound, as
    with `QuantileClipping`.

    Guarantees:
      * It costs nothing: see this module for the proof. The noise in the gradient,
        `noise_stddev`, and epsilon are those of the inner mechanism.
      * The length in :math:`s_i` is rounded up, by more than float32 may hide.
      * An example of norm zero, or not finite, has no slack, as padding has none.

    Args:
      mechanism: the mechanism that draws the batches, with independent noise. A
        `clip_rule` that makes all gradients long, such as `Automatic()`, leaves no
        slack.
      target_slack: s, in (0, 1).
      learning_rate: η, positive.

    Raises:
      TypeError, ValueError: if `mechanism` is no mechanism with a fixed bound, or a
      number is out of its range.

    Example:
      >>> import dpadambc, jax, jax.numpy as jnp
      >>> from dpadambc import contrib
      >>> mechanism = contrib.SlackClipping(dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=1.0, iterations=60,
      ...     normalize_by=100))
      >>> mechanism.noise_stddev
      0.01
      >>> private = dpadambc.privatize(mechanism, key=jax.random.key(0))
      >>> params = jnp.zeros(2)
      >>> grads = dpadambc.as_per_example(
      ...     5 * jax.random.normal(jax.random.key(1), (100, 2)),
      ...     is_padding_example=jnp.zeros(100, bool))
      >>> state = private.init(params)
      >>> for _ in range(60):
      ...     _, state = private.update(grads, state, params)
      >>> share = (dpadambc.per_example_norms(grads) <= state.l2_clip_norm).mean()
      >>> print(f"{state.l2_clip_norm:.1f}, {share:.0%} within")
      6.9, 56% within

    References:
      Zou et al., "SlaClip: Gradient Norm Slacks can be Indicator for Adaptive Clipping
      in DP-SGD", 2026. Its text was not read: that the slack is free follows from the
      proof here, the rest from public words about it. It has several coordinates of
      slack and a controller of its own; here it is one, and the step of Andrew et al.
    """

    mechanism: Mechanism
    target_slack: float = 0.4
    learning_rate: float = 0.2

    def __post_init__(self):
        validate.open_unit_interval(target_slack=self.target_slack)
        super().__post_init__()

    @property
    def gradient_multiplier(self) -> Any:
        """z, the noise multiplier: the slack is free."""
        return self.noise_multiplier

    def unit(self) -> float:
        """Returns the factor of the slack in the sum: see `MovingBound.unit`."""
        return self.l2_clip_norm / self.normalize_by

    def indicator(
        self, norm: jax.Array, used: jax.Array, l2_clip_norm: jax.Array
    ) -> jax.Array:
        """Returns s, the rest of the bound."""
        del norm, l2_clip_norm
        return jnp.sqrt(1 - jnp.minimum(used, 1) ** 2)

    def error(self, mean: jax.Array) -> jax.Array:
        """Computes the difference of the mean slack from the target."""
        return mean - self.target_slack

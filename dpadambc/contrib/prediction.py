r"""A loss whose gradient predicts its own change: DiSK's Kalman filter.

The sensitivity is proved here, since a public implementation has another noise level.
Whether the rest agrees with the paper's text is not verified. One public comparison
reports 49.0 against 39.4 at batches of 256, and no gain, 39.9, at 4,096; it was not
repeated here.

A low pass of private gradients lags, since the parameters move. DiSK moves its estimate
along before the correction. With :math:`d = x_t - x_{t-1}`, the gradient has changed by
about :math:`\nabla^2 F d \approx (\nabla F(x_t + \gamma d) - \nabla F(x_t)) / \gamma`,
so that prediction and correction by a gain :math:`\kappa` are

.. math::
  \hat g_t &= (1 - \kappa) \Bigl(\hat g_{t-1}
      + \frac{\nabla F(x_t + \gamma d) - \nabla F(x_t)}{\gamma} \Bigr)
    + \kappa \nabla F(x_t)
  = (1 - \kappa) \hat g_{t-1} + \kappa h_t \\
  h_t &= a \nabla F(x_t + \gamma d) + (1 - a) \nabla F(x_t),
  \qquad a = \frac{1 - \kappa}{\kappa \gamma}

Sensitivity, with proof. The release of a step is

.. math::
  \tilde h_t = \frac1B \Bigl(
    \sum_i \mathrm{clip}_C(h_{t,i}) + \mathcal{N}(0, z^2 C^2 I) \Bigr), \qquad
  h_{t,i} = a \nabla f_i(x_t + \gamma d) + (1 - a) \nabla f_i(x_t)

Fix the earlier releases. Then :math:`x_t` and :math:`d`, which are functions of them
and of the start, are constants, and :math:`h_{t,i}` is a function of the i-th example
and of constants, as a gradient is. The *combination* is clipped, once for each example,
every term of the sum has norm at most C, for any a. That is the mechanism of ordinary
gradients, with other vectors of norm at most C, and epsilon is that of its adaptive
composition, unchanged. The filter after it is post-processing.

Two similar methods are wrong. To clip both gradients and combine them gives terms of
norm up to :math:`(|a| + |1 - a|) C`. To divide the noise by :math:`\sqrt{a^2 + (1 -
a)^2}`, as if the noise of two gradients were combined, adds too little of it for
:math:`a > 1`, since the clipped combination gets noise only once.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dpadambc.core import validate


def with_prediction(
    loss_fn: Callable[..., jax.Array], *, kappa: float = 0.7, gamma: float = 0.5
) -> Callable[..., jax.Array]:
    r"""Returns the loss whose gradient is the observation of DiSK's Kalman filter.

    .. math:: a f(x + \gamma d) + (1 - a) f(x), \qquad
        a = \frac{1 - \kappa}{\kappa \gamma}

    It is the simplified filter. The loss takes the direction d, the last change of the
    parameters, in the place of `frozen`: use it in a `Step`. After the noise, chain
    ``contrib.low_pass((kappa,), (1.0, kappa - 1.0))``, the correction by the gain. Any
    optimizer may follow; `contrib.low_pass_noise_stddev` is the level for one with a
    correction. Each step costs two gradients. For :math:`a > 1`, tune the clip norm
    again, since combinations are longer than gradients; the default has a = 0.86.

    Guarantees:
      * The gradient of an example is clipped as one vector, so sensitivity and epsilon
        are the mechanism's, as this module's docstring proves.
      * The proof needs a direction made from released parameters alone: give none that
        is computed from examples.

    Args:
      loss_fn: a loss of `(params, *example)`. Both points get the same key, if any.
      kappa: :math:`\kappa`, the gain, in (0, 1).
      gamma: :math:`\gamma`, the distance of the look-ahead, positive.

    Returns:
      A loss of `(params, direction, *example)`, with a direction like the parameters,
      zeros in the first step.

    Raises:
      ValueError: if a number is out of its range.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import dpadambc
      >>> from dpadambc import contrib, training
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.5, iterations=4,
      ...     normalize_by=4)
      >>> data = {"x": jnp.ones((8, 2)), "y": jnp.ones(8)}
      >>> loss_fn = lambda w, example: (w @ example["x"] - example["y"]) ** 2
      >>> step = training.Step(
      ...     contrib.with_prediction(loss_fn, kappa=0.7), mechanism,
      ...     optax.chain(contrib.low_pass((0.7,), (1.0, -0.3)), optax.sgd(0.1)))
      >>> state = step.init(jnp.zeros(2), key=training.secret_key())
      >>> take_step, direction = jax.jit(step), jnp.zeros(2)
      >>> for _ in range(mechanism.iterations):
      ...     batch, before = training.draw_batch(mechanism, state, 8), state.params
      ...     state, seen = take_step(
      ...         state, batch.gather(data), batch.is_padding_example, direction)
      ...     direction = state.params - before
      >>> int(state.step)
      4

    References:
      Zhang et al., `DiSK: Differentially Private Optimizer with Simplified Kalman
      Filter for Noise Reduction <https://arxiv.org/abs/2410.03883>`_, 2024
    """
    validate.open_unit_interval(kappa=kappa)
    validate.positive(gamma=gamma)
    share = (1 - kappa) / (kappa * gamma)

    @functools.wraps(loss_fn)  # for its key
    def combined(params, direction, *example, **key):
        move = lambda p, d: p + jnp.asarray(gamma * d, jnp.result_type(p))
        ahead = jax.tree.map(move, params, direction)
        here = loss_fn(params, *example, **key)
        return share * loss_fn(ahead, *example, **key) + (1 - share) * here

    return combined

"""Weight decay that the second moment does not rescale."""

from collections.abc import Callable
from typing import Any

import optax

from dpadambc.core import validate


def add_decoupled_weight_decay(
    weight_decay: optax.ScalarOrSchedule,
    *,
    mask: Any | Callable[[optax.Params], Any] | None = None,
) -> optax.GradientTransformation:
    r"""Adds :math:`\lambda \theta` to the update.

    Chain it after the scaling and before the learning rate, as in AdamW:

    .. math:: \theta_t = \theta_{t-1} - \eta_t (u_t + \lambda \theta_{t-1})

    Released parameters are public, so decay costs no privacy here. Before the noise it
    would change the sensitivity, and before the moments it would falsify the
    correction. The total shrinkage is :math:`\prod_t (1 - \eta_t \lambda)`, which is
    often negligible at the learning rates of private training.

    Args:
      weight_decay: :math:`\lambda`, a non-negative number or a schedule.
      mask: a tree of bools shaped like the parameters or a prefix of them, or a
        function from the parameters to one: True where decay applies.

    Returns:
      `optax.add_decayed_weights`, with its arguments checked.

    Raises:
      ValueError: if `weight_decay` is negative or not finite.

    Example:
      >>> import jax.numpy as jnp
      >>> import dpadambc
      >>> decay = dpadambc.add_decoupled_weight_decay(0.1)
      >>> params = jnp.array([2.0, -1.0])
      >>> updates, _ = decay.update(jnp.zeros(2), decay.init(params), params)
      >>> print(updates)
      [ 0.2 -0.1]

    References:
      Loshchilov and Hutter, `Decoupled Weight Decay Regularization
      <https://arxiv.org/abs/1711.05101>`_, 2019; with private gradients,
      `DP-AdamW <https://arxiv.org/abs/2511.07843>`_, 2025, Algorithm 1
    """
    if not callable(weight_decay):
        validate.non_negative(weight_decay=weight_decay)
    return optax.add_decayed_weights(weight_decay, mask)

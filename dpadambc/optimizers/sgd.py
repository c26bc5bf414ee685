"""DP-SGD."""

import jax
import optax

from dpadambc.core import validate
from dpadambc.core.mechanism import Mechanism
from dpadambc.optimizers import _chains
from dpadambc.transforms.dtypes import with_wide_state


def dp_sgd(
    learning_rate: optax.ScalarOrSchedule,
    mechanism: Mechanism,
    *,
    key: jax.Array,
    momentum: float | None = None,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""DP-SGD: clip, add noise, step.

    .. math:: b_t = \mu b_{t-1} + \tilde g_t, \quad
        \theta_t = \theta_{t-1} - \eta_t b_t

    Args:
      learning_rate: :math:`\eta`, a number or a schedule.
      mechanism: the public numbers, such as a `PoissonGaussian`.
      key: a typed key for the noise; a new one for each run.
      momentum: :math:`\mu`, without dampening; none by default.
      nesterov: whether momentum is Nesterov's.

    Returns:
      An Optax transformation of per-example gradients; see `privatize` for its masks.

    Raises:
      TypeError: if `mechanism` is no mechanism, or `key` no typed key.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=0.0, sampling_prob=1.0,
      ...     iterations=1, normalize_by=2)
      >>> optimizer = dpadambc.dp_sgd(0.5, mechanism, key=jax.random.key(0))
      >>> params, x = jnp.zeros(2), jnp.array([[0.6, 0.8], [3.0, 4.0]])
      >>> gradients = dpadambc.per_example_grad(lambda w, x: w @ x)(params, x)
      >>> updates, _ = optimizer.update(gradients, optimizer.init(params), params)
      >>> print(updates.round(3))
      [-0.3 -0.4]

    References:
      Abadi et al., `Deep Learning with Differential Privacy
      <https://arxiv.org/abs/1607.00133>`_, 2016
    """
    stages = []
    if momentum is not None:
        validate.decay(momentum=momentum)
        stages = [with_wide_state(optax.trace(momentum, nesterov))]
    return _chains.private_chain(learning_rate, mechanism, key, *stages)

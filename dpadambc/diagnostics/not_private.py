"""Read-outs of gradients before the noise, which are *not private*.

No epsilon covers them: publish none of them, do not let them decide anything that you
publish, and keep them out of checkpoints. Use them with public or synthetic data, or
for research. None is an Optax transformation, so none can get into an optimizer's
state, and `dpadambc.diagnostics.snapshot` refuses a state with clean moments in it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpadambc.core import clipped_sum
from dpadambc.core.clip import clip_per_example, factors
from dpadambc.core.gradient import is_per_example, per_example_norms
from dpadambc.core.mechanism import Mechanism
from dpadambc.core.noise import stddev_at_step
from dpadambc.diagnostics import _estimates, readout

__all__ = [
    "GradientStatistics",
    "gradient_statistics",
    "init_clean_moments",
    "snapshot",
    "update_clean_moments",
]


class GradientStatistics(NamedTuple):
    """The norms of the gradients of one batch, *not private*.

    Attributes:
      clip_fraction: the fraction of examples whose gradient is shortened, left out, or
        lengthened: those whose weight by the mechanism's rule is not 1.
      norm: quantiles of the norms, at the levels of a `Readout`. shape=(9,).
      l2_clip_norm: C, the clip norm.
      signal_norm: the norm of the clipped sum over normalize_by, without the noise.
      noise_norm: the expected norm of the noise in it.
    """

    clip_fraction: jax.Array
    norm: jax.Array
    l2_clip_norm: jax.Array
    signal_norm: jax.Array
    noise_norm: jax.Array

    @property
    def signal_to_noise(self) -> jax.Array:
        """The norm of the clipped sum over the expected norm of the noise."""
        return self.signal_norm / self.noise_norm


def gradient_statistics(
    per_example_gradients: optax.Updates,
    mechanism: Mechanism,
    *,
    is_padding_example: jax.Array | None = None,
    step: jax.typing.ArrayLike = 0,
) -> GradientStatistics:
    """Computes norms, clipping and signal to noise of one batch, *not private*.

    Args:
      per_example_gradients: from `per_example_grad`, factored or not.
      mechanism: the public numbers, with a clip norm that does not move.
      is_padding_example: True for padding rows, shape (batch,).
      step: the number of steps made before, where the noise level is a schedule.

    Returns:
      A `GradientStatistics`. The quantiles of an empty batch are NaN.

    Example:
      >>> import jax.numpy as jnp
      >>> import dpadambc
      >>> from dpadambc.diagnostics import not_private
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.1,
      ...     iterations=1, normalize_by=2)
      >>> seen = not_private.gradient_statistics(
      ...     dpadambc.as_per_example(jnp.array([[0.3, 0.4], [3.0, 4.0]])), mechanism)
      >>> print(seen.clip_fraction, seen.signal_norm.round(2))
      0.5 0.75
    """
    grads, padding = per_example_gradients, is_padding_example
    norms = per_example_norms(grads)
    padding = jnp.zeros(norms.shape, bool) if padding is None else padding
    zeros = lambda leaf: jnp.zeros(leaf.shape)
    like = jax.tree.map(zeros, grads, is_leaf=is_per_example)
    bound, rule = mechanism.l2_clip_norm, mechanism.clip_rule
    clip = clip_per_example(bound, normalize_by=mechanism.normalize_by, clip_rule=rule)
    clean, _ = clip.update(grads, clip.init(like), like, is_padding_example=padding)
    weights = factors(grads, like, bound, None, rule).weights
    is_changed = jnp.stack([weight != 1 for weight in weights.values()]).any(0)
    stddev = stddev_at_step(mechanism.noise_stddev, step)
    present = jnp.where(padding, jnp.nan, norms)
    return GradientStatistics(
        clip_fraction=jnp.mean(is_changed, where=~padding),
        norm=jnp.nanquantile(present, jnp.array(readout.QUANTILES)),
        l2_clip_norm=jnp.asarray(bound, norms.dtype),
        signal_norm=optax.tree.norm(clipped_sum.materialize(clean)),
        noise_norm=stddev * optax.tree.size(like) ** 0.5,
    )


def init_clean_moments(params: optax.Params) -> _estimates.CleanMoments:
    """Makes moments of gradients before the noise, *not private*: keep them secret.

    Args:
      params: the parameters.

    Returns:
      The moments after no step. `dpadambc.diagnostics.snapshot` refuses them.

    Example:
      >>> import jax.numpy as jnp
      >>> from dpadambc.diagnostics import not_private
      >>> moments = not_private.init_clean_moments(jnp.zeros(2))
      >>> for clipped_gradient in (jnp.array([0.5, 0.1]), jnp.array([0.5, -0.1])):
      ...     moments = not_private.update_clean_moments(moments, clipped_gradient)
      >>> int(moments.count)
      2
    """
    zeros = optax.tree.zeros_like(params, dtype=float)
    return _estimates.CleanMoments(jnp.zeros([], jnp.int32), zeros, zeros)


def update_clean_moments(
    state: _estimates.CleanMoments,
    clipped_gradient: optax.Updates,
    *,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
) -> _estimates.CleanMoments:
    """Updates the moments with a clipped sum before the noise: *not private*.

    Args:
      state: from `init_clean_moments`, or from the step before.
      clipped_gradient: the sum of clipped gradients over `normalize_by`, such as
        `clipped_grad` returns.
      b1: the decay rate of the first moment.
      b2: the decay rate of the second moment.

    Returns:
      The state after the step.

    Example:
      >>> import jax.numpy as jnp
      >>> from dpadambc.diagnostics import not_private
      >>> moments = not_private.init_clean_moments(jnp.zeros(2))
      >>> moments = not_private.update_clean_moments(moments, jnp.array([0.5, 0.1]))
      >>> print(moments.mu.round(3))  # a tenth, since b1 is 0.9
      [0.05 0.01]
    """
    clipped_gradient = clipped_sum.materialize(clipped_gradient)
    mu = optax.tree.update_moment(clipped_gradient, state.mu, b1, 1)
    nu = optax.tree.update_moment_per_elem_norm(clipped_gradient, state.nu, b2, 2)
    count = jnp.asarray(optax.safe_increment(state.count))
    return _estimates.CleanMoments(count, mu, nu)


def snapshot(
    clean_moments: _estimates.CleanMoments,
    *,
    noise_stddev: jax.typing.ArrayLike,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    sample_size: int = 16_384,
) -> readout.Snapshot:
    """Summarizes the clean moments, in units of the noise: *not private*.

    Compare it with `dpadambc.diagnostics.snapshot`: it has the same fields and bins,
    with `noise_variance` 0, so that the excess is the clean second moment, which the
    correction estimates.

    Args:
      clean_moments: from `update_clean_moments`.
      noise_stddev: the level of the noise that the private run adds, a number.
      b1: the decay rate of the first moment.
      b2: the decay rate of the second moment.
      eps: the number that is added outside the root.
      sample_size: as for the private snapshot.

    Returns:
      A `Snapshot` whose update is the one that Adam makes without noise.

    Example:
      >>> import jax.numpy as jnp
      >>> from dpadambc.diagnostics import not_private
      >>> moments = not_private.init_clean_moments({"w": jnp.zeros(2)})
      >>> moments = not_private.update_clean_moments(
      ...     moments, {"w": jnp.array([0.5, 0.1])})
      >>> seen = not_private.snapshot(moments, noise_stddev=0.3)
      >>> print(seen.parameters["['w']"].mean_second_moment.round(2))
      0.13
    """
    numbers: dict[str, Any] = dict(b1=b1, b2=b2, eps=eps, eps_root=0.0, correction=1.0)
    moments = optax.ScaleByAdamState(*clean_moments)
    clean: dict[str, Any] = dict(noise_stddev=0.0, variance_floor=0.0)
    step, found = _estimates.find(moments, **clean, **numbers)
    return readout.of_estimates(step, found, sample_size, noise_stddev)

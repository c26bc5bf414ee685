"""Clip and noise as one stage: from private data to a private gradient.

They are the two halves of one transformation, so that microbatches and devices can add
up clipped sums before the noise. Both read one state.
"""

import jax
import optax

from dpadambc.core import validate
from dpadambc.core.arrays import shard_map_axes
from dpadambc.core.gradient import per_example_leaves
from dpadambc.core.mechanism import Mechanism
from dpadambc.engine import rounding


def privatize(
    mechanism: Mechanism, *, key: jax.Array, precision: rounding.Precision = None
) -> optax.GradientTransformationExtraArgs:
    r"""Clips per-example gradients, sums and adds noise: the private gradient.

    .. math:: \tilde g = \frac{1}{B} \sum_i g_i \min(1, C / \lVert g_i \rVert_2)
        + \mathcal{N}(0, \sigma^2 I)

    with C, B and :math:`\sigma` = `mechanism.noise_stddev`, or with the factor of
    another `mechanism.clip_rule`. Chain it first. Its output is as private as the
    mechanism says, whatever Optax optimizer follows. Other arguments of `update`, such
    as the `value` of a loss, have no noise: give public ones.

    Guarantees:
      * It has those of `clip_per_example` and of `add_dp_noise`: every coordinate gets
        noise of the mechanism's level, on a sum whose sensitivity is the mechanism's.
      * Epsilon is that of the mechanism if batches are drawn as it says, each with its
        mask, one for each update, and the key is secret.
      * It refuses changed gradients, a part of them, gradients without a mask where
        batches are padded, and batches of another size than the mechanism draws.

    Args:
      mechanism: the public numbers, such as a `PoissonGaussian`.
      key: a typed key for the noise; a new one for each run.
      precision: the precision of products in the clip; see `clip_per_example`.

    Returns:
      An Optax transformation, to be called as
      `update(gradients, state, params, is_padding_example=mask)`; the mask may have
      been given to the gradient function instead. Its updates are in at least float32.

    Raises:
      TypeError: if `mechanism` is no mechanism, `key` no typed key, or a gradient is
        not, or no longer, as `per_example_grad` returned it.
      ValueError: if there is no mask, or only a part of the parameters or gradients, or
        the clip has no bound for this `precision`.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import dpadambc
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.5, iterations=10,
      ...     normalize_by=2)
      >>> optimizer = optax.chain(
      ...     dpadambc.privatize(mechanism, key=jax.random.key(0)), optax.lion(1e-3))
      >>> params, x = jnp.zeros(2), jnp.array([[3.0, 4.0], [0.0, 0.5]])
      >>> grads = dpadambc.per_example_grad(lambda w, x: w @ x)(
      ...     params, x, is_padding_example=jnp.zeros(2, bool))
      >>> updates, state = optimizer.update(grads, optimizer.init(params), params)
      >>> updates.shape
      (2,)

    References:
      Abadi et al., `Deep Learning with Differential Privacy
      <https://arxiv.org/abs/1607.00133>`_, 2016
    """
    if not isinstance(mechanism, Mechanism):
        raise TypeError(f"Expected mechanism of dpadambc, got {type(mechanism)}.")
    validate.precision(precision)
    private = mechanism.private_gradient(key)

    def update_fn(updates, state, params=None, **extra_args):
        sums = private.clip(updates, state, params, precision=precision, **extra_args)
        leaves, mask = per_example_leaves(updates), extra_args.get("is_padding_example")
        if mask is None and not all(leaf.is_masked for leaf in leaves):
            _check_unmasked_batch(leaves[0].batch_size, mechanism)
        return private.add_noise(sums, state, params)

    return optax.GradientTransformationExtraArgs(private.init, update_fn)


def _check_unmasked_batch(batch_size: int, mechanism: Mechanism) -> None:
    """Raises for a batch without a mask that no step of the mechanism draws.

    In a batch of twice the size each example takes part with twice the probability. A
    smaller batch is the last of an epoch: that epoch was dealt out, and no step was
    drawn alone.
    """
    drawn, name = mechanism.known_batch_size, type(mechanism).__name__
    if mechanism.pads_batches:
        raise ValueError(
            f"Expected is_padding_example, as batches of {name} are padded. If nothing"
            " is padded, give a mask that is all False."
        )
    is_part = bool(shard_map_axes())  # of a batch that is split over devices
    if drawn is not None and (batch_size > drawn or not is_part and batch_size < drawn):
        raise ValueError(
            f"Expected {drawn} examples in each step of {name}, got {batch_size}. Say"
            " by is_padding_example which are padding."
        )

"""Add Gaussian noise of which a part is taken back in later steps."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpadambc.contrib import _noising
from dpadambc.core import clipped_sum, keys, noise, validate
from dpadambc.core.noise import AddDPNoiseState


class AddCorrelatedNoiseState(NamedTuple):
    """State of `add_correlated_noise`: *secret*, earlier noise follows from it.

    Attributes:
      draws: the state of the independent z.
      earlier_keys: of the z of the last step, of the step before, and so on.
        shape=(w - 1,) for w coefficients.
    """

    draws: AddDPNoiseState
    earlier_keys: jax.Array

    def __repr__(self) -> str:
        """Without the keys."""
        return f"AddCorrelatedNoiseState(draws={self.draws}, earlier_keys=...: secret)"

    @property
    def rng_key(self) -> jax.Array:
        """That of the draws."""
        return self.draws.rng_key


def add_correlated_noise(
    noise_stddev: float, coefficients: Sequence[float], *, key: jax.Array
) -> optax.GradientTransformation:
    r"""Adds Gaussian noise that is correlated over steps, independent elsewhere.

    .. math:: \tilde g_t = \bar g_t + \sum_{j=0}^{w-1} d_j z_{t-j},
        \quad z_t \sim \mathcal{N}(0, \sigma^2 I)

    with :math:`\sigma` = `noise_stddev`, d = `coefficients`, w of them, and no z before
    the first step. With negative :math:`d_j` a step takes back a part of the noise of
    earlier ones, so that a sum of many gradients has less of it than the sum of
    independent noise. All steps together decide how much the noise hides:
    `contrib.CorrelatedGaussian` computes that epsilon, and `contrib.strategies`
    has the proof. *The epsilon of independent noise does not hold for it.*

    Guarantees:
      * The z are independent over coordinates, leaves, steps, keys and sums, as those
        of `add_dp_noise` are. None is kept: the state has the keys of the last w - 1
        steps, and each step draws those of w steps anew. That takes w times the time
        of `add_dp_noise`, and the memory of one gradient more, whatever w is.
      * The state reveals the noise of the last w - 1 steps, and a saved one continues
        with the same noise, bit for bit. The state of `add_dp_noise` reveals no
        earlier noise.
      * Inside `jax.shard_map`, in low precision and for gradients per example, what
        `add_dp_noise` says of devices, dtypes and shapes holds here too.

    Args:
      noise_stddev: of the z, non-negative; the standard deviation of the noise is that
        times the norm of the coefficients, from step w - 1 on. No schedule: the proof
        is of z of one level.
      coefficients: d, finite numbers of which the first is 1.
      key: a typed JAX key, of this run alone.

    Returns:
      An Optax transformation. Its state is an `AddCorrelatedNoiseState`.

    Raises:
      TypeError: if `key` is not a typed key, or a number is not a number.
      ValueError: if a number is out of its range, gradients still have their batch
        axis, a part of the parameters is hidden, or as `add_dp_noise`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> from dpadambc import transforms
      >>> noise = contrib.add_correlated_noise(
      ...     0.1, (1.0, -0.9), key=jax.random.key(0))
      >>> params = jnp.zeros(10_000)
      >>> state, total = noise.init(params), jnp.zeros(10_000)
      >>> summed = dpadambc.as_clipped_sum(
      ...     jnp.ones(10_000), l2_clip_norm=100.0, normalize_by=1)
      >>> for _ in range(4):
      ...     noised, state = noise.update(summed, state, params)
      ...     total += noised
      >>> print(f"{total.mean():.2f} +- {total.std():.2f}, independent 0.20")
      4.00 +- 0.10, independent 0.20

    References:
      Kalinin et al., `DP-λCGD: Efficient Noise Correlation for Differentially Private
      Model Training <https://arxiv.org/abs/2601.22334>`_, 2026: draws them anew
    """
    validate.typed_key(key=key)
    validate.non_negative(noise_stddev=noise_stddev)
    d = _noising.check(coefficients)

    def init_fn(params):
        _refuse_parts(params)
        first = noise.first_state(key, "add_correlated_noise", params)
        not_yet = jax.random.split(jax.random.fold_in(first.rng_key, 0), len(d) - 1)
        return AddCorrelatedNoiseState(first, not_yet)

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        draws = state.draws
        updates = clipped_sum.opened(updates, params)
        noise.check_devices(updates, draws.rng_key)
        own_key = keys.of_one_run(draws.rng_key, updates)
        rng_key, step_key = jax.random.split(own_key)
        sigma = noise.stddev_of_step(noise_stddev, draws)
        shares = jnp.array(d, float)
        also = sigma, shares, state.earlier_keys
        step_key = noise.key_of_step(step_key, updates, *also)
        words = map(jax.random.key_data, (step_key[None], state.earlier_keys))
        words, kind = jnp.concatenate([*words]), jax.random.key_impl(step_key)

        def with_draws_of(j, noised):
            """Adds the share of the step that was j steps ago."""
            key_then = jax.random.wrap_key_data(words[j], impl=kind)
            share = jnp.where(j <= draws.noised_steps, shares[j], 0.0) * sigma
            return jax.tree.map(
                lambda g, z: g + share.astype(z.dtype) * z,
                noised,
                noise.gaussian_like(key_then, noised),
            )

        noised = with_draws_of(0, updates)
        noised = jax.lax.fori_loop(1, len(d), with_draws_of, noised)
        earlier_keys = jax.random.wrap_key_data(words[:-1], impl=kind)
        next_state = noise.next_state(draws, rng_key)
        return noised, AddCorrelatedNoiseState(next_state, earlier_keys)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _refuse_parts(params: optax.Params) -> None:
    if validate.sees_a_part(params):
        raise ValueError(
            "Expected all parameters, got a part of them, inside optax.masked or"
            " optax.multi_transform: parts with one key and other coefficients would"
            " have noise of the same draws. Add the noise to all parameters first."
        )

"""Add Gaussian noise that a banded strategy correlates over all steps."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpadambc.contrib import _noising, correlated_noise
from dpadambc.core import clipped_sum, keys, noise, validate
from dpadambc.core.noise import AddDPNoiseState


class AddBandedNoiseState(NamedTuple):
    """State of `add_banded_noise`: *secret*, for it has the noise of earlier steps.

    Attributes:
      draws: the state of the independent z.
      earlier: the noise of the last step, of the step before, and so on.
    """

    draws: AddDPNoiseState
    earlier: tuple[optax.Updates, ...]

    def __repr__(self) -> str:
        """Without the noise, with which gradients are bare."""
        return f"AddBandedNoiseState(draws={self.draws}, earlier=...: secret)"

    @property
    def rng_key(self) -> jax.Array:
        """That of the draws."""
        return self.draws.rng_key


def add_banded_noise(
    noise_stddev: float, strategy_coefficients: Sequence[float], *, key: jax.Array
) -> optax.GradientTransformation:
    r"""Adds Gaussian noise y whose combination over b steps is independent.

    .. math:: \tilde g_t = \bar g_t + y_t, \quad
        y_t = z_t - \sum_{j=1}^{b-1} c_j y_{t-j}, \quad
        z_t \sim \mathcal{N}(0, \sigma^2 I)

    with :math:`\sigma` = `noise_stddev`, c = `strategy_coefficients`, b of them, and no
    y before the first step. In matrices over all steps :math:`C y = z`, with the banded
    Toeplitz matrix C of the c: the strategy. With positive :math:`c_j` a step takes
    back a part of the noise of *all* earlier ones, so that a sum of many gradients has
    less of it than the sum of independent noise. (`add_correlated_noise` is the other
    way round: there the inverse of the strategy is banded.) How much it hides is a
    matter of all steps together: `contrib.BandedGaussian` has that epsilon. *The
    epsilon of independent noise does not hold for it.*

    Guarantees:
      * The z are those of `add_dp_noise`: independent over coordinates, leaves, steps
        and keys.
      * A state has the noise of b - 1 earlier steps: with it, their gradients are bare.
        It takes the memory of so many gradients in at least float32. A saved state
        continues with the same noise, bit for bit.
      * Inside `jax.shard_map`, in low precision and for gradients per example, what
        `add_dp_noise` says of devices, dtypes and shapes holds here too.

    Args:
      noise_stddev: of the z, non-negative; that of the noise y grows with the steps, by
        the norm of the first coefficients of the inverse of C. No schedule: the proof
        is of z of one level.
      strategy_coefficients: c, finite numbers of which the first is 1.
      key: a typed JAX key, of this run alone.

    Returns:
      An Optax transformation. Its state is an `AddBandedNoiseState`.

    Raises:
      TypeError: if `key` is not a typed key, or a number is not a number.
      ValueError: if a number is out of its range, gradients still have their batch
        axis, a part of the parameters is hidden, or as `add_dp_noise`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> from dpadambc import transforms
      >>> noise = contrib.add_banded_noise(0.1, (1.0, 0.5), key=jax.random.key(0))
      >>> params = jnp.zeros(10_000)
      >>> state, total = noise.init(params), jnp.zeros(10_000)
      >>> summed = dpadambc.as_clipped_sum(
      ...     jnp.ones(10_000), l2_clip_norm=100.0, normalize_by=1)
      >>> for _ in range(4):
      ...     noised, state = noise.update(summed, state, params)
      ...     total += noised
      >>> print(f"{total.mean():.2f} +- {total.std():.2f}, independent 0.20")
      4.00 +- 0.15, independent 0.20

    References:
      Choquette-Choo et al., `(Amplified) Banded Matrix Factorization
      <https://arxiv.org/abs/2306.08153>`_, 2023
    """
    validate.typed_key(key=key)
    validate.non_negative(noise_stddev=noise_stddev)
    _, *later = _noising.check(strategy_coefficients, "strategy_coefficients")

    def init_fn(params):
        correlated_noise._refuse_parts(params)
        zeros = lambda x: jnp.zeros_like(x, noise._like(x).dtype)
        return AddBandedNoiseState(
            noise.first_state(key, "add_banded_noise", params),
            tuple(jax.tree.map(zeros, params) for _ in later),
        )

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        draws = state.draws
        updates = clipped_sum.opened(updates, params)
        noise.check_devices(updates, draws.rng_key)
        own_key = keys.of_one_run(draws.rng_key, updates)
        rng_key, step_key = jax.random.split(own_key)
        sigma = noise.stddev_of_step(noise_stddev, draws)
        also = sigma, jnp.array(later), state.earlier[:1]
        step_key = noise.key_of_step(step_key, updates, *also)

        def without_earlier(z, *earlier):
            taken_back = sum(c * y for c, y in zip(later, earlier, strict=True))
            return sigma.astype(z.dtype) * z - taken_back

        drawn = noise.gaussian_like(step_key, updates)
        added = jax.tree.map(without_earlier, drawn, *state.earlier)
        noised = jax.tree.map(jnp.add, updates, added)
        return noised, AddBandedNoiseState(
            noise.next_state(draws, rng_key),
            (added, *state.earlier)[: len(later)],
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)

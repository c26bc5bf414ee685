"""The state of a run, what of it is secret, and where keys come from."""

import secrets
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpadambc import precision


class TrainState(NamedTuple):
    """All that a run needs to go on: *secret*, for its keys. See `releasable`."""

    step: jax.Array  # shape=(), int32: how many steps were taken
    params: optax.Params
    opt_state: optax.OptState
    average: optax.Params | None  # moving average of the parameters
    sampling_key: (
        jax.Array
    )  # who takes part must stay secret: amplification rests on it
    loss_key: jax.Array


class Releasable(NamedTuple):
    """What is as private as the model: a function of noised gradients."""

    step: jax.Array
    params: optax.Params
    opt_state: optax.OptState  # without the key of the noise
    average: optax.Params | None


def releasable(state: TrainState) -> Releasable:
    """The part of a state that may be published at the epsilon of the run.

    Keys are left out: with the key of the noise whoever has the state knows all later
    noise, and with that of the sampling who took part in which step. Losses, norms and
    whatever else is computed from single examples are not in a state to begin with.

    Args:
      state: of `fit`.

    Returns:
      Parameters, their average, the step, and the optimizer's state with None in the
      place of every key.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> from dpadambc import training
      >>> noise = dpadambc.add_dp_noise(1.0, key=jax.random.key(0))
      >>> state = training.init_state(jnp.zeros(2), noise, jax.random.key(1))
      >>> print(training.releasable(state).opt_state)
      AddDPNoiseState(count=Array(0, dtype=int32), rng_key=None)
    """
    is_key = lambda x: jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
    without_keys = jax.tree.map(lambda x: None if is_key(x) else x, state.opt_state)
    return Releasable(state.step, state.params, without_keys, state.average)


def in_full_precision(x: jax.Array) -> jax.Array:
    """In at least float32: in bfloat16 a decay of 0.999 is one."""
    return x.astype(precision.at_least_float32(jnp.result_type(x)))


def init_state(
    params: optax.Params,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    *,
    averages: bool = False,
) -> TrainState:
    """The state before the first step.

    Args:
      params: the parameters.
      optimizer: whose noise has a key of its own.
      key: for sampling and for the loss; a new one for each run.
      averages: whether to keep a moving average of the parameters.

    Returns:
      A `TrainState`.
    """
    params = jax.tree.map(jnp.asarray, params)
    sampling_key, loss_key = jax.random.split(key)
    return TrainState(
        step=jnp.zeros([], jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        average=jax.tree.map(in_full_precision, params) if averages else None,
        sampling_key=sampling_key,
        loss_key=loss_key,
    )


def secret_key() -> jax.Array:
    """A key from the operating system's entropy, for a run that nobody can repeat.

    JAX's default generator takes 64 bits. A key made from a small number that is in a
    script, or that can be guessed, gives the noise away to whoever has both.

    Returns:
      A typed key.

    Example:
      >>> from dpadambc import training
      >>> bool((training.secret_key() != training.secret_key()).all())
      True
    """
    words = [secrets.randbits(32) for _ in range(2)]
    return jax.random.wrap_key_data(jnp.array(words, jnp.uint32), impl="threefry2x32")

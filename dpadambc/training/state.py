"""The state of a run, what of it is secret, and where keys come from."""

import secrets
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

from dpadambc._core import keys, precision
from dpadambc.mechanisms.base import Mechanism
from dpadambc.transforms.noise import AddDPNoiseState, add_dp_noise


class TrainState(NamedTuple):
    """All that a run needs to go on: *secret*, for its keys. See `releasable`."""

    step: jax.Array  # shape=(), int32: how many steps were taken
    params: optax.Params
    opt_state: optax.OptState
    average: optax.Params | None  # moving average of the parameters
    noise: AddDPNoiseState  # whoever has it can subtract all later noise
    sampling_key: (
        jax.Array
    )  # who takes part must stay secret: amplification rests on it
    loss_key: jax.Array


class Releasable(NamedTuple):
    """What is as private as the model: a function of noised gradients."""

    step: jax.Array
    params: optax.Params
    opt_state: optax.OptState  # with None in the place of every key
    average: optax.Params | None


def releasable(run: Any) -> Releasable:
    """The part of a run that may be published at its epsilon.

    Keys are left out: with the key of the noise whoever has the state knows all later
    noise, and with that of the sampling who took part in which step. So is the history,
    which has losses. What an `eval_fn` or a callback was told is not covered either.

    Args:
      run: what `fit` returns, or a `TrainState`.

    Returns:
      Parameters, their average, the step, and the optimizer's state without keys.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import dpadambc
      >>> from dpadambc import training
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.5, iterations=4,
      ...     normalize_by=4)
      >>> state = training.init_state(
      ...     jnp.zeros(2), mechanism, optax.sgd(0.1), key=jax.random.key(0))
      >>> training.releasable(state)._fields
      ('step', 'params', 'opt_state', 'average')
    """
    state: TrainState = getattr(run, "state", run)
    is_key = lambda x: jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
    without_keys = jax.tree.map(lambda x: None if is_key(x) else x, state.opt_state)
    return Releasable(state.step, state.params, without_keys, state.average)


def in_full_precision(x: jax.Array) -> jax.Array:
    """In at least float32: in bfloat16 a decay of 0.999 is one."""
    return x.astype(precision.at_least_float32(jnp.result_type(x)))


def init_state(
    params: optax.Params,
    mechanism: Mechanism,
    optimizer: optax.GradientTransformation,
    *,
    key: jax.Array,
    averages: bool = False,
) -> TrainState:
    """The state before the first step, for `Step`.

    Args:
      params: the parameters.
      mechanism: whose noise is added.
      optimizer: of the private gradient. Its state is in at least float32.
      key: a typed key, a new one for each run; secret. The keys of the noise, of the
        sampling and of the loss are made from it, and repeat nothing that was drawn
        with it elsewhere.
      averages: whether to keep a moving average of the parameters.

    Returns:
      A `TrainState`.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import dpadambc
      >>> from dpadambc import training
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.5, iterations=4,
      ...     normalize_by=4)
      >>> state = training.init_state(
      ...     jnp.zeros(2), mechanism, optax.adam(0.1), key=training.secret_key())
      >>> print(state.params)
      [0. 0.]
    """
    # Copies: a step that is given the buffers of a state must not take others with it.
    params = jax.tree.map(jnp.array, params)
    noise_key, run_key = jax.random.split(keys.of_domain(key, "fit"))
    sampling_key, loss_key = jax.random.split(run_key)
    wide = lambda: jax.tree.map(lambda x: jnp.array(precision.wide(x)), params)
    noise: Any = add_dp_noise(mechanism.noise_stddev, key=noise_key).init(params)
    return TrainState(
        step=jnp.zeros([], jnp.int32),
        params=params,
        opt_state=optimizer.init(wide()),
        average=wide() if averages else None,
        noise=noise,
        sampling_key=sampling_key,
        loss_key=loss_key,
    )


# Of the keys that this process has drawn from entropy: nobody means one of them.
_DRAWN: set[bytes] = set()


def secret_key() -> jax.Array:
    """A key from the operating system's entropy, for a run that nobody can repeat.

    JAX's default generator takes 64 bits. A key made from a small number that is in a
    script, or that can be guessed, gives the noise away to whoever has both.

    Where a program runs in several processes (`jax.distributed.initialize`), all of
    them get the key that the first one draws, so all of them must call this.

    Returns:
      A typed key.

    Example:
      >>> from dpadambc import training
      >>> bool((training.secret_key() != training.secret_key()).all())
      True
    """
    words = [secrets.randbits(32) for _ in range(2)]
    key = jax.random.wrap_key_data(jnp.array(words, jnp.uint32), impl="threefry2x32")
    key = the_same_everywhere(key)
    _DRAWN.add(np.asarray(jax.random.key_data(key)).tobytes())
    return key


def is_from_entropy(key: jax.Array) -> bool:
    """Whether `secret_key` has drawn it in this process."""
    return np.asarray(jax.random.key_data(key)).tobytes() in _DRAWN


def the_same_everywhere(key: jax.Array) -> jax.Array:
    """The key of the first process, on no device in particular.

    Processes with keys of their own would each draw other batches and other noise, and
    an example be in the sum of several.
    """
    words = np.asarray(jax.random.key_data(key))
    if jax.process_count() > 1:
        words = np.asarray(multihost_utils.broadcast_one_to_all(words))
    return jax.random.wrap_key_data(jnp.asarray(words), impl=jax.random.key_impl(key))

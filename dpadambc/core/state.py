"""The state of a run, and what of it is secret."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpadambc.core import keys
from dpadambc.core.arrays import widen
from dpadambc.core.mechanism import Mechanism


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "step",
        "params",
        "opt_state",
        "average",
        "noise",
        "sampling_key",
        "loss_key",
    ),
    meta_fields=("mechanism",),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """All that a run needs to go on: *secret*, for its keys. See `releasable`.

    A pytree. The mechanism is a static part of it, so that a step of another mechanism
    does not take it: epsilon is of one mechanism.

    Attributes:
      step: the number of steps taken. shape=(), int32.
      params: the parameters.
      opt_state: the optimizer's state.
      average: the moving average of the parameters, if there is one.
      noise: the key of the noise, a bound that moves, and the noise of earlier steps if
        later ones take it back. Whoever has it can subtract all later noise.
      sampling_key: decides who takes part. It must stay secret, since amplification
        rests on it.
      loss_key: gives each example a key, if the loss is random.
      mechanism: that draws the batches and sets the noise.
    """

    step: jax.Array
    params: optax.Params
    opt_state: optax.OptState
    average: optax.Params | None
    noise: Any
    sampling_key: jax.Array
    loss_key: jax.Array
    mechanism: Mechanism

    def __repr__(self) -> str:
        """Without the arrays: a notebook that is shared must not show the keys."""
        return f"TrainState(step={self.step}, ...: secret)"


class Releasable(NamedTuple):
    """What is as private as the model: a function of noised gradients.

    Attributes:
      step: the number of steps taken. shape=(), int32.
      params: the parameters.
      opt_state: the optimizer's state, with None in the place of every key.
      average: the moving average of the parameters, if there is one.
    """

    step: jax.Array
    params: optax.Params
    opt_state: optax.OptState
    average: optax.Params | None


def releasable(run: Any) -> Releasable:
    """The part of a run that may be published at its epsilon.

    It has no keys: the key of the noise reveals all later noise, and the key of the
    sampling reveals who took part in which step. It has no history, which contains
    losses. Epsilon does not cover the output of an `eval_fn` or a callback either.

    Args:
      run: what `fit` returns, or a `TrainState`.

    Returns:
      Parameters, their average, the step, and the optimizer's state without keys.

    Raises:
      TypeError: if it is neither.

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
    state = getattr(run, "state", run)
    if not isinstance(state, TrainState):
        raise TypeError(
            "Expected what fit returns, or a TrainState, got"
            f" {type(run).__name__}. Of a SearchResult all may be published, at its"
            " epsilon, which is of the whole search and not of one run. Of a loop of"
            " your own publish the parameters alone: the optimizer's state has the key"
            " of the noise."
        )
    is_key = lambda x: jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
    without_keys = jax.tree.map(lambda x: None if is_key(x) else x, state.opt_state)
    return Releasable(state.step, state.params, without_keys, state.average)


def _keys_of_run(key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of the noise, the sampling and the loss, from the key of a run."""
    noise_key, run_key = jax.random.split(keys.of_domain(key, "fit"))
    sampling_key, loss_key = jax.random.split(run_key)
    return noise_key, sampling_key, loss_key


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
    noise_key, sampling_key, loss_key = _keys_of_run(key)
    wide = lambda: jax.tree.map(lambda x: jnp.array(widen(x)), params)
    noise: Any = mechanism.private_gradient(noise_key).init(params)
    return TrainState(
        step=jnp.zeros([], jnp.int32),
        params=params,
        opt_state=optimizer.init(wide()),
        average=wide() if averages else None,
        noise=noise,
        sampling_key=sampling_key,
        loss_key=loss_key,
        mechanism=mechanism,
    )

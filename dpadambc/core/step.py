"""One step: clip the gradients of a batch, add noise, update."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpadambc.core import clipped_grad, data, keys, validate
from dpadambc.core.arrays import widen
from dpadambc.core.keys import checksum
from dpadambc.core.mechanism import Mechanism, check_mechanism
from dpadambc.core.per_example import Arguments
from dpadambc.core.sampling import Batch
from dpadambc.core.state import TrainState, init_state
from dpadambc.training._shardings import Shardings


class Seen(NamedTuple):
    """What a step saw of its examples: *not private*.

    Attributes:
      loss: the sum over the examples.
      num_examples: how many examples took part.
    """

    loss: jax.Array
    num_examples: jax.Array


@dataclasses.dataclass(frozen=True)
class Step:
    """One private step on sampled examples, for a loop of your own.

    `step(state, examples, is_padding_example)` returns the next `TrainState` and what
    was `Seen`. It is a function of arrays: compile it, with `donate_argnums=0` to
    update in place.

    Guarantees:
      * The gradient of each example is clipped, and noise of the mechanism's level is
        added to every coordinate of the sum before the optimizer sees it. Parameters,
        the optimizer's state and the average are functions of what is noised alone.
      * The state is `init_state`'s, which has the keys; no step uses a key of another.
      * Epsilon is `mechanism.epsilon(delta, iterations=int(state.step))` if each batch
        was drawn as the mechanism says, `draw_batch` for one, and no state was used
        twice.
      * Under `jax.vmap` over states, each from a key of its own, every row is a
        separate run with its own batches and noise, and costs that epsilon. k runs of T
        steps on the same data cost `accounting.compose(k * [(mechanism, T)])`: where an
        epoch that is begun counts in full, it does so in each.

    Args:
      loss_fn: the loss of one example, of `(params, *example)`; with `has_frozen`, of
        `(params, frozen, *example)`; with `uses_key`, a key comes last.
      mechanism: the public numbers.
      optimizer: any Optax transformation of the private gradient, such as
        `optax.adam(1e-3)` or `dpadambc.adam_bc(1e-3, mechanism)`.
      has_frozen: whether the loss takes what is not trained.
      uses_key: whether the loss takes a key, one for each example.
      microbatch_size: how many examples are in memory at once; all by default.
      average_decay: of a moving average of the parameters; none by default.
      skip_padding: see `clipped_grad`; `fit` sets it where the run has one device.
      shardings: of the state and the examples; `fit` sets it.

    Raises:
      TypeError: if `mechanism` is no mechanism, a state is of another mechanism, or the
        mask or a gradient has the wrong dtype.
      ValueError: if a number is out of its range.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import dpadambc
      >>> from dpadambc import training
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.5, iterations=4,
      ...     normalize_by=4)
      >>> data = {"x": jnp.ones((8, 2)), "y": jnp.ones(8)}
      >>> loss_fn = lambda w, example: (w @ example["x"] - example["y"]) ** 2
      >>> step = training.Step(loss_fn, mechanism, optax.sgd(0.1))
      >>> state = step.init(jnp.zeros(2), key=training.secret_key())
      >>> take_step = jax.jit(step, donate_argnums=0)
      >>> for _ in range(mechanism.iterations):
      ...     batch = training.draw_batch(mechanism, state, num_examples=8)
      ...     state, seen = take_step(
      ...         state, batch.gather(data), batch.is_padding_example)
      >>> int(state.step)
      4

      Three learning rates in one compiled program, each run with a key of its own:

      >>> optimizer = optax.inject_hyperparams(optax.adam)(0.1)
      >>> step = training.Step(loss_fn, mechanism, optimizer)
      >>> def train(key, learning_rate):
      ...     state = step.init(jnp.zeros(2), key=key)
      ...     state = optax.tree.set(state, learning_rate=learning_rate)
      ...     def take_step(state, _):
      ...         batch = training.draw_batch(mechanism, state, num_examples=8)
      ...         return step(state, batch.gather(data), batch.is_padding_example)
      ...     return jax.lax.scan(take_step, state, length=mechanism.iterations)[0]
      >>> keys = jax.random.split(training.secret_key(), 3)
      >>> states = jax.jit(jax.vmap(train))(keys, jnp.array([0.01, 0.1, 1.0]))
      >>> states.params.shape
      (3, 2)
    """

    loss_fn: Callable[..., jax.Array]
    mechanism: Mechanism
    optimizer: optax.GradientTransformation
    has_frozen: bool = False
    uses_key: bool = False
    microbatch_size: int | None = None
    average_decay: float | None = None
    skip_padding: bool = False
    shardings: Shardings = Shardings()

    def __post_init__(self):
        validate.function(loss_fn=self.loss_fn)
        check_mechanism(self.mechanism)
        validate.transformation(optimizer=self.optimizer)
        if self.microbatch_size is not None:
            validate.count(least=1, microbatch_size=self.microbatch_size)
        if self.average_decay is not None:
            validate.decay(average_decay=self.average_decay)

    def init(self, params: optax.Params, *, key: jax.Array) -> TrainState:
        """The state before the first step; see `init_state`."""
        averages = self.average_decay is not None
        return init_state(
            params, self.mechanism, self.optimizer, key=key, averages=averages
        )

    def __call__(
        self,
        state: TrainState,
        examples: Any,
        is_padding_example: Any,
        frozen: Any = None,
    ) -> tuple[TrainState, Seen]:
        """The state after the step, and what was seen of the examples."""
        _check_state(self.mechanism, state)
        losses, summed = self._clipped(state, examples, is_padding_example, frozen)
        halves = self.mechanism.private_gradient(state.noise.rng_key)
        private, noise_state = halves.add_noise(summed, state.noise, state.params)
        updates, opt_state = self.optimizer.update(
            private, state.opt_state, state.params
        )
        params = optax.apply_updates(state.params, updates)
        present = ~is_padding_example
        seen = Seen(loss=jnp.sum(losses, where=present), num_examples=jnp.sum(present))
        after = dataclasses.replace(
            state,
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            average=self._average(params, state.average),
            noise=noise_state,
        )
        return self.shardings.constrain_state(after), seen

    def _clipped(
        self, state: TrainState, examples: Any, padding: jax.Array, frozen: Any
    ) -> tuple[jax.Array, Any]:
        """Losses of the examples, and what is summed of them, for the noise."""
        examples, padding = self.shardings.shard_examples(
            (data.arguments(examples), padding)
        )
        key = jax.random.fold_in(state.loss_key, state.step)
        shared = (frozen,) if self.has_frozen else ()
        arguments = (*shared, *examples, *((key,) if self.uses_key else ()))
        first = 1 + len(shared)
        fun = clipped_grad.values_and_sums(
            self.mechanism.private_gradient(state.noise.rng_key).clip,
            self.loss_fn,
            Arguments(
                0,
                batch_argnums=tuple(range(first, first + len(examples))),
                prng_argnum=len(arguments) if self.uses_key else None,
            ),
            has_aux=False,
            microbatch_size=self.microbatch_size,
            skip_padding=self.skip_padding,
        )
        losses, summed = fun(
            state.noise,
            self.shardings.gather_params(state.params),
            *arguments,
            is_padding_example=padding,
        )
        gradient = self.shardings.scatter_gradient(summed.gradient)
        return losses, summed._replace(gradient=gradient)

    def _average(self, params: optax.Params, average: optax.Params | None):
        if self.average_decay is None or average is None:
            return None
        full = jax.tree.map(widen, params)
        return optax.incremental_update(full, average, 1 - self.average_decay)


def draw_batch(mechanism: Any, state: TrainState, num_examples: int) -> Batch:
    """The batch of the next step: a function of the state alone.

    Where a mechanism draws steps independently, a checksum of the parameters is in the
    key of each, as one of the sum is in that of the noise: two runs with one key draw
    batches of their own from where their parameters differ on. Parameters are functions
    of what was released, so for every data set the batches are as likely as without.

    Args:
      mechanism: which samples from a key.
      state: before the step.
      num_examples: the size of the data set.

    Returns:
      A `Batch`.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import dpadambc
      >>> from dpadambc import training
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.5, iterations=4,
      ...     normalize_by=4)
      >>> state = training.init_state(
      ...     jnp.zeros(2), mechanism, optax.sgd(0.1), key=jax.random.key(0))
      >>> batch = training.draw_batch(mechanism, state, num_examples=8)
      >>> print(batch.gather(jnp.arange(10, 90, 10)))
      [50 80  0  0  0  0  0  0]
    """
    _check_state(mechanism, state)
    key = state.sampling_key
    if mechanism.draws_steps_alone:
        key = keys.of_batches(key, checksum(state.params))
    return mechanism.sample_step(key, state.step, num_examples=num_examples)


def _check_state(mechanism: Mechanism, state: TrainState) -> None:
    """Raises where a state is of another mechanism: epsilon is of one."""
    if state.mechanism != mechanism:
        raise TypeError(
            f"Expected a state of {mechanism!r}, got one of {state.mechanism!r}:"
            " epsilon is of one mechanism, and a schedule is equal to itself alone."
            " Begin a run of its own by init; to go on with more iterations, give"
            " dataclasses.replace(state, mechanism=mechanism)."
        )

"""The loop: as many steps as the budget allows, saved and told about on the way."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from dpadambc import _validate, accounting
from dpadambc.mechanism import Mechanism
from dpadambc.noise import AddDPNoiseState
from dpadambc.training import data as _data
from dpadambc.training import ledger
from dpadambc.training.layout import Layout
from dpadambc.training.runner import Runner
from dpadambc.training.state import TrainState, init_state
from dpadambc.training.step import Step


class Optimizer(Protocol):
    """What makes the optimizer, such as `partial(dpadambc.dp_adambc, 1e-3)`.

    Called as below, so that its noise is that of the mechanism which is accounted for,
    under a key that no other part of the run has.
    """

    def __call__(
        self, mechanism: Any, /, *, key: jax.Array, pre_clipped: bool
    ) -> optax.GradientTransformation:
        """The transformation of gradients that are clipped and summed already."""
        ...


class Progress(NamedTuple):
    """What a callback is told after every call of the compiled steps."""

    state: TrainState  # its buffers are given to the next step: copy what is to be kept
    iterations: int  # steps taken
    iterations_in_all: int  # when the run will end
    losses: tuple[jax.Array, jax.Array]  # sum and number in these steps; *not private*
    mechanism: Mechanism
    target_delta: float

    @property
    def loss(self) -> float:
        """Mean over the examples of these steps; *not private*. It waits for them."""
        total, count = jax.device_get(self.losses)
        return float(total) / max(int(count), 1)

    def epsilon(self) -> float:
        """What is spent so far. It takes the accountant a second or so."""
        return self.mechanism.epsilon(self.target_delta, iterations=self.iterations)


class Result(NamedTuple):
    """What `fit` returns."""

    state: TrainState
    iterations: int  # steps taken, those before a resumption too
    epsilon: float  # spent, at the target delta
    stopped_by_budget: bool  # before the iterations of the mechanism were done


class Checkpoints(Protocol):
    """Where a run goes on from: see `dpadambc.checkpoints.Checkpoints`."""

    def restore(self, like: TrainState, record: dict[str, Any]) -> TrainState | None:
        """The last state saved, or None; raises unless its record is this one."""
        ...

    def is_due(self, before: int, after: int) -> bool:
        """Whether to save, having gone from so many steps to so many."""
        ...

    def save(self, state: TrainState, record: dict[str, Any]) -> None:
        """Saves all of a state, or nothing."""
        ...


def _check(mechanism: Any, num_examples: int) -> None:
    if not isinstance(mechanism, Mechanism) or not hasattr(mechanism, "sample"):
        raise TypeError(
            "Expected a mechanism that draws each batch from a key, such as a"
            f" SubsampledGaussian, got {type(mechanism).__name__}."
        )
    expected = getattr(mechanism, "num_examples", num_examples)
    if expected != num_examples:
        raise ValueError(
            f"Expected {expected} examples, as the mechanism has them, got"
            f" {num_examples}. Its epsilon is for data of that size."
        )


def _budget(
    mechanism: Mechanism, target_epsilon: float | None, target_delta: float
) -> int:
    """How many steps to take; raises if there is nothing to be had."""
    if target_epsilon is None:
        return mechanism.iterations
    iterations = ledger.affordable_iterations(
        mechanism, target_epsilon=target_epsilon, target_delta=target_delta
    )
    if iterations == 0 < mechanism.iterations:
        raise ValueError(
            "Expected a budget for one step at least, which costs epsilon"
            f" {mechanism.epsilon(target_delta, iterations=1):.4g}, got"
            f" target_epsilon={target_epsilon:g}."
        )
    return iterations


def _check_noise(opt_state: optax.OptState, iterations: int) -> None:
    """Raises unless noise was added once in each step."""
    is_noise = lambda node: isinstance(node, AddDPNoiseState)
    nodes = jax.tree.leaves(opt_state, is_leaf=is_noise)
    counts = [int(node.count) for node in nodes if is_noise(node)]
    if counts != [iterations]:
        raise ValueError(
            "Expected an optimizer that adds noise once in every step, through"
            f" dpadambc.add_dp_noise, got noise added {counts} times in {iterations}"
            " steps. Without it nothing is private, and what an optimizer gathers"
            " before it (optax.MultiSteps, say) is in the open in its state; for larger"
            " batches use microbatch_size."
        )


def _from_the_host(key: jax.Array) -> jax.Array:
    """The same key on no device in particular."""
    words = jnp.asarray(np.asarray(jax.random.key_data(key)))
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(key))


class _Saved:
    """The checkpoints of one run."""

    def __init__(self, checkpoints: Checkpoints, runner: Runner, start: TrainState):
        self._checkpoints, self._record = checkpoints, runner.record(start)

    def restore(self, state: TrainState) -> TrainState:
        """The last state saved, or this one, saved."""
        found = self._checkpoints.restore(state, self._record)
        if found is None:
            # From before the first step on, what gets this noise is on record.
            self._checkpoints.save(state, self._record)
            return state
        return found

    def save(self, state: TrainState, before: int, after: int, is_last: bool) -> None:
        if is_last or self._checkpoints.is_due(before, after):
            self._checkpoints.save(state, self._record)


def fit(
    loss_fn: Callable[..., jax.Array],
    params: optax.Params,
    data: Any,
    mechanism: Mechanism,
    optimizer: Optimizer,
    *,
    key: jax.Array,
    target_delta: float,
    target_epsilon: float | None = None,
    frozen: Any = None,
    uses_key: bool = False,
    microbatch_size: int | None = None,
    average_decay: float | None = None,
    steps_per_call: int = 1,
    batch_sharding: NamedSharding | None = None,
    callback: Callable[[Progress], Any] | None = None,
    checkpoints: Checkpoints | None = None,
) -> Result:
    """Trains privately, for the iterations of the mechanism or as far as a budget goes.

    Every batch is drawn by the mechanism, every gradient clipped and noised by its
    numbers, and the epsilon returned is of the steps that were taken. The state after
    a step follows from the key, the data and the number of steps alone, so a run that
    was interrupted and goes on from a checkpoint ends with the same bits, on the same
    devices and with as many steps per call; with others, the steps that were not saved
    are taken again with the same noise, and gradients that differ by rounding.

    Guarantees:
      * With `target_epsilon`, the step that would exceed it is not taken.
      * The noise, the batches and the loss have keys of their own, made from `key`;
        each step folds its number in. No key is used for two draws.
      * The state has no losses, norms or gradients before the noise. They reach the
        callback alone, as `Progress.loss`, which is *not private*.
      * A checkpoint of a run with another mechanism, program, data or start is refused:
        its noise would be added to other gradients, and the difference of the two would
        show them. (Of a source, a few examples are compared.)
      * On any number of devices the draws are the same and what is added to the sum of
        all examples is one draw; the result differs by rounding.
      * An optimizer that does not add noise once in every step is refused. That its
        level is the mechanism's is up to the optimizer; it is for those of `dpadambc`.

    Args:
      loss_fn: the loss of one example, of `(params, *example)`; with `frozen`, of
        `(params, frozen, *example)`; with `uses_key`, a key comes last.
      params: what is trained: any pytree of floating-point arrays, such as Linen's
        parameters, `nnx.split`'s state, the arrays of an Equinox module, or adapters.
      data: a tuple of the arguments of an example, pytrees of arrays with the examples
        along axis 0; or a source with `__len__` and `__getitem__` that returns such a
        tuple for one example.
      mechanism: the public numbers.
      optimizer: makes the optimizer from the mechanism; see `Optimizer`.
      key: a typed key, a new one for each run; secret. See `secret_key`.
      target_delta: for epsilon.
      target_epsilon: a budget; by default all iterations of the mechanism are run.
      frozen: a pytree that the loss needs and that is not trained.
      uses_key: whether the loss takes a key: for dropout, one for each example.
      microbatch_size: how many examples are in memory at once; all by default.
      average_decay: of a moving average of the parameters; none by default.
      steps_per_call: how many steps are compiled into one call, where the data are
        arrays. It changes the result by rounding at most.
      batch_sharding: how each batch is split over the devices of a mesh, along axis 0:
        `NamedSharding(mesh, PartitionSpec("data"))`, say. Parameters lie as they are
        given, each device having the whole of what is on no mesh (`fully_sharded`
        splits them), and so do moments; the state that is returned lies on the same
        devices with axes of the kind `AxisType.Auto`.
      callback: called after every call of the compiled steps.
      checkpoints: where to go on from, and to save to.

    Returns:
      A `Result`.

    Raises:
      TypeError: if the data, the mechanism or the key are not what they should be.
      ValueError: if not even one step is within the budget, or a number is out of its
        range, or a checkpoint is of another run.

    Example:
      >>> import functools, jax, jax.numpy as jnp
      >>> import dpadambc
      >>> from dpadambc import training
      >>> x = jax.random.normal(jax.random.key(0), (1_000, 3))
      >>> data = x, x @ jnp.array([1.0, -2.0, 3.0])
      >>> mechanism = dpadambc.SubsampledGaussian.calibrate(
      ...     target_epsilon=3.0, target_delta=1e-5, sampling_prob=0.2, iterations=200,
      ...     l2_clip_norm=1.0, normalize_by=200)
      >>> result = training.fit(
      ...     lambda w, x, y: (w @ x - y) ** 2, jnp.zeros(3), data, mechanism,
      ...     functools.partial(dpadambc.dp_adambc, 0.05), key=jax.random.key(1),
      ...     target_delta=1e-5, steps_per_call=50)
      >>> print(result.state.params.round(0), f"{result.epsilon:.2f}")
      [ 1. -2.  3.] 3.00
    """
    _validate.typed_key(key=key)
    _validate.count(least=1, steps_per_call=steps_per_call)
    if microbatch_size is not None:
        _validate.count(least=1, microbatch_size=microbatch_size)
    if average_decay is not None:
        _validate.decay(average_decay=average_decay)
    num_examples = _data.num_examples(data)
    accounting.check_delta(target_delta, num_examples)
    _check(mechanism, num_examples)
    iterations = _budget(mechanism, target_epsilon, target_delta)
    arrays = (params, frozen, None if _data.is_source(data) else data)
    layout = Layout.of(arrays, batch_sharding, microbatch_size)
    with layout.context():
        noise_key, run_key = jax.random.split(_from_the_host(key))
    tx = optimizer(mechanism, key=noise_key, pre_clipped=True)
    averages = average_decay is not None
    init = lambda params: init_state(params, tx, run_key, averages=averages)
    with layout.context():
        layout, state = layout.start(init, params)
    step = Step(
        loss_fn,
        mechanism,
        tx,
        has_frozen=frozen is not None,
        uses_key=uses_key,
        microbatch_size=microbatch_size,
        average_decay=average_decay,
        layout=layout,
    )
    runner = Runner(step, data, frozen)
    _check_noise(state.opt_state, 0)
    saved = None if checkpoints is None else _Saved(checkpoints, runner, state)
    state = saved.restore(state) if saved else state
    done, once = int(state.step), 1 if _data.is_source(data) else steps_per_call
    while done < iterations:
        before, done = done, min(done + once, iterations)
        state, losses = runner.advance(state, done - before)
        _check_noise(state.opt_state, done)
        if saved:
            saved.save(state, before, done, is_last=done == iterations)
        if callback is not None:
            told = state, done, iterations, losses, mechanism, target_delta
            callback(Progress(*told))
    epsilon = mechanism.epsilon(target_delta, iterations=done)
    return Result(state, done, epsilon, stopped_by_budget=done < mechanism.iterations)

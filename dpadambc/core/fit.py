"""The loop: its cost, its first state, and as many steps as that allows."""

import functools
import secrets
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding

from dpadambc.core import data as _data
from dpadambc.core import identity as _identity
from dpadambc.core import keys, leaves, mesh, modules, validate
from dpadambc.core.accounting import check_delta
from dpadambc.core.mechanism import Mechanism
from dpadambc.core.programs import Programs
from dpadambc.core.spending import Spending, compose, public_numbers, run_of
from dpadambc.core.step import Step, TrainState
from dpadambc.engine import rounding


class Stop(Exception):
    """An exception by which a callback ends a run, with a `Result` all the same.

    With checkpoints, the state is saved. A stop can be public or private:

    * If it depends on protected data, such as a loss, no epsilon covers it.
    * If it depends on private parameters, even by their score on public data, epsilon
      counts *all steps that might have been taken*. The epsilon of the steps that were
      taken would be too small, since a number of steps that depends on outputs is not
      public (Rogers et al. 2016): in a test, delta is 8e-5 where 1e-5 is stated.
    * If it depends on neither, such as a clock or the number of the step, say
      `Stop(is_public=True)`: epsilon counts the steps that were taken.

    Args:
      *args: the arguments of the exception.
      is_public: whether the stop depends on nothing that was learned from the data.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import dpadambc
      >>> from dpadambc import training
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.5, iterations=4,
      ...     normalize_by=4)
      >>> def stop_after_two_steps(progress):
      ...     if progress.iterations == 2:
      ...         raise training.Stop(is_public=True)
      >>> result = training.fit(
      ...     lambda w, x: w @ x, jnp.zeros(2), (jnp.ones((8, 2)),), mechanism,
      ...     optax.sgd(0.1), key=jax.random.key(0), target_delta=1e-5,
      ...     callbacks=stop_after_two_steps)
      >>> result.iterations, result.stopped_by
      (2, 'callback')
      >>> result.epsilon == mechanism.epsilon(1e-5, iterations=2)
      True

    References:
      Rogers et al., `Privacy Odometers and Filters
      <https://arxiv.org/abs/1605.08294>`_, 2016
    """

    is_public = False  # also of a subclass that does not call this

    def __init__(self, *args: Any, is_public: bool = False):
        super().__init__(*args)
        self.is_public = is_public


class Result(NamedTuple):
    """The value of `fit`: `training.Result` explains its fields."""

    state: TrainState
    iterations: int
    epsilon: float
    target_delta: float
    mechanism: Mechanism
    stopped_by: Literal["iterations", "budget", "callback"]
    resumed_from: int | None
    spent: Spending

    @property
    def params(self) -> optax.Params:
        """The last parameters."""
        return self.state.params


def fit(  # noqa: C901 - one story, from top to bottom
    loss_fn: Callable[..., jax.Array],
    params: Any,
    data: Any,
    mechanism: Mechanism,
    optimizer: optax.GradientTransformation,
    *,
    sharding: NamedSharding | None,
    key: jax.Array,
    target_delta: float,
    target_epsilon: float | None,
    affordable: Callable[..., int],
    spent: Any,
    frozen: Any,
    microbatch_size: int | Callable[..., Step] | None,
    steps_per_call: int,
    precision: rounding.Precision,
    before_steps: Callable[[int, int, float], Any],
    after_steps: Callable[..., None],
    checkpoints: Any,
    wrt: Any,
) -> Result:
    """Trains privately: see `training.fit`, which has the arguments and the guarantees.

    `sharding` is the sharding of batches, where it differs from that of the data.
    `affordable` proposes a number of steps for a budget. `before_steps` is called once,
    before the steps are compiled, with the steps that a resumed run has taken, the step
    at which this one will end, and its epsilon. `after_steps` is called after each
    call of the steps, with the fields of a `training.Progress`. `microbatch_size` may
    be a function that returns the step with the size to take.
    """
    # The arguments.
    validate.typed_key(key=key)
    validate.count(least=1, steps_per_call=steps_per_call)
    earlier = spent if type(spent) in (list, tuple) else [spent]
    if isinstance(getattr(params, "spent", None), Spending):  # a Result, or a Release
        params, earlier = params.params, [params, *earlier]
    earlier = [each for each in earlier if each is not None]
    earlier = compose(earlier) if earlier else None
    data = leaves.with_dictionaries(data)
    num_examples, is_source = _data.num_examples(data), _data.is_source(data)
    arrays = () if is_source else data
    of_batches = [sharding] if sharding else mesh.shardings_of(arrays)
    layout = mesh.layout_of(params, (frozen, arrays), of_batches, wrt)
    step = Step(
        loss_fn,
        mechanism,
        optimizer,
        microbatch_size=None if callable(microbatch_size) else microbatch_size,
        skip_padding=layout.mesh is None,
        precision=precision,
        layout=layout,
        wrt=wrt,
    )

    # The cost, before the first step.
    def epsilon_after(steps: int) -> float:
        if earlier is None:
            return mechanism.epsilon(target_delta, iterations=steps)
        return compose([earlier, (mechanism, steps)]).epsilon(target_delta)

    check_delta(target_delta, num_examples)
    iterations = mechanism.iterations
    if target_epsilon is not None:
        budget = dict(target_epsilon=target_epsilon, target_delta=target_delta)
        iterations = affordable(mechanism, **budget, spent=earlier)
    epsilon = epsilon_after(iterations)
    if target_epsilon is not None and iterations and epsilon > target_epsilon:
        raise ValueError(
            f"Expected at most target_epsilon={float(target_epsilon):g}, got"
            f" {epsilon:.4g} of {iterations} steps. Take fewer steps."
        )

    # The identity: programs, start and data.
    with mesh.on_mesh(layout):
        traced = _identity.traced_programs(step, params, frozen, data)
    numbers = public_numbers(mechanism)
    if precision is not None:  # another clip, so the batches must differ
        numbers["precision"] = str(precision)
    if wrt is not None:
        numbers["wrt"] = modules.names(params, wrt)
    identify = functools.partial(_identity.of_run, numbers, traced, earlier)
    if mesh.spans_processes(layout):
        # Before they are placed: JAX compares placed arrays too, and shows rows that
        # differ.
        settings = target_delta, iterations, epsilon, steps_per_call
        _identity.compare_processes(identify(params, frozen, data), settings)
        key = keys.the_same_everywhere(key)

    # The first state, or the state of a checkpoint.
    with mesh.on_mesh(layout):
        params, frozen = mesh.placed((params, frozen), layout)
        data = data if is_source else mesh.placed(data, layout)
        identity = identify(params, frozen, data)
        # The words of a key as a NumPy array are on no device, and equal in all
        # processes.
        words, impl = np.asarray(jax.random.key_data(key)), jax.random.key_impl(key)
        run_digest = _identity.digest(identity)
    programs = Programs(step, num_examples)
    state = programs.start(params, words, run_digest, impl)
    done, planned, least, parts, resumed_from = 0, iterations, 0, (), None
    name = secrets.token_hex(8)  # the name of this call, so that a run counts once
    if checkpoints is not None and (found := checkpoints.restore(state, identity)):
        state, notes = found
        done = resumed_from = int(state.step)
        planned, least = max(iterations, notes["planned"]), notes["least"]
        parts = tuple(map(tuple, notes["parts"]))
        if done > iterations:
            raise ValueError(
                f"Expected iterations or target_epsilon for at least {done} steps,"
                f" which the checkpoint has taken and paid for, got {iterations}."
            )

    def parts_at(step: int) -> tuple[tuple[str, int], ...]:
        return parts if parts and parts[-1][1] >= step else (*parts, (name, step))

    def save() -> None:
        notes = {"planned": planned, "least": least, "parts": parts_at(done)}
        if checkpoints is not None:
            checkpoints.save(state, identity, notes)

    before_steps(done, iterations, epsilon)

    def examples_of(state: TrainState) -> Any:
        return _data.fetch(data, programs.batch(state), layout) if is_source else data

    if callable(microbatch_size):
        step = microbatch_size(step, num_examples, state, frozen, examples_of)
    if step.microbatch_size != programs.step.microbatch_size:
        programs = Programs(step, num_examples)
        if resumed_from is None:  # the sampling key depends on the microbatch size
            state = programs.start(params, words, run_digest, impl)
    if resumed_from is None:  # the name of the run is known from before the first step
        save()  # from before the first step on, the name of the run is known

    # The steps.
    stop: Stop | None = None
    while done < iterations and stop is None:
        before, examples = done, examples_of(state)
        done = min(done + (1 if is_source else steps_per_call), iterations)
        steps = programs.steps(state, frozen, examples, iterations=done - before)
        state, seen = steps(state, frozen, examples)
        state, seen = mesh.block_on_cpu((state, seen), layout)
        is_due = checkpoints is not None and checkpoints.is_due(before, done)
        try:
            after_steps(done, iterations, done - before, seen, state, epsilon_after)
        except Stop as raised:
            stop = raised
            # All steps that might have been taken count, unless the stop is public.
            planned = max(done, least) if stop.is_public else planned
            least = planned
        except KeyboardInterrupt:
            is_due = True
            raise
        finally:  # where a callback fails, the step is taken all the same
            if is_due or stop is not None or done == iterations:
                save()

    own = Spending((run_of(mechanism, planned, parts_at(done)),))
    by_itself = "iterations" if done == mechanism.iterations else "budget"
    return Result(
        state=state,
        iterations=done,
        epsilon=epsilon if planned == iterations else epsilon_after(planned),
        target_delta=target_delta,
        mechanism=mechanism,
        stopped_by=by_itself if stop is None else "callback",
        resumed_from=resumed_from,
        spent=own if earlier is None else compose([earlier, own]),
    )

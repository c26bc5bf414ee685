"""The loop: as many steps as the budget allows, saved and told about on the way."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding

from dpadambc.core import data as _data
from dpadambc.core import identity as _identity
from dpadambc.core import validate
from dpadambc.core.account import Account, Spent, earlier
from dpadambc.core.accounting import check_delta
from dpadambc.core.keys import of_this_process, the_same_everywhere
from dpadambc.core.mechanism import Mechanism
from dpadambc.core.result import Progress, Result
from dpadambc.core.spending import affordable_iterations
from dpadambc.core.state import TrainState
from dpadambc.core.step import Step
from dpadambc.training import _checks, _memory
from dpadambc.training._history import History
from dpadambc.training._memory import MicrobatchSize
from dpadambc.training._run import Checkpoints, Run
from dpadambc.training._runner import Runner
from dpadambc.training._shardings import Shardings
from dpadambc.training.release import Release


def _account_of(
    mechanism: Mechanism, data: Any, target_delta: float, spent: Spent
) -> Account:
    """What will be spent; raises where the mechanism is not for these data."""
    num_examples = _data.num_examples(data)
    check_delta(target_delta, num_examples)
    _checks.mechanism_of(mechanism, num_examples)
    account = Account(mechanism, target_delta, earlier(spent))
    account.spending(0)  # raises here rather than after the last step
    return account


def _start_of(params: Any, spent: Spent) -> tuple[optax.Params, Spent]:
    """The parameters to begin with, and what they and earlier runs have cost."""
    if not isinstance(params, Result | Release):
        return params, spent
    several = spent if type(spent) in (list, tuple) else [spent]
    found = params.state.params if isinstance(params, Result) else params.params
    return found, [params, *(x for x in several if x is not None)]


def _planned(account: Account, target_epsilon: float | None) -> tuple[int, float]:
    """How many steps to take, and what is spent when they are taken."""
    iterations = account.mechanism.iterations
    if target_epsilon is not None:
        iterations = affordable_iterations(
            account.mechanism,
            target_epsilon=target_epsilon,
            target_delta=account.target_delta,
            spent=account.earlier,
        )
        if iterations == 0 < account.mechanism.iterations:
            before = "" if account.earlier is None else " with what was spent before"
            raise ValueError(
                "Expected a budget for at least one step, which costs epsilon"
                f" {account.epsilon(1):.4g}{before}, got"
                f" target_epsilon={target_epsilon:g}."
            )
    return iterations, account.epsilon(iterations)


def _set_up(
    step: Step,
    params: optax.Params,
    frozen: Any,
    data: Any,
    key: jax.Array,
    batch_sharding: NamedSharding | None,
    account: Account,
    settings: tuple[Any, ...],
    *,
    is_saved: bool,
) -> tuple[Runner, TrainState, _identity.Identity]:
    """The compiled steps, the first state, and what tells the run from others."""
    trees = (params, frozen, None if _data.is_source(data) else data)
    shardings = Shardings.of(trees, batch_sharding, step.microbatch_size)
    with shardings.context():
        programs = _checks.programs_of(step, params, frozen, data, is_saved=is_saved)
    of_run = functools.partial(_identity.of_run, step.mechanism, programs)
    identity = None
    if shardings.spans_processes:
        # Before they are placed: JAX compares them too, and shows the rows that differ.
        identity = of_run(params, frozen, data, account.earlier)
        _identity.refuse_different_processes(identity, settings)
        key = the_same_everywhere(key)
    with shardings.context():
        key = of_this_process(key)
        params, frozen = map(shardings.device_put, (params, frozen))
        data = data if _data.is_source(data) else shardings.device_put(data)
        if identity is None:
            identity = of_run(params, frozen, data, account.earlier)
        shardings = shardings.of_state(functools.partial(step.init, key=key), params)
    step = dataclasses.replace(
        step, shardings=shardings, skip_padding=shardings.mesh is None
    )
    runner = Runner(step, data, frozen)
    start = runner.start(params, key)
    start = runner.with_batches_of(start, _identity.digest(identity))
    return runner, start, identity


def fit(
    loss_fn: Callable[..., jax.Array],
    params: optax.Params,
    data: Any,
    mechanism: Mechanism,
    optimizer: optax.GradientTransformation,
    *,
    key: jax.Array,
    target_delta: float,
    target_epsilon: float | None = None,
    spent: Spent = None,
    frozen: Any = None,
    uses_key: bool = False,
    microbatch_size: MicrobatchSize = "auto",
    average_decay: float | None = None,
    steps_per_call: int = 1,
    batch_sharding: NamedSharding | None = None,
    eval_fn: Callable[[optax.Params], Any] | None = None,
    eval_every: int | None = None,
    history_file: str | pathlib.Path | None = None,
    callback: Callable[[Progress], Any] | None = None,
    checkpoints: Checkpoints | None = None,
) -> Result:
    """Trains privately, for the iterations of the mechanism or as far as a budget goes.

    The mechanism draws every batch. `fit` clips the gradient of each example and adds
    noise of the mechanism's level to the sum. The optimizer gets this private gradient,
    so it may be any, and may keep any state. The epsilon returned covers the steps that
    might be taken, on top of what earlier runs on the same people's data `spent`. It is
    computed before the first step.

    The state after a step follows from the arguments and the number of steps alone. So
    a run that resumes from a checkpoint, on the same devices and with as many steps per
    call, ends with the same bits. On other devices the steps that were not saved are
    taken anew, with gradients that differ by rounding and noise of their own: if what
    came of them before was published, it counts besides.

    Guarantees:
      * Every coordinate of `params` gets noise of the mechanism's level in every step,
        whatever the optimizer is. The optimizer's state and updates are functions of
        gradients with this noise.
      * With `target_epsilon`, the step that would exceed it is not taken.
      * A run that begins with a `Result` or a `Release` spends on top of it. Plain
        parameters do not say where they come from: name earlier runs by `spent`. A run
        counts once, however often it is given; two ways on from one checkpoint are two.
      * The noise, the batches and the loss have keys of their own, made from `key` in a
        domain of theirs: what else is drawn with it shows nothing of them. Runs with
        one key have independent noise wherever their sums differ, and batches of their
        own, unless mechanism, loss, optimizer, start, `frozen`, data and `spent` are
        the same: checksums of these, of a source its length and first example, are
        folded into the key of the batches, and `draw_batch` has more. Processes of one
        run take the key of the first, and compare these checksums; a run that is alone
        in its process does not communicate.
      * The state has no losses, norms or gradients before the noise. They reach the
        callback alone, as `Progress.loss`, which is *not private*.
      * A checkpoint goes on with its own keys, and is refused by a run in which one of
        the above is another; a program that calls back to the host is refused with
        checkpoints. More iterations or a larger budget are no difference: a run that is
        done, or that a callback stopped, goes on with them, and its epsilon counts all
        of them once; with fewer than were planned, it counts the planned ones. The
        schedule of the noise must be the same as a whole: one that is stretched over
        more iterations is refused.
      * On any number of devices, what is added to the sum of all examples is one draw.
        Sums that differ by rounding, as on other devices, have other draws.

    A second run is not compiled again if it has the same `loss_fn` and `optimizer` (the
    same objects: `optax.adam(1e-3)` called twice makes two), equal options, shapes and
    shardings, and an equal mechanism; the budget may differ, where the calls have as
    many steps. The programs of eight steps are kept, with the arrays that their
    functions close over. As with `jax.jit`, a compiled program may keep the old value
    of what a function reads besides its arguments, but never of the noise, such as a
    schedule. To compile less in another process, set JAX's `jax_compilation_cache_dir`.
    It holds no keys and no data, unless the loss closes over them.

    Args:
      loss_fn: the loss of one example, of `(params, *example)`; with `frozen`, of
        `(params, frozen, *example)`; with `uses_key`, a key comes last.
      params: what is trained: any pytree of floating-point arrays, such as Linen's
        parameters, `nnx.split`'s state, the arrays of an Equinox module, or adapters;
        or the `Result` or `Release` of an earlier run on the same people's data.
      data: a tuple of the arguments of an example, pytrees of arrays with the examples
        along axis 0; or a dictionary of such, which is one argument; or a source with
        `__len__` and `__getitem__` that returns a tuple or a dictionary of one example.
      mechanism: the public numbers.
      optimizer: any Optax transformation of the private gradient: `optax.adam(1e-3)`,
        `dpadambc.adam_bc(1e-3, mechanism)`, with `optax.masked`,
        `optax.multi_transform`, `optax.MultiSteps` or others around it. Not `dp_adam`
        and the like, which would clip and add noise once more.
      key: a typed key; secret. See `secret_key`.
      target_delta: for epsilon.
      target_epsilon: a budget, of this run and what was `spent` before; by default all
        iterations of the mechanism are run.
      spent: earlier runs on the same people's data, whether or not this one begins with
        what they returned: a `Result`, a `Release`, a mechanism, what
        `accounting.compose` returns, or a list of these and of
        `(mechanism, steps)`. Epsilon is of all of them together. The steps that a
        checkpoint has taken are counted anyway, and are not to be given.
      frozen: a pytree that the loss reads and that is not trained.
      uses_key: whether the loss takes a key: for dropout, one for each example.
      microbatch_size: how many examples are in memory at once; None is all of them.
        "auto" is the largest number with which a step, as compiled, takes nine tenths
        of a device's memory at most; a few are compiled to find it. Where the devices
        do not state their memory, as a CPU does not, it is all of them. Another number
        rounds otherwise, and so draws other noise. On one device, microbatches of
        padding alone are left out, so the time of a step tells how many examples it
        drew. Epsilon covers what is released, not the time. If somebody sees the time,
        use `Step`, which computes all microbatches by default.
      average_decay: of a moving average of the parameters; none by default.
      steps_per_call: how many steps are compiled into one call, where the data are
        arrays. Where they round otherwise, other noise is drawn.
      batch_sharding: the sharding of each batch along axis 0, such as
        `NamedSharding(mesh, PartitionSpec("data"))`. Place the parameters with the
        sharding you want (`fully_sharded` makes one); arrays on no mesh are replicated.
        Moments have the shardings of the parameters, and so has the state returned, on
        the same mesh with axes of type `AxisType.Auto`.
      eval_fn: called with the parameters; returns a number, or several by name, for the
        history. On data that need no protection it costs nothing. What it says of
        protected data is not covered by epsilon, and neither is a choice made by it. An
        error in it ends the run without a `Result`; after the last step it is a
        warning, since the run has spent its epsilon.
      eval_every: after how many steps a record is made and `eval_fn` called; by default
        after the last alone.
      history_file: to which the records are written as JSON lines, as they come.
      callback: called with the `Progress` after every call of the compiled steps, which
        may still be computing; it may keep a copy of the parameters, or raise `Stop`.
      checkpoints: where to go on from, and to save to.

    Returns:
      A `Result`.

    Raises:
      TypeError: if the data, the mechanism, the optimizer or the key are not what they
        should be.
      ValueError: if not even one step is within the budget, a number is out of its
        range, such as a delta of 1 / num_examples or more, a checkpoint is of another
        run, the optimizer adds noise, the loss gathers members of subgraphs and the
        mechanism is not of nodes, or not of as many terms as a node is in, `spent` is
        under another neighboring relation, or the processes of one run differ in more
        than the key.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> from dpadambc import training
      >>> x = jax.random.normal(jax.random.key(0), (1_000, 3))
      >>> data = x, x @ jnp.array([1.0, -2.0, 3.0])
      >>> mechanism = dpadambc.PoissonGaussian.calibrate(
      ...     target_epsilon=3.0, target_delta=1e-5, sampling_prob=0.2, iterations=200,
      ...     l2_clip_norm=1.0, normalize_by=200)
      >>> result = training.fit(
      ...     lambda w, x, y: (w @ x - y) ** 2, jnp.zeros(3), data, mechanism,
      ...     dpadambc.adam_bc(0.05, mechanism), key=jax.random.key(1),
      ...     target_delta=1e-5, steps_per_call=50)
      >>> print(result.state.params.round(0), f"{result.epsilon:.2f}")
      [ 1. -2.  3.] 3.00
    """
    validate.typed_key(key=key)
    validate.count(least=1, steps_per_call=steps_per_call)
    if callback is not None:
        validate.function(callback=callback)
    if isinstance(checkpoints, str | pathlib.Path):
        raise TypeError(
            f"Expected checkpoints to be training.Checkpoints, got {checkpoints!r}."
            f" Give training.Checkpoints({str(checkpoints)!r})."
        )
    params, spent = _start_of(params, spent)
    account = _account_of(mechanism, data, target_delta, spent)
    # Before the first step, since a failure here must not cost the model.
    iterations, epsilon = _planned(account, target_epsilon)
    history = History(eval_fn, eval_every, history_file)
    step = Step(
        loss_fn,
        mechanism,
        optimizer,
        has_frozen=frozen is not None,
        uses_key=uses_key,
        microbatch_size=_memory.check(microbatch_size),
        average_decay=average_decay,
    )
    steps_per_call = 1 if _data.is_source(data) else steps_per_call
    settings = target_delta, iterations, epsilon, steps_per_call, average_decay
    runner, start, identity = _set_up(
        *(step, params, frozen, data, key, batch_sharding, account, settings),
        is_saved=checkpoints is not None,
    )
    run = Run(
        runner=_memory.planned(runner, start, microbatch_size),
        start=start,
        identity=identity,
        account=account,
        checkpoints=checkpoints,
        history=history,
        callback=callback,
        iterations=iterations,
        epsilon=epsilon,
    )
    return run.to_the_end(steps_per_call)

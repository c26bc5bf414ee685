"""`fit` with progress output, and a result with a privacy statement."""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import optax
from jax import core

from dpadambc.accounting.affordable import affordable_iterations
from dpadambc.core import fit as _fit
from dpadambc.core import validate
from dpadambc.core.mechanism import Mechanism
from dpadambc.core.spending import Spending, compose
from dpadambc.engine import rounding
from dpadambc.mechanisms import names
from dpadambc.training import interrupts, microbatches, statement
from dpadambc.training.callbacks import Callback, Progress
from dpadambc.training.sharding import Sharded


class Result(_fit.Result):
    """The value of `fit`. It prints as a statement of its privacy, for a model card.

    Attributes:
      state: the last state; *secret*, for its keys.
      iterations: the number of steps taken, those before a resumption included.
      epsilon: the epsilon spent at target_delta, by this run and the runs in `spent`.
        After a `Stop` that is not public, it counts all steps that might have been
        taken.
      target_delta: the delta of this epsilon.
      mechanism: the mechanism that drew the batches and set the noise.
      stopped_by: "iterations", "budget" or "callback".
      resumed_from: the step of the checkpoint that it went on from, or None.
      spent: this run and those before it, for the `spent` of the next run.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        """Shows the public numbers, without parameters and keys."""
        return (
            f"Result(iterations={self.iterations}, epsilon={self.epsilon:.4g},"
            f" target_delta={self.target_delta:g}, stopped_by={self.stopped_by!r},"
            f" mechanism={self.mechanism!r})"
        )

    def epsilon_of_this_run(self) -> float:
        """Computes the epsilon of this run as the only one on these people's data."""
        counted = self.spent.runs[-1].steps
        return self.mechanism.epsilon(self.target_delta, iterations=counted)

    def __str__(self) -> str:
        """Returns a paragraph for a model card, of public numbers."""
        return statement.of_result(self)


def _bars(progress: bool, callbacks: Sequence[Callback]) -> list[Any]:
    """Returns the progress bars among the callbacks, or on a terminal a new one."""
    try:
        from dpadambc.training import progress as bars
    except ModuleNotFoundError:
        return []
    given = [x for x in callbacks if isinstance(x, bars.ProgressBar)]
    return given or [bars.on_stderr()] * (progress and sys.stderr.isatty())


def _affordable(mechanism: Mechanism, spent: Spending | None, **budget: float) -> int:
    """Returns the number of steps within a budget; raises if it has room for none."""
    iterations = affordable_iterations(mechanism, spent=spent, **budget)
    if not iterations:
        one = compose([each for each in (spent, (mechanism, 1)) if each is not None])
        raise ValueError(
            "Expected target_epsilon for at least one step, which makes epsilon"
            f" {one.epsilon(budget['target_delta']):.4g} together with spent, got"
            f" {budget['target_epsilon']:g}."
        )
    return iterations


@names.explained
def fit(  # noqa: C901 - one story, from top to bottom
    loss_fn: Callable[..., jax.Array],
    params: Any,
    data: Any,
    mechanism: Mechanism,
    optimizer: optax.GradientTransformation,
    *,
    key: jax.Array,
    target_delta: float,
    target_epsilon: float | None = None,
    spent: Any = None,
    frozen: Any = None,
    microbatch_size: int | Literal["auto"] | None = "auto",
    steps_per_call: int = 1,
    precision: rounding.Precision = None,
    callbacks: Callback | Sequence[Callback] = (),
    checkpoints: Any = None,
    wrt: Any = None,
    progress: bool = True,
) -> Result:
    """Trains privately, for the iterations of the mechanism or as far as a budget goes.

    The mechanism draws every batch; `fit` clips the gradient of each example, adds
    noise to the sum, and gives it to the optimizer. The guide on runs has the reasons.

    Guarantees:
      * Every coordinate gets noise of the mechanism's level in every step. Parameters
        and the optimizer's state are functions of noised gradients alone.
      * Epsilon covers all steps that might be taken, on top of `spent`, and is computed
        before the first. A step that would exceed `target_epsilon` is not taken.
      * Runs with one key have different noise and batches wherever they differ. A
        repetition needs a new key: equal results reveal that sums are equal. A run that
        is resumed on the same devices ends with the same bits.

    Args:
      loss_fn: the loss of one example, of `(params, *example)`; with `frozen`, of
        `(params, frozen, *example)`. If it has a keyword-only parameter `key`, each
        example gets its own, for dropout.
      params: any pytree of floating-point arrays; or the `Result` or `Release` of an
        earlier run on the same people's data, whose cost is counted. Of a module of
        Flax NNX, its `nnx.Param` are trained, and the rest stays as it is.
      data: a tuple of the arguments of an example, or a mapping, which is one, with
        arrays that have the examples along axis 0; or a source with `__len__` and
        `__getitem__` that returns one example. `Sharded` splits its batches.
      mechanism: the public numbers.
      optimizer: any Optax transformation of the private gradient.
      key: a typed key; secret. See `secret_key`.
      target_delta: the delta of epsilon.
      target_epsilon: a budget of this run and of `spent`; all steps by default.
      spent: earlier runs on the same people's data: a `Result`, a `Release`, a
        `Spending`, a mechanism, or a list of these and of `(mechanism, steps)`.
      frozen: a pytree that is not trained.
      microbatch_size: how many examples are in memory at once; None for all, "auto" for
        the most with which a step fits into the memory that the devices state.
      steps_per_call: how many steps are compiled into one call, on arrays.
      precision: the precision of products in the clip; see `clip_per_example`.
      callbacks: one or several, each called with the `Progress` after each call. A
        callback may raise `Stop`. Epsilon does not cover its knowledge of protected
        data.
      checkpoints: `Checkpoints` to resume from and to save to.
      wrt: which variables of modules of Flax NNX are trained, a filter as for
        `nnx.grad`. The optimizer gets an `nnx.State` of them in place of a module.
      progress: whether to print on the standard error stream that the run has begun,
        with public numbers: on a terminal by a `ProgressBar`, if there is none among
        the callbacks and its extra is installed; else by one line.

    Returns:
      A `Result`, which prints as a statement of its privacy.

    Raises:
      TypeError: if an argument is of another kind.
      ValueError: if a number is out of its range, no step is within the budget, or the
        checkpoint, the optimizer or the loss does not go with the mechanism.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dpadambc import PoissonGaussian, adam_bc, training
      >>> x = jax.random.normal(jax.random.key(0), (1_000, 3))
      >>> mechanism = PoissonGaussian.calibrate(
      ...     target_epsilon=3.0, target_delta=1e-5, sampling_prob=0.2, iterations=200,
      ...     l2_clip_norm=1.0, normalize_by=200)
      >>> result = training.fit(
      ...     lambda w, x, y: (w @ x - y) ** 2, jnp.zeros(3),
      ...     (x, x @ jnp.array([1.0, -2.0, 3.0])), mechanism,
      ...     adam_bc(0.05, mechanism), key=jax.random.key(1), target_delta=1e-5,
      ...     steps_per_call=50, progress=False)
      >>> print(result.params.round(0), f"{result.epsilon:.2f}")
      [ 1. -2.  3.] 3.00
    """
    if any(isinstance(x, core.Tracer) for x in jax.tree.leaves((params, key))):
        raise TypeError(
            "Expected params and key as arrays, got some that JAX traces. Call fit"
            " outside of jax.jit: it compiles its steps itself."
        )
    callbacks = [callbacks] if callable(callbacks) else callbacks
    for each in callbacks:
        validate.function(callbacks=each)
    # Only the first of several processes prints.
    progress = progress and sys.stderr is not None and not jax.process_index()
    bars = _bars(progress, callbacks)
    all_callbacks = [*(x for x in bars if x not in callbacks), *callbacks]

    tell = functools.partial(print, file=sys.stderr, flush=True)
    compiling = threading.Timer(1.0, tell, ["dpadambc: compiling"])

    def before_steps(done: int, total: int, epsilon: float) -> None:
        for each in bars:
            each.begin(done, total, epsilon)
        if progress and not bars:
            resumed = f" from step {done:,} on" if done else ""
            tell(
                f"dpadambc: {total:,} steps{resumed},"
                f" expected batch {mechanism.normalize_by:,g},"
                f" epsilon {statement.rounded_up(epsilon)} at delta {target_delta:g}"
            )
            compiling.start()

    def after_steps(*fields: Any) -> None:
        compiling.cancel()
        now = Progress(*fields)
        for each in all_callbacks:
            if each(now) is not None:
                raise TypeError(
                    "Expected a callback to return None, got a value, which ends no"
                    " run. To stop, raise training.Stop."
                )
        if interrupted:
            raise KeyboardInterrupt(
                f"after step {now.iterations:,} of {now.total_iterations:,}. "
                + (
                    "Its parameters are lost: with checkpoints= a run can go on."
                    if checkpoints is None
                    else f"It is saved to {checkpoints}: the same call goes on."
                )
            )

    is_sharded, size = isinstance(data, Sharded), microbatch_size
    with interrupts.held() as interrupted, contextlib.ExitStack() as at_end:
        for close in (compiling.cancel, *(each.close for each in bars)):
            at_end.callback(close)
        result = _fit.fit(
            loss_fn,
            params,
            data.data if is_sharded else data,
            mechanism,
            optimizer,
            sharding=data.sharding if is_sharded else None,
            key=key,
            target_delta=target_delta,
            target_epsilon=target_epsilon,
            affordable=_affordable,
            spent=spent,
            frozen=frozen,
            microbatch_size=microbatches.with_microbatches if size == "auto" else size,
            steps_per_call=steps_per_call,
            precision=precision,
            before_steps=before_steps,
            after_steps=after_steps,
            checkpoints=checkpoints,
            wrt=wrt,
        )
    return Result(*result)

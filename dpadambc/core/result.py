"""What a run tells: while it trains, at its end, and how to end it sooner."""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpadambc.core.account import Account
from dpadambc.core.mechanism import Mechanism
from dpadambc.core.spending import Spending
from dpadambc.core.state import TrainState
from dpadambc.core.step import Seen


class Stop(Exception):
    """Raised by a callback or an `eval_fn` to end a run, with a `Result` all the same.

    With checkpoints, the state is saved. When to stop is a choice:

    * If it depends on protected data, such as a loss, no epsilon covers it.
    * If it depends on private parameters, be it by what they do on public data, epsilon
      is of *all steps that might have been taken*. That of the steps that were would be
      too small, for a number of steps that depends on what was released is no public
      number (Rogers et al. 2016): in a test, delta is 8e-5 where 1e-5 is stated.
    * If it depends on neither, such as a clock or the number of the step, say
      `Stop(is_public=True)`: epsilon is of the steps that were taken.

    Args:
      *args: of the exception.
      is_public: whether it depends on nothing that was learned from the data.

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
      ...     callback=stop_after_two_steps)
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


@jax.jit
def _copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


class Progress:
    """What a callback is told after every call of the compiled steps.

    Attributes:
      iterations: the steps taken.
      iterations_in_all: the step at which the run will end.
      seen: sums over the examples in these steps; *not private*.
      mechanism: that draws the batches and sets the noise.
      target_delta: the delta of `epsilon`.
    """

    iterations: int
    iterations_in_all: int
    seen: Seen
    mechanism: Mechanism
    target_delta: float

    def __init__(
        self,
        state: TrainState,
        seen: Seen,
        account: Account,
        iterations: int,
        iterations_in_all: int,
    ):
        self._state, self.seen, self._account = state, seen, account
        self.iterations, self.iterations_in_all = iterations, iterations_in_all
        self.mechanism, self.target_delta = account.mechanism, account.target_delta

    @functools.cached_property
    def state(self) -> TrainState:
        """A copy of the state, which later steps leave as it is; *secret*."""
        return _copied(self._state)

    @functools.cached_property
    def params(self) -> optax.Params:
        """A copy of the parameters, to keep."""
        return _copied(self._state.params)

    @property
    def loss(self) -> float:
        """Mean over the examples of these steps; *not private*. It waits for them."""
        total, count = jax.device_get(self.seen)
        return float(total) / max(int(count), 1)

    def epsilon(self) -> float:
        """What the steps so far spend, earlier runs that `fit` was told of included.

        It is not that of a snapshot which was chosen by what later steps released: such
        a choice is made of all steps, and spends what they do.

        It takes the accountant a second or so.
        """
        return self._account.epsilon(self.iterations)


class Result(NamedTuple):
    """What `fit` returns.

    Attributes:
      state: the last state; *secret*, for its keys.
      iterations: steps taken, those before a resumption too.
      epsilon: spent at target_delta, by this run and those that `spent` told of. After
        a `Stop` that is not public, that of all steps that might have been taken.
      target_delta: the delta of this epsilon.
      mechanism: that drew the batches and set the noise.
      stopped_by: "iterations", "budget" or "callback".
      history: a record for each evaluation; *not private*.
      resumed_from: the step of the checkpoint that it went on from, or None.
      spent: this run and those before it, for the `spent` of the next run.
    """

    state: TrainState
    iterations: int
    epsilon: float
    target_delta: float
    mechanism: Mechanism
    stopped_by: Literal["iterations", "budget", "callback"]
    history: list[dict[str, Any]]
    resumed_from: int | None
    spent: Spending

    def __repr__(self) -> str:
        """The public numbers, without parameters, keys and losses."""
        return (
            f"Result(iterations={self.iterations}, epsilon={self.epsilon:.4g},"
            f" target_delta={self.target_delta:g}, stopped_by={self.stopped_by!r},"
            f" mechanism={self.mechanism!r})"
        )

    def epsilon_of_this_run(self) -> float:
        """What this run would have spent as the only one on these people's data."""
        counted = self.spent.runs[-1].steps
        return self.mechanism.epsilon(self.target_delta, iterations=counted)

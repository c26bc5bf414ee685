"""A progress bar with the epsilon so far; needs `dpadambc[progress]`, for rich."""

from typing import Any, Self

from dpadambc.core import validate
from dpadambc.training.callbacks import Progress

try:
    import rich.console
    import rich.progress
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "training.progress needs rich: pip install 'dpadambc[progress]'."
    ) from error


class ProgressBar:
    """A progress bar for `training.fit`, as a callback: steps, time, epsilon and loss.

    It closes at the end of a run, even one that fails. Inside `with` it stays open from
    one run to the next.

    Args:
      updates_of_epsilon: how often in a run to compute epsilon, which takes the
        accountant about a second each time. The bar shows the step of that epsilon.
      shows_loss: whether to show the mean loss of the last steps, which is *not
        private*: only for people who may see the data.
      console: the console to print to.

    Raises:
      ValueError: if epsilon is to be computed less than once.

    Example:
      >>> import io, jax, jax.numpy as jnp, optax, rich.console
      >>> import dpadambc
      >>> from dpadambc import training
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.5, iterations=4,
      ...     normalize_by=4)
      >>> out = rich.console.Console(file=io.StringIO(), width=100)
      >>> result = training.fit(
      ...     lambda w, x: w @ x, jnp.zeros(2), (jnp.ones((8, 2)),), mechanism,
      ...     optax.sgd(0.1), key=jax.random.key(0), target_delta=1e-5,
      ...     callbacks=training.ProgressBar(console=out))
      >>> f"epsilon {result.epsilon:.2f} at step 4" in out.file.getvalue()
      True
    """

    def __init__(
        self,
        *,
        updates_of_epsilon: int = 10,
        shows_loss: bool = False,
        console: Any = None,
    ) -> None:
        validate.count(least=1, updates_of_epsilon=updates_of_epsilon)
        self._updates, self._shows_loss = updates_of_epsilon, shows_loss
        self._next, self._epsilon = 0.0, ""
        self._last = 0, 0
        self._is_kept_open = False
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("step {task.completed:.0f} of {task.total:.0f}"),
            rich.progress.BarColumn(),
            rich.progress.TimeRemainingColumn(),
            rich.progress.TextColumn("{task.description}"),
            console=console,
        )
        self._task: rich.progress.TaskID | None = None

    def __enter__(self) -> Self:
        self._is_kept_open = True
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_kept_open = False
        self.close()

    def begin(self, done: int, total: int, epsilon: float) -> None:
        """Shows a run before its first step, with the epsilon at its end."""
        self._task = self._added(total)
        self._last, self._next = (done, total), done + total / self._updates
        self._epsilon = f"epsilon {epsilon:.2f} at step {total}"
        begun = f"{self._epsilon}, compiling"
        self._bar.update(self._task, completed=done, description=begun)

    def close(self) -> None:
        """Stops the bar in its current state, unless it is inside `with`."""
        if not self._is_kept_open and self._bar.live.is_started:
            self._bar.stop()
            self._task = None

    def _added(self, total: int) -> rich.progress.TaskID:
        """Adds a line, or the first line of a bar that is opened again."""
        if not self._bar.live.is_started:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._bar.start()
        return self._bar.add_task("", total=total)

    def __call__(self, progress: Progress) -> None:
        """Shows the progress of the run."""
        done, total = progress.iterations, progress.total_iterations
        if self._task is None or done < self._last[0] or total != self._last[1]:
            self._task, self._next = self._added(total), 0
        self._last = done, total
        if done >= self._next or done == total:
            self._epsilon = f"epsilon {progress.epsilon():.2f} at step {done}"
            self._next = done + total / self._updates
        loss = f", loss {progress.loss:.4g} (not private)" if self._shows_loss else ""
        self._bar.update(self._task, completed=done, description=self._epsilon + loss)
        if done == total:
            self.close()


def on_stderr() -> ProgressBar:
    """Makes a bar for the terminal, which shows the epsilon at the end of the run."""
    console = rich.console.Console(stderr=True)
    return ProgressBar(updates_of_epsilon=1, console=console)

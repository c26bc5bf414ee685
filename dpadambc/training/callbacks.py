"""Callbacks of a run: their argument, and one that records plain numbers."""

import contextlib
import dataclasses
import functools
import json
import logging
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpadambc.core import validate
from dpadambc.core.fit import Stop
from dpadambc.core.step import Seen, TrainState

_MOST_WAITING = 1000  # calls whose losses are on the device


_copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))


@dataclasses.dataclass(repr=False)
class Progress:
    """The argument of a callback, after every call of the compiled steps.

    Attributes:
      iterations: the number of steps taken.
      total_iterations: the step at which the run will end.
      num_steps: the number of steps in this call.
      seen: sums over the examples in these steps; *not private*.
    """

    iterations: int
    total_iterations: int
    num_steps: int
    seen: Seen
    _state: TrainState
    _epsilon_after: Callable[[int], float]

    @functools.cached_property
    def state(self) -> TrainState:
        """A copy of the state, which later steps do not change; *secret*."""
        return _copied(self._state)

    @functools.cached_property
    def params(self) -> optax.Params:
        """A copy of the parameters, to keep."""
        return _copied(self._state.params)

    @property
    def loss(self) -> float:
        """The mean over the examples of these steps; *not private*. It blocks."""
        total, count = jax.device_get(self.seen)
        return float(total) / max(int(count), 1)

    def epsilon(self) -> float:
        """Computes the epsilon of the steps so far, and of the runs in `spent`.

        It does not cover a snapshot that was chosen by outputs of later steps: such a
        choice depends on all steps, and spends as much. The accountant takes a second
        or so.
        """
        return self._epsilon_after(self.iterations)


Callback = Callable[[Progress], Any]


class Evaluate:
    """A callback of `fit` that records the mean loss and the values of a function.

    A record has the `iterations`, the `seconds` since the callback was made, the
    `loss_not_private`, a mean over the examples since the last record, and the numbers
    that `eval_fn` returned. All are *not private*; `eval_fn` on data that need no
    protection costs nothing.

    An error in `eval_fn` ends the run, unless it is after the last step: by then the
    run has spent its epsilon, so the error is logged and written to the record.

    Args:
      eval_fn: a function of the parameters that returns a number, or several by name.
        It may raise `Stop`.
      every: the number of steps between records, each made after the first call that
        reaches it; by default one record after the last step.
      history_file: the file to which the first process appends records as JSON lines. A
        resumed run repeats some steps: of two records of one step, the later counts.

    Attributes:
      history: the records, one per recorded step; those of the file first.

    Raises:
      TypeError: if `eval_fn` is no function.
      ValueError: if `every` is less than one, or the file has other lines.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import dpadambc
      >>> from dpadambc import training
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.5, iterations=4,
      ...     normalize_by=4)
      >>> evaluate = training.Evaluate(lambda w: {"norm": jnp.linalg.norm(w)}, every=2)
      >>> result = training.fit(
      ...     lambda w, x: w @ x, jnp.zeros(2), (jnp.ones((8, 2)),), mechanism,
      ...     optax.sgd(0.1), key=jax.random.key(0), target_delta=1e-5,
      ...     callbacks=evaluate)
      >>> [(record["iterations"], record["norm"] > 0) for record in evaluate.history]
      [(2, True), (4, True)]
    """

    def __init__(
        self,
        eval_fn: Callable[[optax.Params], Any] | None = None,
        *,
        every: int | None = None,
        history_file: str | pathlib.Path | None = None,
    ):
        if eval_fn is not None:
            validate.function(eval_fn=eval_fn)
        if every is not None:
            validate.count(least=1, every=every)
        self._eval_fn, self._every = eval_fn, every
        self._path = None if history_file is None else pathlib.Path(history_file)
        self._started = time.perf_counter()
        self._seen: list[Seen] = []  # on the device still, since the last record
        self._loss, self._count = 0.0, 0  # fetched already
        self.history: list[dict[str, Any]] = []
        for record in [] if self._path is None else _read(self._path):
            self._add(record)

    def __call__(self, progress: Progress) -> None:
        """Counts the losses of a call, and makes a record if one is due."""
        before = progress.iterations - progress.num_steps
        self._seen.append(progress.seen)
        is_last = progress.iterations == progress.total_iterations
        every = self._every or progress.total_iterations
        is_due = is_last or before // every != progress.iterations // every
        if is_due or len(self._seen) >= _MOST_WAITING:
            several, self._seen = jax.device_get(self._seen), []
            self._loss += sum(float(seen.loss) for seen in several)
            self._count += sum(int(seen.num_examples) for seen in several)
        if is_due:
            self._record(progress, is_last)

    def _record(self, progress: Progress, is_last: bool) -> None:
        record = {
            "iterations": progress.iterations,
            "seconds": round(time.perf_counter() - self._started, 3),
            "loss_not_private": self._loss / max(self._count, 1),
        }
        self._loss, self._count = 0.0, 0
        try:
            if self._eval_fn is not None:
                record |= _named(self._eval_fn(progress.params))
        except Stop:
            raise
        except Exception as error:
            if not is_last:
                raise
            logging.getLogger("dpadambc").exception("eval_fn failed at the last step.")
            record["error"] = f"{type(error).__name__}: {error}"
        finally:
            self._add(record)
            if self._path is not None and jax.process_index() == 0:
                with self._path.open("a") as file:
                    file.write(json.dumps(record) + "\n")

    def _add(self, record: dict[str, Any]) -> None:
        earlier = (x for x in self.history if x["iterations"] < record["iterations"])
        self.history = [*earlier, record]


def _read(path: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the records in a file, and skips one that was not written to its end."""
    text = path.read_text() if path.exists() else ""
    if text and not text.endswith("\n"):
        with path.open("a") as file:
            file.write("\n")
    records = []
    for line in text.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    if not all(isinstance(x, dict) and "iterations" in x for x in records):
        raise ValueError(
            f"Expected history_file with the records of a run, got {str(path)!r}."
        )
    return records


def _named(found: Any) -> dict[str, float]:
    """Returns the numbers that an `eval_fn` returned, by name."""
    several = found if isinstance(found, Mapping) else {"eval": found}
    try:
        return {str(name): float(value) for name, value in several.items()}
    except (TypeError, ValueError):
        got = jax.tree.map(lambda x: getattr(x, "shape", type(x).__name__), several)
        raise TypeError(
            f"Expected eval_fn to return a number, or several by name, got {got}."
        ) from None

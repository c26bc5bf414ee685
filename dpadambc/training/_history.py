"""What a run was like, as records of plain numbers, written as they come."""

import contextlib
import json
import pathlib
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from dpadambc.core import validate
from dpadambc.core.result import Stop
from dpadambc.core.step import Seen

LOSS = "loss_not_private"
_MOST_WAITING = 1000  # steps whose numbers are on the device


class History:
    """The records of one run: one for each evaluation.

    Args:
      eval_fn: of the parameters; returns a number, or several by name.
      every: after how many steps.
      path: of a file of JSON lines, or None. Where it has records of steps that were
        taken before, they are kept.
    """

    def __init__(
        self,
        eval_fn: Callable[[optax.Params], Any] | None,
        every: int | None,
        path: str | pathlib.Path | None,
    ):
        if every is not None:
            validate.count(least=1, eval_every=every)
        if eval_fn is not None:
            validate.function(eval_fn=eval_fn)
        self._eval_fn, self._every = eval_fn, every
        # Of several processes, the first writes.
        self._path = None
        if path is not None and jax.process_index() == 0:
            self._path = pathlib.Path(path)
        self._seen: list[Seen] = []  # on the device still, since the last record
        self._loss, self._count = 0.0, 0  # fetched already
        self._started = 0.0
        self.records: list[dict[str, Any]] = []

    def goes_on_from(self, iterations: int | None) -> None:
        """Keeps the records of the steps taken, and forgets those to be taken again.

        Raises if there are records where a run is new, and goes on from None.
        """
        self._started = time.perf_counter()
        if self._path is None:
            return
        records = _read(self._path)
        if records and iterations is None:
            raise ValueError(
                f"Expected history_file to be new, got {str(self._path)!r}, which has"
                " the records of another run. Remove it, or give another name."
            )
        taken = iterations or 0
        self.records = [r for r in records if 0 < r["iterations"] <= taken]
        self._path.write_text("".join(map(_line, self.records)))

    def steps_until_due(self, iterations: int) -> int | None:
        """How many steps are left until a record is due; None if only the last is."""
        return self._every and self._every - iterations % self._every

    def tell(self, progress: Any, *, is_last: bool) -> None:
        """Counts the steps of a `Progress`, and records them if a record is due."""
        self._seen.append(progress.seen)
        is_due = self._every and progress.iterations % self._every == 0
        if is_last or is_due:
            self._record(progress, is_last=is_last)
        elif len(self._seen) >= _MOST_WAITING:
            self._fetch()

    def end(self, progress: Any) -> None:
        """Records the last step, if it is not recorded yet."""
        if not self.records or self.records[-1]["iterations"] != progress.iterations:
            self._record(progress, is_last=True)

    def _fetch(self) -> None:
        """Adds up what is on the device."""
        several, self._seen = jax.device_get(self._seen), []
        self._loss += sum(float(seen.loss) for seen in several)
        self._count += sum(int(seen.num_examples) for seen in several)

    def _record(self, progress: Any, *, is_last: bool) -> None:
        self._fetch()
        record: dict[str, Any] = {
            "iterations": progress.iterations,
            "seconds": round(time.perf_counter() - self._started, 3),
            LOSS: self._loss / max(self._count, 1),
        }
        self._loss, self._count = 0.0, 0
        try:
            record |= self._evaluated(progress.params, is_last)
        finally:  # it may end the run
            self.records.append(record)
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(_line(record))

    def _evaluated(self, params: optax.Params, is_last: bool) -> dict[str, float]:
        """What `eval_fn` says, if there is one; nothing if it fails at the end.

        That is no error: a run that is lost at its end has spent its epsilon.
        """
        if self._eval_fn is None:
            return {}
        try:
            return _named(self._eval_fn(params))
        except Stop:
            raise
        except Exception as error:
            if not is_last:
                raise
            warnings.warn(
                f"eval_fn raised {type(error).__name__} at the end of the run: {error}."
                " The history leaves out what it was to return.",
                stacklevel=8,  # of the call of fit
            )
            return {}


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record) + "\n"


def _read(path: pathlib.Path) -> list[dict[str, Any]]:
    """The records in a file, without one that was not written to its end."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    if not all(isinstance(r, dict) and "iterations" in r for r in records):
        raise ValueError(f"Expected records of a run in {str(path)!r}, got others.")
    return records


def _named(found: Any) -> dict[str, float]:
    """What an `eval_fn` returned, by name; raises unless these are numbers."""
    several = found if isinstance(found, Mapping) else {"eval": found}
    try:
        return {str(name): float(value) for name, value in several.items()}
    except (TypeError, ValueError):
        what = jax.tree.map(lambda x: getattr(x, "shape", type(x).__name__), several)
        raise TypeError(
            f"Expected eval_fn to return a number, or several by name, got {what}."
        ) from None

"""A run that is set up: steps, saves and records until its end."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable
from typing import Any, Protocol

from dpadambc.core.account import Account
from dpadambc.core.identity import Identity
from dpadambc.core.result import Progress, Result, Stop
from dpadambc.core.state import TrainState
from dpadambc.training._history import History
from dpadambc.training._runner import Runner

_LOGGER = logging.getLogger("dpadambc")


class Checkpoints(Protocol):
    """Where a run goes on from: see `dpadambc.training.Checkpoints`."""

    def restore(self, like: TrainState, identity: Identity) -> TrainState | None:
        """The last state saved, or None; raises unless it is of this run."""
        ...

    def is_due(self, before: int, after: int) -> bool:
        """Whether to save, having gone from so many steps to so many."""
        ...

    def save(self, state: TrainState, identity: Identity, notes: dict) -> None:
        """Saves all of a state, or nothing."""
        ...

    def notes(self) -> dict[str, Any]:
        """What was noted with the last state saved; nothing if there is none."""
        ...


@dataclasses.dataclass
class Run:
    """A run that is set up."""

    runner: Runner
    start: TrainState
    identity: Identity
    account: Account
    checkpoints: Checkpoints | None
    history: History
    callback: Callable[[Progress], Any] | None
    iterations: int
    epsilon: float  # of all iterations, and of the runs before
    planned: int = 0  # steps that might have been taken, which epsilon is of
    least: int = 0  # of these, those of an earlier stop, which count anyway

    def to_the_end(self, steps_per_call: int) -> Result:
        """All steps that are left, from the last checkpoint on."""
        now, resumed_from = self._restored()
        done, stop = int(now.step), None
        self.history.goes_on_from(resumed_from)
        if resumed_from is None:
            # From before the first step on, what the run is called is known.
            self._save(now)
        while done < self.iterations and stop is None:
            now, done, stop = self._advance(now, done, steps_per_call)
        counted, epsilon = self.planned, self.epsilon
        if counted != self.iterations:
            epsilon = self.account.epsilon(counted)
        by_budget = done < self.account.mechanism.iterations
        return Result(
            state=now,
            iterations=done,
            epsilon=epsilon,
            target_delta=self.account.target_delta,
            mechanism=self.account.mechanism,
            stopped_by=(
                "callback" if stop else "budget" if by_budget else "iterations"
            ),
            history=self.history.records,
            resumed_from=resumed_from,
            spent=self.account.spending(counted, taken=done),
        )

    def _restored(self) -> tuple[TrainState, int | None]:
        """The last state saved and its step; or the first state, and None."""
        self.planned = self.iterations
        found, notes = None, {}
        if self.checkpoints is not None:
            found = self.checkpoints.restore(self.start, self.identity)
            notes = self.checkpoints.notes()
        parts = tuple(map(tuple, notes.get("parts", ())))
        self.account = dataclasses.replace(self.account, parts=parts)
        if found is None:
            return self.start, None
        self.planned = max(self.iterations, notes.get("planned", 0))
        self.least = notes.get("least", 0)
        step = int(found.step)
        if step > self.iterations:
            raise ValueError(
                f"Expected a run of at least {step} steps, since the checkpoint has"
                f" taken and paid for as many, got {self.iterations}. Ask for more"
                " iterations, or a larger budget."
            )
        _LOGGER.warning(
            "Goes on from step %d of %d, from %r, with the keys that are there.",
            *(step, self.iterations, self.checkpoints),
        )
        return found, step

    def _save(self, state: TrainState) -> None:
        if self.checkpoints is not None:
            notes = {
                "planned": self.planned,
                "least": self.least,
                "parts": self.account.parts_at(int(state.step)),
            }
            self.checkpoints.save(state, self.identity, notes)

    def _advance(
        self, now: TrainState, done: int, most: int
    ) -> tuple[TrainState, int, Stop | None]:
        """So many steps at most, in one call; and what stops the run, if anything."""
        left = self.history.steps_until_due(done) or most
        before, done = done, done + min(most, left, self.iterations - done)
        now, seen = self.runner.advance(now, done - before)
        is_last = done == self.iterations
        is_saved = is_last or (
            self.checkpoints is not None and self.checkpoints.is_due(before, done)
        )
        stop = None
        try:
            told = Progress(now, seen, self.account, done, self.iterations)
            stop = self._tell(told, is_last)
        finally:  # where a callback fails, the step is taken all the same
            if is_saved or stop is not None:
                self._save(now)
        return now, done, stop

    def _tell(self, progress: Progress, is_last: bool) -> Stop | None:
        try:
            self.history.tell(progress, is_last=is_last)
            if self.callback is not None:
                self.callback(progress)
        except Stop as stop:
            if stop.is_public:
                self.planned = max(progress.iterations, self.least)
            self.least = self.planned
            with contextlib.suppress(Stop):
                self.history.end(progress)
            return stop
        return None

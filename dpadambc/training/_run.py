"""A run that is set up: steps, saves and records until its end."""

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import jax

from dpadambc._core import key_uses, keys
from dpadambc.training import _account, _checks, _identity, _siblings
from dpadambc.training._account import Account, Spent
from dpadambc.training._history import History
from dpadambc.training._origins import Origin
from dpadambc.training._runner import Runner
from dpadambc.training.result import Progress, Result, Stop
from dpadambc.training.state import TrainState

_LOGGER = logging.getLogger("dpadambc")


class Checkpoints(Protocol):
    """Where a run goes on from: see `dpadambc.training.Checkpoints`."""

    def restore(self, like: TrainState, identity: dict[str, Any]) -> TrainState | None:
        """The last state saved, or None; raises unless it is of this run."""
        ...

    def is_due(self, before: int, after: int) -> bool:
        """Whether to save, having gone from so many steps to so many."""
        ...

    def save(
        self, state: TrainState, identity: dict[str, Any], *, planned: int
    ) -> None:
        """Saves all of a state, or nothing."""
        ...

    def planned(self) -> int:
        """How many steps the run was to take that saved the last state; 0 if none."""
        ...


class Saved:
    """The checkpoints of one run."""

    def __init__(
        self,
        checkpoints: Checkpoints | None,
        runner: Runner,
        start: TrainState,
        key: jax.Array,
        spent: Spent,
    ):
        self._checkpoints, self._start, self._spent = checkpoints, start, spent
        self._runner, self._key, self._planned = runner, key, 0
        self._identity: dict[str, Any] = {}
        if checkpoints is not None:
            self._identity = runner.identity(start) | _identity.of_key(key)
            self._identity |= _identity.of_earlier(_account.earlier(spent))

    def restore(self, iterations: int) -> tuple[TrainState, int | None]:
        """The last state saved and its step; or the first state, and None."""
        found, self._planned = None, iterations
        if self._checkpoints is not None:
            found = self._checkpoints.restore(self._start, self._identity)
            self._planned = max(iterations, self._checkpoints.planned())
        began = self._start if found is None else found
        told = _account.tell(self._spent, began.sampling_key)
        _siblings.check_units(
            self._runner.known_as, told.keys, told.of_users, stacklevel=5
        )
        # What is refused draws nothing with its key.
        outline = self._runner.outline(self._start)
        name = key_uses.name_of(self._start.noise)
        key_uses.check(name, outline, stacklevel=5)  # of the call of fit
        if found is None:
            return self._start, None
        step = int(found.step)
        if step > iterations:
            raise ValueError(
                f"Expected a run of at least {step} steps, since the checkpoint has"
                f" taken and paid for as many, got {iterations}. Ask for more"
                " iterations, or a larger budget."
            )
        if iterations < self._planned:
            warnings.warn(
                f"The run of the checkpoint was to take {self._planned} steps, and is"
                f" asked for {iterations} now. Epsilon of so many holds only if nothing"
                " that it has released decided so; else ask for as many as before.",
                stacklevel=4,  # of the call of fit
            )
        _LOGGER.warning(
            "Goes on from step %d of %d, from %r, with the keys that are there.",
            *(step, iterations, self._checkpoints),
        )
        return found, step

    def is_due(self, before: int, after: int) -> bool:
        """Whether to save, having gone from so many steps to so many."""
        return self._checkpoints is not None and self._checkpoints.is_due(before, after)

    def save(self, state: TrainState, *, is_last: bool = False) -> None:
        """Saves all of a state, if there is where to.

        It is the last if what is public decided so: no more steps are planned then.
        """
        planned = int(state.step) if is_last else self._planned
        if self._checkpoints is not None:
            self._checkpoints.save(state, self._identity, planned=planned)


@dataclasses.dataclass
class Run:
    """A run that is set up."""

    runner: Runner
    saved: Saved
    history: History
    callback: Callable[[Progress], Any] | None
    origin: Origin  # of what it returns
    iterations: int
    epsilon: float  # of all iterations, and of the runs before
    watch: _checks.Watch = dataclasses.field(default_factory=_checks.Watch)

    @property
    def account(self) -> Account:
        """What it spends."""
        return self.origin.account

    def to_the_end(self, steps_per_call: int) -> Result:
        """All steps that are left, from the last checkpoint on."""
        now, resumed_from = self.saved.restore(self.iterations)
        done, stop = int(now.step), None
        self.history.goes_on_from(resumed_from)
        if resumed_from is None:
            # From before the first step on, what gets this noise is known.
            self.saved.save(now)
        _siblings.remember(self.runner.known_as, keys.name_of(now.sampling_key))
        while done < self.iterations and stop is None:
            now, done, stop = self._advance(now, done, steps_per_call)
        self.watch.look_back()
        account = self.account
        # Of all that might have been taken, unless what stopped it is public.
        counted = done if stop is not None and stop.is_public else self.iterations
        epsilon = self.epsilon
        if counted < self.iterations:
            epsilon = account.epsilon(counted)
        by_budget = "budget" if done < account.mechanism.iterations else "iterations"
        self.origin.remember((now.params, now.average), counted)
        return Result(
            state=now,
            iterations=done,
            epsilon=epsilon,
            target_delta=account.target_delta,
            mechanism=account.mechanism,
            stopped_by="callback" if stop is not None else by_budget,
            history=self.history.records,
            resumed_from=resumed_from,
            spent=account.spending(counted),
        )

    def _advance(
        self, now: TrainState, done: int, most: int
    ) -> tuple[TrainState, int, Stop | None]:
        """So many steps at most, in one call; and what stops the run, if anything."""
        left = self.history.steps_until_due(done) or most
        before, done = done, done + min(most, left, self.iterations - done)
        now, seen = self.runner.advance(now, done - before)
        self.watch.look(seen)
        is_last = done == self.iterations
        is_saved = is_last or self.saved.is_due(before, done)
        if is_saved:
            self.saved.save(now)
        stop = self._tell(Progress(now, seen, self, done), is_last)
        if stop is not None and not is_saved:
            self.saved.save(now, is_last=stop.is_public)
        return now, done, stop

    def _tell(self, progress: Progress, is_last: bool) -> Stop | None:
        try:
            self.history.tell(progress, is_last=is_last)
            if self.callback is not None:
                self.callback(progress)
        except Stop as stop:
            with contextlib.suppress(Stop):
                self.history.end(progress)
            return stop
        return None

"""Later steps of a run: the noise does not fade, repeat, or fall behind the data."""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.audit import draws as _drawn
from dpadambc.audit import flow as _flow
from dpadambc.audit import recorder as _recorder
from dpadambc.audit import statistics as _statistics
from dpadambc.audit import steps as _steps
from dpadambc.audit.finding import Finding, combined, within
from dpadambc.core.mechanism import Mechanism

_MOST_STEPS = 512
_MOST_VALUES = 20_000_000
_STATES = 8  # in which an example is looked at
_HEAD = 32  # numbers that are compared with those of other steps


class _Seen(NamedTuple):
    """What is kept of the noise of one crossing, step by step."""

    squares: jax.Array  # mean, shape=(steps,)
    happened: jax.Array  # bool, shape=(steps,)
    head: jax.Array  # the first numbers, shape=(steps, at most _HEAD)


class _Run:
    """A run of many steps as two programs, compiled once whatever the data."""

    def __init__(
        self,
        steps: _steps.Steps,
        crossings: list[_flow.Crossing],
        iterations: int,
    ):
        recorded = steps.recorded(crossings)
        self._start, self._iterations = steps.state, iterations
        self._length = math.ceil(iterations / _STATES)

        def advance(data, state, number):
            (_, state), records = recorded(state, steps.vary(data, number))
            return state, {path: _seen(record) for path, record in records.items()}

        self._run = jax.jit(
            lambda data, state, numbers: jax.lax.scan(
                functools.partial(advance, data), state, numbers
            )
        )

    def walk(self, data: Any) -> Iterator[tuple[Any, dict[_flow.Path, _Seen]]]:
        """A few states, up to the last, and what was seen since the one before."""
        state, numbers = self._start, jnp.arange(self._iterations)
        for first in range(0, self._iterations, self._length):
            state, seen = self._run(data, state, numbers[first : first + self._length])
            yield state, seen


def _seen(record: _recorder.Record) -> _Seen:
    return _Seen(
        jnp.mean(record.noise.astype(jnp.float32) ** 2),
        jnp.any(record.happened),
        jnp.ravel(record.noise)[:_HEAD],
    )


def _fades(
    mechanism: Mechanism,
    noise: _drawn.Noise,
    seen: dict[_flow.Path, _Seen],
    iterations: int,
) -> Finding:
    """The least level of a step, relative to the first ones and to what is claimed."""
    claims = np.array([_drawn.multiplier(mechanism, t) for t in range(iterations)])
    total, count = np.zeros(iterations), np.zeros(iterations)
    for path, drawn in noise.items():
        happened = np.asarray(seen[path].happened)
        level = drawn.stddev_at_first / claims[0] * np.maximum(claims, 1e-300)
        squares = np.asarray(seen[path].squares, float) / level**2
        size = drawn.values.shape[-1] / max(drawn.num_devices, 1)
        total += np.where(happened, size * squares, 0.0)
        count += np.where(happened, size, 0.0)
    took_place = count > 0
    total, count = (_of_windows(x[took_place]) for x in (total, count))
    levels = np.sqrt(total / count)
    errors = _statistics.spread_of_stddev(1) / np.sqrt(count)
    errors = np.hypot(errors, 1e-3)
    bound = _statistics.normal_bound(max(len(levels), 1))
    shift = (1 - levels) / errors
    worst = int(np.argmax(shift)) if len(shift) else 0
    least = float(levels[worst]) if len(levels) else 1.0
    detected = _statistics.detected(len(levels) or 1)
    power = detected * float(errors.max(initial=0.0))
    least_power = 2**0.5 * detected * float(errors.min(initial=1.0))
    return within(
        "noise of later steps",
        float(shift[worst]) if len(shift) else 0.0,
        bound,
        f"The least noise in {iterations} steps is {least:.4g} of that of the first,"
        " relative to what is claimed.",
        f"fails if one of {iterations} steps has {min(power, 1):.2g} less noise, or a"
        f" half of them {min(least_power, 1):.2g} less",
    )


def _of_windows(each: np.ndarray) -> np.ndarray:
    """Each number, and the sums of 2, 4, 8 and more in a row, up to all of them."""
    found, size = [each], 1
    while size < len(each):
        size *= 2
        found.append(np.add.reduceat(each, np.arange(0, len(each), size)))
    return np.concatenate(found)


def _repeats(
    noise: _drawn.Noise, seen: dict[_flow.Path, _Seen], iterations: int
) -> Finding:
    """Whether a step has numbers of another; copies on devices are no repetition."""
    heads = [
        np.asarray(x.head, float)[:, : noise[path].values.shape[-1]]
        for path, x in seen.items()
    ]
    happened = np.all([np.asarray(x.happened) for x in seen.values()], axis=0)
    # In one row, as of a small model a step has fewer numbers than a run.
    row = np.concatenate(heads, axis=1)[happened].ravel()
    repeated, runs = _statistics.repetitions([row])
    return within(
        "noise of later steps, repetition",
        repeated,
        2,
        f"{repeated} of {runs:,} runs of six numbers occur again in {iterations}"
        " steps.",
        "fails if three runs of six numbers occur again",
    )


def _grows(
    mechanism: Mechanism,
    noise: _drawn.Noise,
    moved: list[_drawn.Response],
    iterations: int,
) -> Finding:
    """Whether an example moves the sum further in later steps."""
    squares = [
        sum(
            float(move[path] @ move[path]) / drawn.stddev_at_first**2
            for path, drawn in noise.items()
            if drawn.stddev_at_first and move[path].size
        )
        for move in moved
    ]
    furthest = math.sqrt(max(squares, default=0.0)) * _drawn.multiplier(mechanism, 0)
    return within(
        "sensitivity of later steps",
        furthest,
        1.1,
        f"Within {iterations} steps an example moves the sum by {furthest:.4g} of what"
        " is claimed, if the noise is what it was.",
        f"fails if an example moves the sum a tenth too far after one of {_STATES}"
        f" parts of {iterations} steps",
    )


def later(
    steps: _steps.Steps,
    followed: _steps.Followed,
    mechanism: Mechanism,
    noise: _drawn.Noise,
    data: list[Any],
    factor: float,
    everybody: Any = None,
) -> Finding:
    """One run of many steps, instead of many of a few.

    Args:
      steps: the step.
      followed: its crossings.
      mechanism: that is claimed.
      noise: of the first steps, at the crossings.
      data: neighbors of the first.
      factor: how much further apart neighbors may be than these.
      everybody: data of another run, after which the neighbors are looked at too.
    """
    size = sum(drawn.values.shape[-1] for drawn in noise.values())
    most = max(_MOST_VALUES // max(size, 1), 8)
    iterations = int(min(mechanism.iterations, most, _MOST_STEPS))
    crossings = followed.crossings
    sizes = {path: drawn.values.shape[-1] for path, drawn in noise.items()}

    def movements(state):
        _, moved = _drawn.movements(steps, crossings, data, state)
        return [{p: factor * x[: sizes[p]] for p, x in move.items()} for move in moved]

    run = _Run(steps, crossings, iterations)
    moved, seen = [], []
    for state, of_some in run.walk(steps.data):
        seen.append(of_some)
        moved += movements(state)
    seen = jax.tree.map(lambda *x: np.concatenate(x), *seen)
    # What an example moves may depend on the others that were there before.
    if everybody is not None:
        for state, _ in run.walk(everybody):
            moved += movements(state)
    parts = [
        _fades(mechanism, noise, seen, iterations),
        _repeats(noise, seen, iterations),
        _grows(mechanism, noise, moved, iterations),
    ]
    return combined("noise of later steps", parts)

"""Later steps of a run: the noise does not fade, repeat, or fall behind the data."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.audit import _drawn, _flow, _statistics, _steps
from dpadambc.audit._finding import Finding, combined, within
from dpadambc.mechanisms.base import Mechanism

_MOST_STEPS = 512
_MOST_VALUES = 20_000_000
_HEAD = 32  # numbers that are compared with those of other steps


class _Seen(NamedTuple):
    """What is kept of the noise of one crossing, step by step."""

    squares: jax.Array  # mean, shape=(steps,)
    happened: jax.Array  # bool, shape=(steps,)
    head: jax.Array  # the first numbers, shape=(steps, at most _HEAD)


def _run(
    steps: _steps.Steps,
    init: _steps.Init,
    crossings: list[_flow.Crossing],
    iterations: int,
) -> tuple[Any, dict[_flow.Path, _Seen]]:
    """The state after so many steps on the first data, and what was seen on the way."""
    recorded = steps.recorded(crossings)

    def advance(state, _):
        (_, state), records = recorded(state, steps.data)
        seen = {
            path: _Seen(
                jnp.mean(record.noise.astype(jnp.float32) ** 2),
                jnp.any(record.happened),
                jnp.ravel(record.noise)[:_HEAD],
            )
            for path, record in records.items()
        }
        return state, seen

    @jax.jit
    def run(key):
        start = jax.tree.map(jnp.asarray, init(key))  # traced: it begins no run
        return jax.lax.scan(advance, start, length=iterations)

    return run(jax.random.key(0))


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
    levels = np.sqrt(total[took_place] / count[took_place])
    errors = _statistics.spread_of_stddev(1) / np.sqrt(count[took_place])
    errors = np.hypot(errors, 1e-3)
    bound = _statistics.normal_bound(max(len(levels), 1))
    shift = (1 - levels) / errors
    worst = int(np.argmax(shift)) if len(shift) else 0
    least = float(levels[worst]) if len(levels) else 1.0
    power = _statistics.detected(len(levels) or 1) * float(errors.max(initial=0.0))
    return within(
        "noise of later steps",
        float(shift[worst]) if len(shift) else 0.0,
        bound,
        f"The least noise in {iterations} steps is {least:.4g} of that of the first,"
        " relative to what is claimed.",
        f"fails if one of {iterations} steps has {min(power, 1):.2g} less noise",
    )


def _repeats(
    noise: _drawn.Noise, seen: dict[_flow.Path, _Seen], iterations: int
) -> Finding:
    """Whether a step has numbers of another; copies on devices are no repetition."""
    heads = [
        np.asarray(x.head, float)[:, : noise[path].values.shape[-1]]
        for path, x in seen.items()
    ]
    happened = np.all([np.asarray(x.happened) for x in seen.values()], axis=0)
    rows = np.concatenate(heads, axis=1)[happened]
    repeated, runs = _statistics.repetitions(list(rows))
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
    """Whether an example moves the sum further after many steps."""
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
        f"After {iterations} steps an example moves the sum by {furthest:.4g} of what"
        " is claimed, if the noise is what it was.",
        f"fails if an example moves the sum a tenth too far after {iterations} steps",
    )


def later(
    steps: _steps.Steps,
    init: _steps.Init,
    followed: _steps.Followed,
    mechanism: Mechanism,
    noise: _drawn.Noise,
    data: list[Any],
    factor: float,
) -> Finding:
    """One run of many steps, instead of many of a few.

    Args:
      steps: the step.
      init: its start.
      followed: its crossings.
      mechanism: that is claimed.
      noise: of the first steps, at the crossings.
      data: neighbors of the first.
      factor: how much further apart neighbors may be than these.
    """
    size = sum(drawn.values.shape[-1] for drawn in noise.values())
    most = max(_MOST_VALUES // max(size, 1), 8)
    iterations = int(min(mechanism.iterations, most, _MOST_STEPS))
    crossings = followed.crossings
    state, seen = _run(steps, init, crossings, iterations)
    _, moved = _drawn.movements(steps, crossings, data, state)
    moved = [{p: factor * x for p, x in move.items()} for move in moved]
    sizes = {path: drawn.values.shape[-1] for path, drawn in noise.items()}
    moved = [{p: x[: sizes[p]] for p, x in move.items()} for move in moved]
    parts = [
        _fades(mechanism, noise, seen, iterations),
        _repeats(noise, seen, iterations),
        _grows(mechanism, noise, moved, iterations),
    ]
    return combined("noise of later steps", parts)

"""Tests that the noise of later steps does not fade, repeat, or fall short."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.audit import statistics
from dpadambc.audit.draws import Measured, Noise, Response, movements, multiplier
from dpadambc.audit.finding import Finding, combined, within
from dpadambc.audit.flow import Path
from dpadambc.core.mechanism import Mechanism

_MOST_STEPS = 512
_MOST_VALUES = 20_000_000
_STATES = 8  # in which an example is tried
_HEAD = 32  # numbers to compare with those of other steps


class _Seen(NamedTuple):
    """A summary of the noise of one crossing, step by step."""

    squares: jax.Array  # mean, shape=(steps,)
    happened: jax.Array  # bool, shape=(steps,)
    head: jax.Array  # the first numbers, shape=(steps, at most _HEAD)


def later_steps(found: Measured) -> Finding:
    """Tests one run of many steps, instead of many runs of a few."""
    steps, followed, noise = found.steps, found.followed, found.noise
    sizes = {path: drawn.values.shape[-1] for path, drawn in noise.items()}
    most = max(_MOST_VALUES // max(sum(sizes.values()), 1), 8)
    iterations = int(min(found.mechanism.iterations, most, _MOST_STEPS))
    length = math.ceil(iterations / _STATES)
    recorded = steps.recorded(followed.crossings)

    @jax.jit
    def advance(data, state, numbers):
        def seen(record):
            square = jnp.mean(record.noise.astype(jnp.float32) ** 2)
            head = jnp.ravel(record.noise)[:_HEAD]
            return _Seen(square, jnp.any(record.happened), head)

        def one(state, number):
            (_, state), records = recorded(state, steps.vary(data, number))
            return state, {path: seen(record) for path, record in records.items()}

        return jax.lax.scan(one, state, numbers)

    moved: list[Response] = []

    def walk(data: Any) -> Iterator[dict[Path, _Seen]]:
        """Evaluates the neighbors in a few states, up to the last."""
        state, numbers = steps.state, jnp.arange(iterations)
        for first in range(0, iterations, length):
            state, seen = advance(data, state, numbers[first : first + length])
            yield seen
            looks = steps, followed.crossings, found.neighbors
            for move in movements(*looks, state)[1]:
                scaled = {p: found.factor * x[: sizes[p]] for p, x in move.items()}
                moved.append(scaled)

    seen = jax.tree.map(lambda *x: np.concatenate(x), *walk(steps.data))
    # The change by an example may depend on earlier examples.
    if found.everybody is not None:
        list(walk(found.everybody))
    # In one row: a step of a small model has fewer numbers than a run of six.
    happened = np.all([x.happened for x in seen.values()], axis=0)
    heads = [np.asarray(x.head, float)[:, : sizes[path]] for path, x in seen.items()]
    row = np.concatenate(heads, axis=1)[happened].ravel()
    check, where = "noise of later steps, repetition", f" in {iterations} steps"
    fading = _fading(found.mechanism, noise, seen, iterations)
    growth = _growth(found.mechanism, noise, moved, iterations)
    parts = [fading, repetition(check, [row], where), growth]
    return combined("noise of later steps", parts)


def repetition(check: str, rows: list[np.ndarray], where: str) -> Finding:
    """Tests that no run of six numbers occurs again."""
    repeated, runs = statistics.repetitions(rows)
    sentence = f"{repeated} of {runs:,} runs of six numbers occur again{where}."
    fails_if = "fails if three runs of six numbers occur again, at any scale"
    return within(check, repeated, 2, sentence, fails_if)


def _fading(
    mechanism: Mechanism, noise: Noise, seen: dict[Path, _Seen], iterations: int
) -> Finding:
    """Returns the least level of a step, relative to the first and the claim."""
    claims = np.array([multiplier(mechanism, t) for t in range(iterations)])
    total, count = np.zeros(iterations), np.zeros(iterations)
    for path, drawn in noise.items():
        level = drawn.stddev_at_first / claims[0] * np.maximum(claims, 1e-300)
        squares = np.asarray(seen[path].squares, float) / level**2
        size = drawn.values.shape[-1] / max(drawn.num_devices, 1)
        total += np.where(seen[path].happened, size * squares, 0.0)
        count += np.where(seen[path].happened, size, 0.0)
    took_place = count > 0
    total, count = (_windows(x[took_place]) for x in (total, count))
    levels = np.sqrt(total / count)
    errors = np.hypot(statistics.spread_of_stddev(1) / np.sqrt(count), 1e-3)
    shift = (1 - levels) / errors
    worst = int(np.argmax(shift)) if len(shift) else 0
    figure, least = (shift[worst], levels[worst]) if len(shift) else (0.0, 1.0)
    comparisons = len(levels) or 1
    bound = statistics.normal_bound(comparisons)
    detected = statistics.detected(comparisons)
    power = min(detected * float(errors.max(initial=0.0)), 1)
    of_half = min(2**0.5 * detected * float(errors.min(initial=1.0)), 1)
    sentence = (
        f"The least noise in {iterations} steps is {least:.4g} of that of the first,"
        " relative to the claim."
    )
    fails_if = (
        f"fails if one of {iterations} steps has {power:.2g} less noise, or a half of"
        f" them {of_half:.2g} less"
    )
    return within("noise of later steps", figure, bound, sentence, fails_if)


def _windows(each: np.ndarray) -> np.ndarray:
    """Returns each number, and the sums of 2, 4, 8 and more in a row, up to all."""
    found, size = [each], 1
    while size < len(each):
        size *= 2
        found.append(np.add.reduceat(each, np.arange(0, len(each), size)))
    return np.concatenate(found)


def _growth(
    mechanism: Mechanism, noise: Noise, moved: list[Response], iterations: int
) -> Finding:
    """Whether an example moves the sum further in later steps."""
    levels = {path: x.stddev_at_first for path, x in noise.items() if x.stddev_at_first}
    norms = [[np.linalg.norm(move[p]) / x for p, x in levels.items()] for move in moved]
    z = multiplier(mechanism, 0)
    furthest = z * float(max(map(np.linalg.norm, norms), default=0.0))
    sentence = (
        f"Within {iterations} steps an example moves the sum by {furthest:.4g} of the"
        " claimed sensitivity, if the noise is that of the first steps."
    )
    fails_if = f"fails if it moves the sum a tenth too far after 1/{_STATES} of them"
    return within("sensitivity of later steps", furthest, 1.1, sentence, fails_if)

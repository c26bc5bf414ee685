"""Measures a step's noise and the sensitivity it has to cover."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.audit.flow import Crossing, Path
from dpadambc.audit.neighbors import is_real
from dpadambc.audit.steps import Followed, Init, Steps
from dpadambc.core.mechanism import Mechanism

ITERATIONS = 3
_MOST_VALUES = 4_000_000
_MOST_RUNS = 4_096
_MOST_OF_A_START = 2_000  # numbers of an array in the first state


def multiplier(mechanism: Mechanism, step: int) -> float:
    """Returns the noise multiplier that the mechanism claims for a step."""
    z = mechanism.noise_multiplier
    value: Any = z(step) if callable(z) else z
    return float(value)


class Drawn(NamedTuple):
    """The noise of one crossing, in many runs of a few steps."""

    values: np.ndarray  # shape=(runs, steps, coordinates), float64
    happened: np.ndarray  # shape=(runs, steps), bool
    num_devices: int  # that draw in a shard_map
    start: list[np.ndarray]  # each real array of the first state, (runs, numbers)
    totals: np.ndarray  # some of its sums with the data, (runs, steps, numbers)

    def of_steps(self, span: slice) -> np.ndarray:
        """Returns the draws of some steps, of the runs that have any."""
        return self.values[:, span][self.happened[:, span]]

    @property
    def count(self) -> int:
        """The number of drawn numbers."""
        return int(self.happened.sum()) * self.values.shape[-1]

    @property
    def normalized(self) -> np.ndarray:
        """The draws in units of the standard deviation of their step."""
        steps = (self.of_steps(slice(t, t + 1)) for t in range(self.values.shape[1]))
        variances = [float(np.mean(x**2)) if x.size else 0.0 for x in steps]
        return self.values / np.sqrt([v or 1.0 for v in variances])[:, None]

    @property
    def stddev_at_first(self) -> float:
        """The root mean square in the first step, or in all if that has none."""
        found = self.of_steps(slice(0, 1))
        found = found if found.size else self.of_steps(slice(None))
        return math.sqrt(float(np.mean(found**2))) if found.size else 0.0


# The data that arrives at each crossing, flat, or its movement.
Response = dict[Path, np.ndarray]
Noise = dict[Path, Drawn]


class Measured(NamedTuple):
    """A step of a mechanism: the noise at its crossings, and the change of the data."""

    mechanism: Mechanism
    steps: Steps
    followed: Followed
    state: Any  # a state whose next step adds noise
    neighbors: list[Any]  # the others differ from the first in one example
    factor: float  # the largest distance of neighbors over that of these
    everybody: Any  # data of another run of many steps, if any
    noise: Noise
    moved: list[Response]


def draw(steps: Steps, init: Init, crossings: list[Crossing]) -> Noise:
    """Draws the noise at the crossings, over runs and steps, with separate keys."""
    recorded = steps.recorded(crossings)
    shapes = jax.eval_shape(recorded, steps.state, steps.data)[1]
    size = sum(math.prod(record.noise.shape) for record in shapes.values())
    runs = int(np.clip(_MOST_VALUES // max(1, size * ITERATIONS), 4, _MOST_RUNS))

    def one(key):
        def advance(state, number):
            (_, state), records = recorded(state, steps.vary(steps.data, number))
            some = lambda x: jnp.ravel(x)[:_MOST_OF_A_START]
            kept = lambda record: record._replace(data=(), total=some(record.total))
            return state, {path: kept(record) for path, record in records.items()}

        state = jax.tree.map(jnp.asarray, init(key))
        leaves = [x for x in jax.tree.leaves(state) if is_real(x) and x.size]
        first = [jnp.ravel(x)[:_MOST_OF_A_START] for x in leaves]
        return first, jax.lax.scan(advance, state, jnp.arange(ITERATIONS))[1]

    keys = jax.random.split(jax.random.key(7_041_776), runs)
    starts, records = jax.jit(functools.partial(jax.lax.map, one))(keys)
    starts = [np.asarray(x, float).reshape(runs, -1) for x in starts]
    with np.errstate(invalid="ignore"):  # a state may start with infinity
        starts = [x - x.mean(axis=0) for x in starts]
    rows = lambda x: np.asarray(x).reshape(runs, ITERATIONS, -1)

    def drawn(record):
        values, totals = (rows(x).astype(float) for x in (record.noise, record.total))
        num_devices = math.prod(record.happened.shape[2:])
        return Drawn(values, rows(record.happened)[..., 0], num_devices, starts, totals)

    return {path: drawn(record) for path, record in records.items()}


def once(
    noise: Noise, moved: list[Response], factor: float
) -> tuple[Noise, list[Response]]:
    """The noise, and the movements times a factor, without copies.

    Copies are devices with the same noise and the same data as the first.
    """
    noise = dict(noise)
    moved = [{path: factor * x for path, x in move.items()} for move in moved]
    for path, drawn in noise.items():
        rows = [drawn.values, *(move[path] for move in moved)]
        split = [x.reshape(*x.shape[:-1], drawn.num_devices, -1) for x in rows]
        are_equal = all(bool((x == x[..., :1, :]).all()) for x in split)
        if drawn.num_devices > 1 and are_equal:
            values, *of_first = (x[..., 0, :] for x in split)
            noise[path] = drawn._replace(values=values, num_devices=1)
            for move, first in zip(moved, of_first, strict=True):
                move[path] = first
    return noise, moved


def movements(
    steps: Steps, crossings: list[Crossing], data: list[Any], state: Any = None
) -> tuple[Any, list[Response]]:
    """Measures the changes of the data at the crossings.

    Returns:
      A state whose next step adds noise, and the differences of the other data from the
      first.
    """
    recorded = steps.recorded(crossings)
    state = steps.state if state is None else state
    for _ in range(64):  # until noise is added: not in every step of `MultiSteps`
        (_, after), records = recorded(state, data[0])
        if all(np.any(record.happened) for record in records.values()):
            break
        state = after

    def response(data):
        found = {}
        for path, record in recorded(state, data)[1].items():
            happened = bool(np.any(record.happened))  # or the product is no double
            found[path] = np.ravel(np.asarray(record.data, float)) * happened
        return found

    start, *ends = map(response, data)
    return state, [{path: end[path] - start[path] for path in start} for end in ends]

"""The noise of a step at its crossings, and what arrives there of the data."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.audit import flow as _flow
from dpadambc.audit import steps as _steps
from dpadambc.core.mechanism import Mechanism

ITERATIONS = 3
_MOST_VALUES = 4_000_000
_MOST_RUNS = 4_096


def multiplier(mechanism: Mechanism, step: int) -> float:
    """The noise multiplier that is claimed for a step."""
    z = mechanism.noise_multiplier
    value: Any = z(step) if callable(z) else z
    return float(value)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """The noise of one crossing, and what of it a dtype may have spoilt."""

    values: np.ndarray  # shape=(runs, steps, coordinates), float64
    happened: np.ndarray  # shape=(runs, steps), bool
    num_devices: int  # that draw, in a shard_map
    start: list[np.ndarray]  # of each real array of the first state, (runs, numbers)
    bits: int  # of the noise, or of its sum with the data where that has fewer

    def of_steps(self, span: slice) -> np.ndarray:
        """The draws of some steps, of the runs that have any."""
        return self.values[:, span][self.happened[:, span]]

    @property
    def count(self) -> int:
        """How many numbers were drawn."""
        return int(self.happened.sum()) * self.values.shape[-1]

    @property
    def normalized(self) -> np.ndarray:
        """The draws in units of the standard deviation of their step."""
        steps = range(self.values.shape[1])
        variances = [
            float(np.mean(found**2)) if found.size else 0.0
            for found in (self.of_steps(slice(step, step + 1)) for step in steps)
        ]
        return self.values / np.sqrt([v or 1.0 for v in variances])[:, None]

    @property
    def stddev_at_first(self) -> float:
        """Root mean square at the first step, or over all where it has none."""
        found = self.of_steps(slice(0, 1))
        found = found if found.size else self.of_steps(slice(None))
        return math.sqrt(float(np.mean(found**2))) if found.size else 0.0

    def on_one_device(self) -> "Drawn":
        """Where all devices have the same."""
        size = self.values.shape[-1] // self.num_devices
        return dataclasses.replace(self, values=self.values[..., :size], num_devices=1)


# What arrives at the crossings of the gradient, flat.
Response = dict[_flow.Path, np.ndarray]
Noise = dict[_flow.Path, Drawn]


def draw(
    steps: _steps.Steps,
    init: _steps.Init,
    crossings: list[_flow.Crossing],
) -> Noise:
    """The noise at the crossings, over runs and steps, with keys of their own."""
    recorded = steps.recorded(crossings)
    shapes = jax.eval_shape(recorded, steps.state, steps.data)[1]
    size = sum(math.prod(record.noise.shape) for record in shapes.values())
    runs = int(np.clip(_MOST_VALUES // max(1, size * ITERATIONS), 4, _MOST_RUNS))
    keys = jax.random.split(jax.random.key(7_041_776), runs)
    data = lambda number: steps.vary(steps.data, number)
    starts, records = _steps.draws(init, recorded, data, keys, ITERATIONS)
    starts = [np.asarray(x, float).reshape(runs, -1) for x in starts]
    bits = lambda record: min(
        jnp.finfo(x.dtype).bits for x in (record.noise, record.total)
    )
    return {
        path: Drawn(
            values=np.asarray(record.noise, float).reshape(runs, ITERATIONS, -1),
            happened=np.asarray(record.happened).reshape(runs, ITERATIONS, -1)[..., 0],
            num_devices=math.prod(record.happened.shape[2:]),
            bits=bits(shapes[path]),
            start=[x - x.mean(axis=0) for x in starts],
        )
        for path, record in records.items()
    }


def response(recorded: Callable[..., Any], state: Any, data: Any) -> Response:
    """What arrives at the crossings, without the noise."""
    _, records = recorded(state, data)
    return {
        path: np.ravel(np.asarray(record.data, float)) * bool(np.any(record.happened))
        for path, record in records.items()
    }


def once(noise: Noise, moved: list[Response]) -> tuple[Noise, list[Response]]:
    """Without the copies of devices that have the same noise and the same data."""

    def is_copied(path: _flow.Path, drawn: Drawn) -> bool:
        rows = [drawn.values, *(m[path] for m in moved)]
        split = [x.reshape(*x.shape[:-1], drawn.num_devices, -1) for x in rows]
        return all(bool((x == x[..., :1, :]).all()) for x in split)

    copied = {p for p, d in noise.items() if d.num_devices > 1 and is_copied(p, d)}
    sizes = {p: noise[p].values.shape[-1] // noise[p].num_devices for p in copied}
    return (
        {p: d.on_one_device() if p in copied else d for p, d in noise.items()},
        [{p: m[p][: sizes.get(p)] for p in m} for m in moved],
    )


def movements(
    steps: _steps.Steps,
    crossings: list[_flow.Crossing],
    data: list[Any],
    state: Any = None,
) -> tuple[Any, list[Response]]:
    """How far data move what arrives at the crossings, from the first of them.

    Returns:
      A state in which noise is added in the next step, and the movements.
    """
    recorded = steps.compiled(crossings)
    state, (first, *others) = steps.state if state is None else state, data
    for _ in range(64):  # until noise is added: not in every step of `MultiSteps`
        (_, after), records = recorded(state, first)
        if all(np.any(record.happened) for record in records.values()):
            break
        state = after
    start = response(recorded, state, first)
    ends = [response(recorded, state, other) for other in others]
    return state, [{path: end[path] - start[path] for path in start} for end in ends]

"""A pipeline's step, traced and replayed: which noise makes private what it keeps."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.audit import _flow, _neighbors, _noise, _recorder, _statistics, _steps
from dpadambc.audit.pipeline import Pipeline
from dpadambc.clipping.flat import NeighboringRelation

# By how much noise may be too small before it counts as none: a dropout mask or an
# augmentation that is added is not the mechanism's noise.
_NOT_THE_NOISE = 100.0

_Data = tuple[_neighbors.Batch, Any]  # a batch, and its padding mask


@dataclasses.dataclass(frozen=True)
class Examined:
    """What the checks of a whole step share."""

    pipeline: Pipeline
    steps: _steps.Steps
    followed: _steps.Followed
    state: Any  # one in which noise is added in the next step
    neighbors: list[_Data]
    noise: _noise.Noise
    moved: list[_noise.Response]

    @property
    def before_noise(self) -> Callable[..., list[jax.Array]]:
        """A function of the state and a batch: what the noise is added to.

        It is in units of that noise, and takes a mask if the step does.
        """
        if self.pipeline.takes_mask:
            return self._before_noise
        return lambda state, *batch: self._before_noise(state, *batch)

    def _before_noise(
        self, state: Any, *batch: Any, is_padding_example: Any = None
    ) -> list[jax.Array]:
        mask = is_padding_example
        mask = jnp.zeros(_rows(batch), bool) if mask is None else jnp.asarray(mask)
        steps = self.steps
        if _rows(batch) != _rows(self.pipeline.batch):
            steps = _steps.Steps(_step_of(self.pipeline), state, (batch, mask))
        followed = steps.follow(self.followed.ignored)
        _, records = steps.recorded(followed.crossings)(state, (batch, mask))
        found = zip(records.values(), self._drawn, self._levels, strict=True)
        return [_once(record, drawn) / level for record, drawn, level in found]

    @property
    def _levels(self) -> list[float]:
        """Of the noise at each crossing; one for all where they do not differ."""
        levels = [_stddev(drawn) for drawn in self.noise.values()]
        counts = [
            drawn.happened.sum() * drawn.values.shape[-1] for drawn in self._drawn
        ]
        together = math.sqrt(np.average(np.square(levels), weights=counts))
        spreads = [_statistics.spread_of_stddev(count) for count in counts]
        is_one = all(
            abs(level / together - 1) < _statistics.normal_bound(len(levels)) * spread
            for level, spread in zip(levels, spreads, strict=True)
        )
        return [together for _ in levels] if is_one else levels

    @property
    def _drawn(self) -> list[_noise.Drawn]:
        return list(self.noise.values())

    @property
    def bound(self) -> float:
        """On what `before_noise` may move, and chance in the level of the noise."""
        count = sum(d.happened.sum() * d.values.shape[-1] for d in self._drawn)
        spread = _statistics.spread_of_stddev(int(count))
        allowance = 1 + _statistics.normal_bound() * spread
        return allowance / _noise.multiplier(self.pipeline.mechanism, 0)


def _once(record: _recorder.Record, drawn: _noise.Drawn) -> jax.Array:
    """What arrives at a crossing, of one device where all have the same."""
    is_copied = record.happened.ndim and drawn.num_devices == 1
    return record.data[0] if is_copied else record.data


def _stddev(noise: _noise.Drawn) -> float:
    found = noise.of_steps(slice(0, 1))
    if not found.size:
        found = noise.of_steps(slice(None))
    return float(np.sqrt(np.mean(found**2))) or 1e-30


def _rows(batch: Any) -> int:
    return jax.tree.leaves(batch)[0].shape[0]


def _step_of(pipeline: Pipeline) -> _steps.Step:
    def step(state, data):
        batch, mask = data
        options = {"is_padding_example": mask} if pipeline.takes_mask else {}
        return (), pipeline.step(state, *batch, **options)

    return step


def _neighbors_of(pipeline: Pipeline) -> tuple[list[_Data], float]:
    """Batches that differ in one example from the first of them.

    The first has none, where a step can be told so. Then the others have one; else the
    first example of each is another.

    Returns:
      The batches, and how much further apart neighbors may be than they are.
    """
    batch, size = pipeline.batch, _rows(pipeline.batch)
    row = _neighbors.row_of(batch, 0)
    scaled = [
        _neighbors.on_numbers(lambda x, f=f: f * x.astype(float), row)
        for f in _neighbors.HUGE
    ]
    rows = [row, *(scaled if _neighbors.has_numbers(batch) else [])]
    relation = pipeline.mechanism.neighboring_relation
    replaces = relation is NeighboringRelation.REPLACE_ONE
    if pipeline.takes_mask:
        first = batch, jnp.ones(size, bool)
        alone, factor = jnp.arange(size) != 0, 2.0 if replaces else 1.0
    else:
        opposite = _neighbors.on_numbers(jnp.negative, row)
        first = _neighbors.with_row(batch, 0, opposite), jnp.zeros(size, bool)
        alone, factor = jnp.zeros(size, bool), 1.0 if replaces else 0.5
    others = [(_neighbors.with_row(batch, 0, r), alone) for r in rows]
    return [first, *others], factor


def examine(pipeline: Pipeline) -> Examined:
    """Traces the step, and finds the additions of noise that are large enough.

    Raises:
      NotTraceable: if JAX cannot trace the step.
      NotRecordable: if noise is added where it cannot be taken out.
    """
    step, (neighbors, factor) = _step_of(pipeline), _neighbors_of(pipeline)
    state = _steps.start(pipeline.init)
    steps = _steps.Steps(step, state, neighbors[0])
    ignored: frozenset[_flow.Path] = frozenset()
    while True:
        followed = steps.follow(ignored)
        if not followed.crossings:
            return Examined(pipeline, steps, followed, state, neighbors, {}, [])
        crossings = followed.crossings
        ready, moved = _noise.movements(steps, crossings, neighbors)
        moved = [{path: factor * x for path, x in move.items()} for move in moved]
        noise = _noise.draw(steps, pipeline.init, crossings)
        small = frozenset(
            _recorder.crossing_of(path)
            for path in noise
            if _is_too_small(pipeline, noise[path], path, moved)
        )
        if not small or not steps.follow(ignored | small).crossings:
            noise, moved = _noise.once(noise, moved)
            return Examined(pipeline, steps, followed, ready, neighbors, noise, moved)
        ignored |= small


def _is_too_small(
    pipeline: Pipeline,
    noise: _noise.Drawn,
    path: _flow.Path,
    moved: list[_noise.Response],
) -> bool:
    """Whether what is added is not the noise of a mechanism at all."""
    z = _noise.multiplier(pipeline.mechanism, 0)
    furthest = max(float(np.linalg.norm(move[path])) for move in moved)
    return not furthest * z <= _NOT_THE_NOISE * _stddev(noise)

"""A pipeline's step, traced and replayed: which noise makes private what it keeps."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.audit import draws as _drawn
from dpadambc.audit import flow as _flow
from dpadambc.audit import neighbors as _neighbors
from dpadambc.audit import recorder as _recorder
from dpadambc.audit import statistics as _statistics
from dpadambc.audit import steps as _steps
from dpadambc.audit.pipeline import Pipeline
from dpadambc.core.clip import NeighboringRelation

# By how much noise may be too small before it counts as none: a dropout mask or an
# augmentation that is added is not the mechanism's noise.
_NOT_THE_NOISE = 100.0
_MOST_CROSSINGS = 64  # that are left out one by one

_Data = tuple[_neighbors.Batch, Any]  # a batch, and its padding mask


@dataclasses.dataclass(frozen=True)
class Examined:
    """What the checks of a whole step share."""

    pipeline: Pipeline
    steps: _steps.Steps
    followed: _steps.Followed
    state: Any  # one in which noise is added in the next step
    neighbors: list[_Data]
    factor: float  # how much further apart neighbors may be than these
    noise: _drawn.Noise
    moved: list[_drawn.Response]

    @property
    def everybody(self) -> _Data | None:
        """The batch with all its examples, where the first neighbor has none."""
        if not self.pipeline.takes_mask:
            return None
        return self.pipeline.batch, jnp.zeros(_rows(self.pipeline.batch), bool)

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
        levels = self._levels
        return [
            _once(record, self.noise[path]) / levels[path]
            for path, record in records.items()
        ]

    @property
    def _levels(self) -> dict[_flow.Path, float]:
        """Of the noise at each crossing; one for all where they do not differ."""
        levels = {path: _stddev(drawn) for path, drawn in self.noise.items()}
        counts = {path: drawn.count for path, drawn in self.noise.items()}
        squares = sum(counts[path] * level**2 for path, level in levels.items())
        together = math.sqrt(squares / max(sum(counts.values()), 1))
        bound = _statistics.normal_bound(len(levels))
        is_one = all(
            abs(level / together - 1)
            < bound * _statistics.spread_of_stddev(counts[path])
            for path, level in levels.items()
            if counts[path]
        )
        return dict.fromkeys(levels, together) if is_one else levels

    @property
    def bound(self) -> float:
        """On what `before_noise` may move, and chance in the level of the noise."""
        count = sum(drawn.count for drawn in self.noise.values())
        spread = _statistics.spread_of_stddev(int(count))
        allowance = 1 + _statistics.normal_bound() * spread
        return allowance / _drawn.multiplier(self.pipeline.mechanism, 0)


def _once(record: _recorder.Record, drawn: _drawn.Drawn) -> jax.Array:
    """What arrives at a crossing, of one device where all have the same."""
    is_copied = record.happened.ndim and drawn.num_devices == 1
    return record.data[0] if is_copied else record.data


def _stddev(noise: _drawn.Drawn) -> float:
    return noise.stddev_at_first or 1e-30


def _rows(batch: Any) -> int:
    return jax.tree.leaves(batch)[0].shape[0]


def _step_of(pipeline: Pipeline) -> _steps.Step:
    def step(state, data):
        batch, mask = data
        options = {"is_padding_example": mask} if pipeline.takes_mask else {}
        return (), pipeline.step(state, *batch, **options)

    return step


def _others_in_each_step(data: _Data, number: jax.Array) -> _Data:
    """Other real numbers in each step, and one example where there is none."""
    batch, mask = data
    one = jnp.arange(mask.size) != number % mask.size
    return _neighbors.shifted(batch, number), jnp.where(mask.all(), one, mask)


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
        opposite = _neighbors.on_numbers(jnp.negative, _neighbors.row_of(batch, 1))
        first = _neighbors.with_row(batch, 0, opposite), jnp.zeros(size, bool)
        alone, factor = jnp.zeros(size, bool), 1.0 if replaces else 0.5
    others = [(_neighbors.with_row(batch, 0, r), alone) for r in rows]
    return [first, *others], factor


def examine(pipeline: Pipeline) -> Examined:
    """Traces the step, and finds the additions of noise that make it private.

    Noise may be added on the way that is not the mechanism's: to the inputs, in the
    loss. So the last additions are looked at first, and the first ones where those do
    not suffice.

    Raises:
      NotTraceable: if JAX cannot trace the step.
      NotRecordable: if noise is added where it cannot be taken out.
    """
    if not _drawn.multiplier(pipeline.mechanism, 0):
        raise _steps.NotTraceable("the mechanism has no noise.")
    step, (neighbors, factor) = _step_of(pipeline), _neighbors_of(pipeline)
    start = _steps.start(pipeline.init)
    steps = _steps.Steps(step, start, neighbors[0], _others_in_each_step)
    at = functools.partial(_examined_at, pipeline, steps, neighbors, factor)
    last = at(_all_but_the_last(steps))
    if last.noise and not _too_small(last, 1.05):
        return last
    found, ignored = last, frozenset()
    while steps.follow(ignored).crossings:
        found = at(ignored)
        small = _too_small(found, _NOT_THE_NOISE)
        if not small or not steps.follow(ignored | small).crossings:
            break
        ignored |= small
    return found


def _all_but_the_last(steps: _steps.Steps) -> frozenset[_flow.Path]:
    """The additions without which all that is kept has noise just the same."""
    ignored: frozenset[_flow.Path] = frozenset()
    bare = set(steps.follow().of(_flow.Label.DATA))
    for _ in range(_MOST_CROSSINGS):
        for crossing in steps.follow(ignored).crossings:
            without = steps.follow(ignored | crossing.chain)
            if set(without.of(_flow.Label.DATA)) <= bare:
                ignored |= crossing.chain
                break
        else:
            break
    return ignored


def _examined_at(
    pipeline: Pipeline,
    steps: _steps.Steps,
    neighbors: list[_Data],
    factor: float,
    ignored: frozenset[_flow.Path],
) -> Examined:
    """What is measured at the additions of noise that are not ignored."""
    followed = steps.follow(ignored)
    crossings = followed.crossings
    if not crossings:
        return Examined(
            pipeline, steps, followed, steps.state, neighbors, factor, {}, []
        )
    ready, moved = _drawn.movements(steps, crossings, neighbors)
    moved = [{path: factor * x for path, x in move.items()} for move in moved]
    noise = _drawn.draw(steps, pipeline.init, crossings)
    noise, moved = _drawn.once(noise, moved)
    return Examined(pipeline, steps, followed, ready, neighbors, factor, noise, moved)


def _too_small(found: Examined, limit: float) -> frozenset[_flow.Path]:
    """The additions whose noise is too small, by so much, for what arrives there."""
    z = _drawn.multiplier(found.pipeline.mechanism, 0)
    chains = {crossing.path: crossing.chain for crossing in found.followed.crossings}
    small: frozenset[_flow.Path] = frozenset()
    for path, drawn in found.noise.items():
        furthest = max(float(np.linalg.norm(move[path])) for move in found.moved)
        if drawn.values.size and not furthest * z <= limit * _stddev(drawn):
            small |= chains[_recorder.crossing_of(path)]
    return small

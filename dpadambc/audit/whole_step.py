"""A pipeline's step, traced and replayed: its noise, its sum, and its outputs."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.audit import draws, neighbors, statistics
from dpadambc.audit.finding import Finding, combined, not_tested, within
from dpadambc.audit.flow import Label, Path, label_of_public
from dpadambc.audit.noise_tests import UNFOLLOWED
from dpadambc.audit.pipeline import Pipeline
from dpadambc.audit.recorder import NotRecordable, crossing_of
from dpadambc.audit.sensitivity import sensitivity
from dpadambc.audit.steps import NotTraceable, Step, Steps, start
from dpadambc.core.clip import NeighboringRelation

# Noise that is too small by this factor counts as none: an added dropout mask or
# augmentation is not the mechanism's noise.
_NOT_THE_NOISE = 100.0
_MOST_CROSSINGS = 64  # that are ignored one by one
_ROUNDING = 1e-3
_KEYS = 24  # all leave the sign of a noised number once in 2**24 times
_FURTHER = 1e3

_Data = tuple[neighbors.Batch, Any]  # a batch, and its padding mask


class WholeStep(NamedTuple):
    """A step at the additions of noise that make it private."""

    pipeline: Pipeline
    measured: draws.Measured

    def before_noise(
        self, state: Any, *batch: Any, is_padding_example: Any = None
    ) -> list[jax.Array]:
        """Returns the sum before the noise, in units of that noise."""
        found, mask = self.measured, is_padding_example
        mask = jnp.zeros(_size(batch), bool) if mask is None else jnp.asarray(mask)
        steps = found.steps
        if _size(batch) != _size(self.pipeline.batch):
            steps = Steps(_step_of(self.pipeline), state, (batch, mask))
        crossings = steps.follow(found.followed.ignored).crossings
        _, records = steps.recorded(crossings)(state, (batch, mask))
        levels, sums = _levels(found.noise), []
        for path, record in records.items():
            is_copied = record.happened.ndim and found.noise[path].num_devices == 1
            sums.append((record.data[0] if is_copied else record.data) / levels[path])
        return sums

    def sensitivity(self) -> Finding:
        """Checks the sum before the noise."""
        if not self.measured.noise:
            return not_tested("sensitivity", "no noise is added to a sum of examples.")
        fun, pipeline = self.before_noise, self.pipeline
        count = sum(drawn.count for drawn in self.measured.noise.values())
        allowance = statistics.normal_bound() * statistics.spread_of_stddev(int(count))
        bound = (1 + allowance) / draws.multiplier(pipeline.mechanism, 0)
        own = fun if pipeline.takes_mask else lambda state, *batch: fun(state, *batch)
        of_own = own, self.measured.state, pipeline.batch
        relation = pipeline.mechanism.neighboring_relation
        finding = sensitivity(*of_own, bound=bound, neighboring_relation=relation)
        if finding.passed and (finding.figure or 0.0) < bound / 2:
            finding = dataclasses.replace(finding, passed=None)
        if not self.measured.steps.closes_over_examples:
            return finding
        return combined("sensitivity", [finding, self._closed_over(bound)])

    def _closed_over(self, bound: float) -> Finding:
        """Measures the change by a row of an array that the step closes over.

        It tests only arrays that begin with the examples of the batch. The example
        itself does not take part, if the step takes a mask.
        """
        batch, found = self.pipeline.batch, self.measured
        other = found.steps.with_other_first_row()
        both = self, self._replace(measured=found._replace(steps=other))
        is_first = jnp.arange(_size(batch)) == 0
        mask = {"is_padding_example": is_first} if self.pipeline.takes_mask else {}
        sums = (jax.jit(x.before_noise)(found.state, *batch, **mask) for x in both)
        before, after = map(neighbors.flat, sums)
        distance = float(np.linalg.norm(after - before))
        rounding = 8 * float(np.finfo(np.float32).eps * np.linalg.norm(before))
        allowed = _ROUNDING * bound + rounding
        sentence = "No row of the examples that the step closes over moves another."
        if not distance <= allowed:
            sentence = (
                "The step closes over an array that begins with the examples: a row of"
                f" it moves the sum of others by {distance / bound:.4g} of the bound."
                " Give the loss public arrays alone, or audit with other examples."
            )
            distance = np.inf if np.isnan(distance) else distance
        fails_if = "fails if a row of a closed-over array moves the sum of others"
        return within("sensitivity", distance, allowed, sentence, fails_if)


def _levels(noise: draws.Noise) -> dict[Path, float]:
    """Returns the noise level at each crossing; one for all if they do not differ."""
    levels = {path: _stddev(drawn) for path, drawn in noise.items()}
    counts = {path: drawn.count for path, drawn in noise.items()}
    squares = sum(counts[path] * level**2 for path, level in levels.items())
    together = math.sqrt(squares / max(sum(counts.values()), 1))
    bound = statistics.normal_bound(len(levels))
    is_one = all(
        abs(level / together - 1) < bound * statistics.spread_of_stddev(counts[path])
        for path, level in levels.items()
        if counts[path]
    )
    return dict.fromkeys(levels, together) if is_one else levels


def _too_small(found: draws.Measured, limit: float) -> frozenset[Path]:
    """Returns the additions whose noise is too small for their data, by this factor."""
    z = draws.multiplier(found.mechanism, 0)
    chains = {crossing.path: crossing.chain for crossing in found.followed.crossings}
    small: frozenset[Path] = frozenset()
    for path, drawn in found.noise.items():
        furthest = max(float(np.linalg.norm(move[path])) for move in found.moved)
        if drawn.values.size and not furthest * z <= limit * _stddev(drawn):
            small |= chains[crossing_of(path)]
    return small


def _stddev(noise: draws.Drawn) -> float:
    return noise.stddev_at_first or 1e-30


def _size(batch: Any) -> int:
    return jax.tree.leaves(batch)[0].shape[0]


def _step_of(pipeline: Pipeline) -> Step:
    def step(state, data):
        batch, mask = data
        options = {"is_padding_example": mask} if pipeline.takes_mask else {}
        return (), pipeline.step(state, *batch, **options)

    return step


def _varied(data: _Data, number: jax.Array) -> _Data:
    """Varies the real numbers in each step, with one example if there is none."""
    batch, mask = data
    one = jnp.arange(mask.size) != number % mask.size
    return neighbors.shifted(batch, number), jnp.where(mask.all(), one, mask)


def _neighbors_of(pipeline: Pipeline) -> tuple[list[_Data], float]:
    """Returns batches that differ from the first one in one example.

    If the step takes a mask, the first batch has no example, and the others have one.
    Otherwise each has a different first example.

    Returns:
      The batches, and the largest distance of neighbors over the distance of these.
    """
    batch, size = pipeline.batch, _size(pipeline.batch)
    rows = [neighbors.row_of(batch, 0)]
    if neighbors.has_numbers(batch):
        for factor in neighbors.HUGE:
            scale = lambda x, factor=factor: factor * x.astype(float)
            rows.append(neighbors.on_numbers(scale, rows[0]))
    relation = pipeline.mechanism.neighboring_relation
    replaces = relation is NeighboringRelation.REPLACE_ONE
    if pipeline.takes_mask:
        first = batch, jnp.ones(size, bool)
        alone, factor = jnp.arange(size) != 0, 2.0 if replaces else 1.0
    else:
        opposite = neighbors.on_numbers(jnp.negative, neighbors.row_of(batch, 1))
        first = neighbors.with_row(batch, 0, opposite), jnp.zeros(size, bool)
        alone, factor = jnp.zeros(size, bool), 1.0 if replaces else 0.5
    others = [(neighbors.with_row(batch, 0, row), alone) for row in rows]
    return [first, *others], factor


def whole_step(pipeline: Pipeline) -> WholeStep:
    """Traces the step, and finds the additions of noise that make it private.

    Other noise may be added before: to the inputs, in the loss. So it tries the last
    additions, and the first ones if those do not suffice.

    Raises:
      NotTraceable: if JAX cannot trace the step.
      NotRecordable: if noise is added at a place whose operands cannot be recorded.
    """
    if not draws.multiplier(pipeline.mechanism, 0):
        raise NotTraceable("the mechanism has no noise.")
    batches, factor = _neighbors_of(pipeline)
    state, everybody = start(pipeline.init), None
    if pipeline.takes_mask:  # then the first neighbor has no examples
        everybody = pipeline.batch, jnp.zeros(_size(pipeline.batch), bool)
    steps = Steps(_step_of(pipeline), state, batches[0], _varied)

    def at(ignored: frozenset[Path]) -> draws.Measured:
        """Measures the step at the additions of noise that are not ignored."""
        followed, noise, moved, ready = steps.follow(ignored), {}, [], state
        if followed.crossings:
            ready, moved = draws.movements(steps, followed.crossings, batches)
            noise = draws.draw(steps, pipeline.init, followed.crossings)
            noise, moved = draws.once(noise, moved, factor)
        step = pipeline.mechanism, steps, followed, ready
        return draws.Measured(*step, batches, factor, everybody, noise, moved)

    found = at(_all_but_the_last(steps))
    if not found.noise or _too_small(found, 1.05):
        ignored: frozenset[Path] = frozenset()
        while steps.follow(ignored).crossings:
            found = at(ignored)
            small = _too_small(found, _NOT_THE_NOISE)
            if not small or not steps.follow(ignored | small).crossings:
                break
            ignored |= small
    return WholeStep(pipeline, found)


def _all_but_the_last(steps: Steps) -> frozenset[Path]:
    """Returns the additions without which everything that is kept still has noise."""
    ignored: frozenset[Path] = frozenset()
    bare = set(steps.follow().paths(Label.DATA))
    for _ in range(_MOST_CROSSINGS):
        for crossing in steps.follow(ignored).crossings:
            without = steps.follow(ignored | crossing.chain)
            if set(without.paths(Label.DATA)) <= bare:
                ignored |= crossing.chain
                break
        else:
            break
    return ignored


def state(pipeline: Pipeline) -> Finding:
    """Traces the step, and checks that all that depends on examples passes the noise.

    It follows every value that depends on an example to the additions of noise, and
    past them to the outputs of the step: parameters, moments, averages, everything that
    a checkpoint would hold. An addition counts if its noise is of the order that the
    mechanism claims; `noise` and `sensitivity` say whether it is enough. Then it
    replays the step with other data and with other keys: an output that changes with
    the data must change with the keys, unless the noise was subtracted again. (A step
    that takes no mask has no batch without examples to start from, and is not
    replayed.)

    Args:
      pipeline: the pipeline whose step is traced.

    Returns:
      A `Finding`: the number of arrays without noise, and the path of the first. *Not
      tested* if the step cannot be traced, or a callback tells the host of examples.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import dpadambc
      >>> from dpadambc import audit
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=0.1,
      ...     iterations=100, normalize_by=6)
      >>> keep_norm = optax.GradientTransformation(
      ...     lambda params: jnp.zeros([]),
      ...     lambda g, _, params: (g, optax.tree.norm(dpadambc.materialize(g))))
      >>> def make_optimizer(key):
      ...     clip = dpadambc.clip_per_example(1.0, normalize_by=6)
      ...     noise = dpadambc.add_dp_noise(mechanism, key=key)
      ...     return optax.chain(clip, keep_norm, noise, optax.sgd(0.1))
      >>> pipeline = audit.Pipeline.of_chain(
      ...     lambda w, x: jnp.tanh(w @ x), jnp.zeros(50), (jnp.ones((64, 50)),),
      ...     mechanism, make_optimizer)
      >>> print(audit.state(pipeline))
      FAIL        state: [2][1] is made of the data without noise (1 of 5 arrays).
    """
    try:
        return state_finding(whole_step(pipeline))
    except (NotTraceable, NotRecordable) as error:
        return not_tested("state", f"{error}")


def state_finding(step: WholeStep) -> Finding:
    """Returns the finding for a step that has been traced."""
    followed = step.measured.followed
    bare = [path.removeprefix("[1]") for path in followed.paths(Label.DATA)]
    total = f"{len(followed.labels)} arrays"
    sentence = f"All {total} that are kept have noise, or nothing of the data."
    if bare:
        share = f"{len(bare)} of {total}"
        sentence = f"{bare[0]} is made of the data without noise ({share})."
    fails_if = "fails if an array that the step returns is made of examples alone"
    of_arrays = within("state", len(bare), 0, sentence, fails_if)
    if bare:
        return of_arrays
    if followed.paths(Label.OPAQUE):
        return not_tested("state", UNFOLLOWED)
    parts = [of_arrays]
    if step.pipeline.takes_mask and step.measured.noise:
        parts.append(_replayed(step))
    if followed.tells_host:
        reason = "a callback tells the host a value without noise; its use is unknown."
        parts.append(not_tested("state", reason))
    return combined("state", parts)


def _replayed(step: WholeStep) -> Finding:
    """Tests that outputs that follow the data follow the keys: noise may cancel.

    It compares with the step on no data at all, so that nothing outweighs the noise.
    """
    found, init = step.measured, jax.jit(step.pipeline.init)
    private, program = found.followed.paths(Label.PRIVATE), jax.jit(found.steps.step)

    def kept(state, data):
        leaves = jax.tree.leaves(program(state, data))
        is_wide = lambda x: jnp.issubdtype(x.dtype, jnp.floating) and x.itemsize > 2
        named = zip(found.followed.labels, leaves, strict=True)
        own = ((p, x) for p, x in named if p in private and is_wide(x))
        return {p: np.asarray(x, float) for p, x in own}

    def with_keys_of(other):
        choose = lambda x, y: y if label_of_public(x) == Label.NOISE else x
        return jax.tree.map(choose, found.state, other)

    empty, *others = found.neighbors
    start, by_data = kept(found.state, empty), [kept(found.state, x) for x in others]
    keys = jax.random.split(jax.random.key(1), _KEYS)
    by_key = [kept(with_keys_of(init(key)), empty) for key in keys]
    length = lambda x: np.nan_to_num(np.linalg.norm(x), posinf=0.0)
    most = lambda ends, path: max(length(end[path] - start[path]) for end in ends)
    z = min(draws.multiplier(found.mechanism, 0), 1.0)
    is_bare = lambda path: most(by_data, path) * z > _FURTHER * most(by_key, path)
    bare = [path.removeprefix("[1]") for path in filter(is_bare, start)]
    sentence = "All arrays that follow the data follow the keys of the noise."
    if bare:
        sentence = f"{bare[0]} follows the data, but hardly the keys: it has no noise."
    fails_if = f"fails if data move an array {_FURTHER:g} times as far as {_KEYS} keys"
    return within("state", len(bare), 0, sentence, fails_if)

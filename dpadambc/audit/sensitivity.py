"""Measures the change, by one example, of the sum before the noise."""

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.audit import neighbors
from dpadambc.audit.finding import Finding, not_tested
from dpadambc.core import validate
from dpadambc.core.clip import NeighboringRelation
from dpadambc.core.clipped_sum import materialize

_CHECK = "sensitivity"
_SEARCH_STEPS = 12
_ROUNDING = 1e-3  # of a float32 sum, and the allowance of factored norms
_FACTORS = (10.0, 1e3)
_NOT_OF_JAX = (jax.errors.JAXTypeError, jax.errors.JAXIndexError)
_PADDING = "padding, whose contents must not matter"


class _Movement(NamedTuple):
    """The distance of the values on two neighboring batches."""

    distance: float
    stage: str  # the stage that leaks, if the distance is too large
    pair: str


class _Replay:
    """The function on batches that are public to us, as one vector of doubles."""

    def __init__(self, fun: Callable[..., Any], params: Any, batch: neighbors.Batch):
        self.params = params
        self.size = neighbors.num_examples(batch)
        self.batch = jax.tree.map(jnp.asarray, batch)
        self.nobody = np.zeros(self.size, bool)  # is padding
        try:  # one program for all replays, if the function is one of JAX
            self._begin(jax.jit(fun))
        except (*_NOT_OF_JAX, TypeError, ValueError):
            self._begin(fun)

    def _begin(self, fun: Callable[..., Any]) -> None:
        """Computes the value on the whole batch, with a mask if there can be one."""
        self._fun, self.takes_mask = fun, True
        try:
            self.start = self(self.batch, self.nobody)
        except TypeError as error:
            if "is_padding_example" not in str(error):
                raise
            self.takes_mask = False
            self.start = self(self.batch)

    def tree(self, batch: Any, mask: Any = None) -> Any:
        """Computes the value of the function, with open arrays."""
        own = mask is not None and self.takes_mask
        options = {"is_padding_example": mask} if own else {}
        return materialize(self._fun(self.params, *batch, **options))

    def __call__(self, batch: Any, mask: Any = None) -> np.ndarray:
        return neighbors.flat(self.tree(batch, mask))

    def at_row(self, index: int, row: Any, mask: Any) -> np.ndarray:
        """Computes the value of the batch with another example in one place."""
        return self(neighbors.with_row(self.batch, index, row), mask)

    def without(self, index: int) -> np.ndarray | None:
        """Computes the value without an example; None if that is refused."""
        try:
            value = self(neighbors.without_row(self.batch, index))
        except (TypeError, ValueError):
            return None
        return value if value.shape == self.start.shape else None

    def at(self, factor: float) -> "_Replay":
        """Returns a replay at larger parameters: the bound must hold for any."""
        larger, rng = copy.copy(self), np.random.default_rng(0)

        def grow(x):
            if not jnp.ndim(x) or not neighbors.is_real(x):
                return x
            # A multiple of zero is not larger. Positive, as it may be a second moment.
            start = x if jnp.any(x) else np.abs(rng.normal(size=x.shape))
            return jnp.asarray(factor * start, x.dtype)

        larger.params = jax.tree.map(grow, self.params)
        return larger

    def slack(self, bound: float) -> float:
        """Bounds the rounding difference of sums of this size."""
        rounding = np.finfo(np.float32).eps * np.linalg.norm(self.start)
        return _ROUNDING * bound + 8 * float(rounding)


def _apart(one: np.ndarray, two: np.ndarray) -> float:
    distance = float(np.linalg.norm(one - two))
    return distance if np.isfinite(distance) else np.inf


def _values(
    replay: _Replay, index: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Computes the values with each candidate in one place of the batch.

    A search finds the last candidates. It starts with the candidate whose value is
    furthest from the value without the example.
    """
    at = lambda row: replay.at_row(index, row, replay.nobody)
    rows = neighbors.candidates(replay.batch, index, rng)
    found = {candidate.name: at(candidate.row) for candidate in rows}
    masked = np.arange(replay.size) == index
    rest = replay(replay.batch, masked) if replay.takes_mask else replay.start
    gap = lambda candidate: np.linalg.norm(found[candidate.name] - rest)
    reach = lambda candidate: np.nan_to_num(gap(candidate), nan=-1.0, posinf=-1.0)

    def distance(row):
        batch = neighbors.with_row(replay.batch, index, row)
        tree = replay.tree(batch, replay.nobody)
        flat = [jnp.ravel(x) for x in jax.tree.leaves(tree)]
        return jnp.sum((jnp.concatenate(flat) - rest) ** 2)

    best = max(rows, key=reach).row
    search = neighbors.ascend(distance, best, _SEARCH_STEPS, rng)
    for number, candidate in enumerate(search):
        found[f"{candidate.name} ({number + 1})"] = at(candidate.row)
    return found


def _stage(name: str) -> str:
    return "examples that are not finite" if name in ("NaN", "infinite") else "clip"


def _replacements(values: dict[str, np.ndarray]) -> Iterator[_Movement]:
    for (other, another), (name, value) in itertools.combinations(values.items(), 2):
        stage = _stage(name) if _stage(other) == "clip" else _stage(other)
        yield _Movement(_apart(value, another), stage, f"{name}, or {other}")


def _removals(
    replay: _Replay, index: int, values: dict[str, np.ndarray]
) -> Iterator[_Movement]:
    """Yields changes by removing an example: masked, and left out of the batch.

    It leaves out only the last example: for others, see `_depends_on_place`. If no
    example can be left out, two replacements are at most twice as far apart as a
    removal.
    """
    without = {}
    if replay.takes_mask:
        without["masked"] = replay(replay.batch, np.arange(replay.size) == index)
    rest = replay.without(index) if index == replay.size - 1 else None
    if rest is not None:
        without["left out"] = rest
    pairs = itertools.product(without.items(), values.items())
    for (how, rest), (name, value) in pairs:
        yield _Movement(_apart(value, rest), _stage(name), f"{name}, or {how}")
    for pair in () if without else _replacements(values):
        yield pair._replace(distance=pair.distance / 2)


def _alone(replay: _Replay) -> Iterator[_Movement]:
    """Yields changes of one example in an empty batch, which reveal a normalizer."""
    if replay.takes_mask:
        empty = replay(replay.batch, ~replay.nobody)
        for index in range(min(3, replay.size)):
            only = replay(replay.batch, np.arange(replay.size) != index)
            yield _Movement(_apart(only, empty), "clip", "alone, or not there")


def _paddings(replay: _Replay, rng: np.random.Generator) -> Iterator[_Movement]:
    """Yields changes of the contents of padding, which must not matter."""
    if not replay.takes_mask:
        return
    last = replay.size - 1
    mask = np.arange(replay.size) == last
    here = replay(replay.batch, mask)
    for candidate in neighbors.candidates(replay.batch, last, rng):
        there = replay.at_row(last, candidate.row, mask)
        pair = f"padding that is {candidate.name}"
        yield _Movement(_apart(here, there), _PADDING, pair)


def _movements(
    replay: _Replay, relation: NeighboringRelation, rng: np.random.Generator
) -> Iterator[_Movement]:
    replaces = relation is NeighboringRelation.REPLACE_ONE
    last = replay.size - 1
    for index in (0, last) if replay.takes_mask or replaces else (last,):
        values = _values(replay, index, rng)
        if replaces:
            yield from _replacements(values)
        else:
            yield from _removals(replay, index, values)
    yield from _alone(replay)
    for factor in _FACTORS:
        for movement in _alone(replay.at(factor)):
            pair = f"{movement.pair}, parameters {factor:g} times as large"
            yield movement._replace(pair=pair)
    yield from _paddings(replay, rng)


def _mixes(replay: _Replay, slack: float) -> bool:
    """Returns whether the first example's contents change the sum of the others."""
    if not replay.takes_mask:
        return False
    others = np.arange(replay.size) != 0

    def of_others(row):
        return replay.at_row(0, row, replay.nobody) - replay.at_row(0, row, others)

    rng = np.random.default_rng(0)
    first, *rest = neighbors.candidates(replay.batch, 0, rng)
    start = of_others(first.row)
    moved = [_apart(of_others(candidate.row), start) for candidate in rest]
    return max(filter(np.isfinite, moved), default=0.0) > slack


def _depends_on_place(replay: _Replay, bound: float, slack: float) -> bool:
    """Returns whether the sum of the others changes once the first is removed.

    It does if random numbers depend on the place: no leak if they are secret.
    """
    with_first, allowed = replay.start, bound + slack
    if replay.takes_mask:  # the first example is left out of both
        with_first, allowed = replay(replay.batch, np.arange(replay.size) == 0), slack
    rest = replay.without(0)
    return rest is not None and _apart(rest, with_first) > allowed


def _verdict(
    replay: _Replay, found: list[_Movement], bound: float, relation: NeighboringRelation
) -> Finding:
    slack = replay.slack(bound)
    moved = [movement for movement in found if movement.stage != _PADDING]
    worst = max(moved, key=lambda movement: movement.distance)
    furthest: dict[str, _Movement] = {}  # leak of each stage
    for move in sorted(found, key=lambda movement: movement.distance):
        allowed = slack + (0.0 if move.stage == _PADDING else bound)
        if not move.distance <= allowed:
            furthest[move.stage] = move
    if "clip" in furthest and _mixes(replay, slack):
        mixing = "mixing of examples, where one changes the sum of the others"
        furthest[mixing] = furthest.pop("clip")
    share = f"{worst.distance / bound:.4g}"
    moves = f"moves it by {worst.distance:.5g}, {share}"
    bounds = f"the bound under {relation.name}."
    if furthest:
        leaks = [f"{name} ({x.pair}: {x.distance:.5g})" for name, x in furthest.items()]
        sentence = f"One example {moves} times {bounds} Leaks: {'; '.join(leaks)}."
    else:
        sentence = f"One example ({worst.pair}) {moves} of {bounds}"
        if worst.distance < bound / 2:
            sentence += " No example came near the bound: the clip may not have acted."
        adds = relation is NeighboringRelation.ADD_OR_REMOVE_ONE
        if adds and _depends_on_place(replay, bound, slack):
            sentence += (
                " Without the first example the sum of the others changes: the bound"
                " holds only if all that depends on the place in the batch, such as"
                " keys, is random, secret and new in each step."
            )
    fails_if = (
        f"fails if one of {len(moved)} neighbors moves the value by more than"
        f" {1 + _ROUNDING:g} times the bound and rounding, or padding does at all"
    )
    return Finding(_CHECK, not furthest, worst.distance, bound, sentence, fails_if)


def sensitivity(
    fun: Callable[..., Any],
    params: Any,
    batch: neighbors.Batch,
    *,
    bound: float,
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
) -> Finding:
    """Replays the sum before the noise on neighboring batches.

    It removes one example (masked, and left out), and replaces it by another, by its
    opposite, by a huge, an infinite and a NaN one. It also replaces it by examples that
    a search finds: gradient ascent on the distance that the noise has to hide. It puts
    the example into an empty batch, with larger parameters too, and changes the
    contents of padding. A pass is no proof: it says that none of these neighbors broke
    the bound. It computes some 120 values of `fun`, and 24 of its gradients if it has
    one.

    Args:
      fun: a function of `(params, *batch, is_padding_example=None)` that returns a
        pytree of arrays to which noise will be added: a `clipped_grad`, or a step up to
        the noise. If it has no argument `is_padding_example`, examples are left out
        only.
      params: its first argument.
      batch: a tuple of pytrees of arrays, with at least two examples along axis 0.
      bound: the L2 sensitivity that is claimed.
      neighboring_relation: how neighboring batches differ.

    Returns:
      A `Finding`: the largest change, the bound, and the stage that leaks: the clip,
      examples that are not finite, padding, or the mixing of examples. *Not tested* if
      `fun` returns different values for the same batch. A pass says so if the sum
      depends on the places of examples in the batch, as with keys of places.

    Raises:
      ValueError: if the bound is not positive, or the batch is no batch.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> from dpadambc import audit
      >>> loss_fn = lambda w, x: jnp.tanh(w @ x)
      >>> params, x = jnp.ones(3), jnp.eye(4, 3) + 1
      >>> clipped = dpadambc.clipped_grad(loss_fn, l2_clip_norm=1.0, normalize_by=4)
      >>> audit.sensitivity(clipped, params, (x,), bound=1 / 4).passed
      True
      >>> def averaged(w, x):
      ...     return jax.grad(lambda w: jax.vmap(loss_fn, (None, 0))(w, x).mean())(w)
      >>> audit.sensitivity(averaged, params, (x,), bound=1 / 4).word
      'FAIL'

    References:
      Cebere et al., `Privacy in Theory, Bugs in Practice
      <https://arxiv.org/abs/2602.17454>`_, 2026
    """
    validate.positive(bound=bound)
    if not isinstance(neighboring_relation, NeighboringRelation):
        raise TypeError(
            "Expected neighboring_relation to be a dpadambc.NeighboringRelation, got"
            f" {neighboring_relation!r}."
        )
    replay = _Replay(fun, params, batch)
    again = replay(replay.batch, replay.nobody)
    is_same = np.array_equal(again, replay.start, equal_nan=True)
    if not is_same and _apart(again, replay.start) > replay.slack(bound):
        reason = "the function returns something else for the same batch."
        return not_tested(_CHECK, reason)
    rng = np.random.default_rng(0)
    found = list(_movements(replay, neighboring_relation, rng))
    return _verdict(replay, found, bound, neighboring_relation)

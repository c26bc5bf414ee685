"""How far one example moves what the noise is added to."""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.audit import arrays as _arrays
from dpadambc.audit import neighbors as _neighbors
from dpadambc.audit.finding import Finding, not_tested
from dpadambc.core import validate
from dpadambc.core.clip import NeighboringRelation

_CHECK = "sensitivity"
_SEARCH_STEPS = 12
# Of a float32 sum, and of the allowance that factored norms carry.
_ROUNDING = 1e-3
_FACTORS = (10.0, 1e3)
_NOT_OF_JAX = (jax.errors.JAXTypeError, jax.errors.JAXIndexError)
_PADDING = "padding, whose contents must not matter"


@dataclasses.dataclass(frozen=True)
class _Movement:
    """How far the value is apart on two neighboring batches."""

    distance: float
    stage: str  # what leaks, if it is too far
    pair: str


class _Replay:
    """The function on batches that are public to us, as one vector of doubles."""

    def __init__(self, fun: Callable[..., Any], params: Any, batch: _neighbors.Batch):
        self.params = params
        self.size = _neighbors.num_examples(batch)
        self.batch = jax.tree.map(jnp.asarray, batch)
        try:  # one program for all replays, if the function is one of JAX
            self._begin(jax.jit(fun))
        except (*_NOT_OF_JAX, TypeError, ValueError):
            self._begin(fun)

    def _begin(self, fun: Callable[..., Any]) -> None:
        """Takes the value on the whole batch, with a mask if the function takes one."""
        self._fun, self.takes_mask = fun, True
        try:
            self.start = self(self.batch, np.zeros(self.size, bool))
        except TypeError as error:
            if "is_padding_example" not in str(error):
                raise
            self.takes_mask = False
            self.start = self(self.batch)

    def tree(self, batch: Any, mask: Any = None) -> Any:
        """What the function returns."""
        own = mask is not None and self.takes_mask
        options = {"is_padding_example": mask} if own else {}
        return _arrays.opened(self._fun(self.params, *batch, **options))

    def at(self, factor: float) -> "_Replay":
        """With larger parameters: a bound that holds, holds for any."""
        larger = copy.copy(self)
        rng = np.random.default_rng(0)

        def grow(x):
            is_real = jnp.issubdtype(jnp.result_type(x), jnp.floating)
            if not jnp.ndim(x) or not is_real:
                return x
            # Of zeros no multiple is larger. Positive: it may be a second moment.
            start = x if jnp.any(x) else np.abs(rng.normal(size=x.shape))
            return jnp.asarray(factor * start, x.dtype)

        larger.params = jax.tree.map(grow, self.params)
        return larger

    def __call__(self, batch: Any, mask: Any = None) -> np.ndarray:
        return _arrays.flat(self.tree(batch, mask))

    @property
    def rounding(self) -> float:
        """By how much sums of this size differ that are the same on paper."""
        return 8 * float(np.finfo(np.float32).eps * np.linalg.norm(self.start))


def _apart(one: np.ndarray, two: np.ndarray) -> float:
    distance = float(np.linalg.norm(one - two))
    return distance if np.isfinite(distance) else np.inf


def _searched(
    replay: _Replay,
    index: int,
    row: Any,
    against: np.ndarray,
    rng: np.random.Generator,
) -> Iterator[_neighbors.Candidate]:
    """Rows that move the value far from another one, beginning with one that does."""

    def distance(row):
        tree = replay.tree(
            _neighbors.with_row(replay.batch, index, row), np.zeros(replay.size, bool)
        )
        flat = [jnp.ravel(x) for x in jax.tree.leaves(tree)]
        return jnp.sum((jnp.concatenate(flat) - against) ** 2)

    return _neighbors.ascend(distance, row, _SEARCH_STEPS, rng)


def _values(
    replay: _Replay, index: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """What the function returns with each candidate in one place of the batch."""
    nobody = np.zeros(replay.size, bool)
    at = lambda row: replay(_neighbors.with_row(replay.batch, index, row), nobody)
    rows = _neighbors.candidates(replay.batch, index, rng)
    found = {candidate.name: at(candidate.row) for candidate in rows}
    masked = np.arange(replay.size) == index
    rest = replay(replay.batch, masked) if replay.takes_mask else replay.start
    reach = lambda candidate: np.nan_to_num(
        np.linalg.norm(found[candidate.name] - rest), nan=-1.0, posinf=-1.0
    )
    best = max(rows, key=reach)
    for number, candidate in enumerate(_searched(replay, index, best.row, rest, rng)):
        found[f"{candidate.name} ({number + 1})"] = at(candidate.row)
    return found


def _stage(name: str) -> str:
    return "examples that are not finite" if name in ("NaN", "infinite") else "clip"


def _without(replay: _Replay, index: int) -> dict[str, np.ndarray]:
    """What the function returns without an example: masked, and not there at all.

    The last one is left out: of others, see `_goes_by_place`.
    """
    found = {}
    if replay.takes_mask:
        found["masked"] = replay(replay.batch, np.arange(replay.size) == index)
    if index == replay.size - 1:
        try:
            value = replay(_neighbors.without_row(replay.batch, index))
        except (TypeError, ValueError):  # a batch of this size may not be allowed
            return found
        if value.shape == replay.start.shape:
            found["left out"] = value
    return found


def _removals(replay: _Replay, index: int, rng: np.random.Generator):
    values, without = _values(replay, index, rng), _without(replay, index)
    if not without:
        yield from _halves(values)
    for how, rest in without.items():
        for name, value in values.items():
            yield _Movement(_apart(value, rest), _stage(name), f"{name}, or {how}")


def _pairs(values: dict[str, np.ndarray]) -> Iterator[_Movement]:
    for (other, another), (name, value) in itertools.combinations(values.items(), 2):
        stage = _stage(name) if _stage(other) == "clip" else _stage(other)
        yield _Movement(_apart(value, another), stage, f"{name}, or {other}")


def _halves(values: dict[str, np.ndarray]) -> Iterator[_Movement]:
    """Where no example can be left out: no replacement moves further than twice."""
    for pair in _pairs(values):
        yield dataclasses.replace(pair, distance=pair.distance / 2)


def _replacements(replay: _Replay, index: int, rng: np.random.Generator):
    return _pairs(_values(replay, index, rng))


def _alone(replay: _Replay) -> Iterator[_Movement]:
    """One example in an empty batch: a normalizer that is the batch's own shows."""
    if replay.takes_mask:
        nobody = np.ones(replay.size, bool)
        empty = replay(replay.batch, nobody)
        for index in range(min(3, replay.size)):
            only = replay(replay.batch, np.arange(replay.size) != index)
            yield _Movement(_apart(only, empty), "clip", "alone, or not there")


def _of_padding(replay: _Replay, rng: np.random.Generator) -> Iterator[_Movement]:
    """What the padding holds must not matter: it may be anybody's."""
    if not replay.takes_mask:
        return
    last = replay.size - 1
    mask = np.arange(replay.size) == last
    here = replay(replay.batch, mask)
    for candidate in _neighbors.candidates(replay.batch, last, rng):
        there = replay(_neighbors.with_row(replay.batch, last, candidate.row), mask)
        yield _Movement(
            _apart(here, there), _PADDING, f"padding that is {candidate.name}"
        )


def _mixes(replay: _Replay, bound: float, rng: np.random.Generator) -> bool:
    """Whether what the first example holds changes what the others add."""
    if not replay.takes_mask:
        return False
    nobody, others = np.zeros(replay.size, bool), np.arange(replay.size) != 0

    def of_others(row):
        batch = _neighbors.with_row(replay.batch, 0, row)
        return replay(batch, nobody) - replay(batch, others)

    first, *rest = _neighbors.candidates(replay.batch, 0, rng)
    start = of_others(first.row)
    moved = [_apart(of_others(candidate.row), start) for candidate in rest]
    finite = [distance for distance in moved if np.isfinite(distance)]
    return max(finite, default=0.0) > _ROUNDING * bound + replay.rounding


def _movements(
    replay: _Replay, relation: NeighboringRelation, rng: np.random.Generator
) -> Iterator[_Movement]:
    replaces = relation is NeighboringRelation.REPLACE_ONE
    of_row = _replacements if replaces else _removals
    rows = {0, replay.size - 1} if replay.takes_mask or replaces else {replay.size - 1}
    for index in sorted(rows):
        yield from of_row(replay, index, rng)
    yield from _alone(replay)
    for factor in _FACTORS:
        for movement in _alone(replay.at(factor)):
            pair = f"{movement.pair}, parameters {factor:g} times as large"
            yield dataclasses.replace(movement, pair=pair)


def _stages(replay: _Replay, leaks: list[_Movement], bound: float) -> str:
    """What leaks, the stage of each with its furthest movement."""
    furthest: dict[str, _Movement] = {}
    for leak in sorted(leaks, key=lambda leak: leak.distance):
        furthest[leak.stage] = leak
    if "clip" in furthest and _mixes(replay, bound, np.random.default_rng(0)):
        mixing = "mixing of examples, where one changes what others add"
        furthest[mixing] = furthest.pop("clip")
    return "; ".join(
        f"{stage} ({leak.pair}: {leak.distance:.5g})"
        for stage, leak in furthest.items()
    )


def _goes_by_place(replay: _Replay, bound: float, slack: float) -> bool:
    """Whether others add something else once the first is not there and they move up.

    They do where random numbers go by the place. It is no leak where those are secret.
    """
    with_first, allowed = replay.start, bound + slack
    if replay.takes_mask:  # what the first adds is out of both
        with_first, allowed = replay(replay.batch, np.arange(replay.size) == 0), slack
    try:
        rest = replay(_neighbors.without_row(replay.batch, 0))
    except (TypeError, ValueError):  # a batch of this size may not be allowed
        return False
    return rest.shape == with_first.shape and _apart(rest, with_first) > allowed


def _verdict(
    replay: _Replay, found: list[_Movement], bound: float, relation: Any
) -> Finding:
    moved = [movement for movement in found if movement.stage != _PADDING]
    worst = max(moved, key=lambda movement: movement.distance)
    slack = _ROUNDING * bound + replay.rounding
    allowed = lambda movement: slack + (bound if movement.stage != _PADDING else 0.0)
    leaks = [
        movement for movement in found if not movement.distance <= allowed(movement)
    ]
    fails_if = (
        f"fails if one of {len(moved)} neighbors moves the value by more than"
        f" {1 + _ROUNDING:g} times the bound and rounding, or padding does at all"
    )
    sentence = (
        f"One example ({worst.pair}) moves it by {worst.distance:.5g},"
        f" {worst.distance / bound:.4g} of the bound under {relation.name}."
    )
    if worst.distance < bound / 2:
        sentence += " No example came near the bound: the clip may not have acted."
    if leaks:
        stages = _stages(replay, leaks, bound)
        sentence = (
            f"One example moves it by {worst.distance:.5g},"
            f" {worst.distance / bound:.4g} times the bound under {relation.name}."
            f" What leaks: {stages}."
        )
    elif relation is NeighboringRelation.ADD_OR_REMOVE_ONE and _goes_by_place(
        replay, bound, slack
    ):
        sentence += (
            " Without the first example, those behind it change what they add: the"
            " bound holds only if what goes by the place in the batch, such as keys, is"
            " random, secret and new in each step."
        )
    return Finding(_CHECK, not leaks, worst.distance, bound, sentence, fails_if)


def sensitivity(
    fun: Callable[..., Any],
    params: Any,
    batch: _neighbors.Batch,
    *,
    bound: float,
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
) -> Finding:
    """Replays what the noise is added to on neighboring batches.

    It takes out one example (masked, and left out), and replaces it by another, by its
    opposite, by a huge, an infinite and a NaN one. It also replaces it by examples that
    a search finds: gradient ascent on the distance that the noise has to hide. It puts
    the example into an empty batch, with larger parameters too, and changes the
    contents of padding. A pass is no proof: it says that none of these neighbors broke
    the bound. It takes some 120 values of `fun`, and 24 of its gradients where it has
    one.

    Args:
      fun: of `(params, *batch, is_padding_example=None)`, returns what the noise will
        be added to, a pytree of arrays: a `clipped_grad`, or a step up to the noise. If
        it has no argument `is_padding_example`, examples are left out only.
      params: its first argument.
      batch: a tuple of pytrees of arrays, with at least two examples along axis 0.
      bound: the L2 sensitivity that is claimed.
      neighboring_relation: what neighboring batches differ in.

    Returns:
      A `Finding`: the largest movement, the bound, and the stage that leaks: the clip,
      examples that are not finite, padding, or the mixing of examples. *Not tested* if
      `fun` returns something else for the same batch. A pass says so where examples
      change what they add with their place in the batch, as they do by keys of places.

    Raises:
      ValueError: if the bound is not positive, or the batch is none.

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
    validate_relation(neighboring_relation)
    rng = np.random.default_rng(0)
    replay = _Replay(fun, params, batch)
    again = replay(replay.batch, np.zeros(replay.size, bool))
    if not np.array_equal(again, replay.start, equal_nan=True):
        if _apart(again, replay.start) > _ROUNDING * bound + replay.rounding:
            return not_tested(
                _CHECK, "the function returns something else for the same batch."
            )
    found = [
        *_movements(replay, neighboring_relation, rng),
        *_of_padding(replay, rng),
    ]
    return _verdict(replay, found, bound, neighboring_relation)


def validate_relation(relation: Any) -> None:
    """Raises unless it is a neighboring relation."""
    if not isinstance(relation, NeighboringRelation):
        raise TypeError(
            "Expected neighboring_relation to be a dpadambc.NeighboringRelation, got"
            f" {relation!r}."
        )

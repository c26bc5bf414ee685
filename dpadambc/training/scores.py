"""What the models of a search are scored by: public data, or protected data with noise.

A score decides which model is published. So it may read protected data only if the
epsilon of a trial covers it: hence two classes, and no third.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import dp_accounting
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from dpadambc._core import closures, marks, validate
from dpadambc.mechanisms import _events, accounting
from dpadambc.mechanisms._selection import Events
from dpadambc.mechanisms.accounting import Spending
from dpadambc.mechanisms.base import Mechanism
from dpadambc.mechanisms.poisson import PoissonGaussian
from dpadambc.training import _data, _fingerprint, _grouped, _nodes, _rows

# How many examples are scored at once.
_AT_ONCE = 256


def _per_example(
    fn: Callable[..., Any], params: Any, shared: tuple[Any, ...], data: Any
) -> jax.Array:
    """The score of each example, shape (number of examples,)."""

    def one(example):
        score = jnp.asarray(fn(params, *shared, *_data.arguments(example)), float)
        if score.shape != ():
            raise ValueError(
                "Expected the score of one example to be a number, got shape"
                f" {score.shape}."
            )
        return score

    return jax.lax.map(one, data, batch_size=min(_AT_ONCE, _data.num_examples(data)))


@dataclasses.dataclass(frozen=True, eq=False)
class PublicScore:
    """The mean of a score over examples that need no protection: it costs nothing.

    Data are public if anyone may have them, or if their people are not protected. A
    validation set of protected people is not public: see `NoisyScore`. Rows of the
    training data are refused, in `data` and in what the function closes over, whatever
    their shape is and if they were rounded since; in `data` also in examples that hold
    several rows each, if a tenth of these are. Other rows of a person cannot be found,
    nor rows of a few answers that chance repeats, unless all come as they are.

    Args:
      fn: the score of one example, of `(params, *example)`, or, in a search with
        `frozen`, of `(params, frozen, *example)`; a larger one is better. NaN is worst.
      data: the examples, arrays as for `search`.

    Raises:
      TypeError: if `fn` is not callable, or the data are not arrays.
      ValueError: if the arrays are not of one length.

    Example:
      >>> import jax.numpy as jnp
      >>> from dpadambc import training
      >>> score = training.PublicScore(
      ...     lambda w, x, y: -(w @ x - y) ** 2, (jnp.ones((10, 3)), jnp.ones(10)))
    """

    fn: Callable[..., Any]
    data: Any = dataclasses.field(repr=False)  # may be people's

    def __post_init__(self):
        _check(self.fn, self.data)

    def check(
        self,
        mechanism: Mechanism,
        loss: jex.ClosedJaxpr,
        data: Any,
        *arguments: Any,
    ) -> None:
        """Raises where a row is among the training data; for `search`."""
        del mechanism
        _check_nodes(self, loss, data, arguments, is_public=True)
        num_shared = len(jax.tree.leaves(arguments))
        ours, theirs = (
            _nodes.without_members(program, num_shared, of)
            for program, of in ((_traced(self, arguments), self.data), (loss, data))
        )
        found = max(
            _rows.num_common_examples(ours, theirs),
            _rows.num_common(_closed_over(self, arguments), theirs),
        )
        if found:
            raise ValueError(
                "Expected a PublicScore on examples that need no protection, got"
                f" {found} whose inputs are among the training data. Take them out, or"
                " make it a NoisyScore, which is accounted for."
            )

    @property
    def outline(self) -> dict[str, str]:
        """What tells it from others; for `search`."""
        return _outline(self)

    def per_example(self, params: Any, shared: tuple[Any, ...], data: Any) -> jax.Array:
        """The score of each example; for `search`."""
        return _per_example(self.fn, params, shared, data)

    def summary(self, scores: np.ndarray, rng: np.random.Generator) -> float:
        """The score of a model; for `search`."""
        del rng
        return float(np.mean(scores, dtype=np.float64))

    def compose(self, events: Events, relation: Any) -> Events:
        """What a trial runs, with its score; for `search`."""
        del relation
        return events

    def spent(self, mechanism: Mechanism) -> Spending:
        """The same, as runs."""
        return accounting.compose([mechanism])


@dataclasses.dataclass(frozen=True, eq=False)
class NoisyScore:
    r"""The mean of a score over protected examples, with noise that is accounted for.

    .. math:: \frac{1}{B} \left(\sum_i \min(\max(s_i, 0), 1)
        + \mathcal{N}(0, z^2)\right)

    One example, added, removed or replaced, moves the sum by at most 1. So the function
    must not contain protected data of its own, and known rows in it are refused. The
    data may be the training data or others. A person may have one row in each.

    Args:
      fn: the score of one example, in [0, 1], outside of which it is clipped; NaN
        counts as 0. Of `(params, *example)`, or, in a search with `frozen`, of
        `(params, frozen, *example)`; a larger one is better.
      data: the examples, arrays as for `search`.
      noise_multiplier: z, positive; the standard deviation of a score is z / B.
      normalize_by: B, positive and public; usually about the number of examples.

    Raises:
      TypeError: if `fn` is not callable, or the data are not arrays.
      ValueError: if a number is out of its range, or the arrays are not of one length.

    Example:
      >>> import jax.numpy as jnp
      >>> from dpadambc import training
      >>> is_right = lambda w, x, y: (w @ x > 0) == y
      >>> score = training.NoisyScore(
      ...     is_right, (jnp.ones((10, 3)), jnp.ones(10, bool)), noise_multiplier=5.0,
      ...     normalize_by=10)
    """

    fn: Callable[..., Any]
    data: Any = dataclasses.field(repr=False)  # people's
    noise_multiplier: float
    normalize_by: float

    def __post_init__(self):
        _check(self.fn, self.data)
        validate.positive(normalize_by=self.normalize_by)
        validate.non_negative(noise_multiplier=self.noise_multiplier)
        validate.positive(noise_multiplier=self.noise_multiplier)

    def check(
        self,
        mechanism: Mechanism,
        loss: jex.ClosedJaxpr,
        data: Any,
        *arguments: Any,
    ) -> None:
        """Raises where one row moves more than its own score; for `search`."""
        if hasattr(mechanism, "max_terms"):
            raise ValueError(
                "Expected a mechanism of examples with a NoisyScore, got"
                f" {type(mechanism).__module__}.{type(mechanism).__name__}: a node is"
                " in several rows, and would move the score by more than one. Score"
                " nodes that need no protection, by a PublicScore."
            )
        _check_nodes(self, loss, data, arguments, is_public=False)
        _rows.warn_of_copies(self.data)
        if _grouped.are_of_users(data) and not _grouped.have_the_form(self.data):
            raise ValueError(
                "Expected the data of a NoisyScore as group_by_user makes them, like"
                " those that are trained on, got others: a user with several rows would"
                " move the score by more than one. Score the rows of a user together,"
                " with a number for each user."
            )
        ours = _closed_over(self, arguments)
        found = max(_rows.num_common(ours, rows) for rows in (data, self.data))
        if found:
            raise ValueError(
                "Expected the score of one example to be of that example alone, got a"
                f" function with {found} rows of protected data in it: one of them"
                " would move the score of every example, and the noise is for one."
                " Take them out of the function."
            )

    @property
    def outline(self) -> dict[str, str]:
        """What tells it from others; for `search`."""
        numbers = self.noise_multiplier, self.normalize_by
        return _outline(self, *map(float, numbers))

    def per_example(self, params: Any, shared: tuple[Any, ...], data: Any) -> jax.Array:
        """The score of each example; for `search`."""
        return _per_example(self.fn, params, shared, data)

    def summary(self, scores: np.ndarray, rng: np.random.Generator) -> float:
        """The noisy score of a model, in double precision; for `search`."""
        clipped = np.clip(np.nan_to_num(np.asarray(scores, np.float64), nan=0.0), 0, 1)
        # Exact, in whatever order examples come: rounding would add to what one moves.
        noised = math.fsum(clipped) + rng.normal(0.0, float(self.noise_multiplier))
        return noised / float(self.normalize_by)

    def compose(
        self, events: Events, relation: dp_accounting.NeighboringRelation
    ) -> Events:
        """What a trial runs, with its score; for `search`."""
        noise = float(self.noise_multiplier)
        return {
            accountant: dp_accounting.ComposedDpEvent(
                [event, _events.gaussian(noise, relation, accountant)]
            )
            for accountant, event in events.items()
        }

    def spent(self, mechanism: Mechanism) -> Spending:
        """The same, as runs: the score is a sum over all examples, with noise."""
        score = PoissonGaussian(
            l2_clip_norm=1.0,
            noise_multiplier=float(self.noise_multiplier),
            sampling_prob=1.0,
            iterations=1,
            normalize_by=float(self.normalize_by),
            neighboring_relation=mechanism.neighboring_relation,
        )
        return accounting.compose([mechanism, score])


Score = PublicScore | NoisyScore


def _check(fn: Any, data: Any) -> None:
    if not callable(fn):
        raise TypeError(f"Expected fn to be the score of one example, got {fn!r}.")
    if _data.is_source(data):
        raise TypeError("Expected the examples of a score as arrays, got a source.")
    if _data.num_examples(data) == 0:
        raise ValueError("Expected at least one example to score by, got none.")


def _outline(score: "Score", *numbers: float) -> dict[str, str]:
    return {
        "scored": marks.of(score.data, closely=True),
        "score": closures.checksum(fn=score.fn),
        "scored_by": " ".join(map(str, (type(score).__name__, *numbers))),
    }


def _traced(score: "Score", arguments: tuple[Any, ...]) -> jex.ClosedJaxpr:
    """The program of the score of one example."""
    params, shared = arguments
    example = _data.one_example(score.data)
    return jax.make_jaxpr(score.fn)(params, *shared, *example)


def _check_nodes(
    score: "Score",
    loss: jex.ClosedJaxpr,
    data: Any,
    arguments: tuple[Any, ...],
    *,
    is_public: bool,
) -> None:
    traced = _traced(score, arguments)
    num_shared = len(jax.tree.leaves(arguments))
    _nodes.check_score(loss, traced, num_shared, data, score.data, is_public=is_public)


def _closed_over(score: "Score", arguments: tuple[Any, ...]) -> list[Any]:
    """What a score has beside the example: its function's constants, what is frozen."""
    traced = jax.make_jaxpr(score.per_example)(*arguments, score.data)
    constants = _fingerprint.constants(traced)
    _, shared = arguments
    return [*constants, *jax.tree.leaves(shared)]

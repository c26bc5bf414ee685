"""The score of the models of a search: on public data, or protected data with noise.

A score decides which model is published. So it may read protected data only if the
epsilon of a trial covers it: hence two classes, and no third.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np

from dpadambc import accounting
from dpadambc.accounting import Spending
from dpadambc.core import data as _data
from dpadambc.core import noise, validate
from dpadambc.core.accounting import gaussian
from dpadambc.core.mechanism import Mechanism
from dpadambc.mechanisms.poisson import PoissonGaussian
from dpadambc.mechanisms.terms import gathers_nodes

# How many examples are scored at once.
_AT_ONCE = 256


@dataclasses.dataclass(frozen=True, eq=False)
class Score:
    """A score of examples, given as arrays of one length."""

    score_fn: Callable[..., Any]
    data: Any = dataclasses.field(repr=False)  # may be people's

    def __post_init__(self):
        if not callable(self.score_fn):
            raise TypeError(
                "Expected score_fn to be the score of one example, got"
                f" {type(self.score_fn)}."
            )
        if _data.is_source(self.data):
            raise TypeError("Expected the examples of a score as arrays, got a source.")
        _data.num_examples(self.data)  # raises for none, and for several lengths

    def per_example(self, params: Any, shared: tuple[Any, ...], data: Any) -> jax.Array:
        """Computes the score of each example, shape (num_examples,); for `search`."""

        def one(example):
            arguments = _data.arguments(example)
            score = jnp.asarray(self.score_fn(params, *shared, *arguments), float)
            if score.shape != ():
                raise ValueError(
                    "Expected the score of one example to be a number, got shape"
                    f" {score.shape}."
                )
            return score

        at_once = min(_AT_ONCE, _data.num_examples(data))
        return jax.lax.map(one, data, batch_size=at_once)


class PublicScore(Score):
    """The mean of a score over examples that need no protection: it costs nothing.

    Data are public if anyone may have them, or if their people are not protected. The
    user vouches for that, for `data` and for all values in the function. A validation
    set of protected people is not public: see `NoisyScore`. Nor is a node whose
    prediction reads the features of neighbors that are trained on.

    Args:
      score_fn: the score of one example, of `(params, *example)`, or, in a search
        with `frozen`, of `(params, frozen, *example)`; a larger one is better. NaN is
        worst.
      data: the examples, arrays as for `search`.

    Raises:
      TypeError: if `score_fn` is not callable, or the data are not arrays.
      ValueError: if the arrays are not of one length.

    Example:
      >>> import jax.numpy as jnp
      >>> from dpadambc import training
      >>> score = training.PublicScore(
      ...     lambda w, x, y: -(w @ x - y) ** 2, (jnp.ones((10, 3)), jnp.ones(10)))
    """

    def check(self, mechanism: Mechanism, data: Any, *arguments: Any) -> None:
        """Raises if an array is also trained on; for `search`."""
        trained_on = set(map(id, jax.tree.leaves(data)))
        if trained_on & set(map(id, jax.tree.leaves(self.data))):
            raise ValueError(
                "Expected a PublicScore of data that need no protection, got an array"
                " of the training data. Score these by a NoisyScore."
            )

    def summary(self, scores: np.ndarray, rng: np.random.Generator) -> float:
        """Returns the score of a model; for `search`."""
        del rng
        return float(np.mean(scores, dtype=np.float64))

    def compose(self, event: Any, relation: Any) -> Any:
        """Returns the event of a trial with its score; for `search`."""
        del relation
        return event

    def spent(self, mechanism: Mechanism) -> Spending:
        """Returns the spending of a trial with its score."""
        return accounting.compose([mechanism])


@dataclasses.dataclass(frozen=True, eq=False)
class NoisyScore(Score):
    r"""The mean of a score over protected examples, with noise that is accounted for.

    .. math:: \frac{1}{B} \left(\sum_i \min(\max(s_i, 0), 1)
        + \mathcal{N}(0, z^2)\right)

    One example, added, removed or replaced, moves the sum by at most 1, if the function
    has no protected data of its own. The data may be the training data or others. A
    person may have one row in each: where users are trained on, score all rows of a
    user together. A node of a graph is in several rows, and is refused.

    Args:
      score_fn: the score of one example, in [0, 1], outside of which it is clipped; NaN
        counts as 0. It takes `(params, *example)`, or, in a search with `frozen`,
        `(params, frozen, *example)`; a larger score is better.
      data: the examples, arrays as for `search`.
      noise_multiplier: z, positive; the standard deviation of a score is z / B.
      normalize_by: B, positive and public; usually about the number of examples.

    Raises:
      TypeError: if `score_fn` is not callable, or the data are not arrays.
      ValueError: if a number is out of its range, or the arrays are not of one length.

    Example:
      >>> import jax.numpy as jnp
      >>> from dpadambc import training
      >>> is_right = lambda w, x, y: (w @ x > 0) == y
      >>> score = training.NoisyScore(
      ...     is_right, (jnp.ones((10, 3)), jnp.ones(10, bool)), noise_multiplier=5.0,
      ...     normalize_by=10)
    """

    noise_multiplier: float
    normalize_by: float

    def __post_init__(self):
        super().__post_init__()
        validate.positive(normalize_by=self.normalize_by)
        validate.positive(noise_multiplier=self.noise_multiplier)

    def check(self, mechanism: Mechanism, data: Any, *arguments: Any) -> None:
        """Raises where a node moves more than one score; for `search`."""
        traced = jax.make_jaxpr(self.score_fn)(
            *arguments, *_data.one_example(self.data)
        )
        if mechanism.terms_per_unit > 1 or gathers_nodes(traced):
            raise ValueError(
                "Expected a NoisyScore without graphs.gather, and a mechanism of"
                f" examples, got one of nodes, by {type(mechanism).__name__}: a node is"
                " in several rows, and would move the score by more than one. Score"
                " nodes that need no protection, by a PublicScore."
            )

    def summary(self, scores: np.ndarray, rng: np.random.Generator) -> float:
        """Returns the noisy score of a model, in double precision; for `search`."""
        clipped = np.clip(np.nan_to_num(np.asarray(scores, np.float64), nan=0.0), 0, 1)
        # Exact in any order of examples: rounding would add to the change by one
        # example.
        total, words = math.fsum(clipped), rng.integers(2**32, size=2, dtype=np.uint32)
        with jax.enable_x64(True):
            total, z = jnp.float64(total), jnp.float64(self.noise_multiplier)
            key = jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")
            noised = noise.noised(noise.key_of_step(key, total, z), total, z)
        return float(noised) / float(self.normalize_by)

    def compose(
        self, event: Any, relation: dp_accounting.NeighboringRelation
    ) -> dp_accounting.DpEvent:
        """Returns the event of a trial with its score; for `search`."""
        noise = gaussian(float(self.noise_multiplier), relation)
        return dp_accounting.ComposedDpEvent([event, noise])

    def spent(self, mechanism: Mechanism) -> Spending:
        """Returns the spending of a trial and its score, a noisy sum."""
        score = PoissonGaussian(
            l2_clip_norm=1.0,
            noise_multiplier=float(self.noise_multiplier),
            sampling_prob=1.0,
            iterations=1,
            normalize_by=float(self.normalize_by),
            neighboring_relation=mechanism.neighboring_relation,
        )
        return accounting.compose([mechanism, score])

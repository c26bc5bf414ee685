"""Examples that you insert into the data, to see whether the model reveals them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc.core import validate
from dpadambc.mechanisms import names


@names.explained
@dataclasses.dataclass(frozen=True)
class GradientCanaries:
    """Canaries whose gradient is one coordinate, at the clip norm.

    Each example gets one more argument, the first: the number of its canary, or -1. The
    loss of a canary is linear in one coordinate of the largest array of parameters. So
    its gradient is known, and its trace in the private gradients is one number: see
    `scores`. No example can be stronger in a clipped sum, and canaries do not interfere
    with each other.

    Args:
      params: the parameters that are trained.
      num_canaries: at most the size of the largest array.
      l2_clip_norm: C, the clip norm.
      seed: the seed of the coordinates, and of the members.

    Raises:
      ValueError: if there are more canaries than coordinates.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import dpadambc
      >>> from dpadambc import audit, training
      >>> params, x = jnp.zeros(200), jnp.ones((50, 200))
      >>> canaries = audit.GradientCanaries(params, num_canaries=100, l2_clip_norm=1.0)
      >>> data = canaries.insert((x,))
      >>> mechanism = dpadambc.PoissonGaussian(
      ...     l2_clip_norm=1.0, noise_multiplier=1.0, sampling_prob=1.0, iterations=4,
      ...     normalize_by=10)
      >>> result = training.fit(
      ...     canaries.loss(lambda w, x: jnp.tanh(w @ x)), params, data, mechanism,
      ...     canaries.with_sum(optax.sgd(0.1)), key=jax.random.key(0),
      ...     target_delta=1e-5)
      >>> scores = canaries.scores(result.state.opt_state)
      >>> members, others = scores[canaries.is_member], scores[~canaries.is_member]
      >>> bool(members.mean() > others.mean() + 0.2)
      True
    """

    params: optax.Params
    num_canaries: int
    l2_clip_norm: float
    seed: int = 0

    def __post_init__(self):
        validate.count(num_canaries=self.num_canaries, least=2)
        validate.positive(l2_clip_norm=self.l2_clip_norm)
        size = int(np.size(self._largest(self.params)))
        if self.num_canaries > size:
            raise ValueError(
                f"Expected num_canaries of at most {size}, one for each coordinate of"
                f" the largest array of parameters, got {self.num_canaries}."
            )

    @property
    def is_member(self) -> np.ndarray:
        """Whether each canary is in the data, by a fair coin, shape (num_canaries,)."""
        rng = np.random.default_rng([self.seed, 1])
        return rng.random(self.num_canaries) < 0.5

    @property
    def _coordinates(self) -> np.ndarray:
        rng = np.random.default_rng([self.seed, 2])
        size = int(np.size(self._largest(self.params)))
        return rng.choice(size, self.num_canaries, replace=False)

    def _largest(self, tree: Any) -> Any:
        sizes = [np.size(x) for x in jax.tree.leaves(self.params)]
        return jax.tree.leaves(tree)[int(np.argmax(sizes))]

    def loss(self, loss_fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Returns the loss of `(params, canary, *example)`."""
        coordinates = jnp.asarray(self._coordinates, jnp.int32)

        def of_one(params, canary, *example):
            place = coordinates[jnp.maximum(canary, 0)]
            linear = -2 * self.l2_clip_norm * jnp.ravel(self._largest(params))[place]
            return jnp.where(canary >= 0, linear, loss_fn(params, *example))

        return of_one

    def insert(self, data: tuple[Any, ...]) -> tuple[Any, ...]:
        """Appends the members among the canaries to the data."""
        members = np.flatnonzero(self.is_member).astype(np.int32)
        size = jax.tree.leaves(data)[0].shape[0]
        numbers = np.concatenate([np.full(size, -1, np.int32), members])
        behind = lambda x: jnp.repeat(x[:1], len(members), axis=0)
        longer = lambda x: jnp.concatenate([x, behind(jnp.asarray(x))])
        return jnp.asarray(numbers), *jax.tree.map(longer, data)

    def with_sum(
        self, optimizer: optax.GradientTransformation
    ) -> optax.GradientTransformationExtraArgs:
        """Wraps an optimizer: its state gets the sum of its private gradients."""

        def add(updates, state, params=None):
            return updates, optax.tree.add(state, updates)

        zeros = lambda params: optax.tree.zeros_like(params)
        of_sum = optax.GradientTransformation(zeros, add)
        return optax.chain(of_sum, optimizer)

    def scores(self, opt_state: Any) -> np.ndarray:
        """Sums the components of the private gradients along each canary's gradient.

        Args:
          opt_state: the state of an optimizer `with_sum`.

        Returns:
          An array of shape (num_canaries,).
        """
        total = np.ravel(np.asarray(self._largest(opt_state[0]), float))
        return -total[self._coordinates]

"""A model to time: the loss of one example, and that of a batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax


class Problem(NamedTuple):
    """A model, a loss, parameters and a batch.

    `batch_loss` is the mean loss as one writes it without privacy: a forward pass of
    the whole batch. Where the code is the same with and without a batch axis, it is
    `loss_fn` itself.

    Of a model that is `microbatched`, private gradients in microbatches are timed too.
    What is `frozen` is between parameters and examples, and has no gradient.
    """

    name: str
    loss_fn: Callable[..., jax.Array]  # of (params, *frozen, *example)
    batch_loss: Callable[..., jax.Array]  # of (params, *frozen, *batch)
    params: Any
    batch: tuple[Any, ...]  # each of shape=(batch_size, ...)
    microbatched: bool = False
    frozen: tuple[Any, ...] = ()

    @property
    def batch_size(self) -> int:
        return self.batch[0].shape[0]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Of a gradient, after the parameters."""
        return (*self.frozen, *self.batch)

    @property
    def batch_argnums(self) -> tuple[int, ...]:
        first = 1 + len(self.frozen)
        return tuple(range(first, first + len(self.batch)))

    @property
    def num_params(self) -> int:
        return optax.tree.size(self.params)


def check_losses(problem: Problem, rtol: float = 1e-5) -> None:
    """Raises unless the mean over single examples is the loss of the batch."""
    in_axes = (None,) + (0,) * len(problem.batch)
    losses = jax.vmap(problem.loss_fn, in_axes)(problem.params, *problem.batch)
    batch_loss = problem.batch_loss(problem.params, *problem.batch)
    np.testing.assert_allclose(batch_loss, losses.mean(), rtol=rtol)

"""Trains and scores the trials of a search, in one compiled program."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc.core import data as _data
from dpadambc.core.mechanism import Mechanism
from dpadambc.core.step import Step, draw_batch
from dpadambc.training.scores import Score


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Trains and scores, several trials in one call of one program."""

    step_of: Callable[[Any], Step]
    mechanism: Mechanism
    score: Score
    has_frozen: bool
    at_once: int

    @functools.cached_property
    def _program(self) -> Callable[..., Any]:
        axes = (0, 0, None, None, None, None)
        one = jax.vmap(self._one, axes) if self.at_once > 1 else self._alone
        return jax.jit(one)

    def _alone(self, key, numbers, *rest):
        found = self._one(*jax.tree.map(lambda x: x[0], (key, numbers)), *rest)
        return jax.tree.map(lambda x: x[None], found)

    def _one(self, key, numbers, params, frozen, data, score_data):
        """One trial: its parameters, and the score of each example."""
        step = self.step_of(numbers)
        num_examples = _data.num_examples(data)

        def take_step(state, _):
            batch = draw_batch(self.mechanism, state, num_examples)
            examples = batch.gather(data)
            return step(state, examples, batch.is_padding_example, frozen)[0], None

        state = step.init(params, key=key)
        state, _ = jax.lax.scan(take_step, state, length=self.mechanism.iterations)
        shared = (frozen,) if self.has_frozen else ()
        return state.params, self.score.per_example(state.params, shared, score_data)

    def __call__(
        self, trial_keys: list[jax.Array], numbers: Any, *shared: Any
    ) -> Iterator[tuple[optax.Params, np.ndarray]]:
        """Parameters and scores of each trial; a last call is filled, and cut."""
        number = len(trial_keys)
        for first in range(0, number, self.at_once):
            rows = np.minimum(np.arange(first, first + self.at_once), number - 1)
            row_keys = jnp.stack([trial_keys[row] for row in rows])
            chosen = jax.tree.map(lambda x: x[rows], numbers)  # noqa: B023
            params, scores = self._program(row_keys, chosen, *shared)
            scores = np.asarray(scores)
            for row in range(min(self.at_once, number - first)):
                yield jax.tree.map(lambda x: x[row], params), scores[row]  # noqa: B023

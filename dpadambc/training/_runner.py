"""A run of compiled steps, on arrays on the devices or a source on the host."""

import copy
import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax

from dpadambc.core import data as _data
from dpadambc.core.state import TrainState
from dpadambc.core.step import Seen, Step
from dpadambc.training import _programs


class Runner:
    """The compiled steps, for arrays on the devices or a source on the host.

    Args:
      step: what it does.
      data: arrays on its devices, or a source.
      frozen: what the loss has besides, on its devices.
    """

    def __init__(self, step: Step, data: Any, frozen: Any):
        self._step, self._shardings = step, step.shardings
        self._frozen = frozen
        is_source = _data.is_source(data)
        self._source, self._arrays = (data, None) if is_source else (None, data)
        self._num_examples = _data.num_examples(data)
        self._programs = _programs.of(step, self._num_examples)

    @property
    def num_shards(self) -> int:
        """The number of shards of a batch."""
        return self._shardings.num_shards

    @property
    def spans_processes(self) -> bool:
        """Whether the devices are of several processes."""
        return self._shardings.spans_processes

    def batch_size(self, state: TrainState) -> int:
        """The size of a batch, with its padding."""
        with self._shardings.context():
            return self._batch_shapes(state).indices.shape[0]

    def _batch_shapes(self, state: TrainState) -> Any:
        return jax.eval_shape(self._programs.draw, state)

    def with_microbatches(self, size: int) -> "Runner":
        """The same run, with so many examples in memory at once."""
        other = copy.copy(self)
        other._step = dataclasses.replace(self._step, microbatch_size=size)
        other._programs = _programs.of(other._step, self._num_examples)
        return other

    def peak_bytes(self, state: TrainState, microbatch_size: int | None) -> int:
        """What a step takes on each device, compiled for it."""
        step = dataclasses.replace(self._step, microbatch_size=microbatch_size)
        measure = functools.partial(_programs.peak_bytes, step, self._num_examples)
        with self._shardings.context():
            if self._source is None:
                return measure(1, state, self._frozen, self._arrays)
            batch = _data.no_examples(self._batch_shapes(state))
            examples = _data.fetch(self._source, batch, self._shardings.batch_sharding)
            padding = batch.is_padding_example
            return measure(None, state, examples, padding, self._frozen)

    def start(self, params: optax.Params, key: jax.Array) -> TrainState:
        """The state before the first step."""
        with self._shardings.context():
            return self._programs.start(params, key)

    def with_batches_of(self, state: TrainState, words: np.ndarray) -> TrainState:
        """The state with batches drawn by a key that two words are folded into."""
        with self._shardings.context():
            return self._programs.with_batches_of(state, words)

    def advance(self, state: TrainState, iterations: int) -> tuple[TrainState, Seen]:
        """So many steps in one call; one, where examples come from the host."""
        return self._shardings.finished(self._advance(state, iterations))

    def _advance(self, state: TrainState, iterations: int) -> tuple[TrainState, Seen]:
        with self._shardings.context():
            if self._source is None:
                return self._programs.steps(
                    state, self._frozen, self._arrays, iterations
                )
            batch = self._programs.sample(state)
        examples = _data.fetch(self._source, batch, self._shardings.batch_sharding)
        with self._shardings.context():
            padding = batch.is_padding_example
            return self._programs.step(state, examples, padding, self._frozen)

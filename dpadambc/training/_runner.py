"""A run of compiled steps, on arrays on the devices or a source on the host."""

import copy
import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax

from dpadambc._core import closures, marks
from dpadambc.training import (
    _data,
    _fingerprint,
    _identity,
    _programs,
    _siblings,
)
from dpadambc.training._shardings import Shardings
from dpadambc.training.state import TrainState, releasable
from dpadambc.training.step import Seen, Step


class Runner:
    """The compiled steps, for arrays on the devices or a source on the host.

    Args:
      step: what it does.
      data: arrays or a source.
      frozen: what the loss has besides.
      program: what tells the loss and the update from others.
    """

    def __init__(self, step: Step, data: Any, frozen: Any, program: str):
        self._step, self._shardings = step, step.shardings
        self._program = program
        self._frozen = self._shardings.device_put(frozen)
        self._source = data if _data.is_source(data) else None
        self._arrays = (
            None if self._source is not None else self._shardings.device_put(data)
        )
        self._num_examples = _data.num_examples(data)
        self._programs = _programs.of(step, self._num_examples)

    @property
    def num_shards(self) -> int:
        """The number of shards of a batch."""
        return self._shardings.num_shards

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
        measure = functools.partial(self._programs.peak_bytes, microbatch_size)
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

    def identity(self, state: TrainState) -> dict[str, Any]:
        """What tells this run from others, before its first step.

        It does not depend on the number of devices, nor on the number of iterations.
        *Secret*, as the checkpoint that it is for: it follows from the data.
        """
        with self._shardings.context():
            found = self._identity(state)
        # A loss may have changed since a program of it was kept, and a checkpoint must
        # name the program that runs: its steps may be taken again, with their noise.
        program = found["program"]
        self._programs = _programs.of(self._step, self._num_examples, program)
        return found

    @functools.cached_property
    def data(self) -> str:
        """What the data are known by."""
        if self._source is None:
            return marks.of(self._arrays, closely=True)
        sample = jax.tree.map(np.asarray, _data.sample_of(self._source))
        return marks.of(sample, closely=True)

    @functools.cached_property
    def known_as(self) -> _siblings.Names:
        """The same, and what each array is known by."""
        return _siblings.names_of(self._arrays, self.data)

    def outline(self, state: TrainState) -> dict[str, Any]:
        """What of the identity can be told at once: that of two runs may be the same.

        A large array is known by some of its numbers, a source by a few examples.
        """
        own = {
            "num_examples": self._num_examples,
            "data": self.data,
            "frozen": marks.of(self._frozen),
            "loss_and_optimizer": self._program,
            "derivatives": closures.derivatives(loss_fn=self._step.loss_fn),
        }
        return own | self._step._outline(state)

    def _identity(self, state: TrainState) -> dict[str, Any]:
        # The program of one device that skips nothing, wherever the run is.
        step = dataclasses.replace(
            self._step, shardings=Shardings(), skip_padding=False
        )
        on_one_device = _programs.Programs(step, self._num_examples)
        if self._source is None:
            program = _fingerprint.of_program(
                functools.partial(on_one_device.scan, iterations=1),
                *(state, self._frozen, self._arrays),
            )
        else:
            batch = _data.no_examples(jax.eval_shape(on_one_device.draw, state))
            examples = _data.fetch(self._source, batch)
            program = _fingerprint.of_program(
                step, state, examples, batch.is_padding_example, self._frozen
            )
        data = self._arrays if self._source is None else _data.sample_of(self._source)
        known = jax.random.key(0, impl=jax.random.key_impl(state.sampling_key))
        return _identity.public_numbers(step.mechanism) | {
            "program": program,
            "data": _fingerprint.of_values(data),
            "frozen": _fingerprint.of_values(self._frozen),
            "start": _fingerprint.of_values(releasable(state)),
            "numbers": self._step._numbers(state),
            # They differ where JAX draws differently: another version or configuration.
            "batches": _fingerprint.of_values(self._programs.sample_first(known)),
        }

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

"""Steps compiled, for arrays on the devices or for a source on the host."""

import dataclasses
import functools
from typing import Any

import jax

from dpadambc.mechanisms.batch import Batch
from dpadambc.training import _data, _fingerprint, _identity, _numbers
from dpadambc.training._shardings import Shardings
from dpadambc.training.state import TrainState, releasable
from dpadambc.training.step import Seen, Step, draw_batch


class Runner:
    """The compiled steps, for arrays on the devices or a source on the host."""

    def __init__(self, step: Step, data: Any, frozen: Any):
        self._step, self._shardings = step, step.shardings
        self._frozen = self._shardings.device_put(frozen)
        self._source = data if _data.is_source(data) else None
        self._arrays = (
            None if self._source is not None else self._shardings.device_put(data)
        )
        self._num_examples = _data.num_examples(data)
        self._fetched = jax.jit(step, donate_argnums=0)
        self._scanned = jax.jit(
            functools.partial(self._scan, step), static_argnums=3, donate_argnums=0
        )
        self._sample = jax.jit(
            lambda state: step.shardings.replicate(self._draw(step, state))
        )

    def _draw(self, step: Step, state: TrainState) -> Batch:
        batch = draw_batch(step.mechanism, state, self._num_examples)
        return step.shardings.padded(batch, step.microbatch_size)

    def _scan(
        self, step: Step, state: TrainState, frozen: Any, arrays: Any, iterations: int
    ) -> tuple[TrainState, Seen]:
        def one(state, _):
            batch = self._draw(step, state)
            examples = batch.gather(arrays)
            return step(state, examples, batch.is_padding_example, frozen)

        if iterations == 1:  # a loop around it would cost some percent
            return one(state, None)
        state, seen = jax.lax.scan(one, state, length=iterations)
        return state, seen.total()

    def identity(self, state: TrainState) -> dict[str, Any]:
        """What tells this run from others, before its first step.

        It does not depend on the number of devices, nor on the number of iterations.
        *Secret*, as the checkpoint that it is for: it follows from the data.
        """
        with self._shardings.context():
            return self._identity(state)

    def _numbers(self, state: TrainState) -> dict[str, float]:
        """Those that have a name: in closures, and in the state at the start."""
        found = _numbers.of(
            optimizer=self._step.optimizer,
            loss_fn=self._step.loss_fn,
            noise_multiplier=self._step.mechanism.noise_multiplier,
        )
        start = jax.tree_util.tree_leaves_with_path(releasable(state))
        scalars = {
            f"start{jax.tree_util.keystr(path)}": float(x)
            for path, x in start
            if x.shape == () and x.is_fully_addressable
        }
        return found | scalars

    def _identity(self, state: TrainState) -> dict[str, Any]:
        step = dataclasses.replace(self._step, shardings=Shardings())
        if self._source is None:
            program = _fingerprint.of_program(
                functools.partial(self._scan, step, iterations=1),
                *(state, self._frozen, self._arrays),
            )
        else:
            shapes = jax.eval_shape(functools.partial(self._draw, step), state)
            batch = _data.no_examples(shapes)
            examples = _data.fetch(self._source, batch)
            program = _fingerprint.of_program(
                step, state, examples, batch.is_padding_example, self._frozen
            )
        data = self._arrays if self._source is None else _data.sample_of(self._source)
        return _identity.public_numbers(step.mechanism) | {
            "program": program,
            "data": _fingerprint.of_values(data),
            "frozen": _fingerprint.of_values(self._frozen),
            "start": _fingerprint.of_values(releasable(state)),
            "numbers": self._numbers(state),
            "batches": _fingerprint.of_values(self._batch_of_a_known_key(state)),
        }

    def _batch_of_a_known_key(self, state: TrainState) -> Batch:
        """It differs where JAX draws differently: another version, or configuration."""
        known = jax.random.key(0, impl=jax.random.key_impl(state.sampling_key))
        step = dataclasses.replace(self._step, shardings=Shardings())
        draw = jax.jit(lambda key: self._draw(step, state._replace(sampling_key=key)))
        return draw(known)

    def advance(self, state: TrainState, iterations: int) -> tuple[TrainState, Seen]:
        """So many steps in one call; one, where examples come from the host."""
        with self._shardings.context():
            if self._source is None:
                return self._scanned(state, self._frozen, self._arrays, iterations)
            batch = self._sample(state)
        examples = _data.fetch(self._source, batch, self._shardings.batch_sharding)
        with self._shardings.context():
            padding = batch.is_padding_example
            return self._fetched(state, examples, padding, self._frozen)

"""Steps compiled, for arrays on the device or for a source on the host."""

import functools
from typing import Any

import jax

from dpadambc.training import data as _data
from dpadambc.training import fingerprint, ledger
from dpadambc.training.state import TrainState
from dpadambc.training.step import Step, draw


class Runner:
    """The compiled steps, for arrays on the device or a source on the host."""

    def __init__(self, step: Step, data: Any, frozen: Any):
        self._step, self._frozen = step, frozen
        self._source = data if _data.is_source(data) else None
        self._arrays = None if self._source is not None else jax.device_put(data)
        self._num_examples = _data.num_examples(data)
        self._fetched = jax.jit(step, donate_argnums=0)
        self._scanned = jax.jit(self._scan, static_argnums=3, donate_argnums=0)
        self._sample = jax.jit(
            lambda state: draw(step.mechanism, state, self._num_examples)
        )

    def _scan(self, state: TrainState, frozen: Any, arrays: Any, iterations: int):
        def one(state, _):
            batch = draw(self._step.mechanism, state, self._num_examples)
            examples = _data.gather(arrays, batch.indices)
            return self._step(state, frozen, examples, batch.is_padding_example)

        state, (losses, counts) = jax.lax.scan(one, state, length=iterations)
        return state, (losses.sum(), counts.sum())

    def record(self, state: TrainState, data: Any) -> dict[str, Any]:
        """What tells this run from others, before its first step.

        *Secret*, as the checkpoint that it is for: it follows from the data.
        """
        if self._source is None:
            scan = functools.partial(self._scan, iterations=1)
            program = fingerprint.of_program(scan, state, self._frozen, self._arrays)
        else:
            batch = self._sample(state)
            examples = _data.fetch(self._source, batch)
            program = fingerprint.of_program(
                self._step, state, self._frozen, examples, batch.is_padding_example
            )
        return ledger.public_numbers(self._step.mechanism) | {
            "program": program,
            "data": fingerprint.of_values(_data.sample_of(data)),
            "frozen": fingerprint.of_values(self._frozen),
            "start": fingerprint.of_values((state.params, state.opt_state)),
        }

    def advance(
        self, state: TrainState, iterations: int
    ) -> tuple[TrainState, tuple[jax.Array, jax.Array]]:
        """So many steps in one call; one, where examples come from the host."""
        if self._source is None:
            return self._scanned(state, self._frozen, self._arrays, iterations)
        batch = self._sample(state)
        examples = _data.fetch(self._source, batch)
        return self._fetched(state, self._frozen, examples, batch.is_padding_example)

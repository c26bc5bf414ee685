"""The programs of a step, and those of earlier runs that are of the same step.

A program is kept as `jax.jit` keeps one: what its functions read besides their
arguments is read once, when it is traced. No number of the noise may be that old, or a
run would add other noise than its epsilon is computed from. So programs are kept for
the mechanisms of this package alone, and for levels that are plain numbers. A loss or
an optimizer that has changed since is as private as it was: each example is clipped
whatever its loss is, and the optimizer sees nothing but the private gradient.
"""

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc.clipping import memory
from dpadambc.core import keys
from dpadambc.core.sampling import Batch
from dpadambc.core.state import TrainState
from dpadambc.core.step import Seen, Step, draw_batch


class Programs:
    """The programs of a step on so many examples, each compiled when it is called.

    Parameters, keys and data are arguments: none is in a program as a constant.
    """

    def __init__(self, step: Step, num_examples: int):
        self._step, self._num_examples = step, num_examples
        placed = step.shardings.state
        jit = functools.partial(jax.jit, out_shardings=placed) if placed else jax.jit
        self._start = jit(self._started, static_argnums=2)
        self.with_batches_of = jit(self._with_batches_of)
        self.step = jax.jit(step, donate_argnums=0)
        self.steps = jax.jit(self.scan, static_argnums=3, donate_argnums=0)
        self.sample = jax.jit(lambda s: step.shardings.replicate(self.draw(s)))

    def start(self, params: optax.Params, key: jax.Array) -> TrainState:
        """The state before the first step, in buffers of its own."""
        # As NumPy's words a key is on no device, and the same in several processes.
        words = np.asarray(jax.random.key_data(key))
        return self._start(params, words, jax.random.key_impl(key))

    def _started(self, params: optax.Params, words: Any, impl: Hashable) -> TrainState:
        key = jax.random.wrap_key_data(words, impl=impl)
        # The first step donates the buffers of the state; those of the user must stay.
        return jax.tree.map(jnp.copy, self._step.init(params, key=key))

    def _with_batches_of(self, state: TrainState, words: jax.Array) -> TrainState:
        """The state whose batches are drawn by a key that two words are folded into."""
        key = keys.of_batches(state.sampling_key, words)
        return dataclasses.replace(state, sampling_key=key)

    def draw(self, state: TrainState) -> Batch:
        """The batch of the next step, its shards of equal sizes."""
        batch = draw_batch(self._step.mechanism, state, self._num_examples)
        return self._step.shardings.padded(batch, self._step.microbatch_size)

    def scan(
        self, state: TrainState, frozen: Any, arrays: Any, iterations: int
    ) -> tuple[TrainState, Seen]:
        """So many steps on arrays."""

        def one(state, _):
            batch = self.draw(state)
            examples = batch.gather(arrays)
            return self._step(state, examples, batch.is_padding_example, frozen)

        if iterations == 1:  # a loop around it would cost some percent
            return one(state, None)
        state, seen = jax.lax.scan(one, state, length=iterations)
        return state, jax.tree.map(lambda x: x.sum(0), seen)


def of(step: Step, num_examples: int) -> Programs:
    """The programs of a step, of an earlier run where one had an equal step.

    Args:
      step: with the shardings of its state.
      num_examples: the size of the data set.
    """
    programs_of = _kept if _may_be_kept(step) else Programs
    return programs_of(step, num_examples)


def _may_be_kept(step: Step) -> bool:
    """Whether an equal step has the same noise, and can be found at all."""
    mechanism = step.mechanism
    is_ours = type(mechanism).__module__.startswith("dpadambc.")
    try:
        hash(step)
    except TypeError:  # such as a module of Equinox, for its arrays
        return False
    return is_ours and not callable(mechanism.noise_multiplier)


# It holds what the functions of a step close over: hence so few.
_kept = functools.lru_cache(maxsize=8)(Programs)


def peak_bytes(
    step: Step, num_examples: int, iterations: int | None, *args: Any
) -> int:
    """What a program takes on each device.

    Args:
      step: compiled.
      num_examples: the size of the data set.
      iterations: as for `Programs.steps`; of `Programs.step`, if None.
      *args: the others of either.
    """
    shape = lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=getattr(x, "sharding", None)
    )
    leaves, structure = jax.tree.flatten(jax.tree.map(shape, args))
    measure = _known_peak_bytes if _may_be_kept(step) else _peak_bytes
    return measure(step, num_examples, iterations, structure, tuple(leaves))


def _peak_bytes(
    step: Step,
    num_examples: int,
    iterations: int | None,
    structure: Any,
    leaves: tuple[jax.ShapeDtypeStruct, ...],
) -> int:
    programs, args = Programs(step, num_examples), structure.unflatten(leaves)
    if iterations is None:
        lowered = programs.step.lower(*args)
    else:
        lowered = programs.steps.lower(*args, iterations)
    return memory.peak_bytes(lowered.compile())


_known_peak_bytes = functools.lru_cache(maxsize=64)(_peak_bytes)

"""The programs of a step, and those of earlier runs that are of the same step.

A program is kept as `jax.jit` keeps one: what its functions read besides their
arguments is read once, when it is traced. No number of the noise may be that old, or a
run would add other noise than its epsilon is computed from. So programs are kept for
the mechanisms of this package alone, all of whose numbers are plain and are compared. A
loss or an optimizer that has changed since is as private as it was: each example is
clipped whatever its loss is, and the optimizer sees nothing but the private gradient.
"""

import copy
import dataclasses
import enum
import functools
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc.clipping import _plan
from dpadambc.mechanisms.base import Mechanism
from dpadambc.mechanisms.batch import Batch
from dpadambc.training.state import TrainState
from dpadambc.training.step import Seen, Step, draw_batch


class Programs:
    """The programs of a step on so many examples, each compiled when it is called.

    Parameters, keys and data are arguments: none is in a program as a constant.
    """

    def __init__(self, step: Step, num_examples: int):
        self._step, self._num_examples = step, num_examples
        self._peak_bytes: dict[Hashable, int] = {}
        placed = step.shardings.state
        jit = functools.partial(jax.jit, out_shardings=placed) if placed else jax.jit
        self._start = jit(self._started, static_argnums=2)
        self.step = jax.jit(step, donate_argnums=0)
        self.steps = jax.jit(self.scan, static_argnums=3, donate_argnums=0)
        self.sample = jax.jit(lambda s: step.shardings.replicate(self.draw(s)))
        sample = functools.partial(
            step.mechanism.sample_step, num_examples=num_examples
        )
        self.sample_first = jax.jit(lambda key: sample(key, jnp.int32(0)))

    def peak_bytes(
        self, microbatch_size: int | None, iterations: int | None, *args: Any
    ) -> int:
        """What the program takes on each device with microbatches of another size.

        Args:
          microbatch_size: in place of that of the step.
          iterations: as for `steps`; of `step`, if None.
          *args: the others of either.
        """
        leaves, structure = jax.tree.flatten(args)
        shapes = tuple(map(jax.typeof, leaves))
        which = microbatch_size, iterations, structure, shapes
        if which not in self._peak_bytes:
            step = dataclasses.replace(self._step, microbatch_size=microbatch_size)
            other = Programs(step, self._num_examples)
            if iterations is None:
                lowered = other.step.lower(*args)
            else:
                lowered = other.steps.lower(*args, iterations)
            self._peak_bytes[which] = _plan.peak_bytes(lowered.compile())
        return self._peak_bytes[which]

    def start(self, params: optax.Params, key: jax.Array) -> TrainState:
        """The state before the first step, in buffers of its own."""
        # As NumPy's words a key is on no device, and the same in several processes.
        words = np.asarray(jax.random.key_data(key))
        return self._start(params, words, jax.random.key_impl(key))

    def _started(self, params: optax.Params, words: Any, impl: Hashable) -> TrainState:
        key = jax.random.wrap_key_data(words, impl=impl)
        # The first step donates the buffers of the state; those of the user must stay.
        return jax.tree.map(jnp.copy, self._step.init(params, key=key))

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
        return state, seen.total()


@dataclasses.dataclass(frozen=True)
class _Kept:
    """A step as the cache compares it."""

    name: Hashable
    step: Step = dataclasses.field(compare=False)
    num_examples: int


# It holds what the functions of a step close over: hence so few.
@functools.lru_cache(maxsize=8)
def _kept(kept: _Kept) -> Programs:
    return Programs(kept.step, kept.num_examples)


def of(step: Step, num_examples: int, fingerprint: str | None = None) -> Programs:
    """The programs of a step, of an earlier run where one had an equal step.

    Args:
      step: with the shardings of its state.
      num_examples: the size of the data set.
      fingerprint: of the program as it would be traced now, if it must be that one.

    Returns:
      Programs that are kept for the next run, or, where it cannot be told whether a
      step is the same, that are not.
    """
    numbers = _numbers(step.mechanism)
    if numbers is None:
        return Programs(step, num_examples)
    parts = {f.name: getattr(step, f.name) for f in dataclasses.fields(step)}
    parts |= {"mechanism": numbers, "shardings": step.shardings.name}
    # A mechanism of the cache's own: whatever becomes of the other, its numbers stay.
    own = dataclasses.replace(step, mechanism=copy.copy(step.mechanism))
    kept = _Kept((*parts.items(), fingerprint), own, num_examples)
    try:
        hash(kept)
    except TypeError:  # such as a module of Equinox, for its arrays
        return Programs(step, num_examples)
    return _kept(kept)


def _numbers(mechanism: Mechanism) -> Hashable | None:
    """What a step reads of a mechanism; None where that may not be all that it reads.

    A schedule may be made of what has changed since: then the noise would be of the old
    one, and epsilon of the new one. A mechanism that is not of this package may have
    more than its fields, and a step that depends on `iterations`; no step of ours does.
    """
    kind = type(mechanism)
    if kind.__module__.partition(".")[0] != __name__.partition(".")[0]:
        return None
    fields: Any = dataclasses.fields(mechanism)  # pyright: ignore[reportArgumentType]
    values = {f.name: getattr(mechanism, f.name) for f in fields}
    del values["iterations"]
    # Whatever a rule of others reads, the clip bounds what it takes, as with a loss;
    # those of ours are equal where their numbers are.
    rule = values.pop("clip_rule")
    if not all(
        isinstance(x, int | float | np.number | enum.Enum) for x in values.values()
    ):
        return None
    # 1 and 1.0 are equal, and may be two programs.
    return kind, rule, *((name, type(x), x) for name, x in values.items())

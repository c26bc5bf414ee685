"""Which batches were drawn by hand in this process, to warn of one drawn twice.

Epsilon is for batches that are drawn independently. The same one again, at every step
or in every epoch, takes part without the chance of being left out.
"""

import collections
import contextlib
import hashlib
import json
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np
from jax import core

from dpadambc.mechanisms.batch import Batch

# By the identity of a key: (step, number of examples). To read a key is to wait for the
# device, so one that is made anew of its seed is not known.
_DRAWN: dict[int, set[tuple[int | None, int]]] = {}
# By the identity of a generator's lock, and how a run of it deals how many examples:
# how many batches the last such run has drawn.
_DEALT: dict[int, dict[tuple["Order", int], int]] = {}
# The latest states of generators that a run began with, and for how many examples.
_BEGUN: collections.deque[tuple[str, int]] = collections.deque(maxlen=2**12)


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """Forgets what the runs inside have drawn: nobody trains with it."""
    begun, dealt = list(_BEGUN), {name: dict(runs) for name, runs in _DEALT.items()}
    try:
        yield
    finally:
        _BEGUN.clear()
        _BEGUN.extend(begun)
        for name, runs in _DEALT.items():
            runs.clear()
            runs.update(dealt.get(name, {}))


def check_key(key: jax.Array, batch: Batch, *, stacklevel: int) -> None:
    """Warns where a key draws a batch again, of itself or compiled into a program.

    Args:
      key: what the batch was drawn with.
      batch: of as many examples, drawn the same way.
      stacklevel: of the line to name, from here.
    """
    if isinstance(key, core.Tracer):
        return
    found = None
    if isinstance(batch.indices, core.Tracer):
        found = "a constant of what is compiled, which draws one batch in every call"
    elif _is_known(key, None, batch.num_examples):
        found = "one that has drawn a batch before, and draws the same again"
    if found:
        warnings.warn(
            f"Expected a new key for each batch, got {found}. Epsilon is for batches"
            " drawn independently. Call sample_step(run_key, step), or"
            " sample(jax.random.fold_in(run_key, step)), with the key and the step as"
            " arguments of what is compiled.",
            stacklevel=stacklevel + 1,
        )


def check_step(
    run_key: jax.Array, step: int | jax.Array, batch: Batch, *, stacklevel: int
) -> None:
    """Warns where a key draws the batch of a step again.

    Args:
      run_key: that of the run.
      step: of the run; one on a device is not waited for.
      batch: of as many examples, drawn the same way.
      stacklevel: of the line to name, from here.
    """
    arrays = run_key, step, batch.indices
    if any(isinstance(x, core.Tracer) for x in arrays) or isinstance(step, jax.Array):
        return
    if _is_known(run_key, int(step), batch.num_examples):
        warnings.warn(
            "Expected each step of a run once, counted over all epochs, got step"
            f" {step} again with the same key, which draws the same batch. Epsilon is"
            " for batches drawn independently. Go on counting, or draw a key for each"
            " run, such as training.secret_key().",
            stacklevel=stacklevel + 1,
        )


class Order(NamedTuple):
    """Of a mechanism of which several batches follow from one order of the examples.

    Attributes:
      name: of the mechanism.
      steps: how many batches follow from one order.
      iterations: of a run.
    """

    name: str
    steps: int
    iterations: int

    def is_cut(self, drawn: int) -> bool:
        """Whether a run that begins after so many batches of another deals anew."""
        is_whole_run = self.steps == self.iterations  # another has its own generator
        return is_whole_run or 0 < drawn < self.iterations and drawn % self.steps > 0


def watched(
    rng: np.random.Generator,
    batches: Iterator[Batch],
    is_drawn: Callable[[Batch], bool],
    order: Order | None = None,
) -> Iterator[Batch]:
    """The same batches, with a warning where the generator drew them before.

    Args:
      rng: what they are drawn from, in the state before the first of them.
      batches: all of a run.
      is_drawn: whether chance decides who takes part in one.
      order: of a mechanism that deals the examples into several batches.

    Raises:
      TypeError: if it is no generator, at once.
    """
    if not isinstance(rng, np.random.Generator):
        raise TypeError(
            "Expected rng to be a numpy.random.Generator, such as"
            f" numpy.random.default_rng(), got {type(rng).__name__}."
        )
    return _watched(rng, batches, is_drawn, order)


def _watched(
    rng: np.random.Generator,
    batches: Iterator[Batch],
    is_drawn: Callable[[Batch], bool],
    order: Order | None,
) -> Iterator[Batch]:
    state = _state_of(rng)
    for step, batch in enumerate(batches):
        if step == 0 and is_drawn(batch):
            _check_state(state, batch, stacklevel=2)
        if order:
            _check_order(rng, order, step, batch, stacklevel=2)
        yield batch


def _check_order(
    rng: np.random.Generator, order: Order, step: int, batch: Batch, *, stacklevel: int
) -> None:
    """Warns where a generator deals the examples anew within what it dealt before."""
    lock = rng.bit_generator.lock  # lives as long, and knows weak references
    if id(lock) not in _DEALT:
        _DEALT[id(lock)] = {}
        weakref.finalize(lock, _DEALT.pop, id(lock), None)
    runs, name = _DEALT[id(lock)], (order, batch.num_examples)
    if step == 0 and name in runs and order.is_cut(runs[name]):
        warnings.warn(
            "Expected a generator of its own for each run, got one that has drawn"
            f" {runs[name]} batches of a run of {order.name} before. One call of"
            f" batches is the whole run: {order.steps} steps follow from one order of"
            " the examples, and called anew within them an example takes part in other"
            " steps than epsilon is for. Take all batches of one call, as in"
            " `for batch in mechanism.batches(...)`; another run needs another"
            " generator.",
            stacklevel=stacklevel + 1,
        )
    runs[name] = step + 1


def _state_of(rng: np.random.Generator) -> str:
    """What a generator will draw, by a checksum."""
    as_list = lambda x: x.tolist()  # of an array
    state = json.dumps(rng.bit_generator.state, default=as_list, sort_keys=True)
    return hashlib.blake2b(state.encode(), digest_size=16).hexdigest()


def _check_state(state: str, batch: Batch, *, stacklevel: int) -> None:
    """Warns where the generator of a run begins where that of another did."""
    begun = state, batch.num_examples
    if begun in _BEGUN:
        warnings.warn(
            "Expected a generator of its own for each run, got one in the state that"
            " another began with: the same batches come again. Epsilon is for batches"
            " drawn independently. Make the generator once, before the first run, and"
            " of no seed: np.random.default_rng().",
            stacklevel=stacklevel + 1,
        )
    _BEGUN.append(begun)


def _is_known(key: jax.Array, step: int | None, num_examples: int) -> bool:
    """Whether the batch was drawn before; it is now."""
    if id(key) not in _DRAWN:
        _DRAWN[id(key)] = set()
        weakref.finalize(key, _DRAWN.pop, id(key), None)
    drawn = _DRAWN[id(key)]
    is_known = (step, num_examples) in drawn
    drawn.add((step, num_examples))
    return is_known

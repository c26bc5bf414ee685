"""Which batches were drawn by hand in this process, to warn of one drawn twice.

Epsilon is for batches that are drawn independently. The same one again, at every step
or in every epoch, takes part without the chance of being left out.
"""

import collections
import dataclasses
import hashlib
import json
import warnings
import weakref
from typing import Any

import jax
import numpy as np
from jax import core

from dpadambc.mechanisms.batch import Batch

# By the identity of a key: (step, number of examples). To read a key is to wait for the
# device, so one that is made anew of its seed is not known.
_DRAWN: dict[int, set[tuple[int | None, int]]] = {}
# The latest states of generators that a run began with, and for how many examples.
_BEGUN: collections.deque[tuple[str, int]] = collections.deque(maxlen=2**12)


@dataclasses.dataclass
class _Dealt:
    """A run whose batches follow from one key, and the step that it is at."""

    mechanism: Any
    num_examples: int
    key: jax.Array
    step: int

    def is_alike(self, other: "_Dealt") -> bool:
        """Whether they are steps of the same data, drawn the same way."""
        own = self.mechanism, self.num_examples
        return own == (other.mechanism, other.num_examples)


_DEALT: collections.deque[_Dealt] = collections.deque(maxlen=2**8)


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


def check_dealt(
    mechanism: Any,
    steps: int,
    run_key: jax.Array,
    step: int | jax.Array,
    batch: Batch,
    *,
    stacklevel: int,
) -> None:
    """Warns where a step is drawn with another key than the step before.

    Args:
      mechanism: whose batches follow from one key.
      steps: how many do.
      run_key: that of the run; read where it is another array than before.
      step: of the run; one on a device is not waited for.
      batch: of as many examples, drawn the same way.
      stacklevel: of the line to name, from here.
    """
    arrays = run_key, step, batch.indices
    if any(isinstance(x, core.Tracer) for x in arrays) or isinstance(step, jax.Array):
        return
    dealt = _Dealt(mechanism, batch.num_examples, run_key, int(step))
    alike = [run for run in _DEALT if run.is_alike(dealt)]
    before = [run for run in alike if step % steps and run.step == dealt.step - 1]
    own = [run for run in alike if run.key is run_key]
    own = own or [run for run in before if _are_equal(run.key, run_key)]
    if own:
        own[0].key, own[0].step = run_key, dealt.step
        return
    _DEALT.append(dealt)
    if before:
        warnings.warn(
            f"Expected one run_key for all steps, got another at step {step} than at"
            f" the step before. The batches of {type(mechanism).__name__} follow from"
            " one key: with several an example takes part any number of times, which"
            " epsilon does not cover. Do not split the key: each step has its number.",
            stacklevel=stacklevel + 1,
        )


def _are_equal(key: jax.Array, other: jax.Array) -> bool:
    if key.is_deleted() or key.dtype != other.dtype:
        return False
    return np.array_equal(jax.random.key_data(key), jax.random.key_data(other))


def state_of(rng: np.random.Generator) -> str:
    """What a generator will draw, by a checksum."""
    as_list = lambda x: x.tolist()
    state = json.dumps(rng.bit_generator.state, default=as_list, sort_keys=True)
    return hashlib.blake2b(state.encode(), digest_size=16).hexdigest()


def check_state(state: str, batch: Batch, *, stacklevel: int) -> None:
    """Warns where the generator of a run begins where that of another did.

    Args:
      state: of the generator before the first batch.
      batch: the first.
      stacklevel: of the line to name, from here.
    """
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

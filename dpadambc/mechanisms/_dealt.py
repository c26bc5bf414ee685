"""Whether batches that follow from one key were all drawn with it.

Where an epoch deals its examples, an example takes part as often as epsilon says in the
batches of one key. In batches of several, each with a key of its own, it is any number
of times.
"""

import collections
import dataclasses
import warnings
from typing import Any

import jax
import numpy as np
from jax import core

from dpadambc.mechanisms.batch import Batch


@dataclasses.dataclass
class _Run:
    """A run whose batches follow from one key, and the step that it is at."""

    mechanism: Any
    num_examples: int
    key: jax.Array
    step: int

    def is_alike(self, other: "_Run") -> bool:
        """Whether they are steps of the same data, drawn the same way."""
        own = self.mechanism, self.num_examples
        return own == (other.mechanism, other.num_examples)


_RUNS: collections.deque[_Run] = collections.deque(maxlen=2**8)


def check(
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
    now = _Run(mechanism, batch.num_examples, run_key, int(step))
    if step % steps:
        _warn_of_another_size(now, stacklevel=stacklevel + 1)
    alike = [run for run in _RUNS if run.is_alike(now)]
    before = [run for run in alike if step % steps and run.step == now.step - 1]
    own = [run for run in alike if run.key is run_key]
    own = own or [run for run in before if _are_equal(run.key, run_key)]
    if own:
        own[0].key, own[0].step = run_key, now.step
        return
    _RUNS.append(now)
    if before:
        warnings.warn(
            f"Expected one run_key for all steps, got another at step {step} than at"
            f" the step before. The batches of {type(mechanism).__name__} follow from"
            " one key: with several an example takes part any number of times, which"
            " epsilon does not cover. Do not split the key: each step has its number.",
            stacklevel=stacklevel + 1,
        )


def _warn_of_another_size(now: _Run, *, stacklevel: int) -> None:
    """Where the step before, with this very key, was of more or fewer examples.

    Unless one was of as many: of two runs with one key, on two data sets.
    """
    is_before = lambda run: (
        run.mechanism == now.mechanism
        and run.key is now.key
        and run.step == now.step - 1
    )
    before = list(filter(is_before, _RUNS))
    if any(run.num_examples == now.num_examples for run in before):
        return
    if before:
        warnings.warn(
            f"Expected {before[0].num_examples} examples in all steps of a run, got"
            f" {now.num_examples} at step {now.step}. The batches of"
            f" {type(now.mechanism).__name__} follow from one order: with another"
            " number all are dealt anew, and an example takes part in other steps"
            " than epsilon is for. Keep the row of who leaves, and mask it, until a"
            " new run begins.",
            stacklevel=stacklevel + 1,
        )


def _are_equal(key: jax.Array, other: jax.Array) -> bool:
    if key.is_deleted() or key.dtype != other.dtype:
        return False
    return np.array_equal(jax.random.key_data(key), jax.random.key_data(other))

"""How many examples at a time fit into the memory of the devices."""

import functools
import warnings
from typing import Literal

import jax
import numpy as np
from jax.experimental import multihost_utils

from dpadambc.clipping import memory
from dpadambc.core import validate
from dpadambc.core.state import TrainState
from dpadambc.training._runner import Runner

MicrobatchSize = int | Literal["auto"] | None

# Of a device's memory; the rest is lost between buffers, or others have it.
_SHARE = 0.9


def check(microbatch_size: MicrobatchSize) -> int | None:
    """The size, None where it is still to be planned; raises if it is none."""
    if microbatch_size == "auto" or microbatch_size is None:
        return None
    validate.count(least=1, microbatch_size=microbatch_size)
    return microbatch_size


def stated_bytes(*, spans_processes: bool = False) -> float | None:
    """What a program may take of each device, if all of them state their memory.

    It does not depend on what else is there: a run that goes on from a checkpoint must
    be the same program. Of a run that spans processes, all have one program.
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    limits = [each.get("bytes_limit") for each in stats]
    least = _SHARE * min(limit or 0 for limit in limits)
    if spans_processes:
        least = float(np.min(multihost_utils.process_allgather(np.float64(least))))
    return least or None


def planned(
    runner: Runner, start: TrainState, microbatch_size: MicrobatchSize
) -> Runner:
    """The run with microbatches that fit; as it is, where the memory is not known.

    The memory is that of one step: a run of more steps, or with more of them in a call,
    has the same microbatches, and goes on from its checkpoints.

    Args:
      runner: of a step with the size that was asked for.
      start: the state before the first step.
      microbatch_size: what was asked for.
    """
    limit = stated_bytes(spans_processes=runner.spans_processes)
    if limit is None:
        return runner
    needed = functools.partial(runner.peak_bytes, start)
    if microbatch_size != "auto":
        _warn_of(needed(microbatch_size), limit, _TRY_AUTO)
        return runner
    sizes = memory.sizes(runner.batch_size(start), runner.num_shards)
    known = memory.measured_around(limit, sizes, needed)
    chosen = memory.largest_within(limit, known)
    if chosen is None:
        chosen = sizes[0]
        _warn_of(known[chosen], limit, _TRY_LESS.format(chosen))
    return runner if chosen == sizes[-1] else runner.with_microbatches(chosen)


_TRY_AUTO = "microbatch_size='auto' finds how many examples fit at a time."
_TRY_LESS = (
    "No fewer than {} examples can be computed at a time: rematerialize"
    " (jax.checkpoint), cut the length of an example, train fewer parameters, shard"
    " them, or take smaller batches."
)


def _warn_of(needed: int, limit: float, what_to_do: str) -> None:
    """Warns where a step takes more than a device has."""
    if needed > limit:
        warnings.warn(
            f"A step takes {needed / 1e9:.3g} GB as compiled, more than the"
            f" {limit / 1e9:.3g} GB that it may have of the device. {what_to_do}",
            stacklevel=4,  # of the call of fit
        )

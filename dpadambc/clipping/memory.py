"""The largest microbatch whose compiled program fits into a memory limit."""

import bisect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

# The usable fraction of a device's memory; fragmentation or others take the rest.
_SHARE = 0.9


def stated_bytes(*, of_all_processes: bool = False) -> float | None:
    """Returns the memory that a program may use on each device, if all state it.

    It does not depend on the device's other programs: a run that is resumed from a
    checkpoint must be the same program. A program of several processes is one for all
    of them.
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    least = _SHARE * min(each.get("bytes_limit") or 0 for each in stats)
    if of_all_processes:
        least = float(np.min(multihost_utils.process_allgather(np.float64(least))))
    return least or None


def of_program(compiled: Any) -> Any:
    """Returns the memory of a compiled program, as its compiler states it.

    Raises:
      RuntimeError: if the compiler of this device does not state it.
    """
    memory = compiled.memory_analysis()
    if memory is None:
        raise RuntimeError(
            "Expected a compiler that states the memory of its programs, got one"
            " for a device that does not: plan on another, such as a CPU."
        )
    return memory


def peak_bytes(compiled: Any) -> int:
    """Returns the bytes of a compiled program: arguments, outputs and temporaries.

    Raises:
      RuntimeError: as `of_program`.
    """
    memory = of_program(compiled)
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )


def is_stated_by_compiler() -> bool:
    """Returns whether the default device's compiler states the memory of programs."""
    return jax.jit(lambda: 0.0).lower().compile().memory_analysis() is not None


# The largest fraction of a batch that may be padding of the last microbatch.
_MOST_PADDING = 1 / 16


def sizes(batch_size: int, multiple_of: int = 1) -> list[int]:
    """Returns the sizes of microbatches to choose from, increasing.

    For each number of microbatches it takes the least size that holds the batch, unless
    that needs too much padding, which takes as long as examples do.
    """
    shards = max(1, -(-batch_size // multiple_of))
    found = {-(-shards // count) for count in range(1, shards + 1)}
    padding = lambda size: -shards % size
    kept = (size for size in found if padding(size) <= _MOST_PADDING * shards)
    return sorted(multiple_of * size for size in kept)


def measured_around(
    limit: float, sizes: Sequence[int], measure: Callable[[int], int]
) -> dict[int, int]:
    """Measures the bytes of some sizes, among them the largest that fits and the next.

    Bytes are nearly a linear function of the size. So the next size to compile is where
    the line between the known ones meets the limit, and every second time, should they
    not be linear, the one in the middle.

    Args:
      limit: the limit in bytes.
      sizes: the sizes, increasing.
      measure: compiles the program of a size and returns its bytes.

    Returns:
      The bytes by size: of the largest size alone, if it fits; of the least and the
      largest, if not even the least fits.
    """
    known: dict[int, int] = {}

    def fits(i: int) -> bool:
        known[sizes[i]] = measure(sizes[i])
        return known[sizes[i]] <= limit

    below, above = 0, len(sizes) - 1
    if fits(above) or above == 0 or not fits(below):
        return known
    halve = False
    while above - below > 1:
        low, high = sizes[below], sizes[above]
        share = (limit - known[low]) / (known[high] - known[low])
        guess = bisect.bisect_right(sizes, low + share * (high - low)) - 1
        i = (below + above) // 2 if halve else min(max(guess, below + 1), above - 1)
        below, above = (i, above) if fits(i) else (below, i)
        halve = not halve
    return known


def microbatch_size(
    limit: float, batch_size: int, multiple_of: int, measure: Callable[[int], int]
) -> int | None:
    """Returns the largest size that fits, or the least; None for the whole batch."""
    possible = sizes(batch_size, multiple_of)
    known = measured_around(limit, possible, measure)
    fitting = (size for size, num in known.items() if num <= limit)
    chosen = max(fitting, default=possible[0])
    return None if chosen == possible[-1] else chosen

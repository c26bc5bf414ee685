"""Times of several functions, interleaved in one process, and their memory."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

_FEW = 5  # rounds of what is slow

Cases = dict[str, tuple[Callable[..., Any], Sequence[Any]]]


def compile_cases(cases: Cases) -> dict[str, Any]:
    """Each function compiled ahead of time for its arguments."""
    return {
        name: jax.jit(fun).lower(*args).compile() for name, (fun, args) in cases.items()
    }


def interleaved_times(cases: Cases, compiled: dict[str, Any], rounds: int):
    """Seconds of each call, shape (rounds,), after two warm rounds.

    In every round each function is called once, in turn, so that whatever else the
    machine does hits all of them alike. One that takes more than a second, and more
    than three times as long as the first of them, is called in the first rounds only.
    The memory it gives back would slow down the next, which is warmed again there.
    """
    times = {name: [] for name in cases}

    def call(name):
        start = time.perf_counter()
        jax.block_until_ready(compiled[name](*cases[name][1]))
        times[name].append(time.perf_counter() - start)

    for name in [*cases, *cases]:
        call(name)
    warm = {name: min(seconds) for name, seconds in times.items()}
    longest = max(1.0, 3 * next(iter(warm.values()), 0.0))
    slow = [name for name in cases if warm[name] > longest]
    for i in range(rounds):
        called = [name for name in cases if i < _FEW or name not in slow]
        for name in called:
            if name not in slow and i < _FEW and slow:
                jax.block_until_ready(compiled[name](*cases[name][1]))
            call(name)
    return {name: np.array(seconds[2:]) for name, seconds in times.items()}


def peak_bytes(compiled: Any) -> int:
    """Memory that the compiled program needs: arguments, outputs and temporaries."""
    analysis = compiled.memory_analysis()
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        + analysis.temp_size_in_bytes
    )


def quartiles(values: np.ndarray) -> dict[str, float]:
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    return {"median": float(median), "q1": float(low), "q3": float(high)}

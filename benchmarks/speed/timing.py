"""Times of several functions, interleaved in one process, and their memory."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

Cases = dict[str, tuple[Callable[..., Any], Sequence[Any]]]


def compile_cases(cases: Cases) -> dict[str, Any]:
    """Each function compiled ahead of time for its arguments."""
    return {
        name: jax.jit(fun).lower(*args).compile() for name, (fun, args) in cases.items()
    }


def interleaved_times(cases: Cases, compiled: dict[str, Any], rounds: int):
    """Seconds of each call, shape (rounds,), after two warm rounds.

    In every round each function is called once, in turn, so that whatever else the
    machine does hits all of them alike.
    """
    times = {name: [] for name in cases}
    for _ in range(rounds + 2):
        for name, (_, args) in cases.items():
            start = time.perf_counter()
            jax.block_until_ready(compiled[name](*args))
            times[name].append(time.perf_counter() - start)
    return {name: np.array(t[2:]) for name, t in times.items()}


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

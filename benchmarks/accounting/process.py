"""One accountant on one setting, in a process of its own.

The processes are forked from one that has imported the libraries and called nothing.
So none finds what another left in a cache, and imports are not in the figures.
"""

import importlib
import logging
import multiprocessing
import os
import pathlib
import resource
import signal
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.accounting.settings import BY_NAME, Setting

MOST_SECONDS = 120  # of CPU, so that a busy machine changes nothing
MOST_MEMORY = 8 * 2**30
REPEATS = 3
_SLOW = 1.0  # seconds: what takes longer is measured once

# CPU time would count the threads that wait.
_ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}

# What every accountant computes first, so that no figure has what a first call costs.
WARM_UP = Setting(batch_size=1, num_examples=10, iterations=10, noise_multiplier=4.0)

# Epsilon or, where there is a target, the noise multiplier; None where it cannot.
Accountant = Callable[[Setting], float | None]
Row = dict[str, Any]


def peak_megabytes() -> float:
    """The most memory that this process has had, as `benchmarks.speed.process` does."""
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in status if line.startswith("VmHWM:"))
    return float(line.split()[1]) * 1024 / 1e6


def _measured(accountant: Accountant, setting: Setting) -> Row:
    before = peak_megabytes()
    accountant(WARM_UP)
    start = time.process_time()
    value = accountant(setting)
    if value is None:
        return {}
    seconds = time.process_time() - start
    megabytes = max(peak_megabytes() - before, 0.0)
    return {"value": float(value), "seconds": seconds, "megabytes": megabytes}


def _child(
    connection: Connection, module: str, name: str, setting: str, most_seconds: int
) -> None:
    warnings.simplefilter("ignore")
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (most_seconds, most_seconds + 1))
    accountant = importlib.import_module(module).ACCOUNTANTS[name]
    try:
        row = _measured(accountant, BY_NAME[setting])
    except Exception as error:
        text = str(error).split("\n")[0][:100]
        row = {"error": f"{type(error).__name__}: {text}".removesuffix(": ")}
    connection.send(row)


def _once(module: str, name: str, setting: str, most_seconds: int) -> Row:
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    args = (sender, module, name, setting, most_seconds)
    process = context.Process(target=_child, args=args)
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        if process.exitcode == -signal.SIGXCPU:
            return {"error": f"more than {most_seconds} s"}
        return {"error": f"exit status {process.exitcode}"}
    finally:
        process.join()


def prepare(modules: Sequence[str]) -> None:
    """Has processes forked from one that has imported these modules."""
    os.environ.update(_ONE_THREAD)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*modules, __name__])


def measure(
    module: str,
    name: str,
    setting: Setting,
    *,
    most_seconds: int = MOST_SECONDS,
    repeats: int = REPEATS,
) -> Row:
    """An accountant of a module on one setting: median seconds and memory.

    Returns:
      "value", "seconds" of CPU and "megabytes"; or "error"; or nothing where the
      accountant cannot account for the setting.
    """
    rows = [_once(module, name, setting.name, most_seconds)]
    while len(rows) < repeats and rows[0].get("seconds", _SLOW) < _SLOW:
        rows.append(_once(module, name, setting.name, most_seconds))
    if "value" not in rows[0]:
        return rows[0]
    medians = {
        key: statistics.median(row[key] for row in rows if key in row)
        for key in ("seconds", "megabytes")
    }
    return {"value": rows[0]["value"]} | medians

"""Ctrl-C in a run: it ends after a step, where the state is whole and can be saved."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax


@contextlib.contextmanager
def held() -> Iterator[list[Any]]:
    """Puts a Ctrl-C into the list that it yields; a second one interrupts at once.

    In a process of its own, in the main thread, and where nobody else handles it.
    """
    interrupts: list[Any] = []

    def hold(*interrupt: Any) -> None:
        if interrupts:
            raise KeyboardInterrupt
        interrupts.append(interrupt)
        told = "dpadambc: ends after this step; Ctrl-C once more ends it at once."
        print(told, file=sys.stderr, flush=True)

    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    is_ours = is_main and before is signal.default_int_handler
    if is_ours and jax.process_count() == 1:
        signal.signal(signal.SIGINT, hold)
    try:
        yield interrupts
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before)

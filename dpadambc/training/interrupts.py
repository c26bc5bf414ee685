"""Ctrl-C in a run: it ends after a step, where the state is whole and can be saved."""

import contextlib
import signal
import sys
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
        message = "dpadambc: ends after this step; Ctrl-C once more ends it at once."
        print(message, file=sys.stderr, flush=True)

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler and jax.process_count() == 1:
        with contextlib.suppress(ValueError):  # of another thread than the main one
            signal.signal(signal.SIGINT, hold)
    try:
        yield interrupts
    finally:
        if signal.getsignal(signal.SIGINT) is hold:
            signal.signal(signal.SIGINT, before)

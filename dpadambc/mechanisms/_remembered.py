"""Numbers of events that were computed before."""

import functools
import io
import pickle
from collections.abc import Callable

import dp_accounting

_MOST_KNOWN = 4096
# Whose events are what their fields say: the code of others may change in a notebook.
_KNOWN_PACKAGES = {"dp_accounting", "dpadambc", "numpy", "builtins"}


class _Content(pickle.Pickler):
    """All fields of an event, and of those in it, of packages that are known."""

    def reducer_override(self, obj):
        # Of a class or a function its own, of an object that of its class.
        module = getattr(obj, "__module__", None) or type(obj).__module__
        if module.partition(".")[0] not in _KNOWN_PACKAGES:
            raise pickle.PicklingError(f"{module} may change.")
        return NotImplemented


def _content(event: dp_accounting.DpEvent) -> bytes | None:
    written = io.BytesIO()
    try:
        _Content(written).dump(event)
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError):
        return None
    return written.getvalue()


def remembered(of_event: Callable[..., float]) -> Callable[..., float]:
    """Computes a number of an event, and other arguments, once.

    Events are told apart by their content, so one that was changed is another.
    """

    @functools.lru_cache(_MOST_KNOWN)
    def known(content: bytes, *args, **kwargs) -> float:
        return of_event(pickle.loads(content), *args, **kwargs)

    @functools.wraps(of_event)
    def found(event: dp_accounting.DpEvent, *args, **kwargs) -> float:
        content = _content(event)
        if content is None:
            return of_event(event, *args, **kwargs)
        return known(content, *args, **kwargs)

    return found

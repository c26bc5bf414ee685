"""With which keys the runs of this process began, to warn of one that serves two."""

import collections
import warnings
from typing import Any

from dpadambc._core import differences

_MOST_KNOWN = 2**14  # keys, the latest

_BEGAN: collections.OrderedDict[str, dict[str, Any]] = collections.OrderedDict()


def check(key: str, outline: dict[str, Any], *, stacklevel: int) -> None:
    """Warns if a run of this process began with the key that was another run.

    The same run once more, be it for more iterations, adds the same noise to the same
    gradients, which tells nothing new.

    Args:
      key: the name of it.
      outline: what the run is, as far as that is known before its first step. Of two
        runs what both tell is compared: a loop by hand does not show its data.
      stacklevel: of the line to name, from here.
    """
    known = _BEGAN.pop(key, outline)
    _BEGAN[key] = outline | known
    while len(_BEGAN) > _MOST_KNOWN:
        _BEGAN.popitem(last=False)
    both = known.keys() & outline.keys()
    there, here = ({name: run[name] for name in both} for run in (known, outline))
    apart = differences.of_identities(there, here) + differences.of_numbers(there, here)
    if apart:
        warnings.warn(
            "Expected a key of its own for each run, got that of an earlier run of this"
            " process that was another. Both add the same noise, which is gone from the"
            " difference of what they return, so epsilon does not hold where both are"
            " released, or one is chosen. Draw a new key, such as"
            " training.secret_key() or jax.random.fold_in(key, run). What differs:\n  "
            + "\n  ".join(dict.fromkeys(apart)),
            stacklevel=stacklevel,
        )

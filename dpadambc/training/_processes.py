"""What the processes of one run must have in common."""

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from dpadambc._core import marks
from dpadambc.mechanisms import _names
from dpadambc.training import _data

_MOST_EXAMPLES = 8  # of a source that are looked at
# What is known by the code of functions, which two processes may write otherwise.
_OF_A_PROCESS = {"functions", "derivatives", "noise"}
_WHAT_TO_DO = {
    "data": " Each process draws the whole batch, and fetches what its devices need of"
    " it. So a source has every example of the run, under the same index in all"
    " processes, and arrays are the same in all; where each has a part of the rows,"
    " jax.make_array_from_process_local_data makes one array of them.",
    "mechanism": " Each would add noise of its own level, and state an epsilon of its"
    " own. Give all the numbers of the whole data.",
}


def digest(told: Any) -> np.ndarray:
    """Sixteen numbers, which another text hardly has."""
    text = told if isinstance(told, bytes) else repr(told).encode()
    return np.frombuffer(hashlib.blake2b(text).digest(), np.uint32)


def refuse_different(**parts: Any) -> None:
    """Raises where a part of one run is another in another process.

    Args:
      **parts: what is told of each, by name. All processes must call this.
    """
    if jax.process_count() == 1:
        return
    own = np.stack([digest(told) for told in parts.values()])
    same = (multihost_utils.process_allgather(own) == own).all((0, 2))
    different = [name for name, is_same in zip(parts, same, strict=True) if not is_same]
    if different:
        raise ValueError(
            f"Expected the same {' and '.join(different)} in all processes of one run,"
            " got others in another process: what is stated would be of neither."
            + "".join(_WHAT_TO_DO.get(name, "") for name in different)
        )


def common(outline: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """What of an outline is the same in all processes that do the same."""
    return sorted((name, x) for name, x in outline.items() if name not in _OF_A_PROCESS)


def mechanism(of_run: Any) -> list[tuple[str, Any]]:
    """What can be told of a mechanism."""
    return common(_names.outline(of_run))


def arrays(tree: Any) -> tuple[str, list[str]]:
    """What can be told of arrays; of one that several processes hold, its shape."""
    leaves = jax.tree.leaves(tree)
    here = [np.asarray(x) for x in leaves if _data.is_here(x) and not _is_key(x)]
    shapes = [f"{np.shape(x)} {jax.numpy.result_type(x)}" for x in leaves]
    return marks.of(here, closely=True), shapes


def _is_key(x: Any) -> bool:
    return jax.numpy.issubdtype(jax.numpy.result_type(x), jax.dtypes.prng_key)


def data(of_run: Any) -> Any:
    """What can be told of arrays or of a source, by a few of its examples."""
    if not _data.is_source(of_run):
        return arrays(of_run)
    size = len(of_run)
    places = np.linspace(0, size - 1, min(size, _MOST_EXAMPLES)).astype(int)
    return size, [arrays(of_run[int(i)]) for i in places]

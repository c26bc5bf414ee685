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
    "settings": " They decide how many steps are taken, and what epsilon is stated.",
    "search": " Give all the same data, candidates, trials and settings.",
}
_MOST_PARTS = 8


def digest(told: Any) -> np.ndarray:
    """Sixteen numbers, which another text hardly has."""
    text = told if isinstance(told, bytes) else repr(told).encode()
    return np.frombuffer(hashlib.blake2b(text).digest(), np.uint32)


def gathered(kind: str, *told: Any) -> tuple[np.ndarray, np.ndarray]:
    """Digests of what this process tells, and of what each one does.

    Args:
      kind: of the run, "alone" or "of all processes".
      *told: at most `_MOST_PARTS`.

    Returns:
      Shapes (parts, 16) and (processes, parts, 16).

    Raises:
      ValueError: if another process begins with a run of another kind.
    """
    rows = [*told, *[""] * (_MOST_PARTS - len(told)), kind]  # as many for each kind
    own = np.stack(list(map(digest, rows)))
    everyone = np.asarray(multihost_utils.process_allgather(own))
    if (everyone[:, -1] != own[-1]).any():
        raise ValueError(
            "Expected all processes to train one model, with batch_sharding over the"
            " devices of all, or each its own, got some of each: runs of all processes"
            " compare what they are at their start."
        )
    return own[:-1], everyone[:, :-1]


def refuse_different(**parts: Any) -> None:
    """Raises where a part of one run is another in another process.

    Args:
      **parts: what is told of each, by name. All processes must call this.
    """
    if jax.process_count() == 1:
        return
    own, everyone = gathered("of all processes", *parts.values())
    same = (everyone == own).all((0, 2))[: len(parts)]
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
    """What can be told of arrays; of one that no process has whole, its shape."""
    leaves = list(map(_without_keys, jax.tree.leaves(tree)))
    here = [np.asarray(x) for x in map(_of_this_process, leaves) if _data.is_here(x)]
    shapes = [f"{np.shape(x)} {jax.numpy.result_type(x)}" for x in leaves]
    return marks.of(here, closely=True), shapes


def _without_keys(x: Any) -> Any:
    is_key = jax.numpy.issubdtype(jax.numpy.result_type(x), jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


def _of_this_process(x: Any) -> Any:
    """Its own copy of an array that all have."""
    return x.addressable_data(0) if getattr(x, "is_fully_replicated", False) else x


def data(of_run: Any) -> Any:
    """What can be told of arrays or of a source, by a few of its examples."""
    if not _data.is_source(of_run):
        return arrays(of_run)
    size = len(of_run)
    places = np.linspace(0, size - 1, min(size, _MOST_EXAMPLES)).astype(int)
    return size, [arrays(of_run[int(i)]) for i in places]

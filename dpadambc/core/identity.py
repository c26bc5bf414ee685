"""What tells a run from others: its public numbers, and checksums of the rest.

Three things rest on it. Batches are drawn by a key that the identity is folded into, so
that two runs with one key do not draw the same. A checkpoint goes on only with the run
that it is of. And processes that train one model must agree on it.
"""

import hashlib
import json
import types
from typing import Any

import jax.extend.core as jex
import numpy as np
from jax.experimental import multihost_utils

from dpadambc.core import data as _data
from dpadambc.core import fingerprint
from dpadambc.core.mechanism import Mechanism
from dpadambc.core.spending import Spending, public_numbers

Identity = dict[str, Any]

_EARLIER = "spent_before"
_PROGRAM = "program"
_MEANING = types.MappingProxyType(
    {
        "program": "of another loss, optimizer, schedule of noise or release of JAX",
        "start": "which begins elsewhere",
        "frozen": "of other numbers in frozen",
        "data": "of other data",
    }
)
# How many steps a run was to have is no difference: a run may be extended.
_MAY_DIFFER = ("iterations",)


def of_run(
    mechanism: Mechanism,
    programs: list[jex.ClosedJaxpr],
    params: Any,
    frozen: Any,
    data: Any,
    earlier: Spending | None = None,
) -> Identity:
    """What tells a run from others before its first step; *secret*.

    Args:
      mechanism: the public numbers.
      programs: of the optimizer, the loss of one example, and a schedule of noise.
      params: where it begins.
      frozen: what the loss has besides.
      data: arrays, or a source, which is known by its length and first example.
      earlier: what was spent before, and is in the epsilon of the run.
    """
    known = (len(data), data[0]) if _data.is_source(data) else data
    return public_numbers(mechanism) | {
        _PROGRAM: " ".join(map(fingerprint.of_traced, programs)),
        "start": fingerprint.of_values(params),
        "frozen": fingerprint.of_values(frozen),
        "data": fingerprint.of_values(known),
        _EARLIER: None if earlier is None else _without_names(earlier),
    }


def _without_names(earlier: Spending) -> str:
    """What was spent before, as text, which is the same after JSON.

    Names are random: a script that is run again makes other ones for the same runs.
    """
    runs = earlier.runs
    return json.dumps([(public_numbers(run.mechanism), run.levels) for run in runs])


def digest(identity: Identity) -> np.ndarray:
    """64 bits of an identity, shape (2,), uint32."""
    parts = {k: v for k, v in identity.items() if k not in _MAY_DIFFER}
    text = json.dumps(parts, sort_keys=True).encode()
    return np.frombuffer(hashlib.sha256(text).digest()[:8], np.uint32)


def refuse_different_processes(identity: Identity, settings: tuple[Any, ...]) -> None:
    """Raises where the processes of one run are not about to do the same."""
    here = digest(identity | {"settings": repr(settings)})
    if (multihost_utils.process_allgather(here) != here).any():
        raise ValueError(
            "Expected the same mechanism, loss, optimizer, parameters, data and"
            " settings in all processes of one run, got others in another process. A"
            " source has every example, under the same index in all of them; where each"
            " process has a part of the rows, jax.make_array_from_process_local_data"
            " makes one array of them."
        )


def refuse_other_run(path: Any, there: Identity, here: Identity) -> None:
    """Raises where a checkpoint is of another run than the one that asks."""
    if there.get(_EARLIER) != here.get(_EARLIER):
        raise ValueError(
            "Expected the spent= that the run of the checkpoint began with,"
            f" {there.get(_EARLIER) or 'nothing'}, got {here[_EARLIER] or 'nothing'}."
            " Its epsilon counts that and all of its own steps. To add an earlier run"
            " that was forgotten then, compose it with the result:"
            " dpadambc.accounting.compose."
        )
    names = [n for n in {**there, **here} if n not in _MAY_DIFFER]
    apart = [
        f"{name}: another, {_MEANING[name]}"
        if name in _MEANING
        else f"{name}: {there.get(name)} there, {here.get(name)} here"
        for name in names
        if there.get(name) != here.get(name)
    ]
    if apart:
        raise ValueError(
            f"The checkpoint {path} is of another run ({'; '.join(apart)}), whose steps"
            " its epsilon counts. Resume with the original settings, or begin anew in"
            " another folder; then both runs count, by spent=."
        )

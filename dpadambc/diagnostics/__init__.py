"""Does the correction help in this run? Read-outs, and advice from them.

`snapshot` reads the state of an optimizer, and is as private as the state.
`not_private` reads gradients before the noise, so it is not private. `pictures` draws
both (with the extra of that name).
"""

from typing import TYPE_CHECKING

from dpadambc.core import lazy
from dpadambc.diagnostics import not_private
from dpadambc.diagnostics.advice import Advice, advise
from dpadambc.diagnostics.readout import (
    BIN_EDGES,
    QUANTILES,
    Readout,
    Snapshot,
    snapshot,
    stack,
)

__all__ = [
    "Advice",
    "BIN_EDGES",
    "QUANTILES",
    "Readout",
    "Snapshot",
    "advise",
    "not_private",
    "snapshot",
    "stack",
]

if TYPE_CHECKING:
    from dpadambc.diagnostics import pictures as pictures

__getattr__ = lazy.attribute(__name__, {"pictures": "pictures"})


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "pictures"})

"""Private training that stops within its budget and survives interruption.

`fit` is the loop, and `Step` is a step of it for a loop of one's own;
`Checkpoints` (with the extra `checkpoints`) makes a run exact to resume; `ProgressBar`
(with the extra `progress`) shows how far it is.
"""

from typing import TYPE_CHECKING

from dpadambc._core import lazy
from dpadambc.training._identity import public_numbers
from dpadambc.training._keys import secret_key
from dpadambc.training.budget import affordable_iterations
from dpadambc.training.loop import fit
from dpadambc.training.losses import with_augmentations, with_compute_dtype
from dpadambc.training.release import load_release, save_release
from dpadambc.training.result import Progress, Result, Stop
from dpadambc.training.sharding import fully_sharded
from dpadambc.training.state import (
    Releasable,
    TrainState,
    init_state,
    releasable,
)
from dpadambc.training.step import Seen, Step, draw_batch

__all__ = [
    "Progress",
    "Releasable",
    "Result",
    "Seen",
    "Step",
    "Stop",
    "TrainState",
    "affordable_iterations",
    "draw_batch",
    "fit",
    "fully_sharded",
    "init_state",
    "load_release",
    "public_numbers",
    "releasable",
    "save_release",
    "secret_key",
    "with_augmentations",
    "with_compute_dtype",
]

if TYPE_CHECKING:
    from dpadambc.training import checkpoints as checkpoints
    from dpadambc.training import progress as progress
    from dpadambc.training.checkpoints import Checkpoints as Checkpoints
    from dpadambc.training.progress import ProgressBar as ProgressBar

__getattr__ = lazy.attribute(
    __name__,
    {
        "Checkpoints": "checkpoints",
        "ProgressBar": "progress",
        "checkpoints": "checkpoints",
        "progress": "progress",
    },
)

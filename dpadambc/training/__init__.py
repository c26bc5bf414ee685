"""Private training that stops within its budget and survives interruption.

`fit` is the loop, and `Step` is one step for a loop of your own. `search` trains with
several hyperparameters, and accounts for the choice. `Checkpoints` (with the extra
`checkpoints`) resumes a run exactly. `ProgressBar` (with the extra `progress`) shows
how far the run is.
"""

from typing import TYPE_CHECKING

from dpadambc._core import lazy
from dpadambc.training._identity import public_numbers
from dpadambc.training._keys import secret_key
from dpadambc.training.budget import affordable_iterations
from dpadambc.training.loop import fit
from dpadambc.training.losses import with_augmentations, with_compute_dtype
from dpadambc.training.prediction import with_prediction
from dpadambc.training.release import Release, load_release, save_release
from dpadambc.training.result import Progress, Result, Stop
from dpadambc.training.scores import NoisyScore, PublicScore
from dpadambc.training.sharding import fully_sharded
from dpadambc.training.state import (
    Releasable,
    TrainState,
    init_state,
    releasable,
)
from dpadambc.training.step import Seen, Step, draw_batch
from dpadambc.training.tuning import SearchResult, Trial, search
from dpadambc.training.users import group_by_user, with_rows

__all__ = [
    "NoisyScore",
    "Progress",
    "PublicScore",
    "Releasable",
    "Release",
    "Result",
    "SearchResult",
    "Seen",
    "Step",
    "Stop",
    "TrainState",
    "Trial",
    "affordable_iterations",
    "draw_batch",
    "fit",
    "fully_sharded",
    "group_by_user",
    "init_state",
    "load_release",
    "public_numbers",
    "releasable",
    "save_release",
    "search",
    "secret_key",
    "with_augmentations",
    "with_compute_dtype",
    "with_prediction",
    "with_rows",
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


def __dir__() -> list[str]:
    return sorted(
        {*globals(), *__all__, "Checkpoints", "ProgressBar", "checkpoints", "progress"}
    )

"""Private training that stops within its budget and survives interruption.

`fit` is the loop, and `Step` is one step for a loop of your own. `search` trains with
several hyperparameters, and accounts for the choice. `Checkpoints` (with the extra
`checkpoints`) resumes a run exactly. `Evaluate` records numbers during a run.
`ProgressBar` (with the extra `progress`) shows how far it is.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dpadambc.accounting.affordable import (
    affordable_iterations as affordable_iterations,
)
from dpadambc.core.fit import Stop as Stop
from dpadambc.core.step import Step as Step
from dpadambc.core.step import TrainState as TrainState
from dpadambc.core.step import draw_batch as draw_batch
from dpadambc.training.callbacks import Evaluate as Evaluate
from dpadambc.training.callbacks import Progress as Progress
from dpadambc.training.entropy import secret_key as secret_key
from dpadambc.training.fit import Result as Result
from dpadambc.training.fit import fit as fit
from dpadambc.training.losses import with_augmentations as with_augmentations
from dpadambc.training.losses import with_compute_dtype as with_compute_dtype
from dpadambc.training.release import Release as Release
from dpadambc.training.release import load_release as load_release
from dpadambc.training.release import releasable as releasable
from dpadambc.training.release import save_release as save_release
from dpadambc.training.scores import NoisyScore as NoisyScore
from dpadambc.training.scores import PublicScore as PublicScore
from dpadambc.training.search import SearchResult as SearchResult
from dpadambc.training.search import Trial as Trial
from dpadambc.training.search import search as search
from dpadambc.training.sharding import Sharded as Sharded
from dpadambc.training.sharding import fully_sharded as fully_sharded
from dpadambc.training.users import group_by_user as group_by_user
from dpadambc.training.users import with_rows as with_rows

if TYPE_CHECKING:
    from dpadambc.training.checkpoints import Checkpoints as Checkpoints
    from dpadambc.training.progress import ProgressBar as ProgressBar


def __getattr__(name: str) -> Any:
    """Imports a name that needs an extra on first use."""
    extras = {"Checkpoints": "checkpoints", "ProgressBar": "progress"}
    if name in extras:
        return getattr(importlib.import_module(f"{__name__}.{extras[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

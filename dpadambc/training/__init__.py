"""Private training that stops within its budget and survives interruption.

`fit` is the loop, and `Step` is one step for a loop of your own. `search` trains with
several hyperparameters, and accounts for the choice. `Checkpoints` (with the extra
`checkpoints`) resumes a run exactly. `ProgressBar` (with the extra `progress`) shows
how far the run is.
"""

from dpadambc.core import lazy

__all__ = [
    "Checkpoints",
    "NoisyScore",
    "Progress",
    "ProgressBar",
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
    "checkpoints",
    "draw_batch",
    "fit",
    "fully_sharded",
    "group_by_user",
    "init_state",
    "load_release",
    "progress",
    "public_numbers",
    "releasable",
    "save_release",
    "search",
    "secret_key",
    "with_augmentations",
    "with_compute_dtype",
    "with_rows",
]

__getattr__ = lazy.attribute_of(
    {
        "Checkpoints": "dpadambc.training.checkpoints:Checkpoints",
        "NoisyScore": "dpadambc.training.scores:NoisyScore",
        "Progress": "dpadambc.core.result:Progress",
        "ProgressBar": "dpadambc.training.progress:ProgressBar",
        "PublicScore": "dpadambc.training.scores:PublicScore",
        "Releasable": "dpadambc.core.state:Releasable",
        "Release": "dpadambc.training.release:Release",
        "Result": "dpadambc.core.result:Result",
        "SearchResult": "dpadambc.training.tuning:SearchResult",
        "Seen": "dpadambc.core.step:Seen",
        "Step": "dpadambc.core.step:Step",
        "Stop": "dpadambc.core.result:Stop",
        "TrainState": "dpadambc.core.state:TrainState",
        "Trial": "dpadambc.training.tuning:Trial",
        "affordable_iterations": "dpadambc.core.spending:affordable_iterations",
        "checkpoints": "dpadambc.training.checkpoints",
        "draw_batch": "dpadambc.core.step:draw_batch",
        "fit": "dpadambc.core.fit:fit",
        "fully_sharded": "dpadambc.training.sharding:fully_sharded",
        "group_by_user": "dpadambc.training.users:group_by_user",
        "init_state": "dpadambc.core.state:init_state",
        "load_release": "dpadambc.training.release:load_release",
        "progress": "dpadambc.training.progress",
        "public_numbers": "dpadambc.core.spending:public_numbers",
        "releasable": "dpadambc.core.state:releasable",
        "save_release": "dpadambc.training.release:save_release",
        "search": "dpadambc.training.tuning:search",
        "secret_key": "dpadambc.training._keys:secret_key",
        "with_augmentations": "dpadambc.training.losses:with_augmentations",
        "with_compute_dtype": "dpadambc.training.losses:with_compute_dtype",
        "with_rows": "dpadambc.training.users:with_rows",
    }
)

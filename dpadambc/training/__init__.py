"""Private training that stops within its budget and survives interruption.

`fit` is the loop; `dpadambc.checkpoints` (with the extra of that name) makes it exact
to resume; `dpadambc.progress` (with the extra of that name) shows how far it is.
"""

from dpadambc.training.layout import fully_sharded as fully_sharded
from dpadambc.training.ledger import affordable_iterations as affordable_iterations
from dpadambc.training.ledger import public_numbers as public_numbers
from dpadambc.training.loop import Optimizer as Optimizer
from dpadambc.training.loop import Progress as Progress
from dpadambc.training.loop import Result as Result
from dpadambc.training.loop import fit as fit
from dpadambc.training.losses import with_augmentations as with_augmentations
from dpadambc.training.losses import with_compute_dtype as with_compute_dtype
from dpadambc.training.state import Releasable as Releasable
from dpadambc.training.state import TrainState as TrainState
from dpadambc.training.state import init_state as init_state
from dpadambc.training.state import releasable as releasable
from dpadambc.training.state import secret_key as secret_key

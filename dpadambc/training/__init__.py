"""Private training that stops within its budget and survives interruption.

`fit` is the loop, and `Step` is a step of it for a loop of one's own;
`dpadambc.checkpoints` (with the extra of that name) makes a run exact to resume;
`dpadambc.progress` (with the extra of that name) shows how far it is.
"""

from dpadambc.training.layout import fully_sharded as fully_sharded
from dpadambc.training.ledger import affordable_iterations as affordable_iterations
from dpadambc.training.ledger import public_numbers as public_numbers
from dpadambc.training.loop import Progress as Progress
from dpadambc.training.loop import Result as Result
from dpadambc.training.loop import Stop as Stop
from dpadambc.training.loop import fit as fit
from dpadambc.training.losses import with_augmentations as with_augmentations
from dpadambc.training.losses import with_compute_dtype as with_compute_dtype
from dpadambc.training.release import load_release as load_release
from dpadambc.training.release import save_release as save_release
from dpadambc.training.state import Releasable as Releasable
from dpadambc.training.state import TrainState as TrainState
from dpadambc.training.state import init_state as init_state
from dpadambc.training.state import releasable as releasable
from dpadambc.training.state import secret_key as secret_key
from dpadambc.training.step import Seen as Seen
from dpadambc.training.step import Step as Step
from dpadambc.training.step import draw_batch as draw_batch

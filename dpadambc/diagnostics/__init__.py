"""Is the correction of any use in this run? Read-outs, and advice from them.

`snapshot` reads the state of an optimizer and is private, as the state is. What needs
gradients before the noise is in `dpadambc.diagnostics.not_private`, and is not.
"""

from dpadambc.diagnostics import not_private as not_private
from dpadambc.diagnostics.advice import Advice as Advice
from dpadambc.diagnostics.advice import advise as advise
from dpadambc.diagnostics.readout import BIN_EDGES as BIN_EDGES
from dpadambc.diagnostics.readout import QUANTILES as QUANTILES
from dpadambc.diagnostics.readout import Readout as Readout
from dpadambc.diagnostics.readout import Snapshot as Snapshot
from dpadambc.diagnostics.readout import snapshot as snapshot
from dpadambc.diagnostics.readout import stack as stack

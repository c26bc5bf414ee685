"""Read-outs of a run: does noise dominate, and does the correction help?

`snapshot` reads the state of an optimizer, and its result is as private as that state.
`not_private` reads gradients before the noise. The guide *diagnostics* says how to
judge the figures.
"""

from dpadambc.diagnostics import not_private as not_private
from dpadambc.diagnostics.readout import Readout as Readout
from dpadambc.diagnostics.readout import Snapshot as Snapshot
from dpadambc.diagnostics.readout import snapshot as snapshot

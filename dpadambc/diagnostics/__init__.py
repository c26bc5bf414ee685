"""Read-outs of a run: does noise dominate, and does the correction help?

`snapshot` reads the state of an optimizer, and is as private as it is.
`not_private` reads gradients before the noise. The guide *diagnostics* says how to
judge the figures.
"""

from dpadambc.diagnostics import not_private
from dpadambc.diagnostics.readout import Readout, Snapshot, snapshot

__all__ = ["Readout", "Snapshot", "not_private", "snapshot"]

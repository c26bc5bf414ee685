"""Read-outs of a run: does noise dominate, and does the correction help?

`snapshot` and `clip_bound` read the state of an optimizer, and are as private as it is.
`not_private` reads gradients before the noise. The guide *diagnostics* says how to
judge the figures.
"""

from dpadambc.diagnostics import not_private
from dpadambc.diagnostics.clip_bound import clip_bound
from dpadambc.diagnostics.readout import Readout, Snapshot, snapshot

__all__ = ["Readout", "Snapshot", "clip_bound", "not_private", "snapshot"]

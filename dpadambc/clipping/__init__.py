"""Other rules of clipping, and a plan for the memory of the clipped sum."""

from dpadambc.clipping.rules import Automatic as Automatic
from dpadambc.clipping.rules import PerGroup as PerGroup
from dpadambc.core.clip import ClipRule as ClipRule
from dpadambc.core.clip import Flat as Flat

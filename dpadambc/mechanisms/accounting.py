"""What runs cost: the epsilon of events, of several runs and of a search."""

from dpadambc.mechanisms._accountants import (
    PLDAccountant,
    RdpAccountant,
    ReadableDpEvent,
)
from dpadambc.mechanisms._epsilon import calibrate, epsilon
from dpadambc.mechanisms._events import Accountant, level_counts
from dpadambc.mechanisms._losses import privacy_losses
from dpadambc.mechanisms.composition import Spending, compose
from dpadambc.mechanisms.tuning import TunedEpsilon, tuned_epsilon

__all__ = [
    "Accountant",
    "PLDAccountant",
    "RdpAccountant",
    "ReadableDpEvent",
    "Spending",
    "TunedEpsilon",
    "calibrate",
    "compose",
    "epsilon",
    "level_counts",
    "privacy_losses",
    "tuned_epsilon",
]

"""Mechanisms: the public numbers of a run, its sampling and its accounting."""

from dpadambc.mechanisms import (
    accounting,
    planning,
    sampling,
    strategies,
    trade_off,
    trials,
    tuning,
)
from dpadambc.mechanisms.banded import BandedGaussian
from dpadambc.mechanisms.base import Mechanism
from dpadambc.mechanisms.batch import Batch
from dpadambc.mechanisms.correlated import CorrelatedGaussian
from dpadambc.mechanisms.fixed_size import FixedSizeGaussian
from dpadambc.mechanisms.poisson import PoissonGaussian
from dpadambc.mechanisms.private_gradient import privatize
from dpadambc.mechanisms.random_allocation import RandomAllocationGaussian
from dpadambc.mechanisms.shuffled import ShuffledGaussian
from dpadambc.mechanisms.truncated import TruncatedPoissonGaussian

__all__ = [
    "BandedGaussian",
    "Batch",
    "CorrelatedGaussian",
    "FixedSizeGaussian",
    "Mechanism",
    "PoissonGaussian",
    "RandomAllocationGaussian",
    "ShuffledGaussian",
    "TruncatedPoissonGaussian",
    "accounting",
    "planning",
    "privatize",
    "sampling",
    "strategies",
    "trade_off",
    "trials",
    "tuning",
]

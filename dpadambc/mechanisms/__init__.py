"""Mechanisms: the public numbers of a run, its sampling and its accounting."""

from dpadambc.core.mechanism import Mechanism, PoissonGaussian
from dpadambc.core.privatize import privatize
from dpadambc.core.sampling import Batch
from dpadambc.mechanisms.fixed_size import FixedSizeGaussian
from dpadambc.mechanisms.random_allocation import RandomAllocationGaussian
from dpadambc.mechanisms.shuffled import ShuffledGaussian
from dpadambc.mechanisms.truncated import TruncatedPoissonGaussian

__all__ = [
    "Batch",
    "FixedSizeGaussian",
    "Mechanism",
    "PoissonGaussian",
    "RandomAllocationGaussian",
    "ShuffledGaussian",
    "TruncatedPoissonGaussian",
    "privatize",
]

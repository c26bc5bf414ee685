"""Mechanisms: the public numbers of a run, its sampling and its accounting."""

from dpadambc.mechanisms import accounting, sampling
from dpadambc.mechanisms.base import Mechanism
from dpadambc.mechanisms.private_gradient import privatize
from dpadambc.mechanisms.sampling import Batch
from dpadambc.mechanisms.subsampled import (
    FixedSizeGaussian,
    PoissonGaussian,
    ShuffledGaussian,
    TruncatedPoissonGaussian,
)

__all__ = [
    "Batch",
    "FixedSizeGaussian",
    "Mechanism",
    "PoissonGaussian",
    "ShuffledGaussian",
    "TruncatedPoissonGaussian",
    "accounting",
    "privatize",
    "sampling",
]

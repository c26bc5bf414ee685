"""Mechanisms: the public numbers of a run, its sampling and its accounting."""

from dpadambc import lazy

__all__ = [
    "Batch",
    "FixedSizeGaussian",
    "Mechanism",
    "PoissonGaussian",
    "RandomAllocationGaussian",
    "ShuffledGaussian",
    "TruncatedPoissonGaussian",
    "privatize",
    "sampling",
]

__getattr__ = lazy.attribute_of(
    {
        "Batch": "dpadambc.core.sampling:Batch",
        "FixedSizeGaussian": "dpadambc.mechanisms.fixed_size:FixedSizeGaussian",
        "Mechanism": "dpadambc.core.mechanism:Mechanism",
        "PoissonGaussian": "dpadambc.core.poisson:PoissonGaussian",
        "RandomAllocationGaussian": "dpadambc.mechanisms.random_allocation:RandomAllocationGaussian",
        "ShuffledGaussian": "dpadambc.mechanisms.shuffled:ShuffledGaussian",
        "TruncatedPoissonGaussian": "dpadambc.mechanisms.truncated:TruncatedPoissonGaussian",
        "privatize": "dpadambc.core.privatize:privatize",
        "sampling": "dpadambc.mechanisms.sampling",
    }
)

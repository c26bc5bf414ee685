"""Optax transformations of a clipped sum and of the private gradient, one a file."""

from dpadambc.transforms.decay import add_decoupled_weight_decay
from dpadambc.transforms.moments import RelativeFloor, scale_by_adam_bc
from dpadambc.transforms.noise import add_dp_noise
from dpadambc.transforms.rounding import round_stochastically

__all__ = [
    "RelativeFloor",
    "add_decoupled_weight_decay",
    "add_dp_noise",
    "round_stochastically",
    "scale_by_adam_bc",
]

"""Optax transformations of the private gradient, one a file, and their states."""

from dpadambc.core.noise import AddDPNoiseState
from dpadambc.transforms.decay import add_decoupled_weight_decay
from dpadambc.transforms.moments import ScaleByAdamBCState, scale_by_adam_bc
from dpadambc.transforms.rms import ScaleByRmsBCState, scale_by_rms_bc
from dpadambc.transforms.rounding import RoundStochasticallyState, round_stochastically
from dpadambc.transforms.second_moment import RelativeFloor
from dpadambc.transforms.steps import steps_taken

__all__ = [
    "AddDPNoiseState",
    "RelativeFloor",
    "RoundStochasticallyState",
    "ScaleByAdamBCState",
    "ScaleByRmsBCState",
    "add_decoupled_weight_decay",
    "round_stochastically",
    "scale_by_adam_bc",
    "scale_by_rms_bc",
    "steps_taken",
]

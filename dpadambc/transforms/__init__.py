"""Optax transformations of a clipped sum and of the private gradient, one a file.

Two wrap both and take per-example gradients: `delayed_preconditioner` and
`scale_then_privatize`.
"""

from dpadambc.transforms.adafactor import (
    FactoredMoment,
    ScaleByAdafactorBCState,
    scale_by_adafactor_bc,
)
from dpadambc.transforms.ademamix import (
    ScaleByAdemamixBCState,
    scale_by_ademamix_bc,
)
from dpadambc.transforms.banded_noise import AddBandedNoiseState, add_banded_noise
from dpadambc.transforms.correlated_noise import (
    AddCorrelatedNoiseState,
    add_correlated_noise,
)
from dpadambc.transforms.decay import add_decoupled_weight_decay
from dpadambc.transforms.delayed import (
    DelayedPreconditionerState,
    delayed_preconditioner,
    is_preconditioned,
)
from dpadambc.transforms.filtering import (
    LowPassState,
    low_pass,
    low_pass_noise_stddev,
)
from dpadambc.transforms.moments import ScaleByAdamBCState, scale_by_adam_bc
from dpadambc.transforms.noise import AddDPNoiseState, add_dp_noise
from dpadambc.transforms.rms import ScaleByRmsBCState, scale_by_rms_bc
from dpadambc.transforms.rounding import (
    RoundStochasticallyState,
    round_stochastically,
    stochastic_round,
)
from dpadambc.transforms.scaled import ScaleThenPrivatizeState, scale_then_privatize
from dpadambc.transforms.second_moment import RelativeFloor, corrected_second_moment
from dpadambc.transforms.steps import steps_taken

__all__ = [
    "AddBandedNoiseState",
    "AddCorrelatedNoiseState",
    "AddDPNoiseState",
    "DelayedPreconditionerState",
    "FactoredMoment",
    "LowPassState",
    "RelativeFloor",
    "RoundStochasticallyState",
    "ScaleByAdafactorBCState",
    "ScaleByAdamBCState",
    "ScaleByAdemamixBCState",
    "ScaleByRmsBCState",
    "ScaleThenPrivatizeState",
    "add_banded_noise",
    "add_correlated_noise",
    "add_decoupled_weight_decay",
    "add_dp_noise",
    "corrected_second_moment",
    "delayed_preconditioner",
    "is_preconditioned",
    "low_pass",
    "low_pass_noise_stddev",
    "round_stochastically",
    "scale_by_adafactor_bc",
    "scale_by_adam_bc",
    "scale_by_ademamix_bc",
    "scale_by_rms_bc",
    "scale_then_privatize",
    "steps_taken",
    "stochastic_round",
]

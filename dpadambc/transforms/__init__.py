"""Optax transformations of a clipped sum and of the private gradient, one a file.

Two wrap both and take per-example gradients: `delayed_preconditioner` and
`scale_then_privatize`.
"""

from dpadambc import lazy

__all__ = [
    "AddDPNoiseState",
    "RelativeFloor",
    "RoundStochasticallyState",
    "ScaleByAdamBCState",
    "ScaleByRmsBCState",
    "add_decoupled_weight_decay",
    "add_dp_noise",
    "corrected_second_moment",
    "round_stochastically",
    "scale_by_adam_bc",
    "scale_by_rms_bc",
    "steps_taken",
    "stochastic_round",
]

__getattr__ = lazy.attribute_of(
    {
        "AddDPNoiseState": "dpadambc.core.noise:AddDPNoiseState",
        "RelativeFloor": "dpadambc.transforms.second_moment:RelativeFloor",
        "RoundStochasticallyState": "dpadambc.transforms.rounding:RoundStochasticallyState",
        "ScaleByAdamBCState": "dpadambc.transforms.moments:ScaleByAdamBCState",
        "ScaleByRmsBCState": "dpadambc.transforms.rms:ScaleByRmsBCState",
        "add_decoupled_weight_decay": "dpadambc.transforms.decay:add_decoupled_weight_decay",
        "add_dp_noise": "dpadambc.core.noise:add_dp_noise",
        "corrected_second_moment": "dpadambc.transforms.second_moment:corrected_second_moment",
        "round_stochastically": "dpadambc.transforms.rounding:round_stochastically",
        "scale_by_adam_bc": "dpadambc.transforms.moments:scale_by_adam_bc",
        "scale_by_rms_bc": "dpadambc.transforms.rms:scale_by_rms_bc",
        "steps_taken": "dpadambc.transforms.steps:steps_taken",
        "stochastic_round": "dpadambc.transforms.rounding:stochastic_round",
    }
)

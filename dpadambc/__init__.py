"""Differentially private Adam, corrected for its noise, as Optax transformations."""

import importlib.metadata

from dpadambc import (
    audit,
    clipping,
    diagnostics,
    gradients,
    graphs,
    mechanisms,
    optimizers,
    theory,
    training,
    transforms,
)
from dpadambc.clipping import (
    Explanation,
    NeighboringRelation,
    clip_per_example,
    clipped_grad,
    clipped_value_and_grad,
    explain,
    sensitivity,
)
from dpadambc.gradients import (
    PerExampleGradient,
    as_per_example,
    materialize,
    per_example_grad,
    per_example_norms,
    per_example_value_and_grad,
)
from dpadambc.mechanisms import (
    Batch,
    FixedSizeGaussian,
    Mechanism,
    PoissonGaussian,
    ShuffledGaussian,
    TruncatedPoissonGaussian,
    privatize,
)
from dpadambc.optimizers import (
    adam_bc,
    adamw_bc,
    dp_adam,
    dp_adam_bc,
    dp_adamw,
    dp_adamw_bc,
    dp_sgd,
)
from dpadambc.transforms import (
    RelativeFloor,
    add_decoupled_weight_decay,
    add_dp_noise,
    round_stochastically,
    scale_by_adam_bc,
)

__version__ = importlib.metadata.version("dpadambc")
__all__ = [
    "Batch",
    "Explanation",
    "FixedSizeGaussian",
    "Mechanism",
    "NeighboringRelation",
    "PerExampleGradient",
    "PoissonGaussian",
    "RelativeFloor",
    "ShuffledGaussian",
    "TruncatedPoissonGaussian",
    "adam_bc",
    "adamw_bc",
    "add_decoupled_weight_decay",
    "add_dp_noise",
    "as_per_example",
    "audit",
    "clip_per_example",
    "clipped_grad",
    "clipped_value_and_grad",
    "clipping",
    "diagnostics",
    "dp_adam",
    "dp_adam_bc",
    "dp_adamw",
    "dp_adamw_bc",
    "dp_sgd",
    "explain",
    "gradients",
    "graphs",
    "materialize",
    "mechanisms",
    "optimizers",
    "per_example_grad",
    "per_example_norms",
    "per_example_value_and_grad",
    "privatize",
    "round_stochastically",
    "scale_by_adam_bc",
    "sensitivity",
    "theory",
    "training",
    "transforms",
]

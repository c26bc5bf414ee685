"""Differentially private Adam, corrected for its noise, as Optax transformations.

Every name is imported when it is first used, so that what computes nothing, such as
`dpadambc --help`, does not wait for JAX.
"""

import importlib.metadata
from typing import TYPE_CHECKING

from dpadambc import lazy

__version__ = importlib.metadata.version("dpadambc")
__all__ = [
    "Batch",
    "ClippedSum",
    "Explanation",
    "FixedSizeGaussian",
    "Mechanism",
    "NeighboringRelation",
    "PerExampleGradient",
    "PoissonGaussian",
    "RandomAllocationGaussian",
    "RelativeFloor",
    "ShuffledGaussian",
    "TruncatedPoissonGaussian",
    "adam_bc",
    "adamw_bc",
    "add_decoupled_weight_decay",
    "add_dp_noise",
    "as_clipped_sum",
    "as_per_example",
    "audit",
    "clip_per_example",
    "clipped_grad",
    "clipping",
    "diagnostics",
    "dp_adam",
    "dp_adam_bc",
    "dp_adamw",
    "dp_adamw_bc",
    "dp_rms_bc",
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
    "rms_bc",
    "round_stochastically",
    "scale_by_adam_bc",
    "scale_by_rms_bc",
    "sensitivity",
    "steps_taken",
    "theory",
    "accounting",
    "contrib",
    "training",
    "transforms",
]

if TYPE_CHECKING:
    from dpadambc import (
        accounting,
        audit,
        clipping,
        contrib,
        diagnostics,
        gradients,
        graphs,
        mechanisms,
        optimizers,
        theory,
        training,
        transforms,
    )
    from dpadambc.clipping import Explanation, explain
    from dpadambc.core.clip import NeighboringRelation, clip_per_example, sensitivity
    from dpadambc.core.clipped_grad import clipped_grad
    from dpadambc.gradients import (
        ClippedSum,
        PerExampleGradient,
        as_clipped_sum,
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
        RandomAllocationGaussian,
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
        dp_rms_bc,
        dp_sgd,
        rms_bc,
    )
    from dpadambc.transforms import (
        RelativeFloor,
        add_decoupled_weight_decay,
        add_dp_noise,
        round_stochastically,
        scale_by_adam_bc,
        scale_by_rms_bc,
        steps_taken,
    )
else:
    __getattr__ = lazy.attribute(
        __name__,
        {
            "Batch": "mechanisms",
            "ClippedSum": "gradients",
            "Explanation": "clipping",
            "FixedSizeGaussian": "mechanisms",
            "Mechanism": "mechanisms",
            "NeighboringRelation": "core.clip",
            "PerExampleGradient": "gradients",
            "PoissonGaussian": "mechanisms",
            "RandomAllocationGaussian": "mechanisms",
            "RelativeFloor": "transforms",
            "ShuffledGaussian": "mechanisms",
            "TruncatedPoissonGaussian": "mechanisms",
            "adam_bc": "optimizers",
            "adamw_bc": "optimizers",
            "add_decoupled_weight_decay": "transforms",
            "add_dp_noise": "transforms",
            "as_clipped_sum": "gradients",
            "as_per_example": "gradients",
            "audit": "audit",
            "clip_per_example": "core.clip",
            "clipped_grad": "core.clipped_grad",
            "clipping": "clipping",
            "diagnostics": "diagnostics",
            "dp_adam": "optimizers",
            "dp_adam_bc": "optimizers",
            "dp_adamw": "optimizers",
            "dp_adamw_bc": "optimizers",
            "dp_rms_bc": "optimizers",
            "dp_sgd": "optimizers",
            "explain": "clipping",
            "gradients": "gradients",
            "graphs": "graphs",
            "materialize": "gradients",
            "mechanisms": "mechanisms",
            "optimizers": "optimizers",
            "per_example_grad": "gradients",
            "per_example_norms": "gradients",
            "per_example_value_and_grad": "gradients",
            "privatize": "mechanisms",
            "rms_bc": "optimizers",
            "round_stochastically": "transforms",
            "scale_by_adam_bc": "transforms",
            "scale_by_rms_bc": "transforms",
            "sensitivity": "core.clip",
            "steps_taken": "transforms",
            "theory": "theory",
            "accounting": "accounting",
            "contrib": "contrib",
            "training": "training",
            "transforms": "transforms",
        },
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

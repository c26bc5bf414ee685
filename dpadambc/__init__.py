"""Differentially private Adam, corrected for its noise, as Optax transformations.

Each public name is listed once: here, or in `accounting`, `audit`, `clipping`,
`contrib`, `diagnostics`, `graphs` or `training`.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from dpadambc import accounting as accounting
from dpadambc import clipping as clipping
from dpadambc import diagnostics as diagnostics
from dpadambc import training as training
from dpadambc.clipping.clips import add_dp_noise as add_dp_noise
from dpadambc.clipping.clips import clip_per_example as clip_per_example
from dpadambc.clipping.clips import clipped_grad as clipped_grad
from dpadambc.clipping.explanation import Explanation as Explanation
from dpadambc.clipping.explanation import explain as explain
from dpadambc.clipping.sensitivity import sensitivity as sensitivity
from dpadambc.clipping.vouched import as_clipped_sum as as_clipped_sum
from dpadambc.clipping.vouched import as_per_example as as_per_example
from dpadambc.core.clip import NeighboringRelation as NeighboringRelation
from dpadambc.core.clipped_sum import ClippedSum as ClippedSum
from dpadambc.core.clipped_sum import materialize as materialize
from dpadambc.core.gradient import PerExampleGradient as PerExampleGradient
from dpadambc.core.gradient import per_example_norms as per_example_norms
from dpadambc.core.per_example import per_example_grad as per_example_grad
from dpadambc.core.privatize import privatize as privatize
from dpadambc.core.sampling import Batch as Batch
from dpadambc.mechanisms.fixed_size import FixedSizeGaussian as FixedSizeGaussian
from dpadambc.mechanisms.mechanism import Mechanism as Mechanism
from dpadambc.mechanisms.poisson import PoissonGaussian as PoissonGaussian
from dpadambc.mechanisms.random_allocation import (
    RandomAllocationGaussian as RandomAllocationGaussian,
)
from dpadambc.mechanisms.shuffled import ShuffledGaussian as ShuffledGaussian
from dpadambc.mechanisms.truncated import (
    TruncatedPoissonGaussian as TruncatedPoissonGaussian,
)
from dpadambc.optimizers import Recipe as Recipe
from dpadambc.optimizers import adam_bc as adam_bc
from dpadambc.optimizers import adamw_bc as adamw_bc
from dpadambc.optimizers import dp_adam as dp_adam
from dpadambc.optimizers import dp_adam_bc as dp_adam_bc
from dpadambc.optimizers import dp_adamw as dp_adamw
from dpadambc.optimizers import dp_adamw_bc as dp_adamw_bc
from dpadambc.optimizers import dp_sgd as dp_sgd
from dpadambc.optimizers import recipe as recipe
from dpadambc.optimizers import rms_bc as rms_bc
from dpadambc.transforms.decay import (
    add_decoupled_weight_decay as add_decoupled_weight_decay,
)
from dpadambc.transforms.moments import scale_by_adam_bc as scale_by_adam_bc
from dpadambc.transforms.rms import scale_by_rms_bc as scale_by_rms_bc
from dpadambc.transforms.rounding import round_stochastically as round_stochastically
from dpadambc.transforms.second_moment import RelativeFloor as RelativeFloor
from dpadambc.transforms.steps import steps_taken as steps_taken

if TYPE_CHECKING:
    from dpadambc import audit as audit
    from dpadambc import contrib as contrib
    from dpadambc import graphs as graphs

# A source tree on the path need not be installed.
_INSTALLED = importlib.metadata.distributions(name="dpadambc")
__version__ = next((each.version for each in _INSTALLED), "0+unknown")


def __getattr__(name: str) -> Any:
    """Imports on first use the three names that few programs need."""
    if name in ("audit", "contrib", "graphs"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

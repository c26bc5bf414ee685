"""Differentially private Adam, corrected for its noise, as Optax transformations."""

import importlib.metadata

from dpadambc.clipped import clipped_grad as clipped_grad
from dpadambc.clipped import clipped_value_and_grad as clipped_value_and_grad
from dpadambc.clipping import NeighboringRelation as NeighboringRelation
from dpadambc.clipping import clip_per_example as clip_per_example
from dpadambc.clipping import sensitivity as sensitivity
from dpadambc.decay import add_decoupled_weight_decay as add_decoupled_weight_decay
from dpadambc.explanation import Explanation as Explanation
from dpadambc.explanation import explain as explain
from dpadambc.leaves import PerExampleGradient as PerExampleGradient
from dpadambc.leaves import as_per_example as as_per_example
from dpadambc.leaves import materialize as materialize
from dpadambc.leaves import per_example_norms as per_example_norms
from dpadambc.mechanism import Mechanism as Mechanism
from dpadambc.moments import RelativeFloor as RelativeFloor
from dpadambc.moments import scale_by_adam_bc as scale_by_adam_bc
from dpadambc.multi_term import (
    FixedSizeSampledMultiTermGaussian as FixedSizeSampledMultiTermGaussian,
)
from dpadambc.multi_term import (
    SubsampledMultiTermGaussian as SubsampledMultiTermGaussian,
)
from dpadambc.noise import add_dp_noise as add_dp_noise
from dpadambc.optimizers import adam_bc as adam_bc
from dpadambc.optimizers import adamw_bc as adamw_bc
from dpadambc.optimizers import dp_adam as dp_adam
from dpadambc.optimizers import dp_adambc as dp_adambc
from dpadambc.optimizers import dp_adamw as dp_adamw
from dpadambc.optimizers import dp_adamw_bc as dp_adamw_bc
from dpadambc.optimizers import dp_sgd as dp_sgd
from dpadambc.per_example import per_example_grad as per_example_grad
from dpadambc.per_example import (
    per_example_value_and_grad as per_example_value_and_grad,
)
from dpadambc.private_gradient import privatize as privatize
from dpadambc.rounding import round_stochastically as round_stochastically
from dpadambc.sampling import Batch as Batch
from dpadambc.subsampled import FixedSizeSampledGaussian as FixedSizeSampledGaussian
from dpadambc.subsampled import ShuffledGaussian as ShuffledGaussian
from dpadambc.subsampled import SubsampledGaussian as SubsampledGaussian
from dpadambc.subsampled import (
    TruncatedSubsampledGaussian as TruncatedSubsampledGaussian,
)

__version__ = importlib.metadata.version("dpadambc")

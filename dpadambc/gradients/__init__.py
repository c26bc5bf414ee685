"""Gradients of single examples, in the form in which reverse mode makes them."""

from dpadambc.gradients._clipped_sum import ClippedSum, as_clipped_sum, materialize
from dpadambc.gradients._leaves import (
    PerExampleGradient,
    as_per_example,
    per_example_norms,
)
from dpadambc.gradients.per_example import per_example_grad, per_example_value_and_grad
from dpadambc.gradients.preconditioning import (
    KroneckerPreconditioner,
    kronecker_preconditioner,
    preconditioned,
)

__all__ = [
    "ClippedSum",
    "KroneckerPreconditioner",
    "PerExampleGradient",
    "as_clipped_sum",
    "as_per_example",
    "kronecker_preconditioner",
    "materialize",
    "per_example_grad",
    "per_example_norms",
    "per_example_value_and_grad",
    "preconditioned",
]

"""Checks of your own training: is it as private as it claims?

`run` makes all checks of a `Pipeline`. You can also make each one alone: `sensitivity`,
`noise`, `state`, `isolation`, `factored`, `sampling`, `correction`.
`empirical_epsilon` bounds epsilon from below after a run with canaries. A `Finding`
says pass, fail or not tested. A pass means that this check, with the power that it
states, found no breach.
"""

from dpadambc.audit.canaries import GradientCanaries
from dpadambc.audit.correction import correction
from dpadambc.audit.finding import Finding
from dpadambc.audit.lower_bounds import empirical_epsilon
from dpadambc.audit.noise import noise
from dpadambc.audit.per_example import factored, isolation
from dpadambc.audit.pipeline import Pipeline
from dpadambc.audit.report import CHECKS, Report, run
from dpadambc.audit.sampling import sampling
from dpadambc.audit.sensitivity import sensitivity
from dpadambc.audit.state import state

__all__ = [
    "CHECKS",
    "Finding",
    "GradientCanaries",
    "Pipeline",
    "Report",
    "correction",
    "empirical_epsilon",
    "factored",
    "isolation",
    "noise",
    "run",
    "sampling",
    "sensitivity",
    "state",
]

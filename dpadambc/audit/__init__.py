"""Checks of your own training: is it as private as it claims?

`run` makes all checks of a `Pipeline`. You can also make each one alone: `sensitivity`,
`noise`, `state`, `isolation`, `factored`, `sampling`, `correction`. `empirical_epsilon`
bounds epsilon from below after a run with canaries. A `Finding` says pass, fail or not
tested. A pass means that this check, with its stated power, found no breach.
"""

from dpadambc.audit.canaries import GradientCanaries as GradientCanaries
from dpadambc.audit.correction import correction as correction
from dpadambc.audit.finding import Finding as Finding
from dpadambc.audit.lower_bounds import empirical_epsilon as empirical_epsilon
from dpadambc.audit.noise import noise as noise
from dpadambc.audit.per_example import factored as factored
from dpadambc.audit.per_example import isolation as isolation
from dpadambc.audit.pipeline import Pipeline as Pipeline
from dpadambc.audit.report import CHECKS as CHECKS
from dpadambc.audit.report import Report as Report
from dpadambc.audit.report import run as run
from dpadambc.audit.sampling import sampling as sampling
from dpadambc.audit.sensitivity import sensitivity as sensitivity
from dpadambc.audit.whole_step import state as state

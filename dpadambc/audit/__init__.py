"""Checks of your own training: is it as private as it says?

`run` makes all checks of a `Pipeline`. You can also make each one alone: `sensitivity`,
`noise`, `state`, `isolation`, `factored`, `sampling`, `correction`.
`empirical_epsilon` bounds epsilon from below after a run with canaries. A `Finding`
says pass, fail or not tested. A pass means that this check, with the power that it
states, found no breach.
"""

from typing import TYPE_CHECKING

from dpadambc import lazy
from dpadambc.audit import trade_off
from dpadambc.audit.canaries import GradientCanaries, with_sum
from dpadambc.audit.correction import correction
from dpadambc.audit.empirical import empirical_epsilon
from dpadambc.audit.factored import factored
from dpadambc.audit.finding import Finding
from dpadambc.audit.isolation import isolation
from dpadambc.audit.noise import noise
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
    "trade_off",
    "with_sum",
]

if TYPE_CHECKING:
    from dpadambc.audit import pictures as pictures

__getattr__ = lazy.attribute(__name__, {"pictures": "pictures"})


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "pictures"})

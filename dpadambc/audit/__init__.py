"""Checks of your own training: is it as private as it says?

`run` makes all checks of a `Pipeline`. You can also make each one alone: `sensitivity`,
`noise`, `state`, `isolation`, `factored`, `sampling`, `correction`.
`empirical_epsilon` bounds epsilon from below after a run with canaries. A `Finding`
says pass, fail or not tested. A pass means that this check, with the power that it
states, found no breach.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dpadambc.audit import trade_off as trade_off
from dpadambc.audit.canaries import GradientCanaries as GradientCanaries
from dpadambc.audit.canaries import with_sum as with_sum
from dpadambc.audit.correction import correction as correction
from dpadambc.audit.empirical import empirical_epsilon as empirical_epsilon
from dpadambc.audit.factored import factored as factored
from dpadambc.audit.finding import Finding as Finding
from dpadambc.audit.isolation import isolation as isolation
from dpadambc.audit.noise import noise as noise
from dpadambc.audit.pipeline import Pipeline as Pipeline
from dpadambc.audit.report import CHECKS as CHECKS
from dpadambc.audit.report import Report as Report
from dpadambc.audit.report import run as run
from dpadambc.audit.sampling import sampling as sampling
from dpadambc.audit.sensitivity import sensitivity as sensitivity
from dpadambc.audit.state import state as state

if TYPE_CHECKING:
    from dpadambc.audit import pictures as pictures


def __getattr__(name: str) -> Any:
    """Pictures need an extra: the module is imported when it is first used."""
    if name == "pictures":
        return importlib.import_module(f"{__name__}.pictures")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

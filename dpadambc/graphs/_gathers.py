"""Whether a program gathers features by `graphs.gather`."""

from typing import Any

from dpadambc.engine import jaxprs


def are_in(jaxpr: Any) -> bool:
    """Whether there is a `gather` in a program, or in one inside it."""
    return any(
        eqn.params.get("name") == "graph_members"
        or any(are_in(inner.jaxpr) for inner in jaxprs.inner(eqn))
        for eqn in jaxpr.eqns
    )

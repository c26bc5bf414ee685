"""Whether a loss on a graph has as many terms of each node as are accounted for."""

import math
import warnings
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from dpadambc.graphs import _subgraphs
from dpadambc.mechanisms.base import Mechanism
from dpadambc.training import _data


def check(
    traced: jex.ClosedJaxpr, num_shared: int, data: Any, mechanism: Mechanism
) -> None:
    """Raises or warns where one node is in more terms than the mechanism knows.

    Args:
      traced: the program of the loss.
      num_shared: how many of its inputs are not of the example.
      data: of all examples.
      mechanism: that accounts for the terms.
    """
    gathers = _subgraphs.gathers(traced.jaxpr)
    _refuse_nodes(gathers, mechanism)
    _warn_of_gaps(gathers, data, mechanism)
    _check_terms(traced, num_shared, data, mechanism)


def _refuse_nodes(gathers: bool, mechanism: Mechanism) -> None:
    """Raises for terms of a graph under the epsilon of one term."""
    if gathers and not hasattr(mechanism, "max_terms"):
        raise ValueError(
            "Expected a mechanism of nodes for a loss with graphs.gather, such as"
            " graphs.PoissonGaussian(max_terms=graphs.max_terms(max_memberships), ...),"
            f" got {type(mechanism).__name__}, whose epsilon is for one term of the"
            " sum: a node is in those of several roots. With max_terms=1 it is that of"
            " one term, for subgraphs that share no node. Features that are public need"
            " no graphs.gather: index them, features[members]."
        )


def _check_terms(
    traced: jex.ClosedJaxpr, num_shared: int, data: Any, mechanism: Mechanism
) -> None:
    """Raises where a node is in more terms than the mechanism accounts for."""
    leaves: list[Any] = [] if _data.is_source(data) else jax.tree.leaves(data)
    own = dict(enumerate(leaves, start=num_shared))
    allowed = getattr(mechanism, "max_terms", math.inf)
    for members in map(own.get, _subgraphs.members_of(traced.jaxpr)):
        if members is None or not _data.is_here(members):
            continue
        most = _subgraphs.most_terms(np.asarray(members))
        if most > allowed:
            raise ValueError(
                f"Expected each node in at most {allowed} terms, the max_terms of this"
                f" {type(mechanism).__name__}, got one in {most}: its epsilon would not"
                " hold. Give max_terms=graphs.max_terms(max_memberships), which counts"
                " the node's own term too. Features that are public need no"
                " graphs.gather: index them, features[members]."
            )


def _warn_of_gaps(gathers: bool, data: Any, mechanism: Mechanism) -> None:
    """Warns where -1 may have taken the last node of a graph for every gap."""
    max_terms = getattr(mechanism, "max_terms", None)
    if gathers or max_terms is None or _data.is_source(data):
        return
    has_gaps = lambda x: (
        jnp.ndim(x) > 1
        and jnp.issubdtype(jnp.result_type(x), jnp.integer)
        and _data.is_here(x)
        and np.min(np.asarray(x), initial=0) < 0
    )
    if any(map(has_gaps, jax.tree.leaves(data))):
        warnings.warn(
            "Expected graphs.gather(features, members) in the loss, got members with"
            " -1 where there is none, and no gather. features[members] takes the last"
            " node for each -1, so that it is in the terms of all roots with a gap, and"
            f" not in the {max_terms} that its epsilon is for.",
            stacklevel=6,  # of the call of fit
        )

"""Whether a loss on a graph has a mechanism that knows in how many terms a node is."""

from typing import Any

import jax
import jax.extend.core as jex

from dpadambc.core import data as _data
from dpadambc.core.mechanism import Mechanism
from dpadambc.graphs.subgraphs import Subgraphs, gathers_members


def check(traced: jex.ClosedJaxpr, data: Any, mechanism: Mechanism) -> None:
    """Raises where a node may be in more terms than the mechanism accounts for.

    Args:
      traced: the program of the loss.
      data: of all examples, whose types are looked at and no numbers.
      mechanism: that accounts for the terms.
    """
    if gathers_members(traced.jaxpr) and not hasattr(mechanism, "max_terms"):
        raise ValueError(
            "Expected a mechanism of nodes for a loss with graphs.gather, such as"
            " graphs.NodePoissonGaussian(max_terms=subgraphs.max_terms, ...), got"
            f" {type(mechanism).__name__}, whose epsilon is for one term of the sum."
            " Features that are public need no graphs.gather: index them,"
            " features[members]."
        )
    allowed = getattr(mechanism, "max_terms", 1)
    is_graph = lambda x: isinstance(x, Subgraphs)
    parts = jax.tree.leaves(_data.one_example(data), is_leaf=is_graph)
    # Of several kinds of edges a node is in the terms of all.
    max_terms = sum(part.max_terms for part in parts if is_graph(part))
    if max_terms > allowed:
        raise ValueError(
            f"Expected Subgraphs with a node in at most {allowed} terms in all, which"
            f" this {type(mechanism).__name__} accounts for, got {max_terms}. Give it"
            " max_terms=subgraphs.max_terms; or, where the features are public, give"
            " the data subgraphs.members."
        )

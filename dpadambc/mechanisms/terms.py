"""The number of terms that contain one node of a graph, from the loss."""

from typing import Any

import jax
import jax.extend.core as jex

from dpadambc.engine.jaxprs import equations_in


def gathers_nodes(program: jex.ClosedJaxpr) -> bool:
    """Returns whether a loss reads the members of a subgraph, by `graphs.gather`."""
    names = (equation.params.get("name") for equation in equations_in(program))
    return "graph_members" in names


def check_terms(loss: jex.ClosedJaxpr, example: Any, terms: int) -> None:
    """Raises where a node may be in more terms than the mechanism accounts for."""
    is_graph = lambda x: isinstance(getattr(x, "max_terms", None), int)
    parts = filter(is_graph, jax.tree.leaves(example, is_leaf=is_graph))
    # With several kinds of edges a node is in the terms of all; without a graph that
    # states its terms, assume two if the loss gathers nodes.
    needed = sum(part.max_terms for part in parts) or 1 + gathers_nodes(loss)
    if needed > terms:
        raise ValueError(
            f"Expected mechanism to account for a node in {needed} terms or more, got"
            f" one for {terms}. Give one of graphs, with max_terms=subgraphs.max_terms;"
            " index public features without graphs.gather, features[members]."
        )

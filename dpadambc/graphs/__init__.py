"""Node-level privacy: bounded subgraphs, and mechanisms for what one node moves."""

from dpadambc.graphs.mechanisms import (
    NodeFixedSizeGaussian,
    NodePoissonGaussian,
)
from dpadambc.graphs.subgraphs import (
    Subgraphs,
    distinct_edges,
    gather,
    max_terms,
    subgraphs,
    undirected,
)

__all__ = [
    "NodeFixedSizeGaussian",
    "NodePoissonGaussian",
    "Subgraphs",
    "distinct_edges",
    "gather",
    "max_terms",
    "subgraphs",
    "undirected",
]

"""Node-level privacy: bounded subgraphs, and mechanisms for all terms of a node."""

from dpadambc.graphs.mechanisms import NodeFixedSizeGaussian as NodeFixedSizeGaussian
from dpadambc.graphs.mechanisms import NodePoissonGaussian as NodePoissonGaussian
from dpadambc.graphs.subgraphs import Subgraphs as Subgraphs
from dpadambc.graphs.subgraphs import distinct_edges as distinct_edges
from dpadambc.graphs.subgraphs import gather as gather
from dpadambc.graphs.subgraphs import max_terms as max_terms
from dpadambc.graphs.subgraphs import subgraphs as subgraphs
from dpadambc.graphs.subgraphs import undirected as undirected

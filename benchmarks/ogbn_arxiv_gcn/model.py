"""A graph convolution of one hop, its loss, and its accuracy on a whole graph.

Each member of a root's subgraph is encoded, the root takes the mean over itself and its
neighbors, and a dense network labels it:

    e_i = tanh(W_e x_i + b_e),  h = mean_i e_i,  a = tanh(W_c h + b_c) + h,
    d = tanh(W_1 a + b_1),  logits = W_2 d + b_2
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.ogbn_arxiv_gcn import data
from dpadambc import graphs


class GCN(nn.Module):
    """With 128 features and 40 classes it has 173,695 parameters."""

    num_classes: int
    latent_size: int = 255

    def setup(self):
        self.encoder = nn.Dense(self.latent_size)
        self.convolution = nn.Dense(self.latent_size)
        self.decoder = nn.Dense(self.latent_size)
        self.head = nn.Dense(self.num_classes)

    def encode(self, features: jax.Array) -> jax.Array:
        """Each node alone, shape (..., latent_size)."""
        return nn.tanh(self.encoder(features))

    def decode(self, mean: jax.Array) -> jax.Array:
        """The logits of roots, from the mean over their neighbors."""
        aggregated = nn.tanh(self.convolution(mean)) + mean
        return self.head(nn.tanh(self.decoder(aggregated)))

    def __call__(self, features: jax.Array) -> jax.Array:
        """The logits of nodes that see themselves alone."""
        return self.decode(self.encode(features))

    def of_root(self, features: jax.Array, is_padding: jax.Array) -> jax.Array:
        """The logits of one root.

        Args:
          features: of the members of its subgraph, shape (members, features).
          is_padding: True where there is no member, shape (members,).
        """
        encoded = self.encode(features)
        return self.decode(jnp.mean(encoded, axis=0, where=~is_padding[:, None]))


cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def loss_of_root(model: GCN, params: Any, nodes: jax.Array, subgraph, label):
    """The loss of a root and its neighbors, with the features of all nodes at hand."""
    near = graphs.gather(nodes, subgraph.members)
    logits: Any = model.apply(params, near, subgraph.is_padding, method=model.of_root)
    return cross_entropy(logits, label)


def loss_alone(model: GCN, params: Any, features: jax.Array, label: jax.Array):
    """The loss of a node that sees itself alone."""
    logits: Any = model.apply(params, features)
    return cross_entropy(logits, label)


def subgraphs(graph: data.Graph, max_memberships: int) -> graphs.Subgraphs:
    """Of all training nodes; a citation links both papers."""
    return graphs.subgraphs(
        *graphs.undirected(graph.senders, graph.receivers),
        graph.splits["train"],
        max_memberships=max_memberships,
        max_degree=2 * max_memberships,
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _apply(model: GCN, method: str, params: Any, x: jax.Array) -> Any:
    return model.apply(params, x, method=method)


@dataclasses.dataclass
class Evaluator:
    """The accuracy on the nodes of each part, over all their neighbors.

    Prediction reads the features of neighbors, training nodes among them where the
    graph links them to others, and is *not private*.
    """

    model: GCN
    graph: data.Graph

    def __post_init__(self):
        self._mean: Any = data.mean_over_neighbors(self.graph)

    def logits(self, params: Any) -> np.ndarray:
        """Of all nodes."""
        encoded = np.asarray(_apply(self.model, "encode", params, self.graph.features))
        return np.asarray(_apply(self.model, "decode", params, self._mean @ encoded))

    def accuracies(self, params: Any, *parts: str) -> dict[str, float]:
        return accuracies(self.logits(params), self.graph, *parts)


def accuracies(logits: np.ndarray, graph: data.Graph, *parts: str) -> dict[str, float]:
    """The share of the nodes of each part whose label is guessed."""
    is_right = logits.argmax(-1) == graph.labels
    return {part: float(np.mean(is_right[graph.splits[part]])) for part in parts}

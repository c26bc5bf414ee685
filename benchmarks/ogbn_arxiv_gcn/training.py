"""The graph convolution as a task to train, and its accuracy on a whole graph."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.sparse

from benchmarks.ogbn_arxiv_gcn import data
from benchmarks.ogbn_arxiv_gcn.model import GCN
from dpadambc import graphs


class Roots(NamedTuple):
    """The subgraphs to train on, on the device."""

    features: jax.Array  # shape=(num_nodes, num_features)
    labels: jax.Array  # shape=(num_nodes,)
    members: jax.Array  # shape=(num_roots, 1 + max_degree), -1 where there is none

    @property
    def num_examples(self) -> int:
        return self.members.shape[0]


@dataclasses.dataclass(frozen=True)
class NodeClassification:
    """A `Task`: an example is a root and its neighbors."""

    model: GCN
    num_features: int

    def init(self, key: jax.Array) -> optax.Params:
        features, is_padding = jnp.zeros((1, self.num_features)), jnp.zeros(1, bool)
        return self.model.init(key, features, is_padding)

    def examples(self, roots: Roots, indices: jax.Array) -> tuple[Any, ...]:
        members = roots.members[indices]
        features = graphs.gather(roots.features, members)
        return features, members < 0, roots.labels[members[:, 0]]

    def loss_fn(
        self,
        params: Any,
        features: jax.Array,
        is_padding: jax.Array,
        label: jax.Array,
    ) -> jax.Array:
        logits: Any = self.model.apply(params, features, is_padding)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)


def task(graph: data.Graph) -> NodeClassification:
    model = GCN(graph.num_classes)
    return NodeClassification(model, graph.features.shape[1])


def roots(graph: data.Graph, *, max_memberships: int, max_degree: int) -> Roots:
    """The subgraphs of all training nodes; a citation links both papers."""
    edges = graphs.undirected(graph.senders, graph.receivers)
    subgraphs = graphs.subgraphs(
        *edges,
        graph.splits["train"],
        max_memberships=max_memberships,
        max_degree=max_degree,
    )
    arrays = graph.features, graph.labels, subgraphs.members
    return Roots(*map(jnp.asarray, arrays))


@functools.partial(jax.jit, static_argnums=0)
def _encode(model: GCN, params: Any, features: jax.Array) -> Any:
    return model.apply(params, features, method=model.encode)


@functools.partial(jax.jit, static_argnums=0)
def _decode(model: GCN, params: Any, mean: jax.Array) -> Any:
    return model.apply(params, mean, method=model.decode)


class Evaluator:
    """The accuracy on the nodes of each part, over all their neighbors.

    Prediction reads the features of neighbors, training nodes among them where the
    graph links them to others, and is *not private*.
    """

    def __init__(self, model: GCN, graph: data.Graph):
        self._model, self._graph = model, graph
        self._features = jnp.asarray(graph.features)
        self._mean: scipy.sparse.csr_matrix = data.mean_over_neighbors(graph)

    def logits(self, params: Any) -> np.ndarray:
        """Of all nodes."""
        encoded = np.asarray(_encode(self._model, params, self._features))
        return np.asarray(_decode(self._model, params, self._mean @ encoded))

    def accuracies(self, params: Any, parts: tuple[str, ...]) -> dict[str, float]:
        encoded = np.asarray(_encode(self._model, params, self._features))
        found = {}
        for part in parts:
            nodes = self._graph.splits[part]
            logits = _decode(self._model, params, self._mean[nodes] @ encoded)
            guesses = np.asarray(jnp.argmax(logits, axis=-1))
            found[part] = float(np.mean(guesses == self._graph.labels[nodes]))
        return found


class WithoutNeighbors(Evaluator):
    """The accuracy of a network that sees a node alone."""

    def __init__(self, model: GCN, graph: data.Graph):
        none = np.array([], np.int64)
        super().__init__(model, graph._replace(senders=none, receivers=none))

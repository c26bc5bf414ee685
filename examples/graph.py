"""Trains on a graph, with privacy for each node and its own list of edges.

pip install '.[demo]'    # in a clone: scikit-learn, which has the data
python examples/graph.py

A node is in its own loss and in those of some neighbors: the noise is for all of them.
"""

import argparse

import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from dpadambc import graphs, training

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--iterations", type=int, default=200)
args = parser.parse_args()

cross_entropy = optax.softmax_cross_entropy_with_integer_labels
K = 3  # a node is in its own loss and in those of at most three others
images, labels = load_digits(return_X_y=True)
# Blurred images, each of which lists eight others, six of them of its own class. Let
# lists be the nodes' own: those of nearest neighbors change with others' features.
rng = np.random.default_rng(0)
features = jnp.asarray(images / 16 + rng.normal(0, 0.4, images.shape))
alike = [rng.choice(np.flatnonzero(labels == label), 6) for label in labels]
listed = np.hstack([alike, rng.integers(len(labels), size=(len(labels), 2))])
senders, receivers = np.repeat(np.arange(len(labels)), 8), listed.ravel()
# The last 397 nodes are the test: they need no protection, and see nobody who does.
within = (senders < 1_400) == (receivers < 1_400)
edges = senders[within], receivers[within]


def examples(roots, most):
    """Of each root: who is in its subgraph, -1 where nobody is, and its label."""
    found = graphs.subgraphs(*edges, roots, max_memberships=most, max_degree=8)
    return found, jnp.asarray(labels[roots])


def logits(params, features, subgraph):
    x = graphs.gather(features, subgraph.members)
    mean = jnp.mean(x, axis=-2, where=~subgraph.is_padding[..., None])
    return x[..., 0, :] @ params["own"] + mean @ params["mean"]


def loss_fn(params, features, subgraph, y):
    """The loss of one root, which knows in how many of them a node is."""
    return cross_entropy(logits(params, features, subgraph), y)


adam, data = optax.adam(0.003), examples(np.arange(1_400), K)
mechanism = graphs.NodePoissonGaussian.calibrate(
    target_epsilon=8.0,
    target_delta=1e-4,
    max_terms=data[0].max_terms,
    sampling_prob=0.2,
    iterations=args.iterations,
    l2_clip_norm=1.0,
    normalize_by=280,
)
params = {"own": jnp.zeros((64, 10)), "mean": jnp.zeros((64, 10))}
options = {"key": training.secret_key(), "target_delta": 1e-4, "frozen": features}
result = training.fit(loss_fn, params, data, mechanism, adam, **options)
subgraphs, y = examples(np.arange(1_400, len(labels)), most=100)
predicted = logits(result.state.params, features, subgraphs).argmax(-1)
print(f"epsilon {result.epsilon:.2f} at delta 0.0001, of a node and its list")
print(f"test accuracy {jnp.mean(predicted == y):.1%}")

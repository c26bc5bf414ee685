r"""Node-level privacy: 1-hop subgraphs with a bounded number for each node.

Training on a graph clips one term for each *root*, a training node: the gradient of its
loss, computed on the root and its neighbors. One node is then in its own term and in
those of all its neighbors, of which there can be any number. A guarantee needs a bound
on that number, by a rule with which one node cannot change the edges of *others*. That
is the hard part: a rule that keeps K of a node's edges replaces an edge that is
removed, and one hub that is removed would let thousands of its neighbors choose anew.

**Unit of privacy.** The data of a node are its features, its label and its list of
edges, those that start from it. Neighboring graphs differ in the data of one node. The
lists of others belong to them: when a node is removed, their lists still name it, and
gathering its features gives zeros. In a citation graph the list is the paper's own
references. In an undirected graph every edge is in both lists; the entries in the lists
of *others* are then not hidden, unlike all the data of the node itself.

**Rule.** A node sends its features to at most K receivers on its own list: the K with
the least hash of (seed, sender, receiver). The hash depends on nothing else, and an
entry whose receiver is no root also counts toward the K. A root takes in the
`max_degree` senders with the least hash.

**Theorem.** When the data of node x are removed, added, or changed in its features
and label, the subgraphs of all roots but x and at most K others stay as they are. If
its list changes as well, those of at most 2 K others change.

*Proof.* The receivers of a node y depend on y's list alone. So for every y but x they
stay the same. x sends to at most K, before the change and after it; only there do the
senders of a root change, or their features. Cutting the senders of a root to
`max_degree` changes the subgraph of that root only. ∎

So one node is in at most K + 1 clipped terms: `max_terms`, which `Subgraphs` carry to
`NodePoissonGaussian`. The rule must see *whole* lists. Leaving out edges first, by the
year of the papers, say, is right if the year is public for each node, and wrong if it
depends on which nodes are in the graph, or on their labels.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.core import validate

Edges = tuple[np.ndarray, np.ndarray]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Subgraphs:
    """The nodes of each root's subgraph, and the most subgraphs that a node is in.

    They may be part of the data of `fit`: the example of a root has its members, and a
    mechanism for fewer terms is refused.

    Args:
      members: rows of the features, see `gather`: the root first, then its neighbors,
        then -1. shape=(num_roots, 1 + max_degree), int32; of one root, (1 +
        max_degree,).
      max_terms: the `max_terms` of the mechanism: K + 1, see `max_terms`.
    """

    members: np.ndarray | jax.Array
    max_terms: int = dataclasses.field(metadata={"static": True})

    @property
    def is_padding(self) -> np.ndarray | jax.Array:
        """A mask that is True where there is no member, with the members' shape."""
        return self.members < 0

    @property
    def degrees(self) -> np.ndarray | jax.Array:
        """The number of members besides the root, shape (num_roots,)."""
        return (~self.is_padding[..., 1:]).sum(-1)


def gather(features: jax.Array, members: jax.Array) -> jax.Array:
    """Gathers the features of members, and zeros where there is none.

    An index of -1 alone would gather the last node, for every root with a gap. Its
    weight there is zero, but zero times NaN or infinity is NaN: that one node could
    break the terms of all these roots.

    Args:
      features: shape (num_nodes, num_features).
      members: shape (..., 1 + max_degree), -1 where there is none.

    Returns:
      Features, shape (..., 1 + max_degree, num_features).

    Example:
      >>> import jax.numpy as jnp
      >>> from dpadambc import graphs
      >>> print(graphs.gather(jnp.array([[1.0], [jnp.nan]]), jnp.array([0, -1])))
      [[1.]
       [0.]]
    """
    return graph_members(features, members)


@jax.jit
def graph_members(features: jax.Array, members: jax.Array) -> jax.Array:
    """Gathers features, in a call with a name that `mechanisms.terms` finds."""
    return jnp.where((members >= 0)[..., None], features[members], 0)


def max_terms(max_memberships: int) -> int:
    """Returns K + 1, the most clipped terms that a node is in: its own, and K others.

    `Subgraphs` have this number. Where a node may be replaced by one with *another
    list*, it is 2 K + 1: set that with `dataclasses.replace`.

    Args:
      max_memberships: K, the argument of `subgraphs`.

    Returns:
      The `max_terms` of `NodePoissonGaussian` or `NodeFixedSizeGaussian`.

    Raises:
      TypeError: if `max_memberships` is not an int.
      ValueError: if `max_memberships` is negative.

    Example:
      >>> from dpadambc import graphs
      >>> graphs.max_terms(7)
      8
    """
    validate.count(max_memberships=max_memberships)
    return max_memberships + 1


def _mixed(x: np.ndarray) -> np.ndarray:
    """Maps 64-bit words one to one, and spreads every bit over all (splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def edge_hashes(senders: np.ndarray, receivers: np.ndarray, seed: int) -> np.ndarray:
    """Hashes each edge to 64 bits, by the two nodes and the seed alone."""
    gamma = np.uint64(0x9E3779B97F4A7C15)
    word = _mixed(np.full(1, seed, np.uint64) + gamma)
    for nodes in (senders, receivers):
        word = _mixed((word ^ nodes.astype(np.uint64)) + gamma)
    return word


def ranks_in_groups(groups: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    """Returns the rank of each edge in its group, in the order of the hashes."""
    order = np.lexsort((hashes, groups))
    is_first = np.diff(groups[order], prepend=-1) != 0
    places = np.arange(len(order))
    starts = np.maximum.accumulate(np.where(is_first, places, 0))
    ranks = np.empty_like(order)
    ranks[order] = places - starts
    return ranks


def _nodes(**named: np.ndarray) -> np.ndarray:
    """Converts to an array of node numbers; raises for anything else."""
    ((name, array),) = named.items()
    array = np.asarray(array)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"Expected {name} to be a vector of node numbers, got shape {array.shape}"
            f" and dtype {array.dtype}."
        )
    if array.size and not 0 <= array.min() <= array.max() < 2**31:
        raise ValueError(
            f"Expected {name} in [0, 2**31), got numbers from {array.min()} to"
            f" {array.max()}."
        )
    return array.astype(np.int64)


def _checked_edges(senders: np.ndarray, receivers: np.ndarray) -> Edges:
    senders, receivers = _nodes(senders=senders), _nodes(receivers=receivers)
    if senders.shape != receivers.shape:
        raise ValueError(
            "Expected as many senders as receivers, got"
            f" {len(senders)} and {len(receivers)}."
        )
    return senders, receivers


def distinct_edges(senders: np.ndarray, receivers: np.ndarray) -> Edges:
    """Returns the edges without self loops and repetitions, sorted.

    Args:
      senders: shape (num_edges,), integers: the nodes that edges start from.
      receivers: shape (num_edges,): the nodes that edges point to.

    Returns:
      Senders and receivers, sorted by both.

    Raises:
      ValueError: if arrays are not vectors of node numbers of one length.

    Example:
      >>> import numpy as np
      >>> from dpadambc import graphs
      >>> senders, receivers = np.array([3, 1, 1, 2]), np.array([0, 2, 2, 2])
      >>> print(*graphs.distinct_edges(senders, receivers))
      [1 3] [2 0]
    """
    senders, receivers = _checked_edges(senders, receivers)
    proper = senders != receivers
    edges = np.stack([senders[proper], receivers[proper]], axis=1)
    # Encode a pair as one number: sorting pairs takes ten times as long.
    width = np.int64(edges.max(initial=0) + 1)
    keys = np.unique(edges[:, 0] * width + edges[:, 1])
    return keys // width, keys % width


def undirected(senders: np.ndarray, receivers: np.ndarray) -> Edges:
    """Returns every edge in both directions: each of two nodes then lists the other.

    Args:
      senders: shape (num_edges,), integers: the nodes that edges start from.
      receivers: shape (num_edges,): the nodes that edges point to.

    Returns:
      Senders and receivers of distinct edges, sorted by both.

    Raises:
      ValueError: if arrays are not vectors of node numbers of one length.

    Example:
      >>> import numpy as np
      >>> from dpadambc import graphs
      >>> senders, receivers = np.array([0, 1, 2]), np.array([1, 0, 0])
      >>> print(*graphs.undirected(senders, receivers))
      [0 0 1 2] [1 2 0 0]
    """
    senders, receivers = _checked_edges(senders, receivers)
    ends = [senders, receivers]
    return distinct_edges(np.concatenate(ends), np.concatenate(ends[::-1]))


def subgraphs(
    senders: np.ndarray,
    receivers: np.ndarray,
    roots: np.ndarray,
    *,
    max_memberships: int,
    max_degree: int,
    seed: int = 0,
) -> Subgraphs:
    r"""Makes the 1-hop subgraph of each root, with a bound on those of each node.

    Features flow from sender to receiver: an edge (s, r) belongs to s, and makes s a
    neighbor of the root r. Self loops and repetitions are dropped. Nothing is random:
    the same edges and seed give the same subgraphs.

    Guarantees: a node is in its own subgraph and in at most `max_memberships` others,
    and no change of its data changes any other; the module's documentation has the
    proof. The seed is public.

    Args:
      senders: shape (num_edges,), integers: the nodes that edges start from.
      receivers: shape (num_edges,): the nodes that edges point to. Not all need be
        roots.
      roots: shape (num_roots,), distinct: the nodes with a clipped term, those that
        are trained on.
      max_memberships: K, the most subgraphs of others that a node is in.
      max_degree: the most neighbors of a root.
      seed: the seed of the hash that chooses edges.

    Returns:
      `Subgraphs`, with members of shape (num_roots, 1 + max_degree): the root, its
      neighbors, and -1; and with the `max_terms` of a mechanism, K + 1.

    Raises:
      ValueError: if arrays are not vectors of node numbers of one length, there are no
        roots, or one is repeated, or a number is out of its range.

    Example:
      >>> import numpy as np
      >>> from dpadambc import graphs
      >>> senders, receivers = np.array([1, 2, 3, 3]), np.array([0, 0, 0, 2])
      >>> found = graphs.subgraphs(
      ...     senders, receivers, np.array([0, 2]), max_memberships=2, max_degree=3)
      >>> found.members
      array([[ 0,  3,  1,  2],
             [ 2,  3, -1, -1]], dtype=int32)
      >>> found.max_terms
      3
    """
    senders, receivers = distinct_edges(senders, receivers)
    roots = _nodes(roots=roots)
    validate.count(max_memberships=max_memberships)
    validate.count(max_degree=max_degree)
    validate.count(seed=seed)
    if not roots.size:
        raise ValueError("Expected at least one root to train on, got none.")
    if len(np.unique(roots)) != len(roots):
        raise ValueError("Expected distinct roots: one clipped term for each node.")
    hashes = edge_hashes(senders, receivers, seed)
    sent = ranks_in_groups(senders, hashes) < max_memberships
    row_of = np.full(max(roots.max(), receivers.max(initial=0)) + 1, -1)
    row_of[roots] = np.arange(len(roots))
    sent &= row_of[receivers] >= 0
    rows, senders, hashes = row_of[receivers[sent]], senders[sent], hashes[sent]
    places = ranks_in_groups(rows, hashes)
    taken = places < max_degree
    members = np.full((len(roots), 1 + max_degree), -1, np.int32)
    members[:, 0] = roots
    members[rows[taken], 1 + places[taken]] = senders[taken]
    return Subgraphs(members, max_terms(max_memberships))

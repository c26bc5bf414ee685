r"""Disjoint subgraphs: stars of a root and its leaves, each node in one of them.

    python -m benchmarks.ogbn_arxiv_gcn.stars --data-dir DIR [--seeds 5]
    python -m benchmarks.ogbn_arxiv_gcn.stars      # prints the tables

In the graph convolution a node with one neighbor to send to is in two clipped terms.
Here it is in one, with its neighbors, and its label counts there all the same.

**Rule.** A hash of its number alone makes a node a root or a leaf. A leaf joins the
root in its own list with the least hash of the two; one without a root in its list is a
star by itself. A star has its root and the `max_leaves` leaves with the least hash; the
others are in no star.

**Theorem.** When the data of a node are removed, added, or changed in its features and
label, one star changes at most. If its list changes as well, two do.

*Proof.* Which root a leaf joins depends on its own list and on numbers, which are there
whether the nodes are or not; the lists of roots are not read. So all others join as
before. A root is in its own star only, which goes with it; a leaf is in the one that it
joins, and where it is cut off or lets another in is that star too. ∎

The loss of a star is the mean over its members: of the root with all its leaves, and of
each leaf with the root. Its gradient is clipped as one term. It becomes another where a
leaf goes, so the sensitivity is 2 C: that of `graphs.NodePoissonGaussian` with one term
under REPLACE_ONE, whose proof takes a star that goes, and then adds 0, as well. Nodes
alone have C, the convolution with K = 1 has 3 C. The sampling probability is made of
public numbers.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpadambc
from benchmarks.ogbn_arxiv_gcn import data, run, settings, table, training
from dpadambc import graphs
from dpadambc.graphs.subgraphs import edge_hashes, ranks_in_groups

RESULTS = pathlib.Path(__file__).with_name("stars.jsonl")
METHOD = "DP-Adam"
# What batches are planned for, in round numbers: the true number depends on lists.
NUM_STARS = 50_000

# The share of roots and the most leaves.
SHAPES = ((0.5, 2), (0.4, 3), (0.25, 4))
# Where the settings are from that are tried: a step of theirs takes 2,500 terms.
TARGET_EPSILON_OF_TRIALS = 3.0


@dataclasses.dataclass(frozen=True)
class Setting(settings.Setting):
    """One training, but for its seed."""

    share_of_roots: float = 0.5
    max_leaves: int = 2

    def mechanism(self, num_roots: int) -> settings.Mechanism:
        """With the least noise for the target; a node is in one term."""
        del num_roots  # it depends on the lists
        assert self.target_epsilon is not None
        return dpadambc.graphs.NodePoissonGaussian.calibrate(
            target_epsilon=self.target_epsilon,
            target_delta=settings.TARGET_DELTA,
            l2_clip_norm=self.l2_clip_norm,
            max_terms=1,
            sampling_prob=min(1.0, self.expected_batch_size / NUM_STARS),
            iterations=self.iterations,
            normalize_by=self.expected_batch_size,
            neighboring_relation=dpadambc.NeighboringRelation.REPLACE_ONE,
        )


def trials(target_epsilon: float, searched: Sequence[run.Row]) -> list[Setting]:
    """What the search chose for nodes alone and with neighbors, in every shape."""
    chosen = table.lines(searched)
    found = []
    for is_alone in (True, False):
        row = chosen[METHOD, TARGET_EPSILON_OF_TRIALS, is_alone][0]
        numbers = row["setting"] | {
            "target_epsilon": target_epsilon,
            "max_memberships": 1,
        }
        found += [
            Setting(**numbers, share_of_roots=share_of_roots, max_leaves=max_leaves)
            for share_of_roots, max_leaves in SHAPES
        ]
    return found


def is_root(nodes: np.ndarray, share_of_roots: float, seed: int = 0) -> np.ndarray:
    """Whether nodes are roots, by their numbers alone."""
    hashes = edge_hashes(nodes, nodes, seed)
    return hashes < np.uint64(share_of_roots * 2.0**64)


def stars(
    owners: np.ndarray,
    listed: np.ndarray,
    nodes: np.ndarray,
    *,
    share_of_roots: float,
    max_leaves: int,
) -> np.ndarray:
    """The members of each star, of which each node is in one at most.

    Args:
      owners: shape (num_edges,), the nodes that edges start from, in whose list they
        are.
      listed: shape (num_edges,), the nodes that they name.
      nodes: shape (num_nodes,), distinct numbers: who is trained on. One that goes
        with its data is left out here; lists that name it stay.
      share_of_roots: in (0, 1).
      max_leaves: of one star.

    Returns:
      Shape (num_stars, 1 + max_leaves): the root, or the leaf that is a star by itself,
      the leaves, and -1.
    """
    owners, listed = graphs.distinct_edges(owners, listed)
    # Not whether the root is there: where it is not, its leaves are in no star.
    to_root = is_root(listed, share_of_roots) & ~is_root(owners, share_of_roots)
    to_root &= np.isin(owners, nodes)
    leaves, roots = owners[to_root], listed[to_root]
    hashes = edge_hashes(leaves, roots, 0)
    first = ranks_in_groups(leaves, hashes) == 0
    leaves, roots, hashes = leaves[first], roots[first], hashes[first]
    places = ranks_in_groups(roots, hashes)
    centers = nodes[is_root(nodes, share_of_roots) | ~np.isin(nodes, leaves)]
    row_of = np.full(max(nodes.max(), listed.max(initial=0)) + 1, -1)
    row_of[centers] = np.arange(len(centers))
    members = np.full((len(centers), 1 + max_leaves), -1, np.int32)
    members[:, 0] = centers
    taken = (places < max_leaves) & (row_of[roots] >= 0)
    members[row_of[roots[taken]], 1 + places[taken]] = leaves[taken]
    return members


def sizes(members: np.ndarray, num_nodes: int) -> str:
    """How many stars there are, and who is in none with others."""
    num_members = (members >= 0).sum(axis=1)
    return (
        f"{len(members):,} stars, {np.sum(num_members == 1):,} of one node;"
        f" {num_nodes - num_members.sum():,} of {num_nodes:,} nodes in none"
    )


@dataclasses.dataclass(frozen=True)
class StarClassification(training.NodeClassification):
    """A `Task`: an example is a star."""

    def examples(self, roots: training.Roots, indices: jax.Array) -> tuple[Any, ...]:
        members = roots.members[indices]
        is_padding = members < 0
        labels = jnp.where(is_padding, 0, roots.labels[members])
        return graphs.gather(roots.features, members), is_padding, labels

    def loss_fn(
        self,
        params: Any,
        features: jax.Array,
        is_padding: jax.Array,
        labels: jax.Array,
    ) -> jax.Array:
        model = self.model
        encoded: Any = model.apply(params, features, method=model.encode)
        whole = jnp.mean(encoded, axis=0, where=~is_padding[:, None], keepdims=True)
        pairs = (encoded[:1] + encoded[1:]) / 2
        means = jnp.concatenate([whole, pairs])
        logits: Any = model.apply(params, means, method=model.decode)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(losses, where=~is_padding)


class Laboratory(run.Laboratory):
    """With stars for the subgraphs, and everything else as it is."""

    def __init__(self, graph: data.Graph):
        super().__init__(graph)
        self.task = StarClassification(self.task.model, self.task.num_features)
        self._stars: dict[tuple[float, int], training.Roots] = {}

    def roots(self, setting: Any) -> training.Roots:
        shape = setting.share_of_roots, setting.max_leaves
        if shape not in self._stars:
            members = stars(
                *graphs.undirected(self.graph.senders, self.graph.receivers),
                self.graph.splits["train"],
                share_of_roots=setting.share_of_roots,
                max_leaves=setting.max_leaves,
            )
            arrays = self.graph.features, self.graph.labels, members
            self._stars[shape] = training.Roots(*map(jnp.asarray, arrays))
        return self._stars[shape]


def _setting(rows: Sequence[run.Row]) -> str:
    s = rows[0]["setting"]
    return (
        f"roots {s['share_of_roots']:.0%}, leaves {s['max_leaves']},"
        f" B {s['expected_batch_size']:,}, T {s['iterations']},"
        f" C {s['l2_clip_norm']:g}, η {s['learning_rate']:g}"
    )


def render(searched: Sequence[run.Row], rows: Sequence[run.Row]) -> str:
    """Against nodes alone and against the convolution, all by DP-Adam."""
    found, others = table.lines(rows), table.lines(searched)
    targets = sorted(target for _, target, _ in found if target is not None)
    both = ("accuracy", "averaged_accuracy")
    inductive: Callable[..., str] = lambda rows, which: table.test(
        rows, "inductive", which
    )
    names = {
        "nodes alone": (others, True),
        "convolution": (others, False),
        "stars": (found, False),
    }
    body = [
        [
            f"{name}{'' if which == both[0] else ', mean of iterates'}",
            *(inductive(source[METHOD, t, alone], which) for t in targets),
        ]
        for which in both
        for name, (source, alone) in names.items()
    ]
    body.append(["settings", *(_setting(found[METHOD, t, False]) for t in targets)])
    return table.markdown(["trained", *(f"ε = {t:g}" for t in targets)], body)


def main() -> None:
    arguments = table.options(__doc__, RESULTS)
    searched = table.read(table.RESULTS)
    if arguments.data_dir:
        graph = data.load(arguments.data_dir)
        results = run.Results(arguments.output, graph)
        laboratory = Laboratory(graph)
        lines = [trials(target, searched) for target in settings.TARGET_EPSILONS]
        for setting in lines[0][: len(SHAPES)]:
            members = np.asarray(laboratory.roots(setting).members)
            print(sizes(members, len(graph.splits["train"])))
        make = functools.partial(run.measure, laboratory)
        run.search(lines, results, make, range(arguments.seeds))
    print(render(searched, table.read(arguments.output)))


if __name__ == "__main__":
    main()

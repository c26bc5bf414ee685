r"""Disjoint subgraphs: stars of a root and its leaves, each node in one of them.

    python -m benchmarks.ogbn_arxiv_gcn.stars [--data-dir DIR]

In the graph convolution a node with one neighbor to send to is in two clipped terms.
Here it is in one, with its neighbors, and its label counts there all the same.

README.md has the rule, and the proof that a node changes one star at most. The loss of
a star is the mean over its members: of the root with all its leaves, and of each leaf
with the root. Its gradient is clipped as one term, of sensitivity 2 C.
"""

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dpadambc
from benchmarks.ogbn_arxiv_gcn import data, laboratory, model, run, settings
from benchmarks.records import Row
from benchmarks.study import Cell, Find
from benchmarks.tables import by_epsilon
from dpadambc import graphs
from dpadambc.graphs.subgraphs import edge_hashes, ranks_in_groups

RESULTS = pathlib.Path(__file__).with_name("stars.jsonl")
METHOD = "DP-Adam"
# What batches are planned for, in round numbers: the true number depends on lists.
NUM_STARS = 50_000

# The share of roots and the most leaves.
SHAPES = ((0.5, 2), (0.4, 3), (0.25, 4))
# Of the settings that are tried: their steps take 2,500 terms.
EPSILON_OF_SETTINGS = 3.0


@dataclasses.dataclass(frozen=True)
class Setting(settings.Setting):
    """One training, but for its seed."""

    share_of_roots: float = 0.5
    max_leaves: int = 2

    @property
    def terms(self) -> dict[str, Any]:
        """A node is in one, which becomes another where the node goes."""
        relation = dpadambc.NeighboringRelation.REPLACE_ONE
        return {"max_terms": 1, "neighboring_relation": relation}

    def sampling_prob(self, num_roots: int) -> float:
        return min(1.0, self.expected_batch_size / NUM_STARS)


def trials(target_epsilon: float, searched: Sequence[Row]) -> list[Setting]:
    """The choices of the search for nodes alone and with neighbors, in every shape."""
    common = {"target_epsilon": target_epsilon, "max_memberships": 1}
    choice = lambda alone: dataclasses.asdict(
        laboratory.chosen(searched, METHOD, EPSILON_OF_SETTINGS, alone)
    )
    return [
        Setting(**choice(alone) | common, share_of_roots=share, max_leaves=most)
        for alone in (True, False)
        for share, most in SHAPES
    ]


def cells(find: Find, graph: str) -> Iterator[Cell]:
    searched = run.searched(graph)
    lines = [trials(target, searched) for target in settings.TARGET_EPSILONS]
    return laboratory.search(find, lines, graph)


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

    Owners have in their lists whom the edges name. Nodes are those that are trained on;
    one that goes with its data is not among them, and lists that name it stay.

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


def loss_of_star(gcn: model.GCN, params: Any, nodes: jax.Array, star, labels):
    """The mean loss of a star's members: all for the root, and the root for a leaf."""
    features = graphs.gather(nodes, star.members)
    encoded: Any = gcn.apply(params, features, method=gcn.encode)
    is_member = ~star.is_padding
    whole = jnp.mean(encoded, axis=0, where=is_member[:, None], keepdims=True)
    means = jnp.concatenate([whole, (encoded[:1] + encoded[1:]) / 2])
    logits: Any = gcn.apply(params, means, method=gcn.decode)
    return jnp.mean(model.cross_entropy(logits, labels), where=is_member)


class Laboratory(laboratory.Laboratory):
    """With stars for the subgraphs, and everything else as it is."""

    def __init__(self, graph: data.Graph):
        super().__init__(graph)
        self.stars = functools.cache(self._stars)

    def _stars(self, share_of_roots: float, max_leaves: int) -> graphs.Subgraphs:
        members = stars(
            *graphs.undirected(self.graph.senders, self.graph.receivers),
            self.graph.splits["train"],
            share_of_roots=share_of_roots,
            max_leaves=max_leaves,
        )
        print(sizes(members, len(self.graph.splits["train"])), file=sys.stderr)
        return graphs.Subgraphs(members, max_terms=1)

    def examples(self, setting: Any):
        found = self.stars(setting.share_of_roots, setting.max_leaves)
        labels = np.where(found.is_padding, 0, self.graph.labels[found.members])
        return loss_of_star, (found, labels), self.graph.features


def _setting(row: Row) -> str:
    s = row["setting"]
    return (
        f"roots {s['share_of_roots']:.0%}, leaves {s['max_leaves']},"
        f" B {s['expected_batch_size']:,}, T {s['iterations']},"
        f" C {s['l2_clip_norm']:g}, η {s['learning_rate']:g}"
    )


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Against nodes alone and against the convolution, all by DP-Adam."""
    found = laboratory.lines(rows)
    others = laboratory.lines(run.searched(rows[0]["graph"]))
    targets = sorted(target for _, target, _ in found if target is not None)
    sources = {
        "nodes alone": (others, True),
        "convolution": (others, False),
        "stars": (found, False),
    }
    ways = {"": "accuracy", ", mean of iterates": "averaged_accuracy"}
    cells = {
        (name + end, t): laboratory.test(source[METHOD, t, alone], "inductive", way)
        for end, way in ways.items()
        for name, (source, alone) in sources.items()
        for t in targets
    }
    chosen = {("settings", t): _setting(found[METHOD, t, False][0]) for t in targets}
    return {"stars": by_epsilon("trained", cells | chosen)}


STUDY = laboratory.make_study(RESULTS, cells, tables, Laboratory, Setting)

if __name__ == "__main__":
    STUDY.main(__doc__)

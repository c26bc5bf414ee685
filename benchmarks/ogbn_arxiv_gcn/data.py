"""Citation graphs: ogbn-arxiv, as OGB publishes it or as arrays, and Cora.

    DIR/raw/edge.csv.gz, node-feat.csv.gz, node-label.csv.gz    OGB's layout
    DIR/split/time/{train,valid,test}.csv.gz
    DIR/graph.npz, substitute_features.npz                      arrays of ogbn-arxiv
    DIR/cora.npz                                                Planetoid's Cora

An edge starts from the paper that cites.
"""

import gzip
import hashlib
import pathlib
from typing import NamedTuple

import numpy as np
import scipy.sparse

SPLITS = ("train", "valid", "test")

# Of the sorted edges, the labels and the splits of ogbn-arxiv, as published.
ARXIV_SHA256 = "852142718e46a26fdcb1aa2b69a61bed52003302d7638c8e20297f076c422e37"

_SOURCE = (
    "OGB publishes ogbn-arxiv at https://ogb.stanford.edu/docs/nodeprop/#ogbn-arxiv;"
    " `python -m benchmarks.ogbn_arxiv_gcn.download DIR` fetches it."
)


class Graph(NamedTuple):
    """A citation graph; its features are those of papers."""

    name: str
    features: np.ndarray  # shape=(num_nodes, num_features), float32
    labels: np.ndarray  # shape=(num_nodes,), int32
    senders: np.ndarray  # shape=(num_edges,), int64: who cites
    receivers: np.ndarray  # shape=(num_edges,), int64: who is cited
    splits: dict[str, np.ndarray]  # the nodes of each part

    @property
    def num_nodes(self) -> int:
        return len(self.labels)

    @property
    def num_classes(self) -> int:
        return int(self.labels.max()) + 1

    @property
    def part_of_node(self) -> np.ndarray:
        """The number of each node's part, -1 for a node in none."""
        parts = np.full(self.num_nodes, -1)
        for i, name in enumerate(SPLITS):
            parts[self.splits[name]] = i
        return parts

    @property
    def majority_share(self) -> float:
        """Of the test nodes, those of the class most frequent in training."""
        counts = np.bincount(self.labels[self.splits["train"]])
        return float(np.mean(self.labels[self.splits["test"]] == counts.argmax()))


def content_sha256(graph: Graph) -> str:
    """Of edges, labels and splits, in whatever order and file they came."""
    order = np.lexsort((graph.receivers, graph.senders))
    digest = hashlib.sha256()
    for array in (graph.senders[order], graph.receivers[order], graph.labels):
        digest.update(array.astype(np.int64).tobytes())
    for name in SPLITS:
        digest.update(np.sort(graph.splits[name]).astype(np.int64).tobytes())
    return digest.hexdigest()


def _read_csv(path: pathlib.Path, dtype: type) -> np.ndarray:
    with gzip.open(path, "rt") as file:
        return np.loadtxt(file, dtype, delimiter=",")


def _load_raw(data_dir: pathlib.Path) -> Graph:
    raw, split = data_dir / "raw", data_dir / "split" / "time"
    senders, receivers = _read_csv(raw / "edge.csv.gz", np.int64).T
    return Graph(
        "ogbn-arxiv",
        _read_csv(raw / "node-feat.csv.gz", np.float32),
        _read_csv(raw / "node-label.csv.gz", np.int32),
        senders,
        receivers,
        {name: _read_csv(split / f"{name}.csv.gz", np.int64) for name in SPLITS},
    )


def _load_arrays(data_dir: pathlib.Path) -> Graph:
    arrays = np.load(data_dir / "graph.npz")
    features = np.load(data_dir / "substitute_features.npz")["node_feat"]
    senders, receivers = arrays["edge_index"].astype(np.int64)
    return Graph(
        "ogbn-arxiv graph, substitute features",
        features.astype(np.float32),
        arrays["node_label"].astype(np.int32).ravel(),
        senders,
        receivers,
        {name: arrays[f"{name}_idx"].astype(np.int64) for name in SPLITS},
    )


def load_cora(data_dir: pathlib.Path) -> Graph:
    """Cora with words as features, each row of length one.

    All nodes that are in neither the validation nor the test part are trained on: the
    public split's 140 nodes are too few for any privacy.
    """
    path = data_dir / "cora.npz"
    if not path.exists():
        raise FileNotFoundError(f"Expected cora.npz in {data_dir}.")
    arrays = np.load(path)
    words = scipy.sparse.csr_matrix(
        tuple(arrays[f"feat_{part}"] for part in ("data", "indices", "indptr")),
        arrays["feat_shape"],
    ).toarray()
    lengths = np.linalg.norm(words, axis=1, keepdims=True)
    splits = {name: arrays[f"{name}_idx"].astype(np.int64) for name in SPLITS}
    held_out = np.concatenate([splits["valid"], splits["test"]])
    splits["train"] = np.setdiff1d(np.arange(len(words)), held_out)
    senders, receivers = arrays["edge_index"].astype(np.int64)
    return Graph(
        "Cora",
        (words / np.maximum(lengths, 1)).astype(np.float32),
        arrays["node_label"].astype(np.int32).ravel(),
        senders,
        receivers,
        splits,
    )


def load(data_dir: pathlib.Path) -> Graph:
    """ogbn-arxiv from whatever layout is there, checked against what is published."""
    if (data_dir / "raw" / "edge.csv.gz").exists():
        graph = _load_raw(data_dir)
    elif (data_dir / "graph.npz").exists():
        graph = _load_arrays(data_dir)
    else:
        raise FileNotFoundError(
            f"Expected raw/edge.csv.gz or graph.npz in {data_dir}. {_SOURCE}"
        )
    found = content_sha256(graph)
    if found != ARXIV_SHA256:
        raise ValueError(
            f"Expected the edges, labels and splits of ogbn-arxiv in {data_dir}, whose"
            f" SHA-256 is {ARXIV_SHA256}, got {found}. {_SOURCE}"
        )
    return graph


def same_part(graph: Graph) -> Graph:
    """The graph without edges between parts: what is tested was never seen.

    The part of a paper is the year it appeared in, and public.
    """
    parts = graph.part_of_node
    kept = parts[graph.senders] == parts[graph.receivers]
    return graph._replace(senders=graph.senders[kept], receivers=graph.receivers[kept])


def mean_over_neighbors(graph: Graph) -> scipy.sparse.csr_matrix:
    """Row r: the mean over r and all that cite it or that it cites."""
    ones = np.ones(2 * len(graph.senders) + graph.num_nodes, np.float32)
    loops = np.arange(graph.num_nodes)
    rows = np.concatenate([graph.senders, graph.receivers, loops])
    columns = np.concatenate([graph.receivers, graph.senders, loops])
    shape = (graph.num_nodes, graph.num_nodes)
    adjacency = scipy.sparse.csr_matrix((ones, (rows, columns)), shape)
    adjacency.data[:] = 1  # an edge that is there twice counts once
    degrees = np.asarray(adjacency.sum(1), np.float32).ravel()
    return scipy.sparse.diags(1 / degrees) @ adjacency

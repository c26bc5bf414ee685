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

from dpadambc import graphs

Matrix = scipy.sparse.csr_matrix
SPLITS = ("train", "valid", "test")
ORIGINAL, SUBSTITUTED = "ogbn-arxiv", "ogbn-arxiv graph, substitute features"

# Of the sorted edges, the labels and the splits of ogbn-arxiv, as published; of the
# features that take the place of OGB's; and of Cora's graph and words.
ARXIV_SHA256 = "852142718e46a26fdcb1aa2b69a61bed52003302d7638c8e20297f076c422e37"
SUBSTITUTE_SHA256 = "2eb61c23531d38f7d785bebbcd8c634f16e7768208259d194ac6f61211baf543"
CORA_SHA256 = "953814d0541f464b65ca7c82a063100c1b5bcc28be17b39813e9a69e7105435e"

_SOURCE = (
    "OGB publishes ogbn-arxiv at https://ogb.stanford.edu/docs/nodeprop/#ogbn-arxiv;"
    " `python -m benchmarks.ogbn_arxiv_gcn.download` fetches it."
)
_PLANETOID = "Planetoid publishes it at https://github.com/kimiyoung/planetoid."


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
    def majority_share(self) -> float:
        """Of the test nodes, those of the class most frequent in training."""
        counts = np.bincount(self.labels[self.splits["train"]])
        return float(np.mean(self.labels[self.splits["test"]] == counts.argmax()))

    @property
    def part_of_node(self) -> np.ndarray:
        """The number of each node's part, -1 for a node in none."""
        parts = np.full(self.num_nodes, -1)
        for i, name in enumerate(SPLITS):
            parts[self.splits[name]] = i
        return parts


def sha256(*arrays: np.ndarray) -> str:
    """Of the contents, one array after the other."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()


def content_sha256(graph: Graph, *others: np.ndarray) -> str:
    """Of edges, labels and splits, in whatever order and file they came; and others."""
    order = np.lexsort((graph.receivers, graph.senders))
    edges = graph.senders[order], graph.receivers[order]
    parts = (np.sort(graph.splits[name]) for name in SPLITS)
    whole = (x.astype(np.int64) for x in (*edges, graph.labels, *parts))
    return sha256(*whole, *others)


def _check(content: str, found: str, expected: str, advice: str) -> None:
    if found != expected:
        raise ValueError(
            f"Expected {content} with SHA-256 {expected}, got {found}. {advice}"
        )


def _read_csv(path: pathlib.Path, dtype: type) -> np.ndarray:
    with gzip.open(path, "rt") as file:
        return np.loadtxt(file, dtype, delimiter=",")


def _load_raw(data_dir: pathlib.Path) -> Graph:
    raw, split = data_dir / "raw", data_dir / "split" / "time"
    senders, receivers = _read_csv(raw / "edge.csv.gz", np.int64).T
    return Graph(
        ORIGINAL,
        _read_csv(raw / "node-feat.csv.gz", np.float32),
        _read_csv(raw / "node-label.csv.gz", np.int32),
        senders,
        receivers,
        {name: _read_csv(split / f"{name}.csv.gz", np.int64) for name in SPLITS},
    )


def _of_arrays(name: str, features: np.ndarray, arrays: dict[str, np.ndarray]) -> Graph:
    senders, receivers = arrays["edge_index"].astype(np.int64)
    return Graph(
        name,
        features.astype(np.float32),
        arrays["node_label"].astype(np.int32).ravel(),
        senders,
        receivers,
        {part: arrays[f"{part}_idx"].astype(np.int64) for part in SPLITS},
    )


def _load_arrays(data_dir: pathlib.Path) -> Graph:
    arrays = np.load(data_dir / "graph.npz")
    features = np.load(data_dir / "substitute_features.npz")["node_feat"]
    graph = _of_arrays(SUBSTITUTED, features, arrays)
    found = sha256(graph.features)
    _check("the features of the records", found, SUBSTITUTE_SHA256, _SOURCE)
    return graph


def _is_raw(data_dir: pathlib.Path) -> bool:
    return (data_dir / "raw" / "edge.csv.gz").exists()


def name(data_dir: pathlib.Path) -> str:
    """Of the graph that `load` loads: it tells whose features it has."""
    return ORIGINAL if _is_raw(data_dir) else SUBSTITUTED


def load(data_dir: pathlib.Path) -> Graph:
    """ogbn-arxiv in the layout that is there, OGB's first; contents are checked."""
    if _is_raw(data_dir):
        graph = _load_raw(data_dir)
    elif (data_dir / "graph.npz").exists():
        graph = _load_arrays(data_dir)
    else:
        raise FileNotFoundError(
            f"Expected raw/edge.csv.gz or graph.npz in {data_dir}. {_SOURCE}"
        )
    content = f"the edges, labels and splits of ogbn-arxiv in {data_dir}"
    _check(content, content_sha256(graph), ARXIV_SHA256, _SOURCE)
    return graph


def load_cora(data_dir: pathlib.Path) -> Graph:
    """Cora with words as features, each row of length one; its contents are checked.

    All nodes that are in neither the validation nor the test part are trained on: the
    public split's 140 nodes are too few for any privacy.
    """
    path = data_dir / "cora.npz"
    if not path.exists():
        raise FileNotFoundError(f"Expected cora.npz in {data_dir}. {_PLANETOID}")
    arrays = np.load(path)
    words = Matrix(
        tuple(arrays[f"feat_{part}"] for part in ("data", "indices", "indptr")),
        arrays["feat_shape"],
    ).toarray()
    graph = _of_arrays("Cora", words, arrays)
    found = content_sha256(graph, words.astype(np.uint8))
    _check(
        f"the edges, labels, splits and words of Cora in {path}",
        found,
        CORA_SHA256,
        _PLANETOID,
    )
    lengths = np.linalg.norm(words, axis=1, keepdims=True)
    held_out = np.concatenate([graph.splits["valid"], graph.splits["test"]])
    train = np.setdiff1d(np.arange(len(words)), held_out)
    return graph._replace(
        features=(words / np.maximum(lengths, 1)).astype(np.float32),
        splits=graph.splits | {"train": train},
    )


def same_part(graph: Graph) -> Graph:
    """The graph without edges between parts: what is tested was never seen.

    The part of a paper is the year it appeared in, and public.
    """
    parts = graph.part_of_node
    kept = parts[graph.senders] == parts[graph.receivers]
    return graph._replace(senders=graph.senders[kept], receivers=graph.receivers[kept])


def links(senders: np.ndarray, receivers: np.ndarray, num_nodes: int) -> Matrix:
    """Entry (r, s) is 1 where s sends to r."""
    ones, shape = np.ones(len(senders), np.float32), (num_nodes, num_nodes)
    return Matrix((ones, (receivers, senders)), shape)


def mean_over_neighbors(graph: Graph) -> Matrix:
    """Row r: the mean over r and all that cite it or that it cites."""
    near = links(*graphs.undirected(graph.senders, graph.receivers), graph.num_nodes)
    near += scipy.sparse.identity(graph.num_nodes, "float32")
    degrees = np.asarray(near.sum(1), np.float32).ravel()
    return scipy.sparse.diags(1 / degrees) @ near

"""Fetches ogbn-arxiv as OGB publishes it, into DIR/ogbn_arxiv.

    python -m benchmarks.ogbn_arxiv_gcn.download DIR

A download that was cut off goes on where it ended. What is unpacked is checked against
the SHA-256 of the published graph.
"""

import argparse
import pathlib
import shutil
import tempfile

from benchmarks import download
from benchmarks.ogbn_arxiv_gcn import data

URL = "http://snap.stanford.edu/ogb/data/nodeproppred/arxiv.zip"


def unpack(archive: pathlib.Path, data_dir: pathlib.Path) -> None:
    """Without the archive's outer folder."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.unpack_archive(archive, folder)
        (outer,) = pathlib.Path(folder).iterdir()
        shutil.copytree(outer, data_dir, dirs_exist_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("data_dir", type=pathlib.Path)
    data_dir = parser.parse_args().data_dir / "ogbn_arxiv"
    data_dir.mkdir(parents=True, exist_ok=True)
    archive = data_dir / "arxiv.zip"
    if not archive.exists():
        download.fetch(URL, archive)
    unpack(archive, data_dir)
    graph = data.load(data_dir)
    print(f"{graph.name}: {graph.num_nodes:,} nodes, {len(graph.senders):,} edges.")


if __name__ == "__main__":
    main()

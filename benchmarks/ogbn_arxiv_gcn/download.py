"""Fetches ogbn-arxiv as OGB publishes it.

    python -m benchmarks.ogbn_arxiv_gcn.download DIR

A download that was cut off goes on where it ended. What is unpacked is checked against
the SHA-256 of the published graph.
"""

import argparse
import pathlib
import urllib.error
import urllib.request
import zipfile

import rich.progress

from benchmarks.ogbn_arxiv_gcn import data

URL = "http://snap.stanford.edu/ogb/data/nodeproppred/arxiv.zip"
_CHUNK = 1 << 16


def fetch(url: str, path: pathlib.Path) -> None:
    """Downloads a file, or the rest of it.

    Raises:
      ConnectionError: without a network; what there is by then is kept.
    """
    part = path.with_name(path.name + ".part")
    start = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            # A server that knows no ranges sends all of it.
            start = start if response.status == 206 else 0
            left = response.headers.get("Content-Length")
            total = None if left is None else start + int(left)
            with (
                rich.progress.Progress() as progress,
                part.open("ab" if start else "wb") as file,
            ):
                task = progress.add_task(path.name, total=total, completed=start)
                while chunk := response.read(_CHUNK):
                    file.write(chunk)
                    progress.advance(task, len(chunk))
        if total is not None and part.stat().st_size < total:
            raise OSError(f"cut off after {part.stat().st_size:,} of {total:,} bytes")
    except (OSError, urllib.error.URLError) as error:
        raise ConnectionError(
            f"Could not fetch {url}: {error}. With a network, run this again: it goes"
            f" on where it ended. Without one, put the file at {path} yourself."
        ) from error
    part.rename(path)


def unpack(archive: pathlib.Path, data_dir: pathlib.Path) -> None:
    """The files that `data.load` reads, without the archive's outer folder."""
    with zipfile.ZipFile(archive) as files:
        for name in files.namelist():
            inner = pathlib.PurePosixPath(*pathlib.PurePosixPath(name).parts[1:])
            is_wanted = inner.parts[:1] in (("raw",), ("split",))
            if not is_wanted or ".." in inner.parts or name.endswith("/"):
                continue
            target = data_dir / inner
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(files.read(name))


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetches ogbn-arxiv.")
    parser.add_argument("data_dir", type=pathlib.Path)
    data_dir = parser.parse_args().data_dir
    data_dir.mkdir(parents=True, exist_ok=True)
    archive = data_dir / "arxiv.zip"
    if not archive.exists():
        fetch(URL, archive)
    unpack(archive, data_dir)
    graph = data.load(data_dir)
    print(f"{graph.name}: {graph.num_nodes:,} nodes, {len(graph.senders):,} edges.")


if __name__ == "__main__":
    main()

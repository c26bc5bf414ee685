"""Fetches SST-2 as GLUE publishes it.

    python -m benchmarks.language.download DIR

A download that was cut off goes on where it ended.
"""

import pathlib
import sys
import zipfile

from benchmarks import download
from benchmarks.language import data

URL = "https://dl.fbaipublicfiles.com/glue/data/SST-2.zip"


def fetch(data_dir: pathlib.Path) -> None:
    """Puts SST-2 into the folder, unless it is there.

    Raises:
      ConnectionError: without a network.
    """
    archive = data_dir / "SST-2.zip"
    try:
        data.load(data_dir, "dev")
    except FileNotFoundError:
        data_dir.mkdir(parents=True, exist_ok=True)
        if not archive.exists():
            download.fetch(URL, archive)
        with zipfile.ZipFile(archive) as file:
            file.extractall(data_dir)


if __name__ == "__main__":
    fetch(pathlib.Path(sys.argv[1]))

"""Fetches CIFAR-10 as its authors publish it.

    python -m benchmarks.cifar10.download DIR

A download that was cut off goes on where it ended.
"""

import pathlib
import sys

from benchmarks import download
from benchmarks.cifar10 import data

URL = f"https://www.cs.toronto.edu/~kriz/{data.ARCHIVE}"

if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / data.ARCHIVE).exists():
        download.fetch(URL, folder / data.ARCHIVE)
    known = "the published" if data.load(folder).is_published else "other"
    print(f"{folder} has {known} images.")

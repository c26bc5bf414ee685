"""Fetches CIFAR-10 as its authors publish it.

    python -m benchmarks.cifar10.download DIR

A download that was cut off goes on where it ended.
"""

import argparse
import pathlib

from benchmarks import download
from benchmarks.cifar10 import data

URL = f"https://www.cs.toronto.edu/~kriz/{data.ARCHIVE}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetches CIFAR-10.")
    parser.add_argument("data_dir", type=pathlib.Path)
    data_dir = parser.parse_args().data_dir
    data_dir.mkdir(parents=True, exist_ok=True)
    if not (data_dir / data.ARCHIVE).exists():
        download.fetch(URL, data_dir / data.ARCHIVE)
    cifar = data.load(data_dir)
    known = "" if cifar.is_published else ", which are not the published ones"
    print(
        f"{cifar.train.num_examples:,} and {cifar.test.num_examples:,} images{known}."
    )


if __name__ == "__main__":
    main()

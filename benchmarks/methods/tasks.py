"""Small tasks on which a private training takes seconds: four data sets, two models.

Features are scaled without a statistic of the examples, so preparing them spends no
privacy. Each training part is split once more, four fifths to fit and one to validate.
"""

import dataclasses
import functools
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
from benchmarks.experiment import Data, Model
from benchmarks.ogbn_arxiv_gcn import data as citations
from dpadambc import contrib

NUM_CIFAR = 10_000
DAMPING, NUM_PUBLIC = 0.1, 256  # rows of noise, in the place of public examples


class Parts(NamedTuple):
    """Of a data set; trials see `fit` and are scored on `validation`."""

    train: Data
    test: Data

    @property
    def fit(self) -> Data:
        return experiment.split_validation(self.train)[0]

    @property
    def validation(self) -> Data:
        return experiment.split_validation(self.train)[1]


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

    def poisson(
        self, target_epsilon: float, num_examples: int
    ) -> dpadambc.PoissonGaussian:
        """With the least noise for the target, for gradients in units of C."""
        return dpadambc.PoissonGaussian.calibrate(
            target_epsilon=target_epsilon,
            target_delta=self.target_delta,
            l2_clip_norm=1.0,
            sampling_prob=self.batch_size / num_examples,
            iterations=self.iterations,
            normalize_by=self.batch_size,
        )


@functools.cache
def model(task: Task, is_preconditioned: bool) -> Model:
    """Of a task; its gradients may be preconditioned by moments that noise has."""
    loss_fn = experiment.loss_fn
    if is_preconditioned:
        params_key, features_key, labels_key = jax.random.split(jax.random.key(0), 3)
        num_features, *_, num_classes = task.layer_sizes
        noise = jax.random.normal(features_key, (NUM_PUBLIC, num_features))
        labels = jax.random.randint(labels_key, (NUM_PUBLIC,), 0, num_classes)
        preconditioner = contrib.kronecker_preconditioner(
            loss_fn,
            task.init(params_key),
            public_examples=(noise, labels),
            damping=DAMPING,
        )
        loss_fn = contrib.preconditioned(loss_fn, preconditioner)
    return Model(task.init, loss_fn, experiment.accuracy)


TASKS = {
    task.name: task
    for task in (
        Task("digits", (64, 32, 10), 256, 100, 1e-4),
        Task("Adult", (104, 32, 2), 1_024, 200, 1e-5),
        Task("Cora, words alone", (1_433, 7), 512, 100, 1e-4),
        Task("CIFAR-10, 10,000 images", (972, 10), 1_024, 200, 1e-5),
    )
}


def _cora(data_dir: pathlib.Path) -> Parts:
    """The words of a paper, of norm one, without who cites it; a random third tests."""
    graph = citations.load_cora(data_dir / "planetoid")
    norms = np.linalg.norm(graph.features, axis=1, keepdims=True)
    words = graph.features / np.maximum(norms, 1)
    order = np.random.default_rng(0).permutation(graph.num_nodes)
    train, test = np.split(order, [graph.num_nodes * 2 // 3])
    of = lambda rows: Data(jnp.asarray(words[rows]), jnp.asarray(graph.labels[rows]))
    return Parts(of(train), of(test))


@jax.jit
def scattered(images: jax.Array) -> jax.Array:
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


def _cifar10(data_dir: pathlib.Path, cache_dir: pathlib.Path) -> Parts:
    loaded = cifar10.load(data_dir)

    def of(images, size=500):
        make = lambda: np.concatenate(
            [
                scattered(images.images[i : i + size])
                for i in range(0, images.num_examples, size)
            ]
        )
        features = cifar10.cached(cache_dir, "quadrants", images.images, make)
        return Data(jnp.asarray(features), jnp.asarray(images.labels))

    return Parts(of(loaded.train.take(slice(NUM_CIFAR))), of(loaded.test))


@functools.cache
def load(name: str, data_dir: pathlib.Path, cache_dir: pathlib.Path) -> Parts:
    """The examples of a task."""
    of_task: dict[str, Callable[[], Parts]] = {
        "digits": lambda: Parts(*digits.load()),
        "Adult": lambda: Parts(*adult.load(data_dir / "adult")[:2]),
        "Cora, words alone": lambda: _cora(data_dir),
        "CIFAR-10, 10,000 images": lambda: _cifar10(data_dir, cache_dir),
    }
    return of_task[name]()

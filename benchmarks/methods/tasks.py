"""Small tasks on which a private training takes seconds: four data sets, two models.

Features are scaled without a statistic of the examples, so preparing them spends no
privacy. Each training part is split once more, four fifths to fit and one to validate.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dpadambc
from benchmarks import experiment
from benchmarks.adult import data as adult
from benchmarks.cifar10 import data as cifar10
from benchmarks.cifar10 import scattering
from benchmarks.digits import data as digits
from benchmarks.experiment import Data, Model, Sides
from benchmarks.ogbn_arxiv_gcn import data as citations
from dpadambc import contrib

NUM_CIFAR = 10_000
Pair = tuple[Data, Data]  # to train on, and to test
DAMPING, NUM_PUBLIC = 0.1, 256  # rows of noise, in the place of public examples


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, and how long it is trained on a data set."""

    name: str
    layer_sizes: tuple[int, ...]  # of a perceptron; of two sizes, a linear model
    batch_size: int  # expected
    iterations: int
    target_delta: float  # well below one over the number of examples

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


def _cora(data_dir: pathlib.Path) -> Pair:
    """The words of a paper, of norm one, without who cites it; a random third tests."""
    graph = citations.load_cora(data_dir / "planetoid")
    norms = np.linalg.norm(graph.features, axis=1, keepdims=True)
    words = jnp.asarray(graph.features / np.maximum(norms, 1))
    papers = Data(words, jnp.asarray(graph.labels))
    order = np.random.default_rng(0).permutation(graph.num_nodes)
    train, test = np.split(order, [graph.num_nodes * 2 // 3])
    return papers.take(train), papers.take(test)


@jax.jit
def scattered(images: jax.Array) -> jax.Array:
    """Means of the coefficients over quadrants, each color of norm one together.

    Of bytes, shape=(num_images, 32, 32, 3); shape=(num_images, 972), float32.
    """
    found = scattering.of_images(images)
    half = scattering.GRID // 2
    shape = (*found.shape[:-2], 2, half, 2, half)
    means = found.reshape(shape).mean((-3, -1)).reshape(len(found), 3, -1)
    centered = means - means.mean(-1, keepdims=True)
    norms = jnp.linalg.norm(centered, axis=-1, keepdims=True)
    units = centered / jnp.maximum(norms, 1e-6)
    return units.reshape(len(found), -1) / np.sqrt(3)


def _cifar10(data_dir: pathlib.Path, cache_dir: pathlib.Path) -> Pair:
    loaded = cifar10.load(data_dir)

    def of(pixels, labels, size=500):
        parts = range(0, len(labels), size)
        make = lambda: np.concatenate([scattered(pixels[i : i + size]) for i in parts])
        features = cifar10.cached(cache_dir, "quadrants", pixels, make)
        return Data(jnp.asarray(features), jnp.asarray(labels))

    return of(*loaded.train.take(slice(NUM_CIFAR))), of(*loaded.test)


@functools.cache
def load(name: str, data_dir: pathlib.Path, cache_dir: pathlib.Path) -> Sides:
    """The examples of a task."""
    of_task: dict[str, Callable[[], Pair]] = {
        "digits": digits.load,
        "Adult": lambda: adult.load(data_dir / "adult")[:2],
        "Cora, words alone": lambda: _cora(data_dir),
        "CIFAR-10, 10,000 images": lambda: _cifar10(data_dir, cache_dir),
    }
    train, test = of_task[name]()
    return Sides(train, test, *experiment.split_validation(train))

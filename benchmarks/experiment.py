"""What the experiments share: the optimizers, a small network, and parts of data."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpadambc
from benchmarks.study import Cell

NON_PRIVATE = "Adam, not private"
AUTOMATIC = "AUTO-S, DP-Adam"  # as `dpadambc.recipe` has it
B2 = 0.999
VARIANCE_FLOOR = dpadambc.RelativeFloor(1.0)

# The default of 1e-4 would shrink nothing in a few hundred steps.
WEIGHT_DECAY = 0.01

# Of the private gradient, each made of a learning rate and the level of the noise.
PRIVATE: dict[str, Callable[..., optax.GradientTransformation]] = {
    "DP-SGD": lambda learning_rate, _: optax.sgd(learning_rate),
    "DP-Adam": lambda learning_rate, _: optax.adam(learning_rate, b2=B2),
    "DP-AdamBC": functools.partial(
        dpadambc.adam_bc, b2=B2, variance_floor=VARIANCE_FLOOR
    ),
    "DP-AdamW": lambda learning_rate, _, weight_decay=WEIGHT_DECAY: optax.adamw(
        learning_rate, b2=B2, weight_decay=weight_decay
    ),
    "DP-AdamW-BC": functools.partial(
        dpadambc.adamw_bc,
        b2=B2,
        variance_floor=VARIANCE_FLOOR,
        weight_decay=WEIGHT_DECAY,
    ),
}


class Data(NamedTuple):
    features: jax.Array  # shape=(num_examples, num_features), float32
    labels: jax.Array  # shape=(num_examples,), int32

    @property
    def num_examples(self) -> int:
        return self.labels.shape[0]

    def take(self, rows: np.ndarray | slice) -> "Data":
        return Data(self.features[rows], self.labels[rows])


def split_validation(data: Data, seed: int = 0) -> tuple[Data, Data]:
    """A random four fifths, and the rest to validate on."""
    order = np.random.default_rng(seed).permutation(data.num_examples)
    fit, validation = np.split(order, [data.num_examples * 4 // 5])
    return data.take(fit), data.take(validation)


class Sides(NamedTuple):
    """Trials see `fit` and are scored on `validation`; a test is of the others."""

    train: Data
    test: Data
    fit: Data
    validation: Data

    def of(self, cell: Cell) -> tuple[Data, Data]:
        """To train on, and to score by."""
        is_trial = cell.seed is None
        return (self.fit, self.validation) if is_trial else (self.train, self.test)


class Model(NamedTuple):
    """Static under `jax.jit`."""

    init: Callable[[jax.Array], Any]
    loss_fn: Callable[..., jax.Array]
    accuracy: Callable[[Any, Data], jax.Array]


def init_mlp(key: jax.Array, layer_sizes: tuple[int, ...]) -> optax.Params:
    """Kernels and biases of a multilayer perceptron."""
    shapes = list(zip(layer_sizes[:-1], layer_sizes[1:], strict=True))
    glorot = jax.nn.initializers.glorot_normal()
    keys = jax.random.split(key, len(shapes))
    return [
        {"kernel": glorot(layer_key, shape), "bias": jnp.zeros(shape[1])}
        for layer_key, shape in zip(keys, shapes, strict=True)
    ]


def logits(params: Any, features: jax.Array) -> jax.Array:
    """The network on one example."""
    *hidden, last = params
    for layer in hidden:
        features = jnp.tanh(features @ layer["kernel"] + layer["bias"])
    return features @ last["kernel"] + last["bias"]


def loss_fn(params: Any, features: jax.Array, label: jax.Array) -> jax.Array:
    """Cross-entropy of one example."""
    return optax.softmax_cross_entropy_with_integer_labels(
        logits(params, features), label
    )


@jax.jit
def accuracy(params: Any, data: Data) -> jax.Array:
    """The share of examples that the network labels correctly."""
    outputs = jax.vmap(logits, in_axes=(None, 0))(params, data.features)
    return jnp.mean(jnp.argmax(outputs, axis=-1) == data.labels)

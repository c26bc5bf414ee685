"""The head of EfficientNet-Lite0 tuned privately, with the probe's matrix on top.

    f = mean_p relu6(norm((K + s D) h_p)),  logits = W' x(f)

h_p is what the last block gives at a position p, K the head's kernel of ImageNet, x the
scaling of the probe, s a public number. Trained are W alone, or W and D, which has
409,600 numbers; the norm stays as ImageNet left it. Of the 49 positions every second of
every second row is taken, 16 in all, and no image is mirrored, so that a step takes a
quarter of the time: compare the two lines with each other rather than with the probe.
"""

import functools
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpadambc
from benchmarks.cifar10 import data, efficientnet, features
from benchmarks.probe import linear, search
from dpadambc import training

# s: one learning rate, and one clip, suit D and the matrix.
KERNEL_UNIT = 0.02

TRAINED = ("matrix", "matrix and kernel")


class Data(NamedTuple):
    blocks: jax.Array  # shape=(num_examples, 16, 320), float16: the last block's output
    pooled: jax.Array  # shape=(num_examples, 304), float16: means of earlier blocks
    labels: jax.Array  # shape=(num_examples,), int32

    def take(self, indices: np.ndarray | slice) -> "Data":
        return Data(*(x[indices] for x in self))


@jax.jit
def _last_block(variables: Any, body: jax.Array) -> jax.Array:
    model = efficientnet.EfficientNetLite0()
    last = lambda model, x: model.blocks[-1](x)

    def one(x):
        y: Any = model.apply(variables, x.astype(jnp.float32), method=last)
        return y[::2, ::2].reshape(-1, y.shape[-1]).astype(jnp.float16)

    return jax.lax.map(one, body)


def prepare(view: features.View, labels: np.ndarray, file: pathlib.Path) -> Data:
    """All images of a view; the file keeps the output of the last block."""
    if not file.exists():
        variables = jax.tree.map(jnp.asarray, efficientnet.load())
        chunks = [
            np.asarray(_last_block(variables, view.body[i : i + 1_000]))
            for i in range(0, len(view.body), 1_000)
        ]
        draft = file.with_suffix(".draft.npy")
        np.save(draft, np.concatenate(chunks))
        draft.replace(file)
    earlier = view.pooled[:, : -efficientnet.HEAD_WIDTH]
    return Data(*map(jnp.asarray, (np.load(file), earlier, labels)))


class Frozen(NamedTuple):
    """The head as ImageNet trained it."""

    kernel: jax.Array
    scale: jax.Array
    bias: jax.Array
    mean: jax.Array
    variance: jax.Array

    @classmethod
    def of(cls, variables: Any) -> "Frozen":
        params, seen = variables["params"], variables["batch_stats"]["head_norm"]
        norm = params["head_norm"]
        arrays = params["head"]["kernel"], norm["scale"], norm["bias"]
        return cls(*map(jnp.asarray, (*arrays, seen["mean"], seen["var"])))


def init(trained: str) -> dict[str, jax.Array]:
    """Zeros: what is added to the head, and the matrix."""
    shapes = {"matrix": (sum(features.WIDTHS), data.NUM_CLASSES)}
    if trained == "matrix and kernel":
        shapes |= {"kernel": (320, efficientnet.HEAD_WIDTH)}
    return {name: jnp.zeros(shape) for name, shape in shapes.items()}


def logits(
    params: dict[str, jax.Array], frozen: Frozen, blocks: jax.Array, pooled: jax.Array
) -> jax.Array:
    """Of one example."""
    blocks, pooled = blocks.astype(jnp.float32), pooled.astype(jnp.float32)
    kernel = frozen.kernel
    if "kernel" in params:
        kernel = kernel + KERNEL_UNIT * params["kernel"]
    factor = frozen.scale / jnp.sqrt(frozen.variance + efficientnet.NORM_EPSILON)
    y = (blocks @ kernel - frozen.mean[None]) * factor[None] + frozen.bias[None]
    head = jnp.mean(jnp.clip(y, 0, 6), 0)
    return features.scale(jnp.concatenate([pooled, head])) @ params["matrix"]


def loss_fn(
    params: dict[str, jax.Array],
    frozen: Frozen,
    blocks: jax.Array,
    pooled: jax.Array,
    label: jax.Array,
) -> jax.Array:
    """Cross-entropy of one example."""
    return optax.softmax_cross_entropy_with_integer_labels(
        logits(params, frozen, blocks, pooled), label
    )


@functools.partial(jax.jit, static_argnames="batch_size")
def accuracy(
    params: Any, frozen: Frozen, data: Data, batch_size: int = 200
) -> jax.Array:
    """The share of examples that are labeled correctly."""

    def is_correct(example):
        blocks, pooled, label = example
        return jnp.argmax(logits(params, frozen, blocks, pooled)) == label

    return jnp.mean(jax.lax.map(is_correct, data, batch_size=batch_size))


def train(
    trained: str,
    method: str,
    candidate: linear.Candidate,
    mechanism: dpadambc.PoissonGaussian,
    key: jax.Array,
    frozen: Frozen,
    data: Data,
) -> Any:
    """The parameters after the iterations of the mechanism."""
    return training.fit(
        loss_fn,
        init(trained),
        tuple(data),
        mechanism,
        linear.OPTIMIZERS[method](candidate, mechanism.noise_stddev),
        key=key,
        target_delta=search.DELTA,
        frozen=frozen,
        microbatch_size=512,
    ).state.params

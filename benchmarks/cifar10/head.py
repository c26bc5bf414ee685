"""The head of EfficientNet-Lite0 tuned privately, with the probe's matrix on top.

    f = mean_p relu6(norm((K + s D) h_p)),  logits = W' x(f)

h_p is what the last block gives at a position p, K the head's kernel of ImageNet, x the
scaling of the probe, s a public number. Trained are W alone, or W and D, which has
409,600 numbers; the norm stays as ImageNet left it. Of the 49 positions every second of
every second row is taken, 16 in all, and no image is mirrored, so that a step takes a
quarter of the time: compare the two lines with each other rather than with the probe.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.cifar10 import data, efficientnet, features
from benchmarks.cifar10.efficientnet import HEAD_WIDTH, WIDTHS

# s: one learning rate, and one clip, suit D and the matrix.
KERNEL_UNIT = 0.02
TRAINED = ("matrix", "matrix and kernel")


class Data(NamedTuple):
    last_block: np.ndarray  # shape=(num_examples, 16, 320), float16
    pooled: np.ndarray  # shape=(num_examples, 304), float16: means of earlier blocks
    labels: np.ndarray  # shape=(num_examples,), int32


def init(trained: str) -> dict[str, jax.Array]:
    """Zeros: what is added to the head, and the matrix."""
    shapes = {"matrix": (sum(WIDTHS), data.NUM_CLASSES)}
    if trained == "matrix and kernel":
        shapes |= {"kernel": (320, HEAD_WIDTH)}
    return {name: jnp.zeros(shape) for name, shape in shapes.items()}


def frozen(tensors: efficientnet.Tensors) -> dict[str, jax.Array]:
    """The head as ImageNet trained it."""
    names = ("_bn1.", "_conv_head.")
    return {name: x for name, x in tensors.items() if name.startswith(names)}


def logits(
    params: dict[str, jax.Array],
    frozen: efficientnet.Tensors,
    last_block: jax.Array,
    pooled: jax.Array,
) -> jax.Array:
    """Of one example."""
    last_block, pooled = last_block.astype(jnp.float32), pooled.astype(jnp.float32)
    kernel = frozen["_conv_head.weight"][:, :, 0, 0].T
    if "kernel" in params:
        kernel = kernel + KERNEL_UNIT * params["kernel"]
    y = jax.nn.relu6(efficientnet.norm(frozen, "_bn1", last_block @ kernel))
    return features.scale(jnp.concatenate([pooled, jnp.mean(y, 0)])) @ params["matrix"]


def loss_fn(
    params: Any,
    frozen: Any,
    last_block: jax.Array,
    pooled: jax.Array,
    label: jax.Array,
) -> jax.Array:
    """Cross-entropy of one example."""
    found = logits(params, frozen, last_block, pooled)
    return optax.softmax_cross_entropy_with_integer_labels(found, label)


@functools.partial(jax.jit, static_argnames="batch_size")
def accuracy(params: Any, frozen: Any, data: Data, batch_size: int = 200) -> jax.Array:
    """The share of examples that are labeled correctly."""
    is_correct = lambda x: jnp.argmax(logits(params, frozen, *x[:2])) == x[2]
    return jnp.mean(jax.lax.map(is_correct, tuple(data), batch_size=batch_size))

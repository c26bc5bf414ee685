"""Two networks to time: an MLP and a small CNN, as losses of one example."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax


class Problem(NamedTuple):
    """A loss of one example, its parameters, and a batch."""

    loss_fn: Callable[..., jax.Array]
    params: Any
    batch: tuple[jax.Array, jax.Array]

    @property
    def num_params(self) -> int:
        return optax.tree.size(self.params)


def _dense(rng, inputs, outputs):
    kernel = rng.normal(size=(inputs, outputs)) / np.sqrt(inputs)
    return {"kernel": jnp.asarray(kernel, jnp.float32), "bias": jnp.zeros(outputs)}


def _cross_entropy(logits, label):
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


def mlp(batch_size: int, sizes=(784, 512, 512, 10)) -> Problem:
    rng = np.random.default_rng(0)
    params = [_dense(rng, *pair) for pair in zip(sizes, sizes[1:], strict=False)]

    def loss_fn(params, x, label):
        for layer in params[:-1]:
            x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
        return _cross_entropy(x @ params[-1]["kernel"] + params[-1]["bias"], label)

    x = jnp.asarray(rng.normal(size=(batch_size, sizes[0])), jnp.float32)
    return Problem(loss_fn, params, (x, jnp.arange(batch_size) % sizes[-1]))


def cnn(batch_size: int, channels=(1, 16, 32), side=28) -> Problem:
    rng = np.random.default_rng(0)
    convs = []
    for inputs, outputs in zip(channels, channels[1:], strict=False):
        kernel = rng.normal(size=(3, 3, inputs, outputs)) / np.sqrt(9 * inputs)
        convs.append(
            {"kernel": jnp.asarray(kernel, jnp.float32), "bias": jnp.zeros(outputs)}
        )
    features = channels[-1] * (side // 4) ** 2
    params = {"convs": convs, "dense": _dense(rng, features, 10)}

    def loss_fn(params, x, label):
        x = x[None]
        for layer in params["convs"]:
            x = jax.lax.conv_general_dilated(
                x,
                layer["kernel"],
                (1, 1),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            x = jnp.tanh(x + layer["bias"])
            x = jax.lax.reduce_window(
                x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
            )
        dense = params["dense"]
        return _cross_entropy(x.reshape(-1) @ dense["kernel"] + dense["bias"], label)

    x = jnp.asarray(rng.normal(size=(batch_size, side, side, channels[0])), jnp.float32)
    return Problem(loss_fn, params, (x, jnp.arange(batch_size) % 10))


def batch_loss(loss_fn):
    """The mean loss of a batch, as one writes it without privacy."""

    def mean_loss(params, *batch):
        in_axes = (None, *(0 for _ in batch))
        return jax.vmap(loss_fn, in_axes=in_axes)(params, *batch).mean()

    return mean_loss

"""Small networks: dense, convolutional, of a graph, recurrent."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.speed.models.layers import (
    cross_entropy,
    dense,
    init_dense,
    integers,
    normal,
)
from benchmarks.speed.models.problem import Problem


def mlp(batch_size: int, sizes: tuple[int, ...] = (784, 1024, 1024, 10)) -> Problem:
    """Dense layers and tanh."""
    rng = np.random.default_rng(0)
    params = [init_dense(rng, *pair) for pair in zip(sizes, sizes[1:], strict=False)]

    def loss_fn(params, x, label):
        for layer in params[:-1]:
            x = jnp.tanh(dense(layer, x))
        return cross_entropy(dense(params[-1], x), label)

    batch = (
        normal(rng, batch_size, sizes[0]),
        integers(rng, sizes[-1], batch_size),
    )
    return Problem(f"MLP {'-'.join(map(str, sizes))}", loss_fn, loss_fn, params, batch)


def _init_conv(rng: np.random.Generator, inputs: int, outputs: int) -> Any:
    kernel = normal(rng, 3, 3, inputs, outputs, scale=(9 * inputs) ** -0.5)
    return {"kernel": kernel, "bias": jnp.zeros(outputs)}


def _conv(layer: Any, x: jax.Array, padding: str) -> jax.Array:
    x = jax.lax.conv_general_dilated(
        x,
        layer["kernel"],
        window_strides=(1, 1),
        padding=padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return x + layer["bias"]


def _max_pool(x: jax.Array) -> jax.Array:
    window = (1, 2, 2, 1)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")


def cnn5(
    batch_size: int,
    channels: tuple[int, int, int, int, int] = (32, 64, 128, 256, 10),
    side: int = 32,
) -> Problem:
    """Five convolutions of 3x3, of which three are pooled, and their mean."""
    rng = np.random.default_rng(0)
    pairs = zip((3, *channels), channels, strict=False)
    params = [_init_conv(rng, *pair) for pair in pairs]

    def batch_loss(params, x, labels):
        first, second, third, fourth, last = params
        x = _max_pool(jnp.tanh(_conv(first, x, "VALID")))
        x = _max_pool(jnp.tanh(_conv(second, x, "SAME")))
        x = _max_pool(jnp.tanh(_conv(third, x, "SAME")))
        x = jnp.tanh(_conv(fourth, x, "SAME"))
        return cross_entropy(_conv(last, x, "SAME").mean(axis=(1, 2)), labels)

    def loss_fn(params, x, label):
        return batch_loss(params, x[None], label[None])

    batch = (
        normal(rng, batch_size, side, side, 3),
        integers(rng, channels[-1], batch_size),
    )
    return Problem(f"CNN5, {side}x{side}x3", loss_fn, batch_loss, params, batch)


def gcn(
    num_roots: int = 2000,
    rows: int = 8,
    features: int = 128,
    latent: int = 255,
    classes: int = 40,
) -> Problem:
    """A graph convolution; an example is a root, row 0, and its neighbors."""
    rng = np.random.default_rng(0)
    params = {
        "encoder": init_dense(rng, features, latent),
        "convolution": init_dense(rng, latent, latent),
        "decoder": init_dense(rng, latent, latent),
        "head": init_dense(rng, latent, classes),
    }

    def loss_fn(params, x, is_valid, label):
        encoded = jnp.tanh(dense(params["encoder"], x))
        mean = encoded.mean(axis=-2, where=is_valid[..., None])
        x = jnp.tanh(dense(params["convolution"], mean)) + mean
        x = jnp.tanh(dense(params["decoder"], x))
        return cross_entropy(dense(params["head"], x), label)

    num_valid = rng.integers(1, rows + 1, size=(num_roots, 1))
    batch = (
        normal(rng, num_roots, rows, features),
        jnp.arange(rows) < num_valid,
        integers(rng, classes, num_roots),
    )
    return Problem(f"DP-GCN, {rows} rows", loss_fn, loss_fn, params, batch)


def _init_lstm_layer(rng: np.random.Generator, inputs: int, hidden: int) -> Any:
    return {
        "inputs": normal(rng, inputs, 4 * hidden, scale=inputs**-0.5),
        "hidden": normal(rng, hidden, 4 * hidden, scale=hidden**-0.5),
        "bias": jnp.zeros(4 * hidden),
    }


def _lstm_layer(layer: Any, inputs: jax.Array) -> jax.Array:
    """The hidden states of all steps; steps are along axis 0."""

    def step(state, x):
        hidden, cell = state
        gates = x @ layer["inputs"] + hidden @ layer["hidden"] + layer["bias"]
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
        return (hidden, cell), hidden

    zeros = jnp.zeros((*inputs.shape[1:-1], layer["hidden"].shape[0]))
    return jax.lax.scan(step, (zeros, zeros), inputs)[1]


def lstm(
    batch_size: int = 64,
    hidden: int = 256,
    layers: int = 2,
    length: int = 64,
    inputs: int = 256,
    classes: int = 10,
) -> Problem:
    """An LSTM that labels every step of a sequence."""
    rng = np.random.default_rng(0)
    sizes = (inputs, *(hidden for _ in range(layers)))
    params = {
        "layers": [
            _init_lstm_layer(rng, *pair) for pair in zip(sizes, sizes[1:], strict=False)
        ],
        "head": init_dense(rng, hidden, classes),
    }

    def loss_fn(params, x, labels):
        x = jnp.moveaxis(x, -2, 0)
        for layer in params["layers"]:
            x = _lstm_layer(layer, x)
        return cross_entropy(dense(params["head"], jnp.moveaxis(x, 0, -2)), labels)

    batch = (
        normal(rng, batch_size, length, inputs),
        integers(rng, classes, batch_size, length),
    )
    name = f"LSTM, {layers} layers of {hidden}, length {length}"
    return Problem(name, loss_fn, loss_fn, params, batch)

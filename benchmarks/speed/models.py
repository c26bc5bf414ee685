"""The networks to time: each as the loss of one example and as that of a batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax


class Problem(NamedTuple):
    """A model, a loss, parameters and a batch.

    `batch_loss` is the mean loss as one writes it without privacy: a forward pass of
    the whole batch. Where the code is the same with and without a batch axis, it is
    `loss_fn` itself.
    """

    name: str
    loss_fn: Callable[..., jax.Array]  # of (params, *example)
    batch_loss: Callable[..., jax.Array]  # of (params, *batch)
    params: Any
    batch: tuple[Any, ...]  # each of shape=(batch_size, ...)

    @property
    def batch_size(self) -> int:
        return self.batch[0].shape[0]

    @property
    def num_params(self) -> int:
        return optax.tree.size(self.params)


def check_losses(problem: Problem, rtol: float = 1e-5) -> None:
    """Raises unless the mean over single examples is the loss of the batch."""
    in_axes = (None,) + (0,) * len(problem.batch)
    losses = jax.vmap(problem.loss_fn, in_axes)(problem.params, *problem.batch)
    batch_loss = problem.batch_loss(problem.params, *problem.batch)
    np.testing.assert_allclose(batch_loss, losses.mean(), rtol=rtol)


def _normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(rng.normal(scale=scale, size=shape), jnp.float32)


def _init_dense(rng: np.random.Generator, inputs: int, outputs: int) -> Any:
    kernel = _normal(rng, inputs, outputs, scale=inputs**-0.5)
    return {"kernel": kernel, "bias": jnp.zeros(outputs)}


def _dense(layer: Any, x: jax.Array) -> jax.Array:
    return x @ layer["kernel"] + layer["bias"]


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _labels(rng: np.random.Generator, num_classes: int, *shape: int) -> jax.Array:
    return jnp.asarray(rng.integers(num_classes, size=shape), jnp.int32)


def _init_layer_norm(width: int) -> Any:
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}


def _layer_norm(layer: Any, x: jax.Array) -> jax.Array:
    x = jax.nn.standardize(x, axis=-1, epsilon=1e-5)
    return x * layer["scale"] + layer["bias"]


def _causal_attention(block: Any, x: jax.Array, heads: int) -> jax.Array:
    split = lambda x: x.reshape(*x.shape[:-1], heads, -1)
    query, key, value = (split(_dense(block[name], x)) for name in "qkv")
    scores = jnp.einsum("...qhd,...khd->...hqk", query, key) / query.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    mixed = jnp.einsum("...hqk,...khd->...qhd", weights, value)
    return _dense(block["o"], mixed.reshape(x.shape))


def _init_block(rng: np.random.Generator, width: int) -> Any:
    return {
        "norm_1": _init_layer_norm(width),
        **{name: _init_dense(rng, width, width) for name in "qkvo"},
        "norm_2": _init_layer_norm(width),
        "up": _init_dense(rng, width, 4 * width),
        "down": _init_dense(rng, 4 * width, width),
    }


def transformer(
    batch_size: int,
    width: int = 512,
    layers: int = 4,
    heads: int = 8,
    length: int = 64,
    vocabulary: int = 5000,
) -> Problem:
    """A causal language model, normalized before each part of a block."""
    rng = np.random.default_rng(0)
    params = {
        "tokens": _normal(rng, vocabulary, width, scale=0.02),
        "positions": _normal(rng, length, width, scale=0.02),
        "blocks": [_init_block(rng, width) for _ in range(layers)],
        "norm": _init_layer_norm(width),
        "head": _init_dense(rng, width, vocabulary),
    }

    def loss_fn(params, tokens):
        inputs, targets = tokens[..., :-1], tokens[..., 1:]
        x = params["tokens"][inputs] + params["positions"]
        for block in params["blocks"]:
            x = x + _causal_attention(block, _layer_norm(block["norm_1"], x), heads)
            hidden = jax.nn.gelu(_dense(block["up"], _layer_norm(block["norm_2"], x)))
            x = x + _dense(block["down"], hidden)
        logits = _dense(params["head"], _layer_norm(params["norm"], x))
        return _cross_entropy(logits, targets)

    name = f"transformer, width {width}, {layers} layers, length {length}"
    batch = (_labels(rng, vocabulary, batch_size, length + 1),)
    return Problem(name, loss_fn, loss_fn, params, batch)


def mlp(batch_size: int, sizes: tuple[int, ...] = (784, 1024, 1024, 10)) -> Problem:
    """Dense layers and tanh."""
    rng = np.random.default_rng(0)
    params = [_init_dense(rng, *pair) for pair in zip(sizes, sizes[1:], strict=False)]

    def loss_fn(params, x, label):
        for layer in params[:-1]:
            x = jnp.tanh(_dense(layer, x))
        return _cross_entropy(_dense(params[-1], x), label)

    batch = (
        _normal(rng, batch_size, sizes[0]),
        _labels(rng, sizes[-1], batch_size),
    )
    return Problem(f"MLP {'-'.join(map(str, sizes))}", loss_fn, loss_fn, params, batch)


def _init_conv(rng: np.random.Generator, inputs: int, outputs: int) -> Any:
    kernel = _normal(rng, 3, 3, inputs, outputs, scale=(9 * inputs) ** -0.5)
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
        return _cross_entropy(_conv(last, x, "SAME").mean(axis=(1, 2)), labels)

    def loss_fn(params, x, label):
        return batch_loss(params, x[None], label[None])

    batch = (
        _normal(rng, batch_size, side, side, 3),
        _labels(rng, channels[-1], batch_size),
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
        "encoder": _init_dense(rng, features, latent),
        "convolution": _init_dense(rng, latent, latent),
        "decoder": _init_dense(rng, latent, latent),
        "head": _init_dense(rng, latent, classes),
    }

    def loss_fn(params, x, is_valid, label):
        encoded = jnp.tanh(_dense(params["encoder"], x))
        mean = encoded.mean(axis=-2, where=is_valid[..., None])
        x = jnp.tanh(_dense(params["convolution"], mean)) + mean
        x = jnp.tanh(_dense(params["decoder"], x))
        return _cross_entropy(_dense(params["head"], x), label)

    num_valid = rng.integers(1, rows + 1, size=(num_roots, 1))
    batch = (
        _normal(rng, num_roots, rows, features),
        jnp.arange(rows) < num_valid,
        _labels(rng, classes, num_roots),
    )
    return Problem(f"DP-GCN, {rows} rows", loss_fn, loss_fn, params, batch)


def _init_lstm_layer(rng: np.random.Generator, inputs: int, hidden: int) -> Any:
    return {
        "inputs": _normal(rng, inputs, 4 * hidden, scale=inputs**-0.5),
        "hidden": _normal(rng, hidden, 4 * hidden, scale=hidden**-0.5),
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
        "head": _init_dense(rng, hidden, classes),
    }

    def loss_fn(params, x, labels):
        x = jnp.moveaxis(x, -2, 0)
        for layer in params["layers"]:
            x = _lstm_layer(layer, x)
        return _cross_entropy(_dense(params["head"], jnp.moveaxis(x, 0, -2)), labels)

    batch = (
        _normal(rng, batch_size, length, inputs),
        _labels(rng, classes, batch_size, length),
    )
    name = f"LSTM, {layers} layers of {hidden}, length {length}"
    return Problem(name, loss_fn, loss_fn, params, batch)

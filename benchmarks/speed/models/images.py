"""Networks of images: a ResNet and a U-Net of convolutions, and an MLP-Mixer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.speed.models.layers import (
    cross_entropy,
    dense,
    init_dense,
    init_layer_norm,
    integers,
    layer_norm,
    normal,
)
from benchmarks.speed.models.problem import Problem


def _init_conv(
    rng: np.random.Generator, inputs: int, outputs: int, side: int = 3
) -> jax.Array:
    scale = (2 / (side**2 * inputs)) ** 0.5
    return normal(rng, side, side, inputs, outputs, scale=scale)


def _conv(kernel: jax.Array, x: jax.Array, stride: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(stride, stride),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def _group_norm(layer: Any, x: jax.Array, channels_of_group: int = 8) -> jax.Array:
    """Over the pixels and channels of each group, of each image."""
    grouped = x.reshape(*x.shape[:-1], -1, channels_of_group)
    grouped = jax.nn.standardize(grouped, axis=(-4, -3, -1), epsilon=1e-5)
    return grouped.reshape(x.shape) * layer["scale"] + layer["bias"]


def _init_basic_block(rng: np.random.Generator, inputs: int, outputs: int) -> Any:
    block = {
        "one": _init_conv(rng, inputs, outputs),
        "norm_1": init_layer_norm(outputs),
        "two": _init_conv(rng, outputs, outputs),
        "norm_2": init_layer_norm(outputs),
    }
    if inputs != outputs:
        block["shortcut"] = _init_conv(rng, inputs, outputs, side=1)
        block["norm_3"] = init_layer_norm(outputs)
    return block


def _basic_block(block: Any, x: jax.Array) -> jax.Array:
    """Two convolutions beside a shortcut; a block of more channels halves the sides."""
    stride = 2 if "shortcut" in block else 1
    y = jax.nn.relu(_group_norm(block["norm_1"], _conv(block["one"], x, stride)))
    y = _group_norm(block["norm_2"], _conv(block["two"], y))
    if "shortcut" in block:
        x = _group_norm(block["norm_3"], _conv(block["shortcut"], x, stride))
    return jax.nn.relu(x + y)


def resnet18(
    batch_size: int,
    widths: tuple[int, ...] = (64, 128, 256, 512),
    side: int = 32,
    classes: int = 10,
) -> Problem:
    """A ResNet-18 for CIFAR: a stem of 3x3, no pooling before the mean."""
    rng = np.random.default_rng(0)
    blocks = []
    for inputs, outputs in zip((widths[0], *widths), widths, strict=False):
        blocks.append(_init_basic_block(rng, inputs, outputs))
        blocks.append(_init_basic_block(rng, outputs, outputs))
    params = {
        "stem": _init_conv(rng, 3, widths[0]),
        "norm": init_layer_norm(widths[0]),
        "blocks": blocks,
        "head": init_dense(rng, widths[-1], classes),
    }

    def batch_loss(params, x, labels):
        x = jax.nn.relu(_group_norm(params["norm"], _conv(params["stem"], x)))
        for block in params["blocks"]:
            x = _basic_block(block, x)
        return cross_entropy(dense(params["head"], x.mean(axis=(1, 2))), labels)

    def loss_fn(params, x, label):
        return batch_loss(params, x[None], label[None])

    batch = normal(rng, batch_size, side, side, 3), integers(rng, classes, batch_size)
    name = f"ResNet-18, {side}x{side}x3"
    return Problem(name, loss_fn, batch_loss, params, batch)


def _init_timed_block(
    rng: np.random.Generator, inputs: int, outputs: int, embedding: int
) -> Any:
    block = {
        "norm_1": init_layer_norm(inputs),
        "one": _init_conv(rng, inputs, outputs),
        "time": init_dense(rng, embedding, outputs),
        "norm_2": init_layer_norm(outputs),
        "two": _init_conv(rng, outputs, outputs),
    }
    if inputs != outputs:
        block["shortcut"] = _init_conv(rng, inputs, outputs, side=1)
    return block


def _timed_block(block: Any, x: jax.Array, time: jax.Array) -> jax.Array:
    y = _conv(block["one"], jax.nn.silu(_group_norm(block["norm_1"], x)))
    y = y + dense(block["time"], time)[..., None, None, :]
    y = _conv(block["two"], jax.nn.silu(_group_norm(block["norm_2"], y)))
    return y + (_conv(block["shortcut"], x) if "shortcut" in block else x)


def _waves(times: jax.Array, width: int) -> jax.Array:
    """Sines and cosines of times from 0 to 1, of falling frequencies."""
    frequencies = 1_000 * jnp.exp(jnp.linspace(0, -jnp.log(10_000), width // 2))
    angles = times[..., None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def _init_unet(rng: np.random.Generator, widths: tuple[int, ...]) -> Any:
    first, last, embedding = widths[0], widths[-1], 4 * widths[0]
    block = lambda inputs, outputs: _init_timed_block(rng, inputs, outputs, embedding)
    inputs = (first, *widths)
    down = [{"block": block(*pair)} for pair in zip(inputs, widths, strict=False)]
    up = [
        {"block": block(b + a, a)}
        for a, b in zip(widths, (*widths[1:], last), strict=True)
    ]
    for layer, width in zip(down[:-1], widths, strict=False):
        layer["shrink"] = _init_conv(rng, width, width)
    for layer, width in zip(up[1:], widths[1:], strict=True):
        layer["grow"] = _init_conv(rng, width, width)
    return {
        "time": [
            init_dense(rng, first, embedding),
            init_dense(rng, embedding, embedding),
        ],
        "stem": _init_conv(rng, 3, first),
        "down": down,
        "middle": block(last, last),
        "up": up[::-1],
        "norm": init_layer_norm(first),
        "head": _init_conv(rng, first, 3),
    }


def _unet(params: Any, x: jax.Array, times: jax.Array) -> jax.Array:
    """Down to the middle and up again, joined with the way down at each size."""
    time = _waves(times, params["time"][0]["kernel"].shape[0])
    for layer in params["time"]:
        time = jax.nn.silu(dense(layer, time))
    x, skipped = _conv(params["stem"], x), []
    for layer in params["down"]:
        x = _timed_block(layer["block"], x, time)
        skipped.append(x)
        x = _conv(layer["shrink"], x, 2) if "shrink" in layer else x
    x = _timed_block(params["middle"], x, time)
    for layer in params["up"]:
        x = jnp.concatenate([x, skipped.pop()], axis=-1)
        x = _timed_block(layer["block"], x, time)
        if "grow" in layer:
            x = jnp.repeat(jnp.repeat(x, 2, axis=-3), 2, axis=-2)
            x = _conv(layer["grow"], x)
    return _conv(params["head"], jax.nn.silu(_group_norm(params["norm"], x)))


def unet(
    batch_size: int, widths: tuple[int, ...] = (64, 96, 128), side: int = 32
) -> Problem:
    """A U-Net of diffusion, which tells the noise in an image, given the time."""
    rng = np.random.default_rng(0)

    def batch_loss(params, x, times, noise):
        angles = (jnp.pi / 2 * times)[..., None, None, None]
        noisy = jnp.cos(angles) * x + jnp.sin(angles) * noise
        return jnp.square(_unet(params, noisy, times) - noise).mean()

    def loss_fn(params, x, time, noise):
        return batch_loss(params, x[None], time[None], noise[None])

    params, images = _init_unet(rng, widths), (batch_size, side, side, 3)
    times = jnp.asarray(rng.uniform(size=batch_size), jnp.float32)
    batch = normal(rng, *images), times, normal(rng, *images)
    return Problem(f"U-Net, {side}x{side}x3", loss_fn, batch_loss, params, batch)


def _init_mixer_block(rng: np.random.Generator, tokens: int, width: int) -> Any:
    return {
        "norm_1": init_layer_norm(width),
        "token_up": init_dense(rng, tokens, 2 * tokens),
        "token_down": init_dense(rng, 2 * tokens, tokens),
        "norm_2": init_layer_norm(width),
        "up": init_dense(rng, width, 4 * width),
        "down": init_dense(rng, 4 * width, width),
    }


def _mixer_block(block: Any, x: jax.Array) -> jax.Array:
    """Mixes the patches of each channel, by kernels of transposed activations."""
    columns = layer_norm(block["norm_1"], x).mT
    columns = dense(block["token_down"], jax.nn.gelu(dense(block["token_up"], columns)))
    x = x + columns.mT
    hidden = jax.nn.gelu(dense(block["up"], layer_norm(block["norm_2"], x)))
    return x + dense(block["down"], hidden)


def mixer(
    batch_size: int,
    width: int = 256,
    layers: int = 8,
    patch: int = 4,
    side: int = 32,
    classes: int = 10,
) -> Problem:
    """An MLP-Mixer: dense layers along the patches, and along the channels."""
    rng = np.random.default_rng(0)
    rows = side // patch
    params = {
        "stem": init_dense(rng, 3 * patch**2, width),
        "blocks": [_init_mixer_block(rng, rows**2, width) for _ in range(layers)],
        "norm": init_layer_norm(width),
        "head": init_dense(rng, width, classes),
    }

    def loss_fn(params, x, label):
        x = x.reshape(*x.shape[:-3], rows, patch, rows, patch, 3)
        x = jnp.swapaxes(x, -4, -3).reshape(*x.shape[:-5], rows**2, 3 * patch**2)
        x = dense(params["stem"], x)
        for block in params["blocks"]:
            x = _mixer_block(block, x)
        mean = layer_norm(params["norm"], x).mean(axis=-2)
        return cross_entropy(dense(params["head"], mean), label)

    batch = normal(rng, batch_size, side, side, 3), integers(rng, classes, batch_size)
    name = f"MLP-Mixer, width {width}, {layers} layers, {rows**2} patches"
    return Problem(name, loss_fn, loss_fn, params, batch)

"""Networks of images, volumes, sounds and vectors, small, as they are trained."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.engine.factored_models.common import (
    CHEAPEST,
    PLAIN,
    Model,
    normal,
    score,
    weights,
)
from tests.engine.factored_models.convolutions import LINE, VOLUME, Conv


def convolved(w, x, strides=(1, 1), **options):
    return Conv(strides, **options)(w, x)[0]


def along_channels(vector, x):
    """A vector with the axes of x, of which the last is of channels."""
    return vector.reshape((1,) * (x.ndim - 1) + (-1,))


def group_norm(p, x, groups=2):
    grouped = x.reshape(-1, groups, x.shape[-1] // groups)
    x = jax.nn.standardize(grouped, axis=(0, 2), epsilon=1e-5).reshape(x.shape)
    return x * along_channels(p["scale"], x) + along_channels(p["bias"], x)


def layer_norm(p, x):
    x = jax.nn.standardize(x, axis=-1, epsilon=1e-5)
    return x * along_channels(p["scale"], x) + along_channels(p["bias"], x)


def dense(p, x):
    return x @ p["kernel"] + along_channels(p["bias"], x)


def norm_of(width):
    return {"scale": (width,), "bias": (width,)}


def dense_of(inputs, outputs):
    return {"kernel": (inputs, outputs), "bias": (outputs,)}


def same(w):
    return w


def basic_block(p, x, strides=(1, 1), kernel=same):
    """Two convolutions of 3x3, as in a ResNet, each normalized before."""
    y = jax.nn.relu(group_norm(p["norm_1"], x))
    x = convolved(kernel(p["shortcut"]), y, strides) if "shortcut" in p else x
    y = convolved(kernel(p["one"]), y, strides)
    return x + convolved(kernel(p["two"]), jax.nn.relu(group_norm(p["norm_2"], y)))


def block_of(inputs, outputs):
    block = {
        "norm_1": norm_of(inputs),
        "one": (3, 3, inputs, outputs),
        "norm_2": norm_of(outputs),
        "two": (3, 3, outputs, outputs),
    }
    return block if inputs == outputs else block | {"shortcut": (1, 1, inputs, outputs)}


def resnet(p, x, kernel=same):
    x = convolved(kernel(p["stem"]), x)
    x = basic_block(p["first"], x, kernel=kernel)
    x = basic_block(p["second"], x, (2, 2), kernel)
    x = jax.nn.relu(group_norm(p["norm"], x)).mean((0, 1))
    return score(dense(p["head"], x))


def standardized(w):
    axes = tuple(range(w.ndim - 1))
    return jax.nn.standardize(w, axis=axes, epsilon=1e-5) * w[..., 0].size ** -0.5


def standardized_resnet(p, x):
    """As De et al. 2022 have it for private training."""
    return resnet(p, x, standardized)


RESNET: dict[str, Any] = dict(
    stem=(3, 3, 3, 8),
    first=block_of(8, 8),
    second=block_of(8, 12),
    norm=norm_of(12),
    head=dense_of(12, 5),
)


def time_embedding(p, t, width=8):
    angles = t * jnp.exp(-jnp.arange(width // 2))
    waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)])
    return dense(p["out"], jax.nn.silu(dense(p["in"], waves)))


def timed_block(p, x, embedded):
    y = convolved(p["one"], jax.nn.silu(group_norm(p["norm_1"], x)))
    y = y + along_channels(dense(p["time"], embedded), y)
    y = convolved(p["two"], jax.nn.silu(group_norm(p["norm_2"], y)))
    return y + (convolved(p["shortcut"], x) if "shortcut" in p else x)


def unet(p, x, t, noise):
    """A model of diffusion: the noise in an image, at a time."""
    embedded = time_embedding(p["time"], t)
    outer = timed_block(p["down"], convolved(p["stem"], x), embedded)
    inner = convolved(p["shrink"], outer, (2, 2))
    inner = timed_block(p["middle"], inner, embedded)
    grown = jnp.repeat(jnp.repeat(inner, 2, axis=0), 2, axis=1)
    joined = jnp.concatenate([outer, convolved(p["grow"], grown)], -1)
    last = timed_block(p["up"], joined, embedded)
    return jnp.square(convolved(p["last"], jax.nn.silu(last)) - noise).mean()


def timed_block_of(inputs, outputs):
    return block_of(inputs, outputs) | {"time": dense_of(8, outputs)}


UNET: dict[str, Any] = dict(
    time={"in": dense_of(8, 8), "out": dense_of(8, 8)},
    stem=(3, 3, 2, 6),
    down=timed_block_of(6, 6),
    shrink=(3, 3, 6, 8),
    middle=timed_block_of(8, 8),
    grow=(3, 3, 8, 6),
    up=timed_block_of(12, 6),
    last=(3, 3, 6, 2),
)


def conformer(p, x):
    """Half a dense part, attention, a convolution over time, the other half."""
    half = lambda p, x: dense(p["down"], jax.nn.silu(dense(p["up"], layer_norm(p, x))))
    x = x + 0.5 * half(p["before"], x)
    y = layer_norm(p["attention"], x)
    q, k, v = (y @ p["attention"][name] for name in "qkv")
    x = x + jax.nn.softmax(q @ k.T) @ v @ p["attention"]["o"]
    y = jax.nn.glu(dense(p["in"], layer_norm(p["norm"], x)))
    width = y.shape[-1]
    y = convolved(p["depthwise"], y, (1,), groups=width, layout=LINE)
    x = x + dense(p["out"], jax.nn.silu(layer_norm(p["inner"], y)))
    return score(layer_norm(p["last"], x + 0.5 * half(p["after"], x)))


def half_of(width):
    up, down = dense_of(width, 2 * width), dense_of(2 * width, width)
    return {"up": up, "down": down, **norm_of(width)}


CONFORMER: dict[str, Any] = {
    "before": half_of(8),
    "attention": norm_of(8) | dict.fromkeys("qkvo", (8, 8)),
    "in": dense_of(8, 16),
    "norm": norm_of(8),
    "depthwise": (15, 1, 8),
    "inner": norm_of(8),
    "out": dense_of(8, 8),
    "after": half_of(8),
    "last": norm_of(8),
}


def volume_cnn(p, x):
    x = jax.nn.relu(convolved(p["one"], x, (1, 1, 1), layout=VOLUME))
    x = jax.nn.relu(convolved(p["two"], x, (2, 2, 2), layout=VOLUME))
    return score(dense(p["head"], x.mean((0, 1, 2))))


def convnext(p, x):
    y = convolved(p["depthwise"], x, groups=x.shape[-1])
    y = jax.nn.gelu(dense(p["up"], layer_norm(p["norm"], y)))
    y = dense(p["down"], y)
    return score(x + y * along_channels(p["scale"], y))


def vae(p, x, key):
    """Its decoder has transposed convolutions."""
    h = jax.nn.relu(convolved(p["one"], x, (2, 2)))
    h = jax.nn.relu(convolved(p["two"], h, (2, 2)))
    mean, log_stddev = jnp.split(dense(p["encoded"], h.reshape(-1)), 2)
    sample = mean + jnp.exp(log_stddev) * jax.random.normal(key, mean.shape, x.dtype)
    h = jax.nn.relu(dense(p["decoded"], sample)).reshape(h.shape)
    for name, activation in (("three", jax.nn.relu), ("four", jax.nn.sigmoid)):
        h = activation(lax.conv_transpose(h[None], p[name], (2, 2), "SAME")[0])
    divergence = jnp.square(mean) + jnp.exp(2 * log_stddev) - 2 * log_stddev
    return jnp.square(h - x).sum() + 0.5 * divergence.sum()


def made(p, x):
    """Masks let each number depend on those before it."""
    of_inputs, of_hidden = np.arange(10), np.arange(24) % 9
    masks = of_inputs[:, None] <= of_hidden[None], of_hidden[:, None] < of_inputs[None]
    h = jax.nn.relu(x @ (p["one"] * masks[0]) + p["bias"])
    return jnp.square(h @ (p["two"] * masks[1]) - x).sum()


def network(loss_fn, *batch, rules=None, with_key=False, **shapes):
    """A model whose kernels have the cheapest form, but for those named in rules."""
    is_shape = lambda x: isinstance(x, tuple)
    paths = jax.tree_util.tree_leaves_with_path(shapes, is_leaf=is_shape)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    found = {name(path): CHEAPEST if len(x) > 1 else PLAIN for path, x in paths}
    examples = tuple(normal(*shape) for shape in batch)
    found |= dict.fromkeys(rules or (), PLAIN)
    return Model(loss_fn, weights(**shapes), examples, found, with_key=with_key)


CONV_KERNELS = (
    *("stem", "first/one", "first/two"),
    *("second/one", "second/two", "second/shortcut"),
)

NETWORKS = {
    "resnet": network(resnet, (8, 8, 3), **RESNET),
    "resnet of standardized kernels": network(
        standardized_resnet, (8, 8, 3), rules=CONV_KERNELS, **RESNET
    ),
    "unet": network(unet, (8, 8, 2), (), (8, 8, 2), **UNET),
    "conformer": network(conformer, (20, 8), **CONFORMER),
    "cnn of volumes": network(
        volume_cnn,
        (4, 4, 6, 2),
        one=(3, 3, 3, 2, 4),
        two=(3, 3, 3, 4, 6),
        head=dense_of(6, 3),
    ),
    "convnext": network(
        convnext,
        (8, 8, 6),
        depthwise=(7, 7, 1, 6),
        norm=norm_of(6),
        up=dense_of(6, 24),
        down=dense_of(24, 6),
        scale=(6,),
    ),
    "vae": network(
        vae,
        (8, 8, 2),
        with_key=True,
        one=(3, 3, 2, 4),
        two=(3, 3, 4, 6),
        encoded=dense_of(24, 6),
        decoded=dense_of(3, 24),
        three=(3, 3, 6, 4),
        four=(3, 3, 4, 2),
    ),
    "large kernel": network(
        lambda p, x: score(convolved(p["w"], x)), (12, 12, 2), w=(11, 11, 2, 3)
    ),
    "made": network(
        made, (10,), rules=("one", "two"), one=(10, 24), bias=(24,), two=(24, 10)
    ),
}

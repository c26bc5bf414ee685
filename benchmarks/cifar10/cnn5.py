"""CNN5, the network of the papers on CIFAR-10: 411,466 parameters, five convolutions.

    3 x 3, 32, without padding, tanh, max-pool 2      (32, 32, 3) -> (15, 15, 32)
    3 x 3, 64, tanh, max-pool 2                                   -> (7, 7, 64)
    3 x 3, 128, tanh, max-pool 2                                  -> (3, 3, 128)
    3 x 3, 256, tanh                                              -> (3, 3, 256)
    3 x 3, 10, the mean over positions                            -> (10,)

It is written for the per-example gradients of a CPU: each convolution is one product of
patches with the kernel, tanh and the bias come after the maximum, which they do not
change the place of, and the mean before the last kernel, since both are linear.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

NUM_PARAMETERS = 411_466

# Small enough for the patches to stay in the caches of a core.
MICROBATCH_SIZE = 4

# Of ImageNet, by which the papers normalize.
MEAN, STDDEV = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _init(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """That of Haiku: one over the root of the inputs times a normal cut off at two."""
    return jax.random.truncated_normal(key, -2, 2, shape) / np.sqrt(np.prod(shape[:-1]))


def pad(image: jax.Array) -> jax.Array:
    """A border of zeros, for an output of the size of the input."""
    return jnp.pad(image, ((1, 1), (1, 1), (0, 0)))


def patches(image: jax.Array) -> jax.Array:
    """What each tap of a kernel sees at each position, shape (h - 2, w - 2, 9 c)."""
    height, width, _ = image.shape
    taps = [
        image[i : height - 2 + i, j : width - 2 + j] for i in range(3) for j in range(3)
    ]
    return jnp.concatenate(taps, axis=-1)


def max_pool(image: jax.Array) -> jax.Array:
    """The maximum of each square of four; an odd last row or column is left out."""
    height, width, channels = image.shape
    height, width = height // 2, width // 2
    image = image[: 2 * height, : 2 * width]
    return image.reshape(height, 2, width, 2, channels).max((1, 3))


class Conv(nn.Module):
    """The kernel and the bias of `nn.Conv`, applied to patches."""

    features: int
    pool: Callable[[jax.Array], jax.Array] = lambda image: image

    @nn.compact
    def __call__(self, patches: jax.Array) -> jax.Array:
        shape = (3, 3, patches.shape[-1] // 9, self.features)
        kernel = self.param("kernel", _init, shape)
        bias = self.param("bias", nn.initializers.zeros_init(), (self.features,))
        x = self.pool(patches @ kernel.reshape(-1, self.features))
        return x + bias.reshape((1,) * (x.ndim - 1) + (-1,))


class CNN5(nn.Module):
    """Ten logits of one image, shape (32, 32, 3), normalized."""

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        x = nn.tanh(Conv(32, max_pool, name="conv1")(patches(image)))
        x = nn.tanh(Conv(64, max_pool, name="conv2")(patches(pad(x))))
        x = nn.tanh(Conv(128, max_pool, name="conv3")(patches(pad(x))))
        x = nn.tanh(Conv(256, name="conv4")(patches(pad(x))))
        return Conv(10, name="conv5")(patches(pad(x)).mean((0, 1)))


def init(key: jax.Array) -> optax.Params:
    """Random parameters."""
    return CNN5().init(key, jnp.zeros((32, 32, 3)))["params"]


def logits(params: Any, image: jax.Array) -> jax.Array:
    """Of one image of bytes."""
    pixels = image.astype(jnp.float32) / 255
    mean, stddev = (jnp.array(x).reshape(1, 1, 3) for x in (MEAN, STDDEV))
    found: Any = CNN5().apply({"params": params}, (pixels - mean) / stddev)
    return found


def augment(image: jax.Array, key: jax.Array) -> jax.Array:
    """A crop of the image in a black border of four, flipped in half of the cases."""
    crop_key, flip_key = jax.random.split(key)
    bordered = jnp.pad(image, ((4, 4), (4, 4), (0, 0)))
    row, column = jax.random.randint(crop_key, (2,), 0, 9)
    crop = jax.lax.dynamic_slice(bordered, (row, column, 0), image.shape)
    return jnp.where(jax.random.bernoulli(flip_key), crop[:, ::-1], crop)


def loss_fn(
    params: Any, image: jax.Array, label: jax.Array, key: jax.Array
) -> jax.Array:
    """Cross-entropy of one view of one image."""
    return optax.softmax_cross_entropy_with_integer_labels(
        logits(params, augment(image, key)), label
    )


@jax.jit
def accuracy(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """The share of images that the network labels correctly, all of them counted."""
    is_correct = lambda example: jnp.argmax(logits(params, example[0])) == example[1]
    found = jax.lax.map(is_correct, (images, labels), batch_size=8 * MICROBATCH_SIZE)
    return jnp.mean(found)

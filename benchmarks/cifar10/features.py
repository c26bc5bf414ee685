"""What EfficientNet-Lite0 sees in each image and in its mirror image.

The network has seen ImageNet alone, so nothing here depends on one image but its own
row: private training begins after it.
"""

import functools
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.progress

from benchmarks.cifar10 import data, efficientnet
from benchmarks.cifar10.efficientnet import WIDTHS

SIZE = 224  # what the network was trained with
_CHUNK = 1_000


class View(NamedTuple):
    """A row for each image."""

    pooled: np.ndarray  # shape=(num_images, sum(WIDTHS)), float16
    last_block: np.ndarray  # shape=(num_images, positions, 320), float16


@functools.partial(jax.jit, static_argnames="size")
def see(tensors: Any, images: jax.Array, size: int) -> jax.Array:
    """The pooled features, and every second position of the last block's output.

    One image after the other: what a layer makes of one fits in the cache of a CPU,
    and the layers of many images at once do not. shape=(num_images, numbers), float16.
    """

    def one(image):
        seen = efficientnet.see(tensors, efficientnet.preprocess(image, size))
        parts = seen.pooled, seen.last_block[::2, ::2].ravel()
        return jnp.concatenate(parts).astype(jnp.float16)

    return jax.lax.map(one, images)


def extract(
    images: np.ndarray, cache_dir: pathlib.Path, *, is_mirrored: bool, size: int = SIZE
) -> View:
    """The rows of all images, from the file of an earlier call if there is one."""
    name = f"efficientnet_{size}{'_mirrored' if is_mirrored else ''}"

    def make():
        tensors = efficientnet.load()
        parts = rich.progress.track(range(0, len(images), _CHUNK), name)
        chunks = (images[i : i + _CHUNK] for i in parts)
        turned = (x[:, :, ::-1] if is_mirrored else x for x in chunks)
        return np.concatenate([see(tensors, x, size) for x in turned])

    found = data.cached(cache_dir, name, images, make)
    pooled, rest = np.split(found, [sum(WIDTHS)], axis=1)
    return View(pooled, rest.reshape(len(images), -1, 320))


def scale(pooled: jax.Array) -> jax.Array:
    """What a linear probe takes of the pooled features of some depths.

    x = (x_1 / |x_1|, x_2 / |x_2|, x_3 / |x_3|) / sqrt(3),

    where x_g are those of one depth, less their mean over the channels. So the norm of
    x is 1, and no statistic of the private images is needed.
    """
    groups = jnp.split(pooled, np.cumsum(WIDTHS)[:-1], axis=-1)
    centered = [group - jnp.mean(group, -1, keepdims=True) for group in groups]
    # A constant group is zero, and has a gradient.
    square = lambda x: jnp.sum(x * x, -1, keepdims=True)
    units = [x * jax.lax.rsqrt(square(x) + 1e-12) for x in centered]
    return jnp.concatenate(units, -1) / np.sqrt(len(groups))


def prepare(views: list[View]) -> jax.Array:
    """The features of all images, each averaged over its views."""
    mean = sum(np.asarray(view.pooled, np.float32) for view in views) / len(views)
    return jax.jit(scale)(mean)

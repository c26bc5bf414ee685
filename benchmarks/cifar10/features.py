"""What EfficientNet-Lite0 sees in each image, computed once and kept in files.

    DIR/SIZE/{plain,mirrored}/pooled.npy     means over positions, at three depths
    DIR/SIZE/{plain,mirrored}/body.npy       the input of the last block
    DIR/SIZE/{plain,mirrored}/done.json      how many images are in, and of what

All are float16, of the training images and then the test images. A call that was cut
off goes on where it ended. The network has seen ImageNet alone, so nothing here depends
on one image but its own rows: private training begins after it.
"""

import functools
import hashlib
import json
import pathlib
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import rich.progress

from benchmarks.cifar10 import efficientnet
from benchmarks.probe import linear

SIZE = 224  # what the network was trained with
VIEWS = ("plain", "mirrored")

# The last blocks of 112, 192 and 1280 channels.
DEPTHS = (10, 14)
WIDTHS = (112, 192, efficientnet.HEAD_WIDTH)


class View(NamedTuple):
    """The rows of all images, the training images first."""

    pooled: np.ndarray  # shape=(num_images, sum(WIDTHS)), float16
    body: np.ndarray  # shape=(num_images, size / 32, size / 32, 192), float16


def _see(model: efficientnet.EfficientNetLite0, images: jax.Array) -> tuple[Any, Any]:
    """The pooled features of some depths, and the input of the last block."""
    x = nn.relu6(model.stem_norm(model.stem(images)))
    pooled = []
    for i, block in enumerate(model.blocks[:-1]):
        x = block(x)
        if i in DEPTHS:
            pooled.append(jnp.mean(x, (-3, -2)))
    pooled.append(model.tail(x))
    return jnp.concatenate(pooled, -1), x


@functools.partial(jax.jit, static_argnames=("size", "is_mirrored"))
def see(
    variables: Any, images: jax.Array, size: int, is_mirrored: bool
) -> tuple[jax.Array, jax.Array]:
    """The rows of `View` of images of bytes, shape (batch, 32, 32, 3).

    One image after the other: what a layer makes of one fits in the cache of a CPU,
    and the layers of many images at once do not.
    """
    images = images[:, :, ::-1] if is_mirrored else images

    def see_one(image):
        enlarged = efficientnet.preprocess(image[None], size)
        model = efficientnet.EfficientNetLite0()
        pooled, body = cast(Any, model.apply(variables, enlarged, method=_see))
        return pooled[0].astype(jnp.float16), body[0].astype(jnp.float16)

    return jax.lax.map(see_one, images)


def _shapes(size: int) -> dict[str, tuple[int, ...]]:
    """Of one image."""
    return {"pooled": (sum(WIDTHS),), "body": (size // 32, size // 32, 192)}


def read(cache_dir: pathlib.Path, view: str, size: int = SIZE) -> View:
    """The rows, which stay on the disk until they are used.

    Raises:
      FileNotFoundError: if they were not computed.
    """
    folder = cache_dir / str(size) / view
    return View(
        *(np.load(folder / f"{name}.npy", mmap_mode="r") for name in View._fields)
    )


class _Files:
    """The files of one view, and how many of their rows are there."""

    def __init__(self, folder: pathlib.Path, images: np.ndarray, size: int):
        self._identity = {
            "images": hashlib.sha256(images.tobytes()).hexdigest(),
            "weights": efficientnet.PACKAGE.sha256,
        }
        self._state = folder / "done.json"
        self.done = self._read_state(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.view = View(
            *(
                np.lib.format.open_memmap(
                    folder / f"{name}.npy",
                    "r+" if self.done else "w+",
                    np.float16,
                    (len(images), *shape),
                )
                for name, shape in _shapes(size).items()
            )
        )

    def _read_state(self, folder: pathlib.Path) -> int:
        if not self._state.exists():
            return 0
        state = json.loads(self._state.read_text())
        done = state.pop("done")
        if state != self._identity:
            raise ValueError(
                f"Expected the features of these images in {folder}, got those of"
                " others. Give another folder."
            )
        return done

    def append(self, rows: View) -> None:
        """Writes the rows, and then that they are there."""
        end = self.done + len(rows.pooled)
        for file, values in zip(self.view, rows, strict=True):
            file[self.done : end] = values
            cast(np.memmap, file).flush()
        self.done = end
        draft = self._state.with_suffix(".draft")
        draft.write_text(json.dumps(self._identity | {"done": end}))
        draft.replace(self._state)


def extract(
    images: np.ndarray,
    cache_dir: pathlib.Path,
    view: str,
    *,
    size: int = SIZE,
    batch_size: int = 40,
    chunk_size: int = 1_000,
) -> View:
    """Computes the rows that are not there yet.

    Args:
      images: all of them, shape (num_images, 32, 32, 3), uint8.
      cache_dir: where the files are.
      view: "plain" or "mirrored".
      size: of the enlarged images, a multiple of 32.
      batch_size: how many images the network sees at once.
      chunk_size: how many are written at once.

    Raises:
      ValueError: if the files in the folder are of other images.
    """
    files = _Files(cache_dir / str(size) / view, images, size)
    if files.done == len(images):
        return files.view
    variables = jax.tree.map(jnp.asarray, efficientnet.load())

    def rows(chunk):
        seen = []
        for i in range(0, len(chunk), batch_size):
            batch = chunk[i : i + batch_size]
            filled = np.resize(batch, (batch_size, *batch.shape[1:]))
            out = see(variables, filled, size, view == "mirrored")
            seen.append(View(*(np.asarray(x)[: len(batch)] for x in out)))
        return View(*(np.concatenate(x) for x in zip(*seen, strict=True)))

    with rich.progress.Progress() as progress:
        bar = progress.add_task(f"{view}, {size} pixels", total=len(images))
        while files.done < len(images):
            progress.update(bar, completed=files.done)
            files.append(rows(images[files.done : files.done + chunk_size]))
        progress.update(bar, completed=files.done)
    return files.view


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


def prepare(views: list[View], labels: np.ndarray) -> linear.Data:
    """All images, each averaged over its views."""
    mean = sum(np.asarray(view.pooled, np.float32) for view in views) / len(views)
    return linear.Data(jax.jit(scale)(mean), jnp.asarray(labels))

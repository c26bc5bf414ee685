"""CIFAR-10, as published in binary or as lossless mosaics of 10 by 10 images.

DIR/cifar-10-binary.tar.gz    by `python -m benchmarks.cifar10.download DIR`
DIR/cifar10_webp.zip          000.webp ... and labels_uint8.bin
"""

import hashlib
import io
import pathlib
import tarfile
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import PIL.Image

from benchmarks.experiment import Data, Sides

ARCHIVE = "cifar-10-binary.tar.gz"
NUM_TRAIN, NUM_TEST = 50_000, 10_000
NUM_CLASSES = 10

# Of all records of the binary format, one byte of label and 3,072 of pixels, in order.
SHA256 = "013ba16d14ecc4829da62bf2af648ca30f600491ecb3e7f329c827db0dd17522"

_MOSAICS = "cifar10_webp.zip"
_RECORDS = tuple(f"data_batch_{i}.bin" for i in range(1, 6)) + ("test_batch.bin",)
_RECORD_SIZE = 1 + 3 * 32 * 32


class Images(NamedTuple):
    """Labeled images."""

    images: np.ndarray  # shape=(num_examples, 32, 32, 3), uint8
    labels: np.ndarray  # shape=(num_examples,), int32

    @property
    def num_examples(self) -> int:
        return len(self.labels)

    def take(self, indices: np.ndarray | slice) -> "Images":
        return Images(self.images[indices], self.labels[indices])


class Cifar(NamedTuple):
    train: Images
    test: Images
    is_published: bool  # whether these are the published records


def _decoded(mosaic: bytes) -> np.ndarray:
    """The hundred images of a mosaic, row by row."""
    with PIL.Image.open(io.BytesIO(mosaic)) as image:
        pixels = np.asarray(image.convert("RGB"))
    tiles = pixels.reshape(10, 32, 10, 32, 3).swapaxes(1, 2)
    return tiles.reshape(100, 32, 32, 3)


def _from_mosaics(path: pathlib.Path) -> Images:
    with zipfile.ZipFile(path) as files:
        names = sorted(name for name in files.namelist() if name.endswith(".webp"))
        images = np.concatenate([_decoded(files.read(name)) for name in names])
        labels = np.frombuffer(files.read("labels_uint8.bin"), np.uint8)
    return Images(images, labels.astype(np.int32))


def _from_archive(path: pathlib.Path) -> Images:
    with tarfile.open(path) as archive:
        members = {pathlib.PurePosixPath(x.name).name: x for x in archive if x.isfile()}
        files = (archive.extractfile(members[name]) for name in _RECORDS)
        content = b"".join(file.read() for file in files if file)
    records = np.frombuffer(content, np.uint8).reshape(-1, _RECORD_SIZE)
    pixels = records[:, 1:].reshape(-1, 3, 32, 32)  # a plane for each color
    images = np.ascontiguousarray(pixels.transpose(0, 2, 3, 1))
    return Images(images, records[:, 0].astype(np.int32))


def sha256(examples: Images) -> str:
    """Of the records that the binary format has for these images."""
    planes = examples.images.transpose(0, 3, 1, 2).reshape(len(examples.labels), -1)
    labels = examples.labels.astype(np.uint8)[:, None]
    return hashlib.sha256(
        np.concatenate([labels, planes], axis=1).tobytes()
    ).hexdigest()


def _all_records(data_dir: pathlib.Path) -> Images:
    for name, read in ((ARCHIVE, _from_archive), (_MOSAICS, _from_mosaics)):
        if (data_dir / name).exists():
            return read(data_dir / name)
    raise FileNotFoundError(
        f"Expected {ARCHIVE} or {_MOSAICS} in {data_dir}, got neither. Fetch it by"
        f" `python -m benchmarks.cifar10.download {data_dir}`."
    )


def load(data_dir: pathlib.Path) -> Cifar:
    """Reads the training images, then the test images, in the published order.

    Raises:
      FileNotFoundError: if there is none of the formats in the folder.
    """
    every = _all_records(data_dir)
    num_test = every.num_examples * NUM_TEST // (NUM_TRAIN + NUM_TEST)
    train, test = every.take(slice(-num_test)), every.take(slice(-num_test, None))
    return Cifar(train, test, sha256(every) == SHA256)


def cached(
    cache_dir: pathlib.Path, name: str, images: np.ndarray, make: Callable[[], Any]
) -> np.ndarray:
    """What is made of these images, in a file that a later call finds."""
    digest = hashlib.sha256(images.tobytes()).hexdigest()
    file = cache_dir / f"{name}_{digest[:16]}.npy"
    if not file.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(".draft.npy")
        np.save(draft, make())
        draft.replace(file)
    return np.load(file, mmap_mode="r")


def sides(data_dir: pathlib.Path, features_of: Callable[[np.ndarray], Any]) -> Sides:
    """The features of all images, with those to validate on."""
    cifar = load(data_dir)
    train, test = (
        Data(jnp.asarray(features_of(x.images)), jnp.asarray(x.labels))
        for x in (cifar.train, cifar.test)
    )
    parts = map(train.take, split_validation(train.num_examples))
    return Sides(train, test, *parts)


def split_validation(num_examples: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of nine tenths of the training images, and of those to validate on.

    The same for every choice, so that no image is on both sides in the course of them.
    """
    order = np.random.default_rng(seed).permutation(num_examples)
    fit, validation = np.split(order, [num_examples * 9 // 10])
    return np.sort(fit), np.sort(validation)

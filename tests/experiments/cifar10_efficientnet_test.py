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

from benchmarks.cifar10 import efficientnet, efficientnet_reference

REFERENCE = json.loads(efficientnet_reference.OUTPUT.read_text())["cases"]


@pytest.fixture(scope="module")
def variables():
    try:
        return efficientnet.load()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("case", REFERENCE, ids=lambda case: f"{case['size']} pixels")
def test_logits_are_those_of_pytorch(variables, case):
    images = efficientnet_reference.images(case["size"])
    model = efficientnet.EfficientNetLite0()
    body = model.apply(variables, images, method="body")
    features = model.apply(variables, body, method="tail")
    logits = model.apply(variables, images)
    assert logits.argmax(-1).tolist() == case["label"]
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-4)
    close(logits[:, efficientnet_reference.CLASSES], case["logits"])
    close(features[:, efficientnet_reference.CHANNELS], case["features"])


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

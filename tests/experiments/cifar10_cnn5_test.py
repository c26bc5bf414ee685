"""CNN5 on CIFAR-10: its fast form, its protocols, on images that are made here."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from benchmarks.cifar10 import cnn5


class SlowTwin(nn.Module):
    """The network as the papers write it: convolution, bias, tanh, max-pool."""

    @nn.compact
    def __call__(self, image):
        x = image[None]
        for i, features in enumerate((32, 64, 128), 1):
            padding = "VALID" if i == 1 else "SAME"
            x = nn.Conv(features, (3, 3), padding=padding, name=f"conv{i}")(x)
            x = nn.max_pool(nn.tanh(x), (2, 2), strides=(2, 2))
        x = nn.tanh(nn.Conv(256, (3, 3), name="conv4")(x))
        x = nn.Conv(10, (3, 3), name="conv5")(x)
        return nn.avg_pool(x, (3, 3)).reshape(10)


def _cross_entropy(model):
    def loss_fn(params, image, label):
        return optax.softmax_cross_entropy_with_integer_labels(
            model.apply({"params": params}, image), label
        )

    return loss_fn


@pytest.fixture(scope="module")
def params():
    """Random, biases too."""
    found = cnn5.init(jax.random.key(0))
    noise = optax.tree.random_like(jax.random.key(1), found)
    return optax.tree.add_scale(found, 0.05, noise)


@pytest.fixture(scope="module")
def batch():
    images = jax.random.normal(jax.random.key(2), (4, 32, 32, 3))
    return images, jnp.arange(4)


def test_the_network_is_that_of_the_papers(params):
    assert optax.tree.size(params) == cnn5.NUM_PARAMETERS
    slow = SlowTwin().init(jax.random.key(0), jnp.zeros((32, 32, 3)))["params"]
    chex.assert_trees_all_equal_shapes(params, slow)


def test_the_fast_form_is_the_slow_twin(params, batch):
    images, labels = batch
    fast, slow = (
        jax.vmap(jax.value_and_grad(_cross_entropy(model)), (None, 0, 0))(
            params, images, labels
        )
        for model in (cnn5.CNN5(), SlowTwin())
    )
    chex.assert_trees_all_close(fast, slow, rtol=1e-4, atol=1e-5)

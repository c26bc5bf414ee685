"""Features of CIFAR-10 that are fixed."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.cifar10 import dead_leaves, scattered, scattering


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return dead_leaves.dead_leaves(np.random.default_rng(0), 4)


@pytest.fixture(scope="module")
def coefficients(images) -> jax.Array:
    return scattering.of_images(jnp.asarray(images))


def slow_scattering(plane: np.ndarray) -> np.ndarray:
    """By sums over pixels of one plane at one place, in float64, no Fourier transform.

    Of the paths 0, 3 (fine, angle 2), 12 (coarse, angle 3) and the pair of both.
    """
    padded = np.pad(plane.astype(np.float64), 4, mode="reflect")
    size = len(padded)

    def filtered(x, scale, angle):
        wavelet = scattering.morlet(size, scale, math.pi * angle / 8)
        rolled = [
            [np.roll(wavelet, (i, j), (0, 1)) for j in range(size)] for i in range(size)
        ]
        return np.abs(np.einsum("ij,ijyx->yx", x, np.array(rolled)))

    def mean(x, row, column):
        center = lambda g: 4 + 1.5 + 4 * g
        weight = lambda g: np.exp(-((np.arange(size) - center(g)) ** 2) / (2 * 1.6**2))
        weights = np.outer(weight(row), weight(column))
        return (x * weights).sum() / weights.sum()

    fine, coarse = filtered(padded, 0, 2), filtered(padded, 1, 3)
    layers = [padded, fine, coarse, filtered(fine, 1, 3)]
    return np.array([[mean(x, *at) for at in ((0, 7), (5, 2))] for x in layers])


def test_scattering_is_what_sums_over_pixels_give(images, coefficients):
    opponent = scattering.OPPONENT[1]
    expected = slow_scattering(images[0] @ opponent)
    found = coefficients[0, 1][jnp.array([0, 3, 12, 17 + 8 * 2 + 3])]
    found = np.stack([found[:, 0, 7], found[:, 5, 2]], axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_no_wavelet_sees_a_constant():
    flat = scattering.of_images(jnp.full((1, 32, 32, 3), 0.7))
    np.testing.assert_allclose(flat[:, :, 1:], 0, atol=1e-6)
    np.testing.assert_allclose(flat[:, 0, 0], 0.7 * math.sqrt(3), rtol=1e-6)


def test_the_coefficients_of_the_mirror_image_are_the_same_in_another_order(
    images, coefficients
):
    mirrored = scattering.of_images(jnp.asarray(images[:, :, ::-1]))
    np.testing.assert_allclose(
        scattering.mirrored(coefficients), mirrored, rtol=1e-4, atol=1e-6
    )
    assert sorted(scattering.mirror_order()) == list(range(scattering.NUM_PATHS))
    assert np.abs(np.asarray(coefficients - mirrored)).max() > 0.01


def test_discs_cover_the_image_and_vary_most_in_brightness():
    images = dead_leaves.dead_leaves(np.random.default_rng(0), 50)
    assert images.shape == (50, 32, 32, 3) and images.dtype == np.float32
    assert images.min() >= 0 and images.max() <= 1
    spread = (images @ scattering.OPPONENT.T).std((0, 1, 2))
    assert spread[0] > 2 * spread[1] > 2 * spread[2]
    again = dead_leaves.dead_leaves(np.random.default_rng(0), 50)
    np.testing.assert_array_equal(images, again)


@pytest.fixture(scope="module")
def small():
    """Features that take seconds."""
    numbers = {
        "_NUM_IMAGES": 60,
        "_NUM_FOR_PATCHES": 40,
        "_NUM_FILTERS": 24,
        "_CHUNK": 20,
        "NUM_COMPONENTS": 8,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, number in numbers.items():
            patch.setattr(scattered, name, number)
        tuned = scattered.made_up.__wrapped__()
        patch.setattr(scattered, "made_up", lambda: tuned)
        yield


def test_features_are_public_and_of_each_image_alone(tmp_path, small):
    rng = np.random.default_rng(1)
    images = rng.integers(256, size=(40, 32, 32, 3), dtype=np.uint8)
    found = scattered.extract(images, tmp_path)
    assert found.shape == (40, 8) and found.dtype == np.float16
    np.testing.assert_allclose(
        np.linalg.norm(found.astype(np.float64), axis=1), 1, rtol=1e-3
    )
    # A neighbor: another image in the place of one changes no other row.
    other = images.copy()
    other[3] = images[7]
    neighbor = scattered.extract(other, tmp_path)
    np.testing.assert_array_equal(np.delete(neighbor, 3, 0), np.delete(found, 3, 0))
    assert np.abs(neighbor[3] - found[3]).max() > 1e-3
    # A mirror image has the same features.
    mirrored = scattered.extract(images[:, :, ::-1], tmp_path)
    np.testing.assert_allclose(mirrored, found, atol=5e-3)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_second_call_reads_the_features(tmp_path, small, monkeypatch):
    images = np.zeros((20, 32, 32, 3), np.uint8)
    first = scattered.extract(images, tmp_path)
    monkeypatch.setattr(scattered, "made_up", lambda: pytest.fail("computed again"))
    np.testing.assert_array_equal(scattered.extract(images, tmp_path), first)

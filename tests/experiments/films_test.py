"""The attack on films: it tells what it must, and nothing of noise without holes."""

import importlib.util

import jax
import numpy as np
import pytest

from benchmarks.audit import films

NUM_FILMS, NUM_USED = 400, 100


@pytest.fixture(scope="module")
def batch():
    """Gradients in which some films have no part, and the films that have one."""
    rng = np.random.default_rng(0)
    is_used = rng.permutation(NUM_FILMS) < NUM_USED
    shape = films.BATCH, NUM_FILMS, films.WIDTH
    own = rng.random(shape[:2]) < 0.1
    own[0] = True
    gradients = rng.standard_normal(shape, np.float32) * 0.01
    return gradients * (own & is_used)[..., None], is_used


def of_noise(noise):
    """A contender that adds noise to the mean."""
    release = lambda gradients, seed: np.float32(
        gradients.mean(axis=0) + noise(gradients.shape[1:], seed)
    )
    return films.Contender(release, films.is_noise_of_jax)


def test_values_tell_the_unused_films_and_mistake_no_other(batch):
    def noise(shape, seed):
        return np.float32(films.STDDEV) * jax.random.normal(jax.random.key(seed), shape)

    found = films.attack(of_noise(noise), *batch, num_draws=4)
    assert found["unused"] == NUM_FILMS - NUM_USED and found["used"] == NUM_USED
    assert found["told"]["values"] == {"unused": NUM_FILMS - NUM_USED, "used": 0}


def test_low_bits_tell_noise_that_is_coarser_than_sums(batch):
    def noise(shape, seed):
        exact = films.STDDEV * np.random.default_rng(seed).standard_normal(shape)
        return np.round(exact * 2.0**20) / 2.0**20

    found = films.attack(of_noise(noise), *batch, num_draws=16)
    told = found["told"]
    assert found["area"] == 1
    assert told["low bits"] == {"unused": NUM_FILMS - NUM_USED, "used": 0}
    assert told["values"] == {"unused": 0, "used": 0}


def test_nothing_is_told_of_noise_on_a_public_grid(batch):
    contender = films.Contender(films.on_grid, films.is_noise_of_jax)
    found = films.attack(contender, *batch, num_draws=16)
    told = found["told"]
    assert told["values"] == {"unused": 0, "used": 0}
    assert abs(found["area"] - 0.5) < 0.15  # 4.5 standard errors
    assert sum(told["low bits"].values()) <= 4  # at most one in a thousand, by chance
    # The noise has its level, and the grid is there.
    released = contender.release(np.zeros((1, 2_000, 16), np.float32), 0)
    assert np.std(released) == pytest.approx(films.STDDEV, rel=0.02)
    steps = released / 2.0 ** np.floor(np.log2(films.STDDEV / 256))
    np.testing.assert_array_equal(steps, np.round(steps))


@pytest.mark.skipif(not importlib.util.find_spec("opacus"), reason="needs Opacus")
def test_pytorch_makes_the_pairs_that_it_is_asked_for():
    from benchmarks.audit import films_opacus

    rng = np.random.default_rng(0)
    words = rng.integers(2**24, size=films_opacus.WORDS)
    u, v = (words / 2.0**24).reshape(-1, 2, 8).transpose(1, 0, 2)
    radius, angle = np.sqrt(-2 * np.log1p(-u)), 2 * np.pi * v
    expected = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    made = films_opacus.normals(words) / films_opacus.STDDEV
    np.testing.assert_allclose(made, expected.ravel(), atol=2e-6)
    # Noise alone is made of pairs, and numbers beside it are not.
    noise = films_opacus.release(np.zeros((1, 100, 16), np.float32), 0)
    assert films_opacus.is_possible(noise).all()
    beside = np.nextafter(noise, np.float32(1))
    assert films_opacus.is_possible(beside).mean() < 0.5

"""The numbers are those of the generator that JAX has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpadambc._core import threefry


# Salmon et al. publish these with their code: counter, key, and what comes out.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((2**32 - 1,) * 2, (2**32 - 1,) * 2, (0x1CB996FC, 0xBB002BE7)),
        (
            (0x243F6A88, 0x85A308D3),
            (0x13198A2E, 0x03707344),
            (0xC4923A9C, 0x483DF7A0),
        ),
    ],
)
def test_threefry_gives_the_published_words(counter, key, expected):
    words = threefry.words(jnp.uint32(key), *jnp.uint32(counter))
    assert tuple(map(int, words)) == expected


def assert_draws_are_those_of_jax(shape):
    """One step of the generator is more than one unit in the last place of a draw."""
    key, dtype = jax.random.key(7), np.dtype("float32")
    draw = np.asarray(threefry.normal(key, shape, dtype))
    expected = np.asarray(jax.random.normal(key, shape, dtype))
    assert draw.shape == shape and draw.dtype == dtype
    np.testing.assert_array_max_ulp(draw, expected, maxulp=1)
    # Negative control.
    assert (draw != np.asarray(jax.random.normal(jax.random.key(8), shape))).all()


@pytest.mark.parametrize(
    "shape",
    [(), (0,), (3, 0, 2), (1,), (7,), (5, 3), (2, 3, 5, 7), (1000, 1001)],
    ids=str,
)
def test_draws_are_those_of_jax_random_normal(shape):
    """The slow twin."""
    assert_draws_are_those_of_jax(shape)


def test_single_precision_draws_are_those_of_jax_under_x64(x64):
    assert_draws_are_those_of_jax((5, 3))


@pytest.mark.parametrize(("size", "written_out"), [(2**32 - 1, True), (2**32, False)])
def test_a_leaf_too_long_for_the_counter_is_left_to_jax(size, written_out):
    """A counter of one word would give the first draws again."""
    draw = lambda key: threefry.normal(key, (size,), np.dtype("float32"))
    traced = str(jax.make_jaxpr(draw)(jax.random.key(0)))
    assert ("platform_index" in traced) == written_out


def test_a_draw_is_one_of_some_eight_million_numbers(monkeypatch):
    """All of them, by their bits: what `add_dp_noise` says that it protects with."""
    every = jnp.arange(2**23, dtype=jnp.uint32) << 9
    monkeypatch.setattr(threefry, "words", lambda *_: (every, jnp.uint32(0)))
    draws = np.asarray(threefry._normal(jax.random.key(0), every.shape))
    assert -5.42 < draws.min() < -5.41 and 5.22 < draws.max() < 5.23
    assert 0.99 * 2**23 < len(np.unique(draws)) <= 2**23

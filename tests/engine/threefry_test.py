"""The numbers are those of the generator that JAX has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpadambc.engine import threefry


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


FLOAT32 = np.dtype("float32")
SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (256,), (257,), (5, 3), (2, 3, 5, 7)]


def likes_of(shapes):
    return [jax.ShapeDtypeStruct(shape, FLOAT32) for shape in shapes]


def assert_draws_are_those_of_jax(shapes, impl="threefry2x32", maxulp=1):
    """One step of the generator is more than one unit in the last place of a draw."""
    keys = jax.random.split(jax.random.key(7, impl=impl), len(shapes))
    draws = jax.jit(lambda keys: threefry.normals(keys, likes_of(shapes)))(keys)
    others = jax.random.split(jax.random.key(8, impl=impl), len(shapes))
    for key, other, shape, draw in zip(keys, others, shapes, draws, strict=True):
        expected = np.asarray(jax.random.normal(key, shape, FLOAT32))
        assert draw.shape == shape and draw.dtype == FLOAT32
        np.testing.assert_array_max_ulp(np.asarray(draw), expected, maxulp=maxulp)
        # Negative control.
        assert (draw != jax.random.normal(other, shape)).all()


@pytest.mark.parametrize("shape", [*SHAPES, (1000, 1001)], ids=str)
def test_draws_are_those_of_jax_random_normal(shape):
    """The slow twin."""
    assert_draws_are_those_of_jax([shape])


def test_draws_together_are_those_of_each_key_alone():
    assert_draws_are_those_of_jax([*SHAPES, (300, 301), (256,), (7,)])


@pytest.mark.parametrize("most", [0, 300, 600])
def test_draws_do_not_depend_on_which_are_drawn_together(monkeypatch, most):
    monkeypatch.setattr(threefry, "_TOGETHER", most)
    assert_draws_are_those_of_jax(SHAPES)


def test_a_group_is_no_larger_than_the_largest_array_or_an_eighth_of_all(monkeypatch):
    monkeypatch.setattr(threefry, "_TOGETHER", 10)
    assert threefry._groups([4, 4, 4, 30, 1, 2]) == [[0, 1, 2], [3], [4, 5]]
    assert threefry._groups([1] * 160) == [
        list(range(i, i + 20)) for i in range(0, 160, 20)
    ]
    assert threefry._groups([30, 1]) == [[0], [1]]


def test_single_precision_draws_are_those_of_jax_under_x64(x64):
    assert_draws_are_those_of_jax([(5, 3), (2,)])


def test_arrays_that_are_split_have_the_same_numbers():
    keys = jax.random.split(jax.random.key(7), len(SHAPES))
    draw = lambda: jax.make_jaxpr(lambda keys: threefry.normals(keys, likes_of(SHAPES)))
    with jax.set_mesh(jax.make_mesh((8,), ("devices",))):
        assert_draws_are_those_of_jax(SHAPES)
        split = str(draw()(keys))
    assert "searchsorted" not in split
    assert "searchsorted" in str(draw()(keys))


def test_a_program_does_not_grow_with_what_it_draws():
    def num_characters(size):
        draw = lambda keys: threefry.normals(keys, likes_of([(size,), (size,)]))
        keys = jax.random.split(jax.random.key(0), 2)
        return len(jax.jit(draw).lower(keys).as_text())

    assert num_characters(10**6) < 1.2 * num_characters(10**3)


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_draws_of_other_kinds_of_keys_are_left_to_jax(impl):
    """Under `jax.vmap` these would be other numbers."""
    assert_draws_are_those_of_jax([(5, 3), (2,), (5, 3)], impl, maxulp=0)


def test_double_precision_is_left_to_jax(x64):
    keys = jax.random.split(jax.random.key(7), 3)
    likes = [jax.ShapeDtypeStruct((4,), dtype) for dtype in ("f8", "f4", "f8")]
    draws = threefry.normals(keys, likes)
    assert [draw.dtype for draw in draws] == [like.dtype for like in likes]
    for i in (0, 2):
        np.testing.assert_array_equal(draws[i], jax.random.normal(keys[i], 4, "f8"))


@pytest.mark.parametrize(("size", "written_out"), [(2**32 - 1, True), (2**32, False)])
def test_an_array_too_long_for_the_counter_is_left_to_jax(size, written_out):
    """A counter of one word would give the first draws again."""
    draw = lambda keys: threefry.normals(keys, likes_of([(size,)]))
    traced = str(jax.make_jaxpr(draw)(jax.random.split(jax.random.key(0), 1)))
    assert ("cond[" in traced.split("branches")[1]) == written_out


def test_a_draw_is_one_of_some_eight_million_numbers(monkeypatch):
    """All of them, by their bits: what `add_dp_noise` says that it protects with."""
    every = jnp.arange(2**23, dtype=jnp.uint32) << 9
    monkeypatch.setattr(threefry, "words", lambda *_: (every, jnp.uint32(0)))
    draws = np.asarray(
        threefry._alone(jax.random.key_data(jax.random.key(0)), every.shape)
    )
    assert -5.42 < draws.min() < -5.41 and 5.22 < draws.max() < 5.23
    assert 0.99 * 2**23 < len(np.unique(draws)) <= 2**23

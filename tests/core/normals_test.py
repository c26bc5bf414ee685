"""The normal numbers are exact to 1e-14, have all their bits, and are independent."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
import scipy.special
import scipy.stats

from dpadambc.core import chacha, normals, threefry

pytestmark = pytest.mark.guarantee

KINDS = ["threefry2x32", "rbg", chacha.KIND]


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
    high, low = counter
    words = threefry.block(jnp.uint32(key), high, jnp.uint32(low))
    assert tuple(map(int, words)) == expected


def quantile_of(t):
    with jax.enable_x64(True):
        return np.asarray(jax.jit(normals.quantile)(jnp.asarray(t)))


def places(size):
    """Numbers in (0, 1/2]: of all sizes, and about each place where formulas change."""
    rng = np.random.default_rng(0)
    near = lambda t: t * (1 + np.linspace(-1e-3, 1e-3, size // 8))
    return np.concatenate(
        [
            rng.uniform(0, 0.5, size),
            2.0 ** -rng.uniform(1, 95, size),  # to eleven standard deviations
            near(0.075),
            near(np.exp(-25)),
            0.5 - 2.0 ** -rng.uniform(2, 53, size // 8),
            [0.5],
        ]
    )


def test_the_quantile_is_that_of_scipy():
    t = places(100_000)
    error = np.abs(quantile_of(t) - scipy.special.ndtri(t))
    assert error.max() < 1e-14
    # Negative control: in float32.
    low = np.asarray(normals.quantile(jnp.asarray(t, jnp.float32)), float)
    assert np.abs(low - scipy.special.ndtri(t)).max() > 1e-9


def test_the_quantile_is_exact_to_what_the_proof_takes_from_it():
    """One step of Newton from it, in forty digits: what is left is its error."""
    t = np.random.default_rng(1).permutation(places(8_000))[:1_500]
    with mpmath.workdps(40):
        for u, z in zip(t.tolist(), quantile_of(t).tolist(), strict=True):
            if abs(z) < 11:
                exceeds = mpmath.ncdf(mpmath.mpf(z)) - mpmath.mpf(u)
                assert abs(exceeds / mpmath.npdf(mpmath.mpf(z))) < 8e-15, u


def words_of(*hexadecimal):
    return [jnp.asarray(np.array([int(w, 16)], np.uint32)) for w in hexadecimal]


def number_of(*hexadecimal):
    with jax.enable_x64(True):
        return float(normals.of_words(words_of(*hexadecimal))[0])


def test_each_of_128_bits_counts():
    """Those behind the first 53 do so where the bits before them are zero."""
    zeros, one = "0", "80000000"
    found = {
        number_of(*words)
        for words in (
            (zeros, zeros, zeros, zeros),
            (zeros, zeros, zeros, one),
            (zeros, zeros, one, zeros),
            (zeros, one, zeros, zeros),
            (one, zeros, zeros, zeros),
            ("1", zeros, zeros, zeros),
        )
    }
    assert len(found) == 6
    least = scipy.special.ndtri(2.0**-129)
    assert min(found) == pytest.approx(least, abs=1e-12) and max(found) == -min(found)
    assert number_of("fffffffe", *["ffffffff"] * 3) == pytest.approx(0, abs=1e-15)
    assert number_of("80000000", zeros, zeros, zeros) == pytest.approx(
        scipy.special.ndtri(0.25), abs=1e-14
    )


def draws(key, tree):
    """In float64, outside of programs that have it."""
    drawn = jax.jit(lambda key: normals.with_normals(lambda z, _: z, key, tree))(key)
    return jax.tree.map(np.asarray, drawn)


def key_of(kind, seed=0):
    return jax.random.key(seed, impl=kind)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_draws_are_gaussian_and_independent(kind):
    tree = {"a": jnp.zeros((300, 200)), "b": jnp.zeros(40_000), "c": jnp.zeros(())}
    one, other = draws(key_of(kind), tree), draws(key_of(kind, 1), tree)
    flat = lambda found: np.concatenate([np.ravel(x) for x in found.values()])
    z = flat(one)
    assert scipy.stats.kstest(z, "norm").pvalue > 1e-3
    assert len(np.unique(z)) == z.size
    for x, y in [(z, flat(other)), (z[:40_000], z[60_000:-1]), (z[1:], z[:-1])]:
        assert abs(np.corrcoef(x, y)[0, 1]) * x.size**0.5 < 4.5
    # Negative control.
    assert scipy.stats.kstest(z * 1.05, "norm").pvalue < 1e-3


def test_parts_of_a_tree_whose_paths_differ_draw_other_numbers():
    """As the parts of `optax.multi_transform`, given one key."""
    one = draws(key_of("threefry2x32"), {"a": jnp.zeros(100)})["a"]
    other = draws(key_of("threefry2x32"), {"b": jnp.zeros(100)})["b"]
    assert not np.isin(one, other).any()


@pytest.mark.parametrize("most", [0, 300, 600])
def test_no_number_is_drawn_twice_however_arrays_are_grouped(monkeypatch, most):
    monkeypatch.setattr(normals, "_TOGETHER", most)
    shapes = [(), (0,), (3, 0, 2), (1,), (7,), (256,), (257,), (5, 3), (2, 3, 5, 7)]
    found = draws(key_of("threefry2x32"), [jnp.zeros(shape) for shape in shapes])
    assert [x.shape for x in found] == shapes
    z = np.concatenate([np.ravel(x) for x in found])
    assert len(np.unique(z)) == z.size


def test_a_group_is_no_larger_than_the_largest_array_or_an_eighth_of_all(monkeypatch):
    monkeypatch.setattr(normals, "_TOGETHER", 10)
    assert normals._groups([4, 4, 4, 30, 1, 2]) == [[0, 1, 2], [3], [4, 5]]
    assert normals._groups([1] * 160) == [
        list(range(i, i + 20)) for i in range(0, 160, 20)
    ]
    assert normals._groups([30, 1]) == [[0], [1]]


def test_a_tree_may_begin_with_an_empty_array():
    empty, *rest = draws(key_of("threefry2x32"), [jnp.zeros(0), jnp.zeros(3)])
    assert empty.shape == (0,) and np.all(rest[0] != 0)
    assert draws(key_of("threefry2x32"), [jnp.zeros(0)])[0].shape == (0,)


@pytest.mark.parametrize(("size", "written_out"), [(2**32 - 1, True), (2**32, False)])
def test_an_array_too_long_for_the_counter_is_drawn_in_parts(size, written_out):
    """A counter of one word would give the first draws again."""
    big = jax.ShapeDtypeStruct((size,), jnp.float32)
    draw = lambda x: normals.with_normals(lambda z, _: z, key_of("threefry2x32"), x)
    traced = str(jax.make_jaxpr(draw)(big))
    assert ("scan" not in traced) == written_out


def test_a_program_does_not_grow_with_what_it_draws():
    def num_characters(size):
        draw = lambda key: normals.with_normals(
            lambda z, _: z, key, [jnp.zeros(size), jnp.zeros(size)]
        )
        return len(jax.jit(draw).lower(key_of("threefry2x32")).as_text())

    assert num_characters(10**6) < 1.2 * num_characters(10**3)

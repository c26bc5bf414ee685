"""What is released lies on a public grid, with the probabilities that are proved."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

import dpadambc
from dpadambc import contrib, training
from dpadambc.core import grid, noise
from tests import common

pytestmark = pytest.mark.guarantee

KEY = jax.random.key(0)
LEVELS = [1e-8, 0.1, 1.0, np.nextafter(1.0, 0.0), 3.7, 1e8]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("share", [0.0, 1e-8, 0.3, 50.0, 1e8])
def test_releases_are_multiples_of_a_power_of_two_between_512th_and_256th(level, share):
    level = float(np.float32(level))
    step = 2.0 ** (math.frexp(level)[1] - 9)
    assert level / 512 < step <= level / 256
    sums = jnp.full(5_000, share * level, jnp.float32)
    found = np.float64(jax.jit(noise.noised)(KEY, sums, jnp.float32(level)))
    units = found / step
    # Float32 has 24 bits: a large sum is rounded further, which tells nothing.
    coarser = np.maximum(1.0, np.spacing(np.float32(np.abs(found))) / step)
    np.testing.assert_array_equal(units / coarser, np.round(units / coarser))
    if share <= 1:
        assert len(np.unique(units)) > 500


def noises(size, level, seed=0):
    """Normal numbers of few bits, as JAX draws them: the negative control."""
    z = jax.random.normal(jax.random.key(seed), (size,))
    return np.float64(level) * np.float64(z)


# Of grids whose levels are 256 and 400 of their steps.
@pytest.mark.parametrize("level", [1.0, 400 / 256])
@pytest.mark.parametrize("summed", [0.0, 0.7123, -300.2])
def test_cells_have_the_probabilities_of_the_normal_law(level, summed):
    size, step = 2_000_000, 1 / 256
    sums = jnp.full(size, summed, jnp.float32)
    found = np.float64(jax.jit(noise.noised)(KEY, sums, jnp.float32(level)))
    exact = float(np.float32(summed))

    def chi_square(released):
        units = np.round(released / step).astype(int)
        center = round(exact / step)
        cells = np.arange(center - 512, center + 513)
        counts = np.histogram(units, [*(cells - 0.5), cells[-1] + 0.5])[0]
        edges = ((cells[0] - 0.5 + np.arange(len(cells) + 1)) * step - exact) / level
        expected = size * np.diff(scipy.stats.norm.cdf(edges))
        inside = expected > 20
        figure = np.sum((counts - expected)[inside] ** 2 / expected[inside])
        return scipy.stats.chi2.sf(figure, inside.sum())

    assert chi_square(found) > 1e-3
    # Negative controls: another level, and a shift by some cells.
    z = np.random.default_rng(0).normal(size=size)
    for other in (exact + 1.02 * level * z, exact + (0.03 + z) * level):
        assert chi_square(np.round(other / step) * step) < 1e-6


def told(release, size=200_000):
    """The share of releases of a sum 0 that are impossible for the sum .001, and back.

    By the values that occur: of few values, nearly all are seen.
    """
    one, other = release(np.zeros(size), 1), release(np.full(size, 1e-3), 2)
    return np.mean(~np.isin(one, other)), np.mean(~np.isin(other, one))


def test_releases_of_two_close_sums_have_the_same_values():
    def ours(sums, seed):
        key, sums = jax.random.key(seed), jnp.asarray(sums, jnp.float32)
        return np.asarray(noise.noised(key, sums, jnp.float32(1)))

    def of_few_bits(sums, seed):
        return np.float32(sums) + np.float32(noises(sums.size, 1, seed))

    assert max(told(ours)) < 0.002
    # Negative control: what is drawn in float32 and added there.
    assert min(told(of_few_bits)) > 0.5


def test_low_bits_do_not_tell_a_sum():
    """Of a sum far below the grid, and one of a half of it."""
    key = jax.random.key(3)
    rows = []
    for summed in (0.0, 2.0**-9):
        sums = jnp.full(400_000, summed, jnp.float32)
        found = np.asarray(jax.jit(noise.noised)(key, sums, jnp.float32(1)), float)
        rows.append(np.bincount(np.round(found * 256).astype(int) & 15, minlength=16))
    assert scipy.stats.chi2_contingency(rows).pvalue > 1e-3


def noised_by(tx, sums):
    return tx.update(common.summed(sums), tx.init(sums), sums)[0]


def after_a_step_of_sgd(sums):
    """Parameters that were zero."""
    tx = optax.chain(dpadambc.add_dp_noise(1.0, key=KEY), optax.sgd(0.5))
    return -2 * optax.apply_updates(jnp.zeros_like(sums), noised_by(tx, sums))


def of_nodes(sums):
    mechanism = dpadambc.graphs.NodePoissonGaussian(
        l2_clip_norm=0.5,
        noise_multiplier=2 / 3,
        max_terms=2,
        sampling_prob=0.1,
        iterations=1,
        normalize_by=1.0,
    )
    assert mechanism.noise_stddev == 1.0  # in whose units the others are
    summed = dpadambc.as_clipped_sum(sums, l2_clip_norm=0.5, normalize_by=1.0)
    tx = mechanism.add_noise(key=KEY)
    return tx.update(summed, tx.init(sums), sums)[0]


RELEASES = {
    "independent": lambda x: noised_by(dpadambc.add_dp_noise(1.0, key=KEY), x),
    "chacha": lambda x: noised_by(
        dpadambc.add_dp_noise(1.0, key=training.secret_key(bits=256)), x
    ),
    "sgd": after_a_step_of_sgd,
    "nodes": of_nodes,
    "correlated": lambda x: noised_by(
        contrib.add_correlated_noise(1.0, (1.0, -0.5), key=KEY), x
    ),
    "banded": lambda x: noised_by(contrib.add_banded_noise(1.0, (1, 0.5), key=KEY), x),
}


@pytest.fixture(scope="module")
def possible():
    """Every float32 normal number that JAX draws."""
    every = jnp.arange(2**23, dtype=jnp.uint32) | np.float32(1).view(np.uint32)
    uniform = 2 * (jax.lax.bitcast_convert_type(every, jnp.float32) - 1)
    least = np.nextafter(np.float32(-1), np.float32(0))
    drawn = jax.jit(jax.lax.erf_inv)(jnp.maximum(uniform + least, least))
    return np.unique(np.sqrt(np.float32(2)) * np.asarray(drawn))


@pytest.mark.parametrize("release", RELEASES.values(), ids=RELEASES)
def test_an_embedding_does_not_tell_its_unused_rows(release, possible):
    """By the number of coordinates of a row that could be noise alone."""
    used = np.zeros((1_000, 1), bool)
    used[:150] = True
    sums = 0.01 * np.random.default_rng(0).normal(size=(1_000, 16)) * used
    sums = jnp.asarray(sums, jnp.float32)

    def shares(found):
        is_possible = np.isin(np.asarray(found, np.float32), possible)
        return is_possible[:150].mean(), is_possible[150:].mean()

    of_used, of_unused = shares(release(sums))
    error = (of_unused * (1 - of_unused) / (150 * 16)) ** 0.5
    assert abs(of_used - of_unused) < 4.5 * error + 1e-9
    # Negative control.
    of_used, of_unused = shares(sums + jax.random.normal(KEY, sums.shape))
    assert of_used < 0.3 and of_unused > 0.9


def test_a_level_of_zero_leaves_the_sum_as_it_is():
    sums = {"a": jnp.asarray([1 / 3, -7.1, 0.0]), "b": jnp.float32(2.5)}
    found = noise.noised(KEY, sums, {"a": jnp.float32(0), "b": jnp.float32(1)})
    np.testing.assert_array_equal(found["a"], sums["a"])
    assert found["b"] != sums["b"]


def test_noise_of_two_levels_is_independent():
    sums = {"a": jnp.zeros(50_000), "b": jnp.zeros(50_000)}
    found = noise.noised(KEY, sums, {"a": jnp.float32(1), "b": jnp.float32(2)})
    assert abs(np.corrcoef(found["a"], found["b"])[0, 1]) * 50_000**0.5 < 4.5
    assert float(found["b"].std()) == pytest.approx(2, rel=0.02)


def test_the_sum_is_added_exactly():
    """In float32 the noise would lose the bits below those of a large sum."""
    sums = jnp.full(1_000, 2.0**20, jnp.float32)
    with jax.enable_x64(True):
        z = jnp.asarray(np.random.default_rng(0).normal(size=1_000))
        wide = grid.add_on_grid(z, sums.astype(jnp.float64), jnp.float64(1.0))
    assert wide.dtype == np.float64
    expected = np.floor(np.asarray(z) * 256 + 0.5) / 256
    np.testing.assert_array_equal(np.asarray(wide) - 2.0**20, expected)


def test_what_bits_cost_follows_from_the_constants_of_the_proof():
    """Recomputed from the width of a cell, the error of its ends and the atoms."""
    error, width, atoms = 2e-14, 2.0**-9, 2.0**-128
    z = np.linspace(0, 11, 10_001)
    density = scipy.stats.norm.pdf(z)
    eta = 1.05 * (2 * error / width + 4 * atoms / (width * density))
    assert eta.max() < 4e-9
    mean_square = 2 * np.trapezoid(eta**2 * density, z)
    assert mean_square < 5e-22
    assert 2 * scipy.stats.norm.sf(11) < 4e-28
    assert np.exp(11 * (2**-8 + 2 * error)) < 1.05
    a, delta_0 = grid.cost_of_bits(1e12)
    assert a < 3e-4 and np.exp(8) * delta_0 < 1e-11
    assert grid.cost_of_bits(0)[0] < 1e-6
    with pytest.raises(ValueError, match="num_numbers"):
        grid.cost_of_bits(-1)


def test_the_variance_is_that_of_the_level():
    """The grid adds at most a 786,432nd part."""
    found = np.float64(noise.noised(KEY, jnp.zeros(4_000_000), jnp.float32(1.0)))
    assert abs(np.mean(found**2) - 1) * (4_000_000 / 2) ** 0.5 < 4

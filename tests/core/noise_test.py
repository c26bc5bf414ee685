"""The noise has the stated scale and shape, and never repeats."""

import itertools
import zlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

import dpadambc
from tests import common

pytestmark = pytest.mark.guarantee

SIZE = 200_000


def draws(noise_stddev, params=None, *, seed=0, steps=1):
    """The noise of each step, as a list of trees."""
    params = jnp.zeros(SIZE) if params is None else params
    noise = dpadambc.add_dp_noise(noise_stddev, key=jax.random.key(seed))
    state, out = noise.init(params), []
    for _ in range(steps):
        zeros = common.summed(optax.tree.zeros_like(params))
        updates, state = noise.update(zeros, state, params)
        out.append(jax.tree.map(np.float64, updates))
    return out


def variance_score(sample, stddev):
    """How many standard errors the sample variance lies from stddev**2."""
    n = sample.size
    return (np.sum((sample / stddev) ** 2) - n) / np.sqrt(2 * n)


def correlation_score(a, b):
    """The correlation of two samples in standard errors."""
    return np.corrcoef(a.ravel(), b.ravel())[0, 1] * np.sqrt(a.size)


@pytest.mark.slow
def test_tails_are_gaussian_to_five_standard_deviations():
    """Sixty million draws, each side by itself: of them 17 are expected beyond 5."""
    noise = dpadambc.add_dp_noise(1.0, key=jax.random.key(0))
    zeros, limits, steps = jnp.zeros(1_000_000), jnp.array([3.0, 4.0, 5.0]), 60

    def step(state, _):
        z, state = noise.update(common.summed(zeros), state, zeros)
        sides = jnp.stack([z, -z, 1.1 * z, jnp.minimum(z, 5.0)])
        return state, jnp.sum(sides[:, None] > limits[None, :, None], axis=-1)

    _, counts = jax.jit(lambda s: jax.lax.scan(step, s, None, steps))(noise.init(zeros))
    expected = steps * zeros.size * scipy.stats.norm.sf(limits)
    scores = (np.asarray(counts).sum(0) - expected) / np.sqrt(expected)
    upper, lower, wide, cut = scores
    assert np.abs([upper, lower]).max() < 4
    # Negative controls: a scale off by 10 %, and no draw beyond 5.
    assert wide.min() > 8
    assert cut[-1] < -4


def test_steps_by_themselves_jitted_and_scanned_draw_the_same():
    noise = dpadambc.add_dp_noise(1.0, key=jax.random.key(0))
    zeros = {"a": jnp.zeros((30, 7)), "b": jnp.zeros(())}
    summed = common.summed(zeros)
    step = lambda state, _: noise.update(summed, state, zeros)[::-1]
    _, scanned = jax.lax.scan(step, noise.init(zeros), None, 3)
    _, jitted = jax.jit(step)(noise.init(zeros), None)
    _, alone = step(noise.init(zeros), None)
    first = jax.tree.map(lambda x: x[0], scanned)
    for other in (jitted, first):  # three programs, which may round a normal otherwise
        chex.assert_trees_all_close(other, alone, rtol=1e-6, atol=1e-6)


def test_vmap_over_keys_draws_what_each_key_draws():
    zeros = jnp.zeros((30, 7))

    @jax.jit
    def first_noise(key):
        noise = dpadambc.add_dp_noise(1.0, key=key)
        return noise.update(common.summed(zeros), noise.init(zeros), zeros)[0]

    keys = jax.random.split(jax.random.key(0), 5)
    together = jax.vmap(first_noise)(keys)
    alone = jnp.stack([first_noise(k) for k in keys])
    np.testing.assert_allclose(together, alone, rtol=1e-6, atol=1e-6)  # two programs
    for one, other in itertools.combinations(together, 2):
        assert np.mean(one == other) < 0.05


def test_leaves_whose_paths_collide_get_different_noise():
    first, second = names = "09685295", "12060020"
    checksums = {zlib.crc32(f"['{name}']".encode()) for name in names}
    assert len(checksums) == 1
    params = {first: jnp.zeros(SIZE), second: jnp.zeros(SIZE)}
    (noise,) = draws(1.0, params)
    assert abs(correlation_score(noise[first], noise[second])) < 4


def test_noise_does_not_repeat_draws_made_with_the_same_key():
    """Parameters initialized from the optimizer's key must not predict its noise."""
    (sample,) = draws(1.0)
    for key in (jax.random.key(0), *jax.random.split(jax.random.key(0))):
        drawn = np.float64(jax.random.normal(key, (SIZE,)))
        assert abs(correlation_score(sample, drawn)) < 4


def test_state_forgets_the_noise_it_has_given():
    """With the state after a step, the noise of that step cannot be drawn again."""
    noise = dpadambc.add_dp_noise(1.0, key=jax.random.key(0))
    zeros = jnp.zeros(SIZE)
    summed = common.summed(zeros)
    first, state = noise.update(summed, noise.init(zeros), zeros)
    for count in (0, 1):
        replay = state._replace(noised_steps=jnp.int32(count))
        again, _ = noise.update(summed, replay, zeros)
        assert abs(correlation_score(np.float64(first), np.float64(again))) < 4


def test_a_schedule_is_read_at_the_step_counted_from_zero():
    first, second, third = draws(
        lambda count: jnp.array([1.0, 3.0, 0.0])[count], None, steps=3
    )
    assert abs(variance_score(first, 1.0)) < 4
    assert abs(variance_score(second, 3.0)) < 4
    assert not third.any()


def test_a_tree_prefix_gives_each_group_its_level():
    params = {"low": [jnp.zeros(SIZE), jnp.zeros(SIZE)], "high": jnp.zeros(SIZE)}
    levels = {"low": 0.5, "high": lambda count: 2.0 + count}
    first, second = draws(levels, params, steps=2)
    for leaf in first["low"]:
        assert abs(variance_score(leaf, 0.5)) < 4
    assert abs(variance_score(first["high"], 2.0)) < 4
    assert abs(variance_score(second["high"], 3.0)) < 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_jax_privacy_low_precision_noise_takes_more_than_128_values(dtype):
    (sample,) = draws(1.0, jnp.zeros(SIZE, dtype))
    assert len(np.unique(sample)) > 1_500  # of a grid of 256 values in a level
    assert np.abs(sample).max() > 4
    # Negative control: what drawing in that dtype gives.
    low = np.float64(jax.random.normal(jax.random.key(0), (SIZE,), dtype))
    assert len(np.unique(low[np.abs(low) > 1])) < 400


def test_jax_privacy_small_noise_does_not_vanish_in_float16():
    (sample,) = draws(1e-9, jnp.zeros(SIZE, jnp.float16))
    assert abs(variance_score(sample, 1e-9)) < 4
    # Negative control: the least positive float16 is 6e-8.
    assert not sample.astype(np.float16).any()


def test_double_precision_noise_is_gaussian(x64):
    (sample,) = draws(1.0, jnp.zeros(SIZE, jnp.float64))
    assert scipy.stats.kstest(sample, "norm").pvalue > 1e-3
    assert abs(variance_score(sample, 1.0)) < 4
    assert abs(correlation_score(sample[1:], sample[:-1])) < 4
    # Negative control.
    assert scipy.stats.kstest(sample / 1.05, "norm").pvalue < 1e-6


KEY = jax.random.key(0)
NO_KEYS = {
    "int": 0,
    "none": None,
    "raw": jnp.zeros(2, jnp.uint32),
    "raw numpy": np.zeros(2, np.uint32),
    "several": jax.random.split(KEY),
}
NO_LEVELS = [-1.0, float("nan"), float("inf"), {"a": -0.1}, "0.1", None, jnp.ones(2)]


@pytest.mark.parametrize("key", NO_KEYS.values(), ids=NO_KEYS)
def test_refuses_what_is_not_one_typed_key(key):
    """A default key would give all optimizers of a program the same noise."""
    with pytest.raises((TypeError, ValueError), match="key"):
        dpadambc.add_dp_noise(1.0, key=key)
    with pytest.raises(TypeError, match="key"):
        dpadambc.add_dp_noise(1.0)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("level", NO_LEVELS, ids=str)
def test_refuses_a_level_that_is_no_standard_deviation(level):
    with pytest.raises((TypeError, ValueError), match="noise_stddev"):
        dpadambc.add_dp_noise(level, key=KEY)


def test_a_mechanism_stands_for_its_level():
    mechanism, params = common.poisson_gaussian(), jnp.zeros(100)
    summed = dpadambc.as_clipped_sum(params, l2_clip_norm=1.0, normalize_by=50)
    by_mechanism, by_number = (
        dpadambc.add_dp_noise(level, key=jax.random.key(0))
        for level in (mechanism, mechanism.noise_stddev)
    )
    found, expected = (
        noise.update(summed, noise.init(params), params)[0]
        for noise in (by_mechanism, by_number)
    )
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("other", [dict(l2_clip_norm=2.0), dict(normalize_by=51)])
def test_refuses_a_sum_of_other_numbers_than_the_mechanisms(other):
    noise = dpadambc.add_dp_noise(common.poisson_gaussian(), key=jax.random.key(0))
    params = jnp.zeros(3)
    numbers = dict(l2_clip_norm=1.0, normalize_by=50) | other
    with pytest.raises(ValueError, match=next(iter(other))):
        summed = dpadambc.as_clipped_sum(params, **numbers)
        noise.update(summed, noise.init(params), params)


def test_refuses_a_level_that_does_not_fit_or_is_rounded():
    with pytest.raises(ValueError, match="noise_stddev"):
        dpadambc.add_dp_noise({"a": 1.0}, key=KEY).init({"b": jnp.zeros(2)})
    inject = optax.inject_hyperparams(dpadambc.add_dp_noise)
    with pytest.raises(TypeError, match="noise_stddev"):
        inject(0.3, key=KEY).init(jnp.zeros(2, jnp.bfloat16))
    low, zeros = lambda count: jnp.asarray(1.1, jnp.bfloat16), jnp.zeros(3)
    noise = dpadambc.add_dp_noise(low, key=KEY)
    with pytest.raises(TypeError, match="noise_stddev"):
        noise.update(common.summed(zeros), noise.init(zeros), zeros)


NO_SUMS = {
    "batch": lambda: common.summed(jnp.zeros((5, 3))),
    "per example": lambda: dpadambc.as_per_example(jnp.zeros((5, 3))),
    "arrays": lambda: jnp.zeros(3),
}


@pytest.mark.parametrize("given", NO_SUMS.values(), ids=NO_SUMS)
def test_refuses_what_is_no_clipped_sum_of_the_parameters(given):
    noise, params = dpadambc.add_dp_noise(1.0, key=KEY), jnp.zeros(3)
    with pytest.raises((TypeError, ValueError), match="gradient"):
        noise.update(given(), noise.init(params), params)


def test_independent_noise_of_a_mechanism_with_correlated_noise_is_refused():
    correlated = common.correlated_gaussian()
    with pytest.raises(TypeError, match="noise_stddev"):
        dpadambc.add_dp_noise(correlated, key=jax.random.key(0))
    dpadambc.add_dp_noise(common.poisson_gaussian(), key=jax.random.key(0))
    dpadambc.adam_bc(0.1, correlated)

"""Rounding at random: to the neighbors, right on average, with draws of its own."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from dpadambc.transforms import rounding

LOW = ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
KEY = jax.random.key(0)


def in_full(x):
    return np.asarray(x, np.float64)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("value", [1.001, -1.001, 0.3, 0.9999, 1.9999, 2e-3, -7e-8])
def test_a_number_becomes_one_of_its_neighbors_and_is_kept_on_average(dtype, value):
    size = 40_000
    x = jnp.full(size, value, jnp.float32)
    rounded = in_full(rounding.stochastic_round(KEY, x, dtype))
    number = float(x[0])
    found = np.unique(rounded)
    nearest = in_full(x[0].astype(dtype))
    assert len(found) <= 2 and nearest in found
    assert found[0] <= number <= found[-1]
    if len(found) == 2:  # and nothing lies between them
        low, high = (jnp.asarray(n, dtype) for n in found)
        assert jnp.nextafter(low, high) == high
    standard_error = rounded.std() / size**0.5
    assert abs(rounded.mean() - number) <= 4 * standard_error
    # Negative control: the nearest of the two is off by many standard errors.
    if standard_error and abs(nearest - number) > 0.05 * (found[-1] - found[0]):
        assert abs(nearest - number) > 4 * standard_error


@pytest.mark.parametrize("dtype", LOW)
def test_what_is_a_number_of_the_dtype_stays(dtype):
    x = jnp.array([0.0, -0.0, 1.0, -2.5, 240.0, 2.0**-9]).astype(dtype)
    rounded = rounding.stochastic_round(KEY, x.astype(jnp.float32), dtype)
    np.testing.assert_array_equal(in_full(rounded), in_full(x))
    assert np.signbit(in_full(rounded)[1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_has_no_neighbors_is_rounded_as_always(dtype):
    largest = float(jnp.finfo(dtype).max)
    x = jnp.array([jnp.inf, -jnp.inf, jnp.nan, largest, largest * 1.0005, -largest])
    rounded = rounding.stochastic_round(KEY, x, dtype)
    np.testing.assert_array_equal(in_full(rounded), in_full(x.astype(dtype)))


def test_double_precision_is_rounded_at_random_too(x64):
    x = jnp.full(40_000, 1 + 0.3 * 2**-7, jnp.float64)
    rounded = in_full(rounding.stochastic_round(KEY, x, "bfloat16"))
    assert abs((rounded == 1).mean() - 0.7) < 4 * (0.7 * 0.3 / 40_000) ** 0.5


def step(tx, params, updates, state):
    updates, state = tx.update(updates, state, params)
    return optax.apply_updates(params, updates), state


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_parameter_is_what_was_rounded_to(dtype):
    """Nothing is lost where `apply_updates` adds and casts."""
    rng = np.random.default_rng(0)
    params = jnp.asarray(rng.normal(size=50_000), dtype)
    scales = 10.0 ** rng.uniform(-6, 1, 50_000)
    updates = jnp.asarray(scales * rng.normal(size=50_000), jnp.float32)
    tx = dpadambc.round_stochastically(key=KEY)
    state = tx.init(params)
    full = params.astype(jnp.float32) + updates
    after, _ = step(tx, params, updates, state)
    assert after.dtype == dtype
    near = full.astype(dtype)
    toward = jnp.where(full > near.astype(jnp.float32), jnp.inf, -jnp.inf)
    far = jnp.nextafter(near, toward.astype(dtype))
    assert ((after == near) | (after == far)).all()
    assert 0.05 < (after == far).mean() < 0.5


def test_small_steps_add_up_in_low_precision():
    """A thousand steps of a thousandth of the last digit, which the nearest loses."""
    params = jnp.ones(2000, jnp.bfloat16)
    tx = dpadambc.round_stochastically(key=KEY)
    small = jnp.full(2000, 2.0**-17)

    def one(carry, _):
        return step(tx, carry[0], small, carry[1]), None

    (after, _), _ = jax.lax.scan(one, (params, tx.init(params)), length=1000)
    moved = in_full(after) - 1
    expected = 1000 * 2.0**-17
    assert abs(moved.mean() - expected) < 4 * moved.std() / 2000**0.5
    # Negative control.
    for _ in range(3):
        params = optax.apply_updates(params, small)
    assert (params == 1).all()


def test_parameters_in_full_precision_get_what_comes_in():
    params = {"full": jnp.ones(3), "low": jnp.ones(3, jnp.bfloat16)}
    updates = jax.tree.map(lambda p: jnp.full(3, 1e-5), params)
    tx = dpadambc.round_stochastically(key=KEY)
    got, _ = tx.update(updates, tx.init(params), params)
    np.testing.assert_array_equal(got["full"], updates["full"])
    assert got["low"].dtype == jnp.float32


def test_leaves_steps_and_keys_round_independently():
    half = 2.0**-8  # between one and its neighbor above
    params = {"a": jnp.ones(2000, jnp.bfloat16), "b": jnp.ones(2000, jnp.bfloat16)}
    updates = jax.tree.map(lambda p: jnp.full(p.shape, half), params)
    rounded = []
    for seed in (0, 1):
        tx = dpadambc.round_stochastically(key=jax.random.key(seed))
        state = tx.init(params)
        for _ in range(2):
            after, state = step(tx, params, updates, state)
            rounded += [in_full(after[name]) == 1 for name in params]
    correlations = np.corrcoef(rounded) - np.eye(len(rounded))
    assert np.abs(correlations).max() < 4.5 / 2000**0.5
    assert all(abs(ups.mean() - 0.5) < 4.5 / 2 / 2000**0.5 for ups in rounded)


def test_the_key_of_the_noise_may_be_given_again():
    """Negative control: without a domain of its own, it would draw with the same."""
    params = jnp.ones(3, jnp.bfloat16)
    own = dpadambc.round_stochastically(key=KEY).init(params).key_data
    noise = dpadambc.add_dp_noise(1.0, key=KEY).init(params).key_data
    words = [tuple(x.tolist()) for x in (own, noise, jax.random.key_data(KEY))]
    assert len(set(words)) == 3


def test_parameters_are_needed():
    tx = dpadambc.round_stochastically(key=KEY)
    with pytest.raises(ValueError, match="params"):
        tx.update(jnp.ones(3), tx.init(jnp.ones(3)))
    with pytest.raises(TypeError, match="key"):
        dpadambc.round_stochastically(key=0)


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="dtype"):
        rounding.stochastic_round(KEY, jnp.ones(3), "float8_e8m0fnu")


def test_it_works_masked_and_without_recompiling():
    params = {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(3, jnp.bfloat16)}
    tx = optax.masked(dpadambc.round_stochastically(key=KEY), {"a": True, "b": False})
    update, state = jax.jit(chex.assert_max_traces(tx.update, n=1)), tx.init(params)
    for _ in range(3):
        updates, state = update(params, state, params)
    assert updates["a"].dtype == jnp.float32 and updates["b"].dtype == jnp.bfloat16

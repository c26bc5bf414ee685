"""Banded noise has the covariance of the inverse of its strategy."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.linalg

from dpadambc import contrib
from tests import common

pytestmark = pytest.mark.guarantee

KEY = jax.random.key(3)
C = (1.0, 0.6, 0.2)
STEPS, SIZE = 5, 50_000


def made(coefficients=C, stddev=0.5, key=KEY):
    return contrib.add_banded_noise(stddev, coefficients, key=key)


def noise_of(tx, params, steps=STEPS):
    """The noise of each step, stacked."""
    zeros = common.summed(optax.tree.zeros_like(params))

    def step(state, _):
        noised, state = tx.update(zeros, state, params)
        return state, noised

    return jax.jit(lambda s: jax.lax.scan(step, s, length=steps))(tx.init(params))


def inverse(coefficients, n=STEPS):
    column = np.zeros(n)
    column[: len(coefficients)] = coefficients[:n]
    return np.linalg.inv(scipy.linalg.toeplitz(column, np.zeros(n)))


def worst_score(drawn, coefficients, stddev=0.5):
    """The largest deviation of a covariance from that of C^-1 z, in standard errors."""
    drawn, d = np.asarray(drawn, np.float64), inverse(coefficients)
    expected = stddev**2 * d @ d.T
    found = drawn @ drawn.T / drawn.shape[1]
    variances = np.diag(expected)
    spread = np.sqrt((np.outer(variances, variances) + expected**2) / drawn.shape[1])
    return np.abs((found - expected) / spread).max()


def test_the_covariance_over_steps_is_that_of_the_inverse_of_the_strategy():
    _, drawn = noise_of(made(), jnp.zeros(SIZE))
    assert worst_score(drawn, C) < 5
    # The negative controls: another band, one band less, and another level.
    assert worst_score(drawn, (1.0, 0.64, 0.2)) > 5
    assert worst_score(drawn, C[:2]) > 5
    assert worst_score(drawn, C, stddev=0.51) > 5


def test_it_is_the_dense_inverse_times_the_draws(without_nonces):
    """The slow twin: the draws of each step by itself, and a matrix in float64."""
    params = {"a": jnp.zeros((7, 3)), "b": jnp.zeros(2)}
    _, independent = noise_of(made((1.0,)), params, steps=20)
    _, drawn = noise_of(made(), params, steps=20)
    twin = lambda z: np.tensordot(inverse(C, 20), np.float64(z), axes=1)
    # Each is rounded to a grid of 0.5 / 256, by half a step at most: sums of such too.
    rounding = 0.5 / 512 * (1 + np.abs(inverse(C, 20)).sum(1).max())
    chex.assert_trees_all_close(
        drawn, jax.tree.map(lambda z: np.float32(twin(z)), independent), atol=rounding
    )


def test_it_adds_to_the_gradient_and_other_keys_draw_other_noise():
    params = jnp.zeros(1_000)
    gradient = jnp.linspace(-1, 1, 1_000)
    one, two = (made(key=k) for k in (KEY, jax.random.key(4)))
    silent = made(stddev=0.0)
    noised, _ = silent.update(common.summed(gradient), silent.init(params), params)
    np.testing.assert_array_equal(noised, gradient)
    noised, state = one.update(common.summed(gradient), one.init(params), params)
    found = noised - gradient
    np.testing.assert_allclose(found, state.earlier[0], atol=0.51 / 256 / 2)
    drawn = [np.float64(noise_of(tx, params)[1]) for tx in (one, two)]
    rows = np.concatenate(
        [np.tensordot(np.linalg.inv(inverse(C)), d, 1) for d in drawn]
    )
    correlations = np.corrcoef(rows)[np.triu_indices(len(rows), 1)]
    assert np.abs(correlations).max() * 1_000**0.5 < 5


def test_a_saved_state_goes_on_with_the_same_bits():
    params, tx = jnp.zeros(50), made()
    _, all_steps = noise_of(tx, params, steps=6)
    state, first = noise_of(tx, params, steps=3)
    later = []
    # Another transformation, of another key: the state alone says what is drawn.
    update = jax.jit(made(key=jax.random.key(9)).update)
    for _ in range(3):
        noised, state = update(common.summed(params), state, params)
        later.append(noised)
    np.testing.assert_allclose(np.stack([*first, *later]), all_steps, atol=1e-6)
    # The negative control: a state without the earlier noise is another run.
    forgot = state._replace(earlier=optax.tree.zeros_like(state.earlier))
    zeros = common.summed(params)
    assert abs(update(zeros, forgot)[0] - update(zeros, state)[0]).max() > 0.1


@pytest.mark.parametrize(
    ("dtype", "expected"), [("bfloat16", "float32"), ("float64", "float64")]
)
def test_noise_and_what_is_kept_of_it_are_in_at_least_float32(dtype, expected):
    with jax.enable_x64(dtype == "float64"):
        params = {"w": jnp.zeros(1_000, dtype), "none": None, "empty": {}}
        state, drawn = noise_of(made(), params, steps=2)
    assert drawn["w"].dtype == state.earlier[1]["w"].dtype == expected
    assert state.draws.noised_steps.dtype == "int32"
    assert len(np.unique(drawn["w"])) > 700  # of the grid


def test_wrong_use_is_an_error():
    with pytest.raises(TypeError, match="key"):
        made(key=jnp.zeros(2, jnp.uint32))
    with pytest.raises(ValueError, match="strategy_coefficients"):
        made((0.5, 0.5))
    with pytest.raises(ValueError, match="strategy_coefficients"):
        made((1.0, np.inf))
    with pytest.raises(TypeError, match="noise_stddev"):
        made(stddev=lambda step: 1.0)
    params = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
    with pytest.raises(ValueError, match="params"):
        optax.masked(made(), {"a": True, "b": False}).init(params)

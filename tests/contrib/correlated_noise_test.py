"""Correlated noise has the covariance of its coefficients, and repeats nothing else."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.linalg
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dpadambc
from dpadambc import contrib
from tests import common

pytestmark = pytest.mark.guarantee

KEY = jax.random.key(3)
D = (1.0, -0.6, -0.2)
STEPS, SIZE = 5, 100_000


def made(coefficients=D, stddev=0.5, key=KEY):
    return contrib.add_correlated_noise(stddev, coefficients, key=key)


def noise_of(tx, params, steps=STEPS):
    """The noise of each step, stacked."""
    zeros = common.summed(optax.tree.zeros_like(params))

    def step(state, _):
        noised, state = tx.update(zeros, state, params)
        return state, noised

    return jax.jit(lambda s: jax.lax.scan(step, s, length=steps))(tx.init(params))


def dense(coefficients, n=STEPS):
    column = np.zeros(n)
    column[: len(coefficients)] = coefficients[:n]
    return scipy.linalg.toeplitz(column, np.zeros(n))


def worst_score(drawn, coefficients, stddev):
    """The largest deviation of a covariance from sigma^2 D D^T, in standard errors."""
    drawn = np.asarray(drawn, np.float64)
    expected = stddev**2 * dense(coefficients) @ dense(coefficients).T
    found = drawn @ drawn.T / drawn.shape[1]
    variances = np.diag(expected)
    spread = np.sqrt((np.outer(variances, variances) + expected**2) / drawn.shape[1])
    return np.abs((found - expected) / spread).max()


@pytest.mark.parametrize("coefficients", [D, (1.0,), (1.0, -0.9)])
def test_the_covariance_over_steps_is_that_of_the_dense_matrix(coefficients):
    _, drawn = noise_of(made(coefficients), jnp.zeros(SIZE))
    assert worst_score(drawn, coefficients, 0.5) < 5
    # The negative controls: another share of an earlier step, and another level.
    others = {(1.0, -0.63), (1.0, -0.95), (1.0, -0.6, -0.17)} - {coefficients}
    assert min(worst_score(drawn, c, 0.5) for c in others) > 5
    assert worst_score(drawn, coefficients, 0.51) > 5


def test_it_is_the_dense_matrix_times_the_draws(without_nonces):
    """The slow twin: the draws of each step by itself, and a matrix in float64."""
    params = {"a": jnp.zeros((7, 3)), "b": jnp.zeros(2)}
    _, independent = noise_of(made((1.0,)), params)
    _, drawn = noise_of(made(), params)
    twin = lambda z: np.tensordot(dense(D), np.float64(z), axes=1)
    # Each is rounded to a grid of 0.5 / 256, of which half a step is added five times.
    chex.assert_trees_all_close(
        drawn, jax.tree.map(lambda z: np.float32(twin(z)), independent), atol=0.004
    )


def test_draws_repeat_over_no_steps_leaves_coordinates_or_keys():
    params = {"a": jnp.zeros(1_000), "b": jnp.zeros(1_000)}
    _, one = noise_of(made((1.0,)), params)
    _, two = noise_of(made((1.0,), key=jax.random.key(4)), params)
    independent = dpadambc.add_dp_noise(0.5, key=KEY)
    _, other = noise_of(independent, params)
    drawn = np.concatenate([np.ravel(x) for x in jax.tree.leaves((one, two, other))])
    # On a grid of 256 steps in a level, pairs are equal by chance; whole rows are not.
    rows = [tuple(np.ravel(x)) for x in drawn.reshape(-1, 1_000)]
    assert len(set(rows)) == len(rows) == 30
    rows = [np.float64(x) for t in (one, two, other) for l in t.values() for x in l]
    correlations = np.corrcoef(rows)[np.triu_indices(len(rows), 1)]
    assert np.abs(correlations).max() * 1_000**0.5 < 5
    for key in (KEY, *jax.random.split(KEY)):
        plain = np.float64(jax.random.normal(key, (1_000,)))
        assert max(abs(np.corrcoef(plain, r)[0, 1]) for r in rows) * 1_000**0.5 < 5


def test_a_saved_state_goes_on_with_the_same_bits():
    params, tx = jnp.zeros(50), made()
    _, all_steps = noise_of(tx, params, steps=6)
    half, first = noise_of(tx, params, steps=3)
    state = jax.tree.map(jnp.asarray, jax.tree.map(np.asarray, half))
    later = []
    # Another transformation, of another key: the state alone says what is drawn.
    update = jax.jit(made(key=jax.random.key(9)).update)
    for _ in range(3):
        noised, state = update(common.summed(params), state, params)
        later.append(noised)
    np.testing.assert_allclose(np.stack([*first, *later]), all_steps, atol=1e-6)
    assert int(state.draws.noised_steps) == 6


@pytest.mark.slow
def test_by_hand_compiled_and_vmapped_are_the_same():
    params = jnp.zeros(20)

    @chex.assert_max_traces(n=1)
    def step(state, g):
        return made().update(g, state, params)

    compiled, state = jax.jit(step), made().init(params)
    ones = common.summed(jnp.ones(20))
    for _ in range(2):
        before, (noised, state) = state, compiled(state, ones)
    expected, _ = made().update(ones, before, params)
    np.testing.assert_allclose(noised, expected, atol=1e-6)
    runs = lambda key: noise_of(made(key=key), params)[1]
    together = jax.vmap(runs)(jnp.stack([KEY, jax.random.key(5)]))
    np.testing.assert_allclose(together[0], runs(KEY), atol=1e-6)
    assert abs(together[0] - together[1]).max() > 0.1


@pytest.mark.parametrize(
    ("dtype", "expected"), [("bfloat16", "float32"), ("float64", "float64")]
)
def test_noise_is_in_at_least_float32(dtype, expected):
    with jax.enable_x64(dtype == "float64"):
        params = {"w": jnp.zeros(1_000, dtype), "none": None, "empty": {}}
        state, drawn = noise_of(made(), params, steps=2)
    assert drawn["w"].dtype == expected
    assert state.draws.noised_steps.dtype == "int32"
    assert len(np.unique(drawn["w"])) > 800  # of the grid


def test_devices_need_one_noise_for_a_coordinate():
    mesh = jax.make_mesh((1,), ("i",), (AxisType.Auto,))
    params = jnp.zeros(4)

    def step(state, g):
        return made().update(common.summed(g), state, params)[0]

    mapped = lambda spec, check=True: jax.shard_map(
        step, mesh=mesh, in_specs=(P(), spec), out_specs=spec, check_vma=check
    )
    state = made().init(params)
    assert jax.eval_shape(mapped(P()), state, params).shape == (4,)
    with pytest.raises(ValueError, match="key"):
        jax.eval_shape(mapped(P("i")), state, params)
    with pytest.raises(ValueError, match="check_vma=True"):
        jax.eval_shape(mapped(P(), check=False), state, params)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: made(stddev=-1.0), ValueError, "noise_stddev"),
        (lambda: made(stddev=lambda t: 1.0), TypeError, "noise_stddev"),
        (lambda: made(stddev=np.inf), ValueError, "noise_stddev"),
        (lambda: made((0.5,)), ValueError, "coefficients"),
        (lambda: made((1.0, "x")), TypeError, "coefficients"),
        (lambda: made(key=jax.random.PRNGKey(0)), TypeError, "key"),
        (
            lambda: optax.masked(made(), {"a": True, "b": False}).init(
                {"a": jnp.zeros(2), "b": jnp.zeros(2)}
            ),
            ValueError,
            "params",
        ),
        (
            lambda: made().update(
                dpadambc.per_example_grad(lambda w, x: w @ x)(
                    jnp.zeros(2), jnp.ones((3, 2))
                ),
                made().init(jnp.zeros(2)),
            ),
            TypeError,
            "gradient",
        ),
    ],
)
def test_wrong_use_is_an_error(call, error, match):
    with pytest.raises(error, match=match):
        call()

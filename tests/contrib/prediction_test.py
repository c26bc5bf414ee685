"""DiSK: the combined gradient, its sensitivity, its noise, and what the filter does."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from dpadambc import contrib, training
from tests import common

RNG = np.random.default_rng(0)
draw = lambda *shape: jnp.asarray(RNG.normal(size=shape), jnp.float32)
PARAMS = {"w": draw(3, 4), "out": draw(4)}
DIRECTION = {"w": draw(3, 4), "out": draw(4)}
X = draw(6, 3)
KEY = jax.random.key(0)
# With a share of the point ahead below one, and far above.
SETTINGS = {"default": {}, "small gain": dict(kappa=0.2, gamma=0.5)}
SHARES = {"default": 0.3 / 0.35, "small gain": 8.0}
every_setting = pytest.mark.parametrize("name", SETTINGS)


def loss_fn(params, x):
    return jnp.sum(jnp.tanh(x @ params["w"]) * params["out"]) ** 2


def slow_gradients(share, gamma=0.5, clip=lambda g: g):
    """Of each example by itself, at one point after the other."""
    ahead = jax.tree.map(lambda p, d: p + gamma * d, PARAMS, DIRECTION)
    rows = []
    for x in X:
        there, here = (clip(jax.grad(loss_fn)(p, x)) for p in (ahead, PARAMS))
        rows.append(jax.tree.map(lambda t, h: share * t + (1 - share) * h, there, here))
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)


@pytest.mark.slow
@every_setting
@pytest.mark.parametrize("method", ["factored", "vmap"])
def test_gradient_is_the_combination_of_those_at_two_points(name, method):
    gradient = dpadambc.per_example_grad(
        contrib.with_prediction(loss_fn, **SETTINGS[name]),
        batch_argnums=2,
        method=method,
    )
    found = dpadambc.materialize(gradient(PARAMS, DIRECTION, X))
    expected = slow_gradients(SHARES[name])
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)


def clipped(g):
    return optax.tree.scale(jnp.minimum(1, 1 / optax.tree.norm(g)), g)


@pytest.mark.guarantee
@every_setting
def test_an_example_moves_the_clipped_sum_by_no_more_than_the_clip_norm(name):
    """Also one that is huge, has a gradient ahead alone, or is not a number."""
    clipped_sum = jax.jit(
        dpadambc.clipped_grad(
            contrib.with_prediction(loss_fn, **SETTINGS[name]),
            l2_clip_norm=1.0,
            normalize_by=1.0,
            batch_argnums=2,
        )
    )
    padding = jnp.arange(6) >= 5
    for last in (X[5], 1e4 * X[5], 1e-3 * X[5], jnp.full(3, jnp.nan)):
        rows = X.at[5].set(last)
        here, there = (
            dpadambc.materialize(
                clipped_sum(PARAMS, DIRECTION, rows, is_padding_example=mask)
            )
            for mask in (padding, jnp.zeros(6, bool))
        )
        distance = optax.tree.norm(optax.tree.sub(there, here))
        assert distance <= 1 + 1e-5
    if name == "small gain":
        # Negative control: both gradients clipped, and then combined.
        wrong = slow_gradients(SHARES[name], clip=clipped)
        norms = jnp.sqrt(sum(jnp.sum(g**2, range(1, g.ndim)) for g in wrong.values()))
        assert norms.max() > 2


@pytest.mark.guarantee
@every_setting
def test_the_noise_is_that_of_the_mechanism(name):
    """Of 20,000 coordinates without a gradient, within 5 standard errors."""
    size = 20_000
    mechanism = common.poisson_gaussian(normalize_by=4)
    tell = optax.GradientTransformation(
        lambda params: jnp.zeros_like(params), lambda g, s, p=None: (g, g)
    )
    loss = contrib.with_prediction(lambda w, x: 0 * w[0] * x, **SETTINGS[name])
    step = training.Step(loss, mechanism, tell)
    state = step.init(jnp.zeros(size), key=KEY)
    state, _ = step(state, jnp.ones(4), jnp.zeros(4, bool), jnp.ones(size))
    ratio = np.std(state.opt_state) / mechanism.noise_stddev
    assert abs(ratio - 1) < 5 / np.sqrt(2 * size)
    # Negative control: the noise of two gradients, divided for their combination.
    divided = np.hypot(SHARES[name], 1 - SHARES[name])
    assert abs(ratio - 1 / divided) > 10 / np.sqrt(2 * size)


@pytest.mark.slow
def test_on_a_quadratic_the_estimate_does_not_lag():
    """Without noise: the gradient itself, where a low pass is behind."""
    kappa, curvature = 0.3, jnp.array([1.0, 0.4, 0.1])
    loss_fn = lambda w, x: 0.5 * jnp.sum(curvature * (w - x) ** 2)
    filtering = contrib.low_pass((kappa,), (1.0, kappa - 1.0))

    def last_errors(loss):
        w, direction = jnp.array([3.0, -2.0, 1.0]), jnp.zeros(3)
        state, errors = filtering.init(w), []
        for _ in range(40):
            gradient = jax.grad(loss)(w, direction, jnp.zeros(3))
            estimate, state = filtering.update(gradient, state)
            exact = jax.grad(loss_fn)(w, jnp.zeros(3))
            errors.append(np.max(abs(estimate - exact) / abs(exact)))
            direction = -0.05 * estimate
            w = w + direction
        return max(errors[-5:])

    predicted = contrib.with_prediction(loss_fn, kappa=kappa, gamma=0.5)
    assert last_errors(predicted) < 1e-3
    # Negative control: without the prediction.
    assert last_errors(lambda w, direction, x: loss_fn(w, x)) > 0.05


def test_parameters_in_low_precision_stay_so():
    low = optax.tree.cast(PARAMS, jnp.bfloat16)
    gradient = jax.grad(contrib.with_prediction(loss_fn))(low, DIRECTION, X[0])
    chex.assert_trees_all_equal_shapes_and_dtypes(gradient, low)


@pytest.mark.parametrize("wrong", [dict(kappa=0.0), dict(kappa=1.0), dict(gamma=0.0)])
def test_refuses_numbers_out_of_their_range(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        contrib.with_prediction(loss_fn, **wrong)

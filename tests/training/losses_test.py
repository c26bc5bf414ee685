"""Losses made of losses: views of an example, and low precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpadambc
from dpadambc import training
from tests import common
from tests.core.fit_test import MECHANISM, SILENT, X, Y, adam_bc, fit, loss_fn


@pytest.mark.slow
@pytest.mark.guarantee
def test_views_of_an_example_count_as_one_example():
    """The clipped gradient of a mean of views; negative control, views as examples."""
    views = 8
    shift = lambda key, x, y: (x + 5 * jax.random.normal(key, x.shape), y)
    loss = training.with_augmentations(loss_fn, shift, views)
    of = functools.partial(dpadambc.clipped_grad, l2_clip_norm=1.0, normalize_by=1.0)
    norm = lambda g: float(jnp.linalg.norm(dpadambc.materialize(g)))
    with_key_last = lambda w, x, y, key: loss(w, x, y, key=key)
    one = (X[:1], Y[:1], jax.random.key(0))
    assert norm(of(with_key_last, prng_argnum=3)(jnp.ones(3), *one)) <= 1 + 1e-6
    keys = jax.random.split(jax.random.key(1), views)
    rows = jax.vmap(lambda key: shift(key, X[0], Y[0]))(keys)
    assert norm(of(loss_fn)(jnp.ones(3), *rows)) > 2.0
    assert fit(loss).epsilon == MECHANISM.epsilon(1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jitted"])
def test_views_may_be_compiled_and_the_loss_have_frozen_parts(wrap):
    shift = wrap(lambda key, x, y: (x + 0.1 * jax.random.normal(key, x.shape), y))
    loss = lambda w, frozen, x, y, *, key: (w @ (frozen * x) - y) ** 2
    augmented = training.with_augmentations(loss, shift, 2, has_frozen=True)
    result = fit(augmented, frozen=jnp.ones(3))
    np.testing.assert_allclose(result.params, [1, -2, 0.5], atol=0.5)


@pytest.mark.parametrize("view", [lambda x, y: x, lambda x, y: {"x": x, "y": y}])
def test_a_view_that_is_no_example_is_refused(view):
    """One array of several rows would be taken apart, and a dictionary give names."""
    augment = lambda key, x, y: view(x, y)
    loss = training.with_augmentations(lambda w, x, y: w * x.sum(), augment, 2)
    with pytest.raises(TypeError, match="augment"):
        loss(1.0, jnp.ones(3), 1, key=jax.random.key(0))


def test_the_mean_of_views_is_the_mean_of_their_losses():
    shift = lambda key, x: (x * jax.random.normal(key),)
    of = lambda loss: training.with_augmentations(loss, shift, 3)
    key, w = jax.random.key(5), 2.0
    keys = [jax.random.split(k) for k in jax.random.split(key, 3)]
    views = [float(jax.random.normal(view_key)) for view_key, _ in keys]
    found = of(lambda w, x: w * x)(w, 1.0, key=key)
    assert found == pytest.approx(w * np.mean(views), rel=1e-5)
    # And each view has a key of its own for the loss.
    drawn = [float(jax.random.normal(loss_key)) for _, loss_key in keys]
    found = of(lambda w, x, *, key: w * jax.random.normal(key))(w, 1.0, key=key)
    assert found == pytest.approx(w * np.mean(drawn), rel=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("without_nonces")
def test_masters_keep_the_steps_that_low_precision_would_round_away(one_identity):
    """With steps of 1e-4 on parameters of one, bfloat16 keeps next to nothing."""
    run = functools.partial(fit, mechanism=SILENT, optimizer=adam_bc(SILENT, 1e-4))
    low = training.with_compute_dtype(loss_fn, jnp.bfloat16)
    start = jnp.ones(3)
    masters = run(low, start).params
    assert masters.dtype == jnp.float32 and (masters != start).all()
    rounded = run(loss_fn, start.astype(jnp.bfloat16)).params
    assert rounded.dtype == jnp.bfloat16 and (rounded == 1).all()
    full = run(loss_fn, start).params
    np.testing.assert_allclose(masters - 1, full - 1, rtol=0.2, atol=2e-4)


def test_the_loss_is_computed_in_the_dtype_that_was_asked_for():
    seen = []

    def loss(w, frozen, x, y, *, key):
        seen.append((frozen * (w @ x)).dtype)
        return frozen * (w @ x)

    low = training.with_compute_dtype(loss, jnp.bfloat16)
    key = jax.random.key(0)
    assert low(jnp.ones(3), jnp.ones(()), X[0], 7, key=key).dtype == jnp.float32
    assert seen == [jnp.bfloat16]


def test_the_average_of_low_precision_parameters_does_not_stand_still():
    """In bfloat16, 0.999 is one."""
    still = common.with_average(adam_bc(SILENT, 0.0), 0.999)
    params = jnp.ones(3, jnp.bfloat16)
    _, average = fit(params=params, mechanism=SILENT, optimizer=still).state.opt_state
    assert average.dtype == jnp.float32
    _, (_, average) = still.update(
        jnp.zeros(3), (still.init(params)[0], 0 * average), params
    )
    np.testing.assert_allclose(average, 1e-3, rtol=1e-2)

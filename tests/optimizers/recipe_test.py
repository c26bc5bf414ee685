"""The recipe is AUTO-S and Adam, with the least noise for the target."""

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from dpadambc import clipping, training

NUM_EXAMPLES, BATCH, EPOCHS = 60, 12, 4
PUBLIC = {"num_examples": NUM_EXAMPLES, "batch_size": BATCH, "epochs": EPOCHS}
X = np.random.default_rng(0).normal(size=(NUM_EXAMPLES, 3)).astype(np.float32)
DATA = X, X[:, 0]


def loss_fn(w, x, y):
    return (w @ x - y) ** 2


def fit(mechanism, optimizer):
    options = {"key": jax.random.key(0), "target_delta": 1e-3}
    return training.fit(loss_fn, jnp.ones(3), DATA, mechanism, optimizer, **options)


def test_the_epsilon_is_that_of_the_steps():
    """Of the event of dp-accounting that has these public numbers."""
    mechanism, _ = dpadambc.recipe(0.1, target_epsilon=2.0, target_delta=1e-3, **PUBLIC)
    gaussian = dp_accounting.GaussianDpEvent(mechanism.noise_multiplier)
    step = dp_accounting.PoissonSampledDpEvent(BATCH / NUM_EXAMPLES, gaussian)
    steps = EPOCHS * NUM_EXAMPLES // BATCH
    accountant = dp_accounting.pld.PLDAccountant()
    accountant.compose(dp_accounting.SelfComposedDpEvent(step, steps))
    assert accountant.get_epsilon(1e-3) == pytest.approx(2.0, rel=2e-3)
    assert mechanism.epsilon(1e-3) <= 2.0


def test_it_trains_as_its_parts_do():
    mechanism, optimizer = dpadambc.recipe(
        0.1, target_epsilon=2.0, target_delta=1e-3, **PUBLIC
    )
    by_hand = dpadambc.PoissonGaussian(
        clip_rule=clipping.Automatic(),
        l2_clip_norm=1.0,
        noise_multiplier=mechanism.noise_multiplier,
        sampling_prob=BATCH / NUM_EXAMPLES,
        iterations=EPOCHS * NUM_EXAMPLES // BATCH,
        normalize_by=BATCH,
    )
    found, expected = fit(mechanism, optimizer), fit(by_hand, optax.adam(0.1))
    assert mechanism == by_hand
    np.testing.assert_array_equal(found.params, expected.params)
    other = fit(by_hand, optax.adam(0.05))  # the negative control
    assert np.any(found.params != other.params)


@pytest.mark.parametrize(
    ("name", "value"),
    [("target_delta", 0.1), ("batch_size", 61), ("epochs", 0), ("target_epsilon", 0)],
)
def test_numbers_out_of_range_are_refused(name, value):
    numbers = {"target_epsilon": 2.0, "target_delta": 1e-3, **PUBLIC, name: value}
    with pytest.raises(ValueError, match="Expected"):
        dpadambc.recipe(0.1, **numbers)

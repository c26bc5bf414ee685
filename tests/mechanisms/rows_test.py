"""The rows of a batch are those that were drawn, and each step is drawn once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import common
from tests.attacks import BATCH, MECHANISM, X, mechanism

pytestmark = pytest.mark.guarantee


def test_a7_rows_of_another_data_set_are_refused():
    batch = MECHANISM.sample_step(jax.random.key(0), 0, num_examples=1000)
    with pytest.raises(ValueError, match="data with 1000 rows"):
        batch.gather((X,))
    # What an index does: the last row counts for all that are not there.
    assert int((batch.indices >= BATCH - 1).sum()) > 100


@pytest.mark.parametrize("host", [True, False])
def test_a7_padding_is_zero_rather_than_the_last_example(host):
    if host:
        key = jax.random.key(0)
        batch = next(mechanism(sampling_prob=0.1).batches(key, num_examples=BATCH))
        data = {"x": np.asarray(X) + 1, "i": np.arange(BATCH) + 1}
    else:
        batch = MECHANISM.sample_step(jax.random.key(0), 0, num_examples=BATCH)
        data = {"x": X + 1, "i": jnp.arange(BATCH) + 1}
    rows = batch.gather(data)
    padding = np.asarray(batch.is_padding_example)
    assert padding.any() and not padding.all()
    for name, column in rows.items():
        assert not np.asarray(column)[padding].any()
        present = np.asarray(batch.indices)[~padding]
        np.testing.assert_array_equal(
            np.asarray(column)[~padding], np.asarray(data[name])[present]
        )


def test_a16_steps_after_the_last_are_refused():
    made = mechanism(iterations=3)
    draw = lambda step: made.sample_step(jax.random.key(0), step, num_examples=BATCH)
    for step in (0, np.int64(2)):
        draw(step)
    for step in (3, np.int64(3)):
        with pytest.raises(ValueError, match="step"):
            draw(step)
    # A step on the device is not waited for, and fit counts its own steps.
    jax.jit(draw)(3)
    draw(jnp.asarray(3))


def test_a16_fractions_of_a_step_are_refused():
    made = mechanism(iterations=10)
    draw = lambda step: made.sample_step(jax.random.key(0), step, num_examples=BATCH)
    for step in (0.5, 1.0, np.float64(1), jnp.float32(1), -1, np.arange(2)):
        with pytest.raises(ValueError, match="step"):
            draw(step)
    with pytest.raises(ValueError, match="step"):
        jax.jit(draw)(0.5)
    with pytest.raises(ValueError, match="step"):
        draw(np.array(10))


def test_a16_what_fractions_of_a_step_would_draw():
    """Negative control: JAX rounds them, so that ten of them draw one batch."""
    folded = [jax.random.fold_in(jax.random.key(0), step / 10) for step in range(10)]
    assert len({tuple(jax.random.key_data(key).tolist()) for key in folded}) == 1
    # Ten steps on one batch are one of a tenth of the noise variance: .72 and 13.1.
    made = common.poisson_gaussian(sampling_prob=0.01, iterations=100)
    repeated = common.poisson_gaussian(
        sampling_prob=0.01, iterations=10, noise_multiplier=10**-0.5
    )
    assert made.noise_multiplier == 1.0
    assert repeated.epsilon(1e-5) > 10 * made.epsilon(1e-5)


def test_a16_what_they_spend():
    """Negative control: epsilon of ten times the steps."""
    more = mechanism(iterations=10 * MECHANISM.iterations)
    assert more.epsilon(1e-5) > 1.5 * MECHANISM.epsilon(1e-5)


def test_a31_what_a_batch_spends_that_serves_four_steps():
    """Negative control: 50 steps of half the noise, where 200 of full are stated."""
    epsilon = lambda z, steps: mechanism(
        sampling_prob=0.1, noise_multiplier=z, iterations=steps
    ).epsilon(1e-5)
    assert epsilon(1.0, 200) == pytest.approx(10.0, abs=0.05)
    assert epsilon(1 / 4**0.5, 50) == pytest.approx(22.6, abs=0.05)

"""Padding is said to be padding, by the one name of its mask."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from tests.attacks import (
    BATCH,
    MECHANISM,
    NO_PADDING,
    PADDED,
    PARAMS,
    C,
    X,
    both_methods,
    clipped_grad,
    distance,
    forwards_nothing,
    gradients,
    linear,
    mechanism,
)

pytestmark = pytest.mark.guarantee


@pytest.mark.parametrize("name", ["mask", "pad_mask", "weights", "is_valid", "padding"])
def test_a5_a_mask_by_another_name_is_refused(name):
    """Most names are of arguments of the stages behind: then there is no mask."""
    tx = dpadambc.dp_sgd(0.1, MECHANISM, key=jax.random.key(0))
    grads = dpadambc.per_example_grad(linear)(PARAMS, X)
    for value in (NO_PADDING, np.ones(BATCH, np.float32)):
        with pytest.raises((TypeError, ValueError), match="is_padding_example"):
            tx.update(grads, tx.init(PARAMS), PARAMS, **{name: value})


@both_methods
def test_a5_a_mask_that_is_forgotten_or_lost_is_an_error(method):
    tx = dpadambc.dp_sgd(0.1, MECHANISM, key=jax.random.key(0))
    grads = dpadambc.per_example_grad(linear, method=method)(PARAMS, X)
    state = tx.init(PARAMS)
    with pytest.raises(ValueError, match="is_padding_example"):
        tx.update(grads, state, PARAMS)
    lost = forwards_nothing(tx)
    with pytest.raises(TypeError, match="is_padding_example"):
        lost.update(grads, state, PARAMS, is_padding_example=NO_PADDING)
    dropped = optax.with_extra_args_support(lost)
    with pytest.raises(ValueError, match="is_padding_example"):
        dropped.update(grads, state, PARAMS, is_padding_example=NO_PADDING)
    # It is the gradients' own, if they were given it.
    _, state = lost.update(gradients(method=method), state, PARAMS)
    tx.update(grads, state, PARAMS, is_padding_example=NO_PADDING)


@pytest.mark.parametrize(("made", "is_padded"), PADDED.values(), ids=PADDED)
def test_a5_masks_are_asked_for_where_batches_are_padded(made, is_padded):
    assert made.pads_batches == is_padded
    tx = dpadambc.privatize(made, key=jax.random.key(0))
    grads = dpadambc.per_example_grad(linear)(PARAMS, X[:8])
    if is_padded:
        with pytest.raises(ValueError, match="is_padding_example"):
            tx.update(grads, tx.init(PARAMS), PARAMS)
    else:
        tx.update(grads, tx.init(PARAMS), PARAMS)
        size = getattr(made, "num_examples", BATCH)
        batches = made.batches(jax.random.key(0), num_examples=size)
        assert not any(batch.is_padding_example.any() for batch in batches)


@pytest.mark.slow
def test_a5_what_a_forgotten_mask_did():
    """Negative control: the last example counts as often as there is padding."""
    rare = mechanism(sampling_prob=0.05)
    batch = rare.sample_step(jax.random.key(1), 0, num_examples=BATCH)
    padding = int(batch.is_padding_example.sum())
    last_took_part = bool((batch.indices == BATCH - 1).any())
    rows = X.at[-1].set(1e6)[batch.indices]
    forgotten = clipped_grad()(PARAMS, rows)
    present = jnp.where(batch.is_padding_example[:, None], 0, rows)
    without = clipped_grad()(PARAMS, present)
    assert not last_took_part and padding > 5
    assert distance(forgotten, without) > 0.99 * padding * C

"""What the bound of a clip is for: all parameters, and a divisor that is public."""

import dataclasses

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
    NUMBERS,
    PADDED,
    PARAMS,
    B,
    C,
    X,
    clipped_grad,
    distance,
    linear,
    of_fixed_size,
)

pytestmark = pytest.mark.guarantee


def bfloat16_norms(seed):
    """Of clipped gradients, one example at a time, all of them far above C."""
    rng = np.random.default_rng(seed)
    params = {
        "w": jnp.asarray(rng.normal(size=(9, 7)), jnp.bfloat16),
        "v": jnp.asarray(rng.normal(size=(7, 5)), jnp.bfloat16),
    }
    x = jnp.asarray(rng.normal(size=(40, 3, 9)), jnp.bfloat16)

    def loss(params, x):
        return jnp.sum(jnp.tanh(jnp.sin(x * 3) @ params["w"]) @ params["v"] * 7)

    clipped = clipped_grad(loss, l2_clip_norm=1e-2)
    total = lambda x: dpadambc.materialize(clipped(params, x[None]))
    norm = lambda x: optax.tree.norm(total(x))
    return jax.jit(jax.vmap(norm))(x), jax.jit(norm), x


@pytest.mark.parametrize("seed", range(3))
def test_a6_clipped_norms_in_bfloat16_do_not_exceed_the_bound_under_jit(seed):
    norms, norm, x = bfloat16_norms(seed)
    alone = [float(norm(row)) for row in x[:10]]
    assert max(float(norms.max()), *alone) <= 1e-2 * (1 + 1e-4)


def two_parts(a, b, x):
    return a @ x + b @ x


def test_a11_a_part_of_the_gradients_is_refused():
    """Backbone and head, say: each part alone has a norm of C."""
    both = dpadambc.per_example_grad(two_parts, argnums=(0, 1))
    grads = both(PARAMS, PARAMS, X, is_padding_example=NO_PADDING)
    tx = dpadambc.dp_sgd(0.1, MECHANISM, key=jax.random.key(0))
    with pytest.raises(ValueError, match="gradients"):
        tx.update(grads[0], tx.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="gradients"):
        jax.jit(tx.update)(grads[0], tx.init(PARAMS), PARAMS)
    clip = dpadambc.clip_per_example(C, normalize_by=B)
    with pytest.raises(ValueError, match="gradients"):
        clip.update(grads[0], clip.init(PARAMS), PARAMS)
    tx.update(grads, tx.init((PARAMS, PARAMS)), (PARAMS, PARAMS))
    alone = dpadambc.per_example_grad(two_parts, batch_argnums=2)
    grads = alone(PARAMS, PARAMS, X, is_padding_example=NO_PADDING)
    tx.update(grads, tx.init(PARAMS), PARAMS)


@pytest.mark.slow
def test_a11_what_two_parts_did():
    """Negative control: clipped apart, one example moves them by the root of 2 C."""
    rows = jnp.full((1, 8), 1e3)
    of = lambda *argnums: dpadambc.materialize(
        clipped_grad(two_parts, argnums=argnums, batch_argnums=2)(PARAMS, PARAMS, rows)
    )
    assert optax.tree.norm([of(0), of(1)]) > 1.41 * C
    assert optax.tree.norm(of(0, 1)) <= C * 1.0001


@pytest.mark.parametrize("name", ["fixed", "shuffled by 8"])
def test_a12_a_batch_of_another_size_than_the_mechanism_draws_is_refused(name):
    made, _ = PADDED[name]
    tx = dpadambc.privatize(made, key=jax.random.key(0))
    state, grad_fn = tx.init(PARAMS), dpadambc.per_example_grad(linear)
    for update in (tx.update, jax.jit(tx.update)):
        for size in (BATCH, 5):  # the last of an epoch of a loader is smaller
            with pytest.raises(ValueError, match="examples"):
                update(grad_fn(PARAMS, X[:size]), state, PARAMS)
    _, state = tx.update(grad_fn(PARAMS, X[:8]), state, PARAMS)
    # A loader's own padding, for several devices say, is told of.
    padding, gradients = jnp.arange(16) >= 8, grad_fn(PARAMS, X[:16])
    _, state = tx.update(gradients, state, PARAMS, is_padding_example=padding)
    tx.update(grad_fn(PARAMS, X[:16], is_padding_example=padding), state, PARAMS)


def test_a12_what_a_larger_batch_spends():
    """Negative control: epsilon of batches of 8, and of those of 64 that were given."""
    stated = of_fixed_size(iterations=20)
    given = dataclasses.replace(stated, batch_size=BATCH)
    assert given.epsilon(1e-5) > 2.5 * stated.epsilon(1e-5)


def test_a12_what_the_epochs_of_a_loader_spend():
    """Negative control: 64 of 600 in each batch but the last of an epoch, with 24."""
    numbers = NUMBERS | dict(
        noise_multiplier=2.0, batch_size=64, num_examples=600, iterations=20
    )
    stated = dpadambc.FixedSizeGaussian(**numbers).epsilon(1e-5)
    spent = dpadambc.ShuffledGaussian(**numbers).epsilon(1e-5)
    assert (round(stated, 1), round(spent, 1)) == (1.2, 2.9)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_a22_a_sum_divided_by_the_size_of_its_batch_is_refused(jit):
    noise = dpadambc.add_dp_noise(MECHANISM, key=jax.random.key(0))

    def step(mask):
        fun = dpadambc.clipped_grad(linear, l2_clip_norm=C, normalize_by=jnp.sum(~mask))
        summed = fun(PARAMS, X, is_padding_example=mask)
        return noise.update(summed, noise.init(PARAMS), PARAMS)

    with pytest.raises((TypeError, ValueError), match="normalize_by"):
        jit(step)(NO_PADDING)


@pytest.mark.slow
def test_a22_what_it_did():
    """Negative control: one example moved B times what is said of a sum over B."""
    pair = jnp.stack([X[0], -X[0]]) * 100  # clipped, they are opposite

    def divided_by_size(x):
        return clipped_grad(normalize_by=float(len(x)))(PARAMS, x)

    moved = distance(divided_by_size(pair), divided_by_size(pair[:1]))
    relation = dpadambc.NeighboringRelation.ADD_OR_REMOVE_ONE
    bound = dpadambc.sensitivity(
        C, normalize_by=float(BATCH), neighboring_relation=relation
    )
    assert moved == pytest.approx(BATCH * bound, rel=1e-5)


@pytest.mark.slow
def test_a23_what_it_did():
    """Negative control: a person in k rows moves the sum k times as far."""
    rows = np.resize(100 * X[:1], (6, 8))
    sums = (clipped_grad()(PARAMS, x) for x in (rows, 0 * rows))
    assert distance(*sums) == pytest.approx(6 * C, rel=1e-5)

"""Shared parts of the tests of false epsilons, which are named A1, B1 and so on.

Each shows that a use is an error or harmless. Its negative control shows the damage of
that use without the check.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import dpadambc
from dpadambc import training

C, B, BATCH = 1.0, 1.0, 64
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(BATCH, 8)), jnp.float32)
PARAMS = jnp.zeros(8)
NO_PADDING = jnp.zeros(BATCH, bool)
NUMBERS = dict(l2_clip_norm=C, noise_multiplier=1.0, normalize_by=B)


def mechanism(**changes):
    numbers = NUMBERS | dict(sampling_prob=0.5, iterations=20)
    return dpadambc.PoissonGaussian(**numbers | changes)


MECHANISM = mechanism()
SILENT = mechanism(noise_multiplier=0.0)
both_methods = pytest.mark.parametrize("method", ["factored", "vmap"])


def linear(w, x):
    """Its gradient is the example."""
    return w @ x


def square(w, x):
    return (w @ x - x.sum()) ** 2


def gradients(x=X, method="factored", params=PARAMS):
    fun = dpadambc.per_example_grad(linear, method=method)
    return fun(params, x, is_padding_example=jnp.zeros(len(x), bool))


def clipped_grad(loss=linear, **options):
    options = dict(l2_clip_norm=C, normalize_by=B) | options
    return dpadambc.clipped_grad(loss, **options)


def clipped(grads, params=PARAMS):
    """The arrays of what the clip returns, to look at."""
    clip = dpadambc.clip_per_example(C, normalize_by=B)
    return dpadambc.materialize(clip.update(grads, clip.init(params), params)[0])


def distance(a, b):
    """The L2 distance of two trees, in double precision."""
    a, b = dpadambc.materialize((a, b))
    gaps = jax.tree.map(lambda a, b: np.sum((np.float64(a) - np.float64(b)) ** 2), a, b)
    return float(np.sqrt(sum(jax.tree.leaves(gaps))))


def one_replaced(by):
    return X.at[0].set(jnp.full(8, by))


def fit(optimizer=None, loss_fn=square, data=(X,), mechanism=MECHANISM, **options):
    options = dict(key=jax.random.key(0), target_delta=1e-5) | options
    optimizer = optimizer or dpadambc.adam_bc(0.1, mechanism)
    params = options.pop("params", PARAMS)
    return training.fit(loss_fn, params, data, mechanism, optimizer, **options)


def mesh_of(names, shape):
    size = int(np.prod(shape))
    kinds = (AxisType.Auto,) * len(names)
    return jax.make_mesh(shape, names, axis_types=kinds, devices=jax.devices()[:size])


def forwards_nothing(tx):
    """A wrapper that does not pass on what else it is given."""
    return optax.GradientTransformation(
        tx.init, lambda updates, state, params=None: tx.update(updates, state, params)
    )


def of_fixed_size(**changes):
    numbers = dict(batch_size=8, num_examples=BATCH, iterations=1)
    return dpadambc.FixedSizeGaussian(**NUMBERS | numbers | changes)


def shuffled(batch_size):
    return dpadambc.ShuffledGaussian(
        batch_size=batch_size, num_examples=BATCH, iterations=10, **NUMBERS
    )


# A mechanism, and whether its batches are padded.
PADDED = {
    "poisson": (mechanism(), True),
    "everybody": (mechanism(sampling_prob=1.0), False),
    "truncated": (
        dpadambc.TruncatedPoissonGaussian(
            sampling_prob=0.5,
            truncated_batch_size=40,
            num_examples=BATCH,
            iterations=1,
            **NUMBERS,
        ),
        True,
    ),
    "fixed": (of_fixed_size(), False),
    "correlated": (
        dpadambc.contrib.CorrelatedGaussian(
            noising_coefficients=(1.0, -0.5),
            batches_per_epoch=2,
            iterations=2,
            **NUMBERS,
        ),
        True,
    ),
    "banded": (
        dpadambc.contrib.BandedGaussian(
            strategy_coefficients=(1.0, 0.5),
            sampling_prob=1.0,
            iterations=2,
            **NUMBERS,
        ),
        True,
    ),
    "shuffled by 8": (shuffled(8), False),
    "shuffled by 10": (shuffled(10), True),
}

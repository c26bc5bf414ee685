"""Every stage and optimizer is the same compiled and not, on the device and off it."""

import chex
import jax
import numpy as np
import optax
import pytest
from absl.testing import parameterized

import dpadambc
from tests import common

MECHANISM = common.poisson_gaussian(sampling_prob=1.0, normalize_by=4)
KEY = jax.random.key(0)
LEVEL = MECHANISM.noise_stddev
PARAMS = {"w": np.full((3, 2), 0.5, np.float32), "b": np.ones(2, np.float32)}

PRIVATE = {
    "privatize": dpadambc.privatize(MECHANISM, key=KEY),
    "dp_sgd": dpadambc.dp_sgd(0.1, MECHANISM, key=KEY, momentum=0.9),
    "dp_adam": dpadambc.dp_adam(0.1, MECHANISM, key=KEY),
    "dp_adam_bc": dpadambc.dp_adam_bc(0.1, MECHANISM, key=KEY),
    "dp_adamw": dpadambc.dp_adamw(0.1, MECHANISM, key=KEY),
    "dp_adamw_bc": dpadambc.dp_adamw_bc(0.1, MECHANISM, key=KEY),
    "dp_rms_bc": dpadambc.dp_rms_bc(0.1, MECHANISM, key=KEY),
    "dp2_rmsprop": dpadambc.dp2_rmsprop(
        0.1, MECHANISM, key=KEY, interval=1, preconditioned_clip_norm=1.0
    ),
    "stages": optax.chain(
        dpadambc.clip_per_example(1.0, normalize_by=4),
        dpadambc.add_dp_noise(LEVEL, key=KEY),
        dpadambc.scale_by_adam_bc(LEVEL),
        dpadambc.add_decoupled_weight_decay(0.01),
    ),
}
FULLEST = {"dp_sgd", "dp_adamw_bc"}  # of which the others are parts
OF_PRIVATE_GRADIENTS = {
    "adam_bc": dpadambc.adam_bc(0.1, LEVEL),
    "adamw_bc": dpadambc.adamw_bc(0.1, LEVEL),
    "rms_bc": dpadambc.rms_bc(0.1, LEVEL),
    "round_stochastically": dpadambc.round_stochastically(key=KEY),
}


def random_like(params, *batch):
    rng = np.random.default_rng(0)
    draw = lambda p: rng.normal(size=(*batch, *p.shape)).astype(np.float32)
    return jax.tree.map(draw, params)


def two_steps(update, tx, gradients):
    _, state = update(gradients, tx.init(PARAMS), PARAMS)
    return update(gradients, state, PARAMS)


class Compared(chex.TestCase):
    def assert_as_by_hand(self, tx, fun, gradients):
        expected = two_steps(fun, tx, gradients)
        got = two_steps(self.variant(fun), tx, gradients)
        words = lambda x: (
            jax.random.key_data(x)
            if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
            else x
        )
        got, expected = jax.tree.map(words, (got, expected))
        chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)

    def assert_a_chain_is_as_by_hand(self, name):
        tx = PRIVATE[name]

        def update(gradients, state, params):
            mask = np.zeros(4, bool)
            grads = dpadambc.as_per_example(gradients, is_padding_example=mask)
            return tx.update(grads, state, params)

        self.assert_as_by_hand(tx, update, random_like(PARAMS, 4))


class VariantsTest(Compared):
    @chex.variants(with_jit=True, with_device=True, without_device=True)
    @parameterized.parameters(*sorted(FULLEST))
    def test_a_chain_of_per_example_gradients(self, name):
        self.assert_a_chain_is_as_by_hand(name)

    @chex.variants(with_jit=True, with_device=True, without_device=True)
    @parameterized.parameters(*OF_PRIVATE_GRADIENTS)
    def test_a_transformation_of_private_gradients(self, name):
        tx = OF_PRIVATE_GRADIENTS[name]
        self.assert_as_by_hand(tx, tx.update, random_like(PARAMS))

    @chex.variants(with_jit=True, with_device=True, with_pmap=True)
    @parameterized.parameters("factored", "vmap")
    def test_a_clipped_gradient(self, method):
        loss_fn = lambda p, x: ((x @ p["w"] + p["b"]) ** 2).sum()
        fun = dpadambc.clipped_grad(
            loss_fn, l2_clip_norm=1.0, normalize_by=4, method=method
        )
        x = random_like(np.zeros(3), 4)
        got, expected = self.variant(fun)(PARAMS, x), fun(PARAMS, x)
        chex.assert_trees_all_close(got, expected, rtol=1e-5)


@pytest.mark.slow
class PartsTest(Compared):
    @chex.variants(with_jit=True, with_device=True, without_device=True)
    @parameterized.parameters(*sorted(PRIVATE.keys() - FULLEST))
    def test_a_part_of_a_chain_of_per_example_gradients(self, name):
        self.assert_a_chain_is_as_by_hand(name)

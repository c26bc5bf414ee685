"""The steps of a loop, for epsilon."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

import dpadambc
from dpadambc import contrib, training
from tests import common

PARAMS = {"w": jnp.ones(3), "b": jnp.zeros(())}
ONES = jax.tree.map(jnp.ones_like, PARAMS)
SUMMED = common.summed(ONES)
KEY = jax.random.key(0)
NOISE = dpadambc.add_dp_noise(0.5, key=KEY)
COEFFICIENTS = (1.0, 0.5)
CHAINS = {
    "alone": NOISE,
    "chain": optax.chain(NOISE, optax.adam(0.1)),
    "correlated": contrib.add_correlated_noise(0.5, COEFFICIENTS, key=KEY),
    "banded": contrib.add_banded_noise(0.5, COEFFICIENTS, key=KEY),
    "in parts": optax.multi_transform({"a": NOISE, "b": NOISE}, {"w": "a", "b": "b"}),
    "injected": optax.inject_hyperparams(
        lambda learning_rate: optax.chain(NOISE, optax.sgd(learning_rate))
    )(0.1),
    "not finite": optax.chain(NOISE, optax.apply_if_finite(optax.adam(0.1), 3)),
}


def after(chain, steps, summed=SUMMED):
    state = chain.init(PARAMS)
    for _ in range(steps):
        _, state = chain.update(summed, state, PARAMS)
    return state


@pytest.mark.parametrize("name", CHAINS)
def test_it_counts_the_noise_of_every_step(name):
    each = {key: common.summed(x) for key, x in ONES.items()}
    summed = each if name == "in parts" else SUMMED
    assert dpadambc.steps_taken(after(CHAINS[name], 0)) == 0
    assert dpadambc.steps_taken(after(CHAINS[name], 3, summed)) == 3


def test_it_counts_the_noise_of_every_small_step_before_a_large_one():
    several = optax.MultiSteps(optax.adam(0.1), 4).gradient_transformation()
    assert dpadambc.steps_taken(after(optax.chain(NOISE, several), 9)) == 9


def test_it_takes_the_state_of_a_training():
    mechanism = common.poisson_gaussian(iterations=5, normalize_by=25)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(100, 3)), jnp.float32)

    def stop(progress):
        if progress.iterations == 2:
            raise training.Stop

    result = training.fit(
        lambda w, x: (w @ x - 1) ** 2,
        jnp.zeros(3),
        (x,),
        mechanism,
        optax.sgd(0.1),
        key=training.secret_key(),
        target_delta=1e-5,
        callbacks=stop,
    )
    assert dpadambc.steps_taken(result.state) == 2


def test_it_takes_the_states_of_flax():
    linen = train_state.TrainState.create(
        apply_fn=lambda: None, params=PARAMS, tx=NOISE
    )
    assert dpadambc.steps_taken(linen.apply_gradients(grads=SUMMED)) == 1
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, NOISE, wrt=nnx.Param)
    for _ in range(2):
        optimizer.update(model, common.summed(nnx.state(model, nnx.Param)))
    assert dpadambc.steps_taken(optimizer.opt_state) == 2
    assert dpadambc.steps_taken(optimizer) == 2


def test_several_models_at_once_are_several_runs():
    keys = jax.random.split(KEY, 4)
    start = jax.vmap(lambda key: dpadambc.add_dp_noise(0.5, key=key).init(PARAMS))
    with pytest.raises(ValueError, match="state"):
        dpadambc.steps_taken(start(keys))
    replicas = jax.tree.map(lambda x: jnp.stack([x, x]), after(NOISE, 2))
    assert dpadambc.steps_taken(replicas) == 2


@pytest.mark.guarantee
def test_where_steps_are_not_known_there_is_no_number():
    with pytest.raises(ValueError, match="state"):
        dpadambc.steps_taken(optax.adam(0.1).init(PARAMS))
    with pytest.raises(ValueError, match="state"):
        dpadambc.steps_taken([after(NOISE, 1), after(NOISE, 3)])


@pytest.mark.guarantee
def test_a_loop_that_stops_early_or_goes_on_states_what_it_spent():
    mechanism = dpadambc.PoissonGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        sampling_prob=0.1,
        iterations=10,
        normalize_by=4.0,
    )
    for steps in 2, 20:
        taken = dpadambc.steps_taken(after(mechanism_noise(mechanism), steps))
        spent = mechanism.epsilon(1e-5, iterations=taken)
        assert spent == mechanism.epsilon(1e-5, iterations=steps)
        assert spent != mechanism.epsilon(1e-5)  # what it was planned to spend


def mechanism_noise(mechanism):
    return dpadambc.add_dp_noise(mechanism.noise_stddev, key=training.secret_key())

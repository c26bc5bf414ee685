"""Steps that one state of noise serves have the same noise: that is warned of."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dpadambc
from dpadambc import mechanisms
from tests import common

pytestmark = pytest.mark.guarantee

WARNED = "Expected the state that the step before has returned, got one that"
PARAMS, GRADIENT = {"w": jnp.ones(3)}, {"w": jnp.ones(3)}
MECHANISM = common.poisson_gaussian()
CORRELATED = common.correlated_gaussian()
BANDED = mechanisms.BandedGaussian(
    l2_clip_norm=1.0,
    noise_multiplier=1.0,
    iterations=4,
    normalize_by=4,
    sampling_prob=0.25,
    strategy_coefficients=(1.0, 0.5),
)


@pytest.fixture(params=[MECHANISM, CORRELATED, BANDED], ids=lambda m: type(m).__name__)
def noise(request):
    return request.param.add_noise(key=jax.random.key(1))


def by_hand(noise):
    """A step that is not compiled, of a state."""
    return lambda state: noise.update(GRADIENT, state, PARAMS)


def noise_of(output):
    return np.asarray(output[0]["w"] - GRADIENT["w"])


def test_a_state_that_takes_two_steps_is_warned_of(noise):
    state, step = noise.init(PARAMS), by_hand(noise)
    first = step(state)
    with pytest.warns(UserWarning, match=f"{WARNED} has taken a step before"):
        again = step(state)
    np.testing.assert_array_equal(noise_of(first), noise_of(again))  # what it did


def test_a_state_that_is_closed_over_is_warned_of(noise):
    state = noise.init(PARAMS)
    step = jax.jit(lambda gradient: noise.update(gradient, state, PARAMS))
    with pytest.warns(UserWarning, match=f"{WARNED} is a constant of what is compiled"):
        first = step(GRADIENT)
    np.testing.assert_array_equal(noise_of(first), noise_of(step(GRADIENT)))


def test_a_scan_without_the_state_in_its_carry_is_warned_of(noise):
    state = noise.init(PARAMS)
    body = lambda _, gradient: (None, noise.update(gradient, state, PARAMS)[0])
    several = jax.tree.map(lambda x: jnp.stack([x, x]), GRADIENT)
    with pytest.warns(UserWarning, match=f"{WARNED} is a constant of what is compiled"):
        _, noised = jax.lax.scan(body, None, several)
    np.testing.assert_array_equal(*noised["w"])


def test_a_state_made_anew_in_each_compiled_step_is_warned_of(noise):
    step = jax.jit(lambda g: noise.update(g, noise.init(PARAMS), PARAMS))
    with pytest.warns(UserWarning, match=f"{WARNED} init makes in what is compiled"):
        first = step(GRADIENT)
    np.testing.assert_array_equal(noise_of(first), noise_of(step(GRADIENT)))


def carried_on_by_hand(noise):
    state = noise.init(PARAMS)
    for _ in range(3):
        _, state = noise.update(GRADIENT, state, PARAMS)
    return state


def carried_on_compiled(noise):
    state, step = jax.jit(noise.init)(PARAMS), jax.jit(by_hand(noise))
    for _ in range(3):
        _, state = step(state)
    return state


def carried_on_donated(noise):
    state, step = noise.init(PARAMS), jax.jit(by_hand(noise), donate_argnums=0)
    for _ in range(3):
        _, state = step(state)
    return state


def carried_on_in_an_eager_map(noise):
    """Of copies of a state, as runs on public data are compared."""
    state = jax.tree.map(lambda x: jnp.stack([x, x]), noise.init(PARAMS))
    gradients = jax.tree.map(lambda x: jnp.stack([x, x]), GRADIENT)
    for _ in range(3):
        _, state = jax.vmap(lambda s, g: noise.update(g, s, PARAMS))(state, gradients)
    return jax.tree.map(lambda x: x[0], state)


def carried_on_from_a_file(noise):
    state, rest = jax.tree.flatten(noise.init(PARAMS))
    numbers = [np.asarray(x)[()] if x.dtype == jnp.int32 else x for x in state]
    state = jax.tree.unflatten(rest, numbers)
    for _ in range(3):
        _, state = noise.update(GRADIENT, state, PARAMS)
    return state


def carried_on_in_one_program(noise):
    @jax.jit
    def train(params):
        body = lambda state, _: (by_hand(noise)(state)[1], None)
        return jax.lax.scan(body, noise.init(params), length=3)[0]

    return train(PARAMS)


def carried_on_by_steps_or_not(noise):
    """As `optax.apply_if_finite` and others do."""
    state = noise.init(PARAMS)
    for _ in range(3):
        taken = lambda g, s: noise.update(g, s, PARAMS)
        left = lambda g, s: (jax.tree.map(lambda x: x.astype(jnp.float32), g), s)
        _, state = jax.lax.cond(True, taken, left, GRADIENT, state)
    return state


CARRIED_ON = [
    carried_on_by_hand,
    carried_on_compiled,
    carried_on_donated,
    carried_on_in_an_eager_map,
    carried_on_from_a_file,
    carried_on_in_one_program,
    carried_on_by_steps_or_not,
]


@pytest.mark.parametrize("run", CARRIED_ON)
def test_a_state_that_is_carried_on_is_not(run, noise):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dpadambc.steps_taken(run(noise)) == 3


def test_a_key_that_is_an_argument_is_another_in_each_call():
    def step(key):
        noise = dpadambc.add_dp_noise(1.0, key=key)
        return noise.update(GRADIENT, noise.init(PARAMS), PARAMS)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one, two = map(jax.jit(step), jax.random.split(jax.random.key(3)))
    assert (noise_of(one) != noise_of(two)).all()


def test_nothing_is_said_where_there_is_no_noise():
    none = dpadambc.add_dp_noise(0.0, key=jax.random.key(1))
    state = none.init(PARAMS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            none.update(GRADIENT, state, PARAMS)


def test_a_state_that_a_compiled_step_does_not_return_is_warned_of_when_counted(noise):
    state = noise.init(PARAMS)
    step = jax.jit(lambda state: noise.update(GRADIENT, state, PARAMS)[0])
    assert dpadambc.steps_taken(state) == 0  # before the first, nothing is wrong
    np.testing.assert_array_equal(step(state)["w"], step(state)["w"])
    with pytest.warns(UserWarning, match="got that of init, which counts no step"):
        assert dpadambc.steps_taken(state) == 0


def test_an_optimizer_that_loses_its_state_under_jit_is_warned_of_when_counted():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    chain = optax.chain(MECHANISM.add_noise(key=jax.random.key(2)), optax.sgd(0.1))
    optimizer = nnx.Optimizer(model, chain, wrt=nnx.Param)

    @jax.jit  # not nnx.jit, which returns what has changed
    def train_step(model, optimizer):
        optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model)))
        return model

    train_step(model, optimizer)
    with pytest.warns(UserWarning, match="got that of init, which counts no step"):
        dpadambc.steps_taken(optimizer.opt_state)

"""The noise of runs side by side, and of states that are set back."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from dpadambc import contrib
from tests.attacks import PARAMS, B, C, distance

pytestmark = pytest.mark.guarantee


NOISES = {
    "independent": dpadambc.add_dp_noise,
    "correlated": lambda stddev, key: contrib.add_correlated_noise(
        stddev, (1.0, -0.5), key=key
    ),
    "banded": lambda stddev, key: contrib.add_banded_noise(stddev, (1.0, 0.5), key=key),
}


SEVERAL = jnp.arange(3.0)


CLIPPED = jnp.full(8, 0.1)  # a sum, before the noise
summed = functools.partial(dpadambc.as_clipped_sum, l2_clip_norm=C, normalize_by=B)


def noised_runs(make, key, scale):
    """The noised sums of two steps of one run."""
    tx = make(1.0, key=key)

    def step(state, _):
        noised, state = tx.update(summed(scale * CLIPPED), state, PARAMS)
        return state, noised

    return jax.lax.scan(step, tx.init(PARAMS), length=2)[1]


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
@pytest.mark.parametrize("make", NOISES.values(), ids=NOISES)
def test_a17_runs_side_by_side_with_one_key_are_refused(make, jit):
    run = functools.partial(noised_runs, make)
    with pytest.raises(ValueError, match="key"):
        jit(jax.vmap(run, (None, 0)))(jax.random.key(0), SEVERAL)
    tx = make(1.0, key=jax.random.key(0))
    with pytest.raises(ValueError, match="key"):
        jit(jax.vmap(tx.init))(jnp.ones((3, 4)))


@pytest.mark.slow
@pytest.mark.parametrize("make", NOISES.values(), ids=NOISES)
def test_a17_with_a_key_each_they_are_what_they_are_alone(make):
    keys_of_runs = jax.random.split(jax.random.key(0), 3)
    run = functools.partial(noised_runs, make)
    together = jax.jit(jax.vmap(run))(keys_of_runs, SEVERAL)
    alone = jnp.stack([run(*each) for each in zip(keys_of_runs, SEVERAL, strict=True)])
    chex.assert_trees_all_close(together, alone, atol=1e-5)
    assert distance(together[0], together[1]) > 0.1


@pytest.mark.slow
def test_a17_what_one_key_did():
    """Negative control: two runs of one sum have one noise, and their difference none.

    With a key each they differ by the noise of both.
    """
    noised = lambda seed: noised_runs(dpadambc.add_dp_noise, jax.random.key(seed), 1.0)
    np.testing.assert_array_equal(noised(0), noised(0))
    assert distance(noised(0), noised(1)) > 1


STAGES = {
    name: functools.partial(make, key=jax.random.key(0))
    for name, make in NOISES.items()
}
ZEROS = jnp.zeros(4)


def noise_of_steps(noise, number, state=None):
    """The noise of so many steps, and the state after them."""
    state, drawn = noise.init(ZEROS) if state is None else state, []
    for _ in range(number):
        noised, state = noise.update(summed(ZEROS), state, ZEROS)
        drawn.append(np.asarray(noised))
    return np.stack(drawn), state


@pytest.mark.parametrize("name", STAGES)
def test_a29_a_count_that_is_set_back_is_not_that_of_the_noise(name):
    """As `optax.tree.set` does to all fields of the name, to warm up once more."""
    noise = STAGES[name](0.1)
    chain = optax.chain(noise, optax.adam(optax.linear_schedule(1.0, 0.1, 5)))
    state = chain.init(ZEROS)
    for _ in range(2):
        _, state = chain.update(summed(ZEROS), state, ZEROS)
    restarted = optax.tree.set(state, count=jnp.zeros([], jnp.int32))
    assert restarted[1][0].count == 0 and dpadambc.steps_taken(restarted) == 2
    whole, _ = noise_of_steps(noise, 4)
    rest, _ = noise_of_steps(noise, 2, restarted[0])
    np.testing.assert_array_equal(rest, whole[2:])


@pytest.mark.slow
@pytest.mark.usefixtures("without_nonces")
def test_a29_what_a_count_that_is_set_back_did():
    """Negative control: a level too low."""
    back = lambda state: state._replace(noised_steps=jnp.zeros([], jnp.int32))
    rising = STAGES["independent"](lambda step: 0.1 * (1 + step))
    _, state = noise_of_steps(rising, 3)
    fourth, _ = noise_of_steps(rising, 1, state)
    lower, _ = noise_of_steps(rising, 1, back(state))
    np.testing.assert_allclose(fourth, 4 * lower, rtol=1e-5)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jitted"])
@pytest.mark.parametrize("name", STAGES)
def test_a29_zeros_for_a_state_are_no_key(name, wrap):
    """As one sets moments back: the noise would be that of a key that all know."""
    noise = STAGES[name](0.1)
    _, state = noise_of_steps(noise, 2)
    update = wrap(noise.update)
    assert np.isfinite(update(summed(ZEROS), state, ZEROS)[0]).all()
    lost = optax.tree.zeros_like(state)
    assert np.isnan(update(summed(ZEROS), lost, ZEROS)[0]).all()


def test_a8_complex_updates_are_refused():
    params = jnp.zeros(3, jnp.complex64)
    tx = dpadambc.scale_by_adam_bc(1.0)
    with pytest.raises(TypeError, match="gradients"):
        tx.update(params, tx.init(params), params)
    with pytest.raises(TypeError, match="gradient"):
        summed(params)
    with pytest.raises(TypeError, match="gradient"):
        dpadambc.as_per_example(jnp.full((2, 3), 3 + 4j))

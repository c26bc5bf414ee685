"""The corrected second moment is the clean one, however the noise level moves."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from benchmarks import theory
from dpadambc import RelativeFloor
from tests import common

GRADIENTS = np.array([[1e-4, -3e-4, 5e-5], [2e-4, -1e-4, -5e-5], [1.5e-4, 2e-4, 1e-4]])
START = np.array([0.5, -0.25, 0.125])


def run(tx, gradients, params):
    """The parameters after stepping through the gradients."""
    state = tx.init(params)
    for gradient in gradients:
        updates, state = tx.update(jnp.asarray(gradient), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def test_published_fixture_of_dp_adam_bc(x64):
    """The update of Algorithm 1, computed by hand for three steps."""
    adam_bc = dpadambc.scale_by_adam_bc(
        np.sqrt(2.44140625e-8), b1=0.9, b2=0.999, variance_floor=3e-10
    )
    tx = optax.chain(adam_bc, optax.scale_by_learning_rate(1e-3))
    params, _ = run(tx, GRADIENTS, jnp.asarray(START))
    expected = [0.479204876234, -0.247281534907, 0.120230609109]
    np.testing.assert_allclose(params, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("floor", [0.0, RelativeFloor(1.0)], ids=["zero", "relative"])
def test_no_noise_and_no_floor_is_adam(floor):
    """To four units in the last place, for the order in which XLA divides."""
    ours = dpadambc.scale_by_adam_bc(0.0, variance_floor=floor)
    optaxs = optax.scale_by_adam(eps=0.0)
    params = {"w": jnp.zeros((5, 4)), "b": jnp.zeros(4)}
    states = ours.init(params), optaxs.init(params)
    rng = np.random.default_rng(0)
    for _ in range(50):
        gradient = jax.tree.map(
            lambda p: jnp.asarray(rng.normal(size=p.shape) * 1e-3, jnp.float32), params
        )
        jitted = [
            jax.jit(tx.update)(gradient, state)[0]
            for tx, state in zip((ours, optaxs), states, strict=True)
        ]
        (u, a), (v, b) = (
            tx.update(gradient, state)
            for tx, state in zip((ours, optaxs), states, strict=True)
        )
        states = a, b
        for pair in ((u, v), jitted):
            jax.tree.map(lambda x, y: np.testing.assert_array_max_ulp(x, y, 4), *pair)


@pytest.mark.parametrize("c", [1e-3, 0.1, 100.0])
@pytest.mark.parametrize("relative", [True, False])
def test_scaling_gradient_noise_and_floor_leaves_the_update_unchanged(c, relative):
    """(g, sigma, gamma') to (c g, c sigma, c^2 gamma')."""
    gradients = np.random.default_rng(2).normal(size=(20, 50)).astype(np.float32)

    def last_update(c):
        floor = RelativeFloor(2.0) if relative else 0.3 * c**2
        tx = dpadambc.scale_by_adam_bc(0.8 * c, variance_floor=floor)
        state = tx.init(jnp.zeros(50))
        for g in gradients:
            updates, state = tx.update(jnp.asarray(c * g), state)
        return updates

    np.testing.assert_allclose(last_update(c), last_update(1.0), rtol=2e-3)


def noised_run(noise_stddev, signal, steps, b2=0.99, seed=0):
    """The bias-corrected second moment and tracked variance after noised steps."""
    noise = dpadambc.add_dp_noise(noise_stddev, key=jax.random.key(seed))
    adam_bc = dpadambc.scale_by_adam_bc(noise_stddev, b2=b2)

    def step(states, _):
        noised, noise_state = noise.update(common.summed(signal), states[0])
        _, adam_state = adam_bc.update(noised, states[1])
        return (noise_state, adam_state), None

    init = noise.init(signal), adam_bc.init(signal)
    (_, state), _ = jax.lax.scan(step, init, length=steps)
    correct = lambda x: np.float64(x) / (1 - np.float64(b2) ** steps)
    return jax.tree.map(correct, (state.nu, state.noise_variance))


def score(nu_hat, noise_variance, clean):
    """The mean of v-hat minus Phi-hat, in standard errors from the clean moment."""
    corrected = nu_hat - noise_variance
    return (corrected.mean() - clean) / (corrected.std() / np.sqrt(corrected.size))


LEVELS = {
    "constant": 0.2,
    "drops": lambda count: jnp.where(count < 150, 0.4, 0.1),
    "decays": lambda count: 0.3 * 0.99**count,
    "rises": lambda count: 0.1 + 0.001 * count,
}


@pytest.mark.parametrize("name", LEVELS)
def test_corrected_second_moment_is_the_clean_one(name):
    """Within 4 standard errors, from 40,000 coordinates, with signal 0.05."""
    nu_hat, tracked = noised_run(LEVELS[name], jnp.full(40_000, 0.05), 200)
    assert abs(score(nu_hat, tracked, 0.05**2)) < 4
    # Negative controls: without the correction, and with a level 5 % off.
    assert abs(score(nu_hat, 0.0, 0.05**2)) > 20
    assert abs(score(nu_hat, tracked * 1.05**2, 0.05**2)) > 8
    # And with the level of the last step in the place of the tracked average.
    if name != "constant":
        assert abs(score(nu_hat, float(LEVELS[name](199)) ** 2, 0.05**2)) > 20


def test_each_leaf_is_corrected_by_its_own_level():
    signal = {"quiet": jnp.full(40_000, 0.05), "loud": jnp.full(40_000, 0.05)}
    levels = {"quiet": 0.05, "loud": LEVELS["drops"]}
    nu_hat, tracked = noised_run(levels, signal, 200)
    for name in signal:
        assert abs(score(nu_hat[name], tracked[name], 0.05**2)) < 4
    assert abs(score(nu_hat["quiet"], tracked["loud"], 0.05**2)) > 20


def test_injected_noise_levels_stay_corrected():
    """Setting the hyperparameter by hand in the middle of a run."""
    inject = optax.inject_hyperparams
    noise = inject(dpadambc.add_dp_noise)(0.4, key=jax.random.key(0))
    adam_bc = inject(dpadambc.scale_by_adam_bc)(0.4, b2=0.99)
    signal = jnp.full(40_000, 0.05)
    states = noise.init(signal), adam_bc.init(signal)

    @jax.jit
    def update(states):
        noised, noise_state = noise.update(common.summed(signal), states[0])
        return noise_state, adam_bc.update(noised, states[1])[1]

    for step in range(200):
        for state in states:
            state.hyperparams["noise_stddev"] = jnp.float32(0.4 if step < 150 else 0.1)
        states = update(states)
    unbias = 1 - 0.99**200
    inner = states[1].inner_state
    nu_hat, tracked = np.float64(inner.nu) / unbias, inner.noise_variance / unbias
    assert abs(score(nu_hat, tracked, 0.05**2)) < 4
    assert abs(score(nu_hat, 0.1**2, 0.05**2)) > 20


def test_dp_adam_is_dp_sgd_with_momentum_where_noise_dominates():
    sigma, eta, b1, steps, size = 1.5625e-4, 1e-3, 0.9, 300, 2_000
    rng = np.random.default_rng(0)
    gradients = sigma * rng.normal(size=(steps, size))
    schedule = theory.equivalent_sgdm_schedule(eta, sigma, b1)
    adam = optax.adam(eta, b1=b1, b2=0.9999, eps=0)
    sgdm = optax.sgd(schedule, momentum=b1)
    start = jnp.zeros(size)
    ends = [np.float64(run(tx, gradients, start)[0]) for tx in (adam, sgdm)]
    assert np.corrcoef(*ends)[0, 1] > 0.99
    assert np.std(ends[0]) / np.std(ends[1]) == pytest.approx(1, rel=0.02)
    # Negative control: with signal far above the noise they part.
    loud = gradients + sigma * np.logspace(-1, 3, size)
    ends = [np.float64(run(tx, loud, start)[0]) for tx in (adam, sgdm)]
    assert np.std(ends[0]) / np.std(ends[1]) < 0.1


@pytest.mark.parametrize("steps", [1, 10, *map(common.slow, [100, 800])])
def test_noise_alone_spreads_as_the_floor_assumes_from_the_first_step(steps):
    nu_hat, tracked = noised_run(0.2, jnp.zeros(100_000), steps)
    floor = float(RelativeFloor(1.0).variance(tracked, 0.99, steps))
    # A spread of squares of 100,000 coordinates has a standard error below 0.7 %.
    assert np.std(nu_hat) == pytest.approx(floor, rel=0.03)
    # Negative control: the spread in the limit, which is far less at first.
    if steps < 100:
        assert np.std(nu_hat) > 3 * float(
            RelativeFloor(1.0).variance(tracked, 0.99, 9999)
        )


@pytest.mark.slow
def test_share_at_the_floor_under_noise_alone_is_as_simulated():
    """Published: 46.9 % unclamped at step 40 and 48.2 % at 190, with b2 0.99."""
    for steps, share in [(40, 0.469), (190, 0.482)]:
        nu_hat, tracked = noised_run(0.0096, jnp.zeros(100_000), steps)
        unclamped = np.mean(nu_hat - tracked > 4.3e-9)
        # One standard error is 0.16 %; the published figure has three digits.
        assert unclamped == pytest.approx(share, abs=0.007)


def test_a_dead_coordinate_does_not_move():
    """Adam without eps divides zero by zero."""
    tx = dpadambc.scale_by_adam_bc(0.0)
    updates, _ = tx.update(jnp.array([0.0, 1.0]), tx.init(jnp.zeros(2)))
    assert updates.tolist() == [0.0, pytest.approx(1.0, rel=1e-4)]


def test_refuses_hyperparameters_rounded_to_bfloat16():
    """0.999 in bfloat16 is 1."""
    tx = optax.inject_hyperparams(dpadambc.scale_by_adam_bc, static_args="noise_stddev")
    with pytest.raises(TypeError, match="hyperparam_dtype"):
        tx(0.1).init(jnp.zeros(2, jnp.bfloat16))


@pytest.mark.parametrize(
    "floor", [1e-3, RelativeFloor(0.5)], ids=["number", "relative"]
)
def test_updates_are_those_of_the_equations_when_the_level_moves(floor, x64):
    """Every step, for a tree of levels, against the recursion in NumPy."""
    levels = {"steady": 0.2, "moving": lambda t: 0.5 * 0.8**t}
    tx = dpadambc.scale_by_adam_bc(levels, b1=0.8, b2=0.9, variance_floor=floor)
    rng = np.random.default_rng(0)
    state = tx.init({name: jnp.zeros(200) for name in levels})
    slow = {name: (0.0, 0.0, 0.0) for name in levels}
    for t in range(1, 30):
        gradient = {name: 0.3 * rng.normal(size=200) for name in levels}
        updates, state = tx.update(jax.tree.map(jnp.asarray, gradient), state)
        for name, g in gradient.items():
            sigma = levels[name](t - 1) if callable(levels[name]) else levels[name]
            m, v, phi = slow[name]
            m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
            phi = 0.9 * phi + 0.1 * sigma**2
            slow[name] = m, v, phi
            m_hat, v_hat = m / (1 - 0.8**t), v / (1 - 0.9**t)
            phi_hat = phi / (1 - 0.9**t)
            least = floor
            if isinstance(floor, RelativeFloor):
                settling = (1 + 0.9**t) / (1 - 0.9**t)
                least = 0.5 * phi_hat * np.sqrt(2 * 0.1 / 1.9 * settling)
            expected = m_hat / np.sqrt(np.maximum(v_hat - phi_hat, least))
            np.testing.assert_allclose(updates[name], expected, rtol=1e-9)


@pytest.mark.parametrize("correction", [0.0, 0.5, 1.5])
def test_a_share_of_the_noise_variance_is_subtracted_and_the_floor_stays(correction):
    """In the place of the whole: the floor is in units of all of the noise."""
    gradients = np.random.default_rng(3).normal(size=(30, 200)).astype(np.float32)
    tx = dpadambc.scale_by_adam_bc(0.9, correction=correction)
    _, state = run(tx, gradients, jnp.zeros(200))
    updates, _ = tx.update(jnp.asarray(gradients[0]), state)
    m, v = (np.float64(x) for x in (state.mu, state.nu))
    m, v = 0.9 * m + 0.1 * gradients[0], 0.999 * v + 0.001 * gradients[0] ** 2
    m_hat, v_hat = m / (1 - 0.9**31), v / (1 - 0.999**31)
    floor = float(RelativeFloor(1.0).variance(0.81, 0.999, 31))
    left = np.maximum(v_hat - correction * 0.81, floor)
    np.testing.assert_allclose(updates, m_hat / np.sqrt(left), rtol=1e-3)
    # Negative control: all of it is another update.
    whole = np.maximum(v_hat - 0.81, floor)
    assert np.max(abs(updates * np.sqrt(whole) - m_hat)) > 1e-2


@pytest.mark.parametrize("nesterov", [False, True])
def test_nesterov_is_that_of_optax(nesterov):
    """Without noise and floor: the same updates and the same first moment."""
    ours = dpadambc.scale_by_adam_bc(0.0, variance_floor=0.0, nesterov=nesterov)
    optaxs = optax.scale_by_adam(eps=0.0, nesterov=nesterov)
    gradients = np.random.default_rng(5).normal(size=(20, 50)).astype(np.float32)
    states = [tx.init(jnp.zeros(50)) for tx in (ours, optaxs)]
    for g in gradients:
        (u, a), (v, b) = (
            tx.update(jnp.asarray(g), s)
            for tx, s in zip((ours, optaxs), states, strict=True)
        )
        states = [a, b]
        chex.assert_trees_all_close(u, v, rtol=1e-6)
    chex.assert_trees_all_close((a.mu, a.nu), (b.mu, b.nu), rtol=1e-6, atol=1e-7)


def test_a_first_moment_of_low_precision_decays_as_it_says():
    """It is kept in bfloat16, which has 0.98828 for 0.99, and decays by 0.99."""
    noise = np.random.default_rng(6).normal(size=(600, 1_000))
    gradients = np.float32(noise + np.random.default_rng(7).normal(size=1_000))
    tx = dpadambc.scale_by_adam_bc(0.0, b1=0.99, mu_dtype="bfloat16")
    update = lambda state, g: (tx.update(g, state)[1], None)
    state, _ = jax.lax.scan(update, tx.init(gradients[0]), gradients)
    chex.assert_type([state.mu, state.nu], [jnp.bfloat16, jnp.float32])

    def relative_to_that_of(decay):
        weights = 0.01 * decay ** np.arange(599, -1, -1)
        mu = weights @ np.float64(gradients)
        return np.float64(state.mu) @ mu / (mu @ mu)

    assert relative_to_that_of(0.99) == pytest.approx(1, abs=3e-3)
    # Negative control: the rounded rate is another moment.
    assert relative_to_that_of(0.98828125) > 1.1


def test_refuses_a_dtype_that_optax_took_for_a_schedule():
    inject = optax.inject_hyperparams
    with pytest.raises(TypeError, match="mu_dtype"):
        inject(dpadambc.scale_by_adam_bc)(0.1, mu_dtype=jnp.bfloat16).init(jnp.zeros(2))
    for dtype, static in (("bfloat16", ()), (jnp.bfloat16, "mu_dtype")):
        tx = inject(dpadambc.scale_by_adam_bc, static_args=static)(0.1, mu_dtype=dtype)
        assert tx.init(jnp.zeros(2)).inner_state.mu.dtype == jnp.bfloat16


WRONG = [
    (ValueError, dict(b1=-0.1)),
    (ValueError, dict(b2=1.0)),
    (ValueError, dict(b2=float("nan"))),
    (ValueError, dict(noise_stddev=-1.0)),
    (ValueError, dict(noise_stddev=float("inf"))),
    (ValueError, dict(variance_floor=float("nan"))),
    (ValueError, dict(correction=-0.5)),
    (TypeError, dict(mu_dtype="int8")),
]


@pytest.mark.parametrize(("error", "wrong"), WRONG)
def test_refuses_numbers_out_of_their_range(error, wrong):
    (name,) = wrong
    with pytest.raises(error, match=name):
        dpadambc.scale_by_adam_bc(**dict(noise_stddev=0.1) | wrong)

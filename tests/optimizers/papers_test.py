"""The full optimizers are the papers' updates."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc

GRADIENTS = np.array([[1e-4, -3e-4, 5e-5], [2e-4, -1e-4, -5e-5], [1.5e-4, 2e-4, 1e-4]])
START = np.array([0.5, -0.25, 0.125])
KEY = jax.random.key(0)


def silent(**changed):
    """A mechanism without noise that clips nothing."""
    numbers = dict(
        l2_clip_norm=1e6,
        noise_multiplier=0.0,
        sampling_prob=1.0,
        iterations=3,
        normalize_by=1.0,
    )
    return dpadambc.PoissonGaussian(**{**numbers, **changed})


def end_of(tx, start=START, gradients=GRADIENTS):
    params = jnp.asarray(start)
    state = tx.init(params)
    for gradient in gradients:
        one = dpadambc.as_per_example(jnp.asarray(gradient)[None])
        updates, state = tx.update(one, state, params)
        params = optax.apply_updates(params, updates)
    return np.asarray(params)


def none(*shape):
    """No gradient for any example."""
    return dpadambc.as_per_example(jnp.zeros(shape))


def by_hand(denominator, weight_decay=0.0, learning_rate=1e-3, b1=0.9, b2=0.999):
    """Adam as the papers write it, in NumPy."""
    theta, m, v = START.copy(), np.zeros(3), np.zeros(3)
    for t, g in enumerate(GRADIENTS, 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)
        update = m_hat / denominator(v_hat) + weight_decay * theta
        theta = theta - learning_rate * update
    return theta


def test_dp_adam_is_the_published_fixture(x64):
    found = end_of(dpadambc.dp_adam(1e-3, silent(), key=KEY))
    expected = [0.49705954297, -0.247901793641, 0.123554649305]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-3])
@pytest.mark.parametrize("eps_root", [0.0, 1e-8])
def test_eps_is_outside_and_eps_root_inside_the_root(eps, eps_root, x64):
    tx = dpadambc.dp_adam(1e-3, silent(), key=KEY, eps=eps, eps_root=eps_root)
    expected = by_hand(lambda v: np.sqrt(v + eps_root) + eps)
    np.testing.assert_allclose(end_of(tx), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("second_moment", "shortening"), [(2.44e-8, 0.16), (1e-8, 0.29)]
)
def test_where_the_constant_is_matters(second_moment, shortening):
    """Published: 1e-8 inside the root shortens these steps by 16 % and 29 %."""
    step = lambda inside, outside: 1 / (np.sqrt(second_moment + inside) + outside)
    plain = step(0, 0)
    assert 1 - step(1e-8, 0) / plain == pytest.approx(shortening, abs=0.005)
    assert 1 - step(0, 1e-8) / plain < 1.1e-4


def test_dp_adamw_decays_the_previous_parameters_by_the_learning_rate(x64):
    for eps, eps_root in [(1e-8, 0.0), (0.0, 1e-8)]:
        tx = dpadambc.dp_adamw(
            1e-3, silent(), key=KEY, eps=eps, eps_root=eps_root, weight_decay=0.1
        )
        expected = by_hand(lambda v, r=eps_root, e=eps: np.sqrt(v + r) + e, 0.1)
        np.testing.assert_allclose(end_of(tx), expected, rtol=1e-12)


def test_dp_adamw_bc_without_noise_is_the_floored_rule_with_decay(x64):
    tx = dpadambc.dp_adamw_bc(
        1e-3, silent(), key=KEY, variance_floor=3e-8, weight_decay=0.1
    )
    expected = by_hand(lambda v: np.sqrt(np.maximum(v, 3e-8)), 0.1)
    np.testing.assert_allclose(end_of(tx), expected, rtol=1e-12)


def test_decay_leaves_the_moments_alone(x64):
    """Coupled decay would change what the correction corrects."""
    tx = dpadambc.dp_adamw_bc(1e-3, silent(), key=KEY, weight_decay=0.5)
    plain = dpadambc.dp_adam_bc(1e-3, silent(), key=KEY)
    params = jnp.asarray(START)
    gradient = dpadambc.as_per_example(jnp.asarray(GRADIENTS[:1]))
    states = [t.update(gradient, t.init(params), params)[1] for t in (tx, plain)]
    nus = [optax.tree.get(s, "nu") for s in states]
    np.testing.assert_array_equal(*nus)


def test_dp_sgd_has_no_momentum_unless_asked(x64):
    plain = end_of(dpadambc.dp_sgd(0.1, silent(), key=KEY))
    np.testing.assert_allclose(plain, START - 0.1 * GRADIENTS.sum(0), rtol=1e-14)


def test_momentum_is_without_dampening(x64):
    """b = mu b + g; theta -= eta b."""
    theta, b = START.copy(), np.zeros(3)
    for g in GRADIENTS:
        b = 0.9 * b + g
        theta = theta - 0.1 * b
    found = end_of(dpadambc.dp_sgd(0.1, silent(), key=KEY, momentum=0.9))
    np.testing.assert_allclose(found, theta, rtol=1e-14)


def test_the_chain_written_out_is_the_full_optimizer():
    mechanism = silent(noise_multiplier=1.3, l2_clip_norm=0.01, normalize_by=8.0)
    stages = [
        dpadambc.clip_per_example(
            mechanism.l2_clip_norm, normalize_by=mechanism.normalize_by
        ),
        dpadambc.add_dp_noise(mechanism.noise_stddev, key=KEY),
        dpadambc.scale_by_adam_bc(mechanism.noise_stddev, b1=0.9, b2=0.999),
        dpadambc.add_decoupled_weight_decay(1e-5),
        optax.scale_by_learning_rate(1e-3),
    ]
    full = dpadambc.dp_adamw_bc(1e-3, mechanism, key=KEY, weight_decay=1e-5)
    params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
    gradients = dpadambc.as_per_example(
        jax.tree.map(lambda p: jnp.ones((5, *p.shape)), params)
    )
    written = optax.chain(*stages)
    states = written.init(params), full.init(params)
    for _ in range(3):
        one, state = written.update(gradients, states[0], params)
        two, full_state = full.update(gradients, states[1], params)
        states = state, full_state
        chex.assert_trees_all_equal(one, two)


def test_the_noise_of_a_full_optimizer_is_the_mechanisms():
    mechanism = silent(noise_multiplier=3.0, l2_clip_norm=0.5, normalize_by=10.0)
    tx = dpadambc.dp_sgd(1.0, mechanism, key=KEY)
    params = jnp.zeros(100_000)
    updates, _ = tx.update(none(4, 100_000), tx.init(params), params)
    # The standard error of a standard deviation from n draws is 1 / sqrt(2 n).
    assert np.std(updates) == pytest.approx(0.15, rel=5 / np.sqrt(2e5))
    assert mechanism.noise_stddev == pytest.approx(0.15)


def test_privacy_noise_follows_a_scheduled_mechanism_and_so_does_the_correction():
    schedule = optax.piecewise_constant_schedule(2.0, {5: 0.25})
    mechanism = silent(noise_multiplier=schedule, l2_clip_norm=1.0, iterations=10)
    tx = dpadambc.dp_adam_bc(0.0, mechanism, key=KEY, b2=0.9)
    params = jnp.zeros(50_000)
    state = tx.init(params)
    for _ in range(10):
        _, state = tx.update(none(1, 50_000), state, params)
    nu, tracked = (optax.tree.get(state, n) for n in ("nu", "noise_variance"))
    assert nu.mean() == pytest.approx(float(tracked), rel=0.02)


@pytest.mark.parametrize("bad", [dict(b1=1.5), dict(b2=-0.1), dict(eps=-1.0)])
def test_adam_refuses_numbers_out_of_range(bad):
    for factory in (dpadambc.dp_adam, dpadambc.dp_adamw):
        with pytest.raises(ValueError, match=next(iter(bad))):
            factory(0.1, silent(), key=KEY, **bad)
    with pytest.raises(TypeError, match="mu_dtype"):
        dpadambc.dp_adam(0.1, silent(), key=KEY, mu_dtype=jnp.int8)
    with pytest.raises(ValueError, match="momentum"):
        dpadambc.dp_sgd(0.1, silent(), key=KEY, momentum=-3.0)


def test_a_first_moment_in_low_precision_is_the_same_in_the_plain_optimizer():
    """As the corrected one, nothing subtracted: b1 keeps its digits in both."""
    rng = np.random.default_rng(0)
    gradients = rng.normal(1.0, 1.0, size=(300, 1, 200)).astype(np.float32)
    settings = dict(b1=0.99, mu_dtype="bfloat16")
    plain = dpadambc.dp_adam(0.1, silent(), key=KEY, eps=0.0, **settings)
    control = dpadambc.dp_adam_bc(
        0.1, silent(), key=KEY, variance_floor=0.0, correction=0.0, **settings
    )

    def moments_of(tx, name):
        def step(state, g):
            one = dpadambc.as_per_example(g, is_padding_example=jnp.zeros(1, bool))
            return tx.update(one, state, g[0])[1], None

        state, _ = jax.lax.scan(step, tx.init(jnp.zeros(200)), gradients)
        return optax.tree.get(state, name).mu

    mu, expected = (
        moments_of(tx, name)
        for tx, name in ((plain, "ScaleByAdamState"), (control, "ScaleByAdamBCState"))
    )
    chex.assert_type([mu, expected], jnp.bfloat16)
    # Two programs: where float32 rounds otherwise, bfloat16 may round to a neighbor.
    chex.assert_trees_all_close(mu, expected, rtol=2.0**-6)

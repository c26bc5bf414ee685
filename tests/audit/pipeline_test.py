"""Checks of a whole step: not tested, where they cannot decide."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from dpadambc import audit
from tests import common
from tests.audit import zoo

MECHANISM = common.poisson_gaussian(normalize_by=10)
NOISE = MECHANISM.noise_stddev
X = jax.random.normal(jax.random.key(0), (8, 20))
PARAMS = jnp.zeros(20)


def init(key):
    return key, PARAMS


def clipped(params, x, mask):
    grads = jax.vmap(jax.grad(lambda w, x: jnp.tanh(w @ x)), (None, 0))(params, x)
    norms = jnp.linalg.norm(grads, axis=1)
    weights = jnp.where(jnp.isfinite(norms) & ~mask, jnp.minimum(1, 1 / norms), 0)
    return weights @ jnp.where(jnp.isfinite(grads), grads, 0) / 10


def noised(key, x, level=NOISE):
    return zoo.add(x, zoo.noise_like(key, x, level))


def step(state, x, is_padding_example=None):
    key, params = state
    key, step_key = jax.random.split(key)
    return key, params - noised(step_key, clipped(params, x, is_padding_example))


def pipeline(step=step, **changes):
    own = dict(mechanism=MECHANISM, init=init, step=step, batch=(X,))
    return audit.Pipeline(**own | changes)


def outcomes(**changes):
    report = audit.run(pipeline(**changes))
    return {finding.check: finding.passed for finding in report.findings}


@pytest.mark.slow
def test_a_step_of_plain_jax_passes_as_far_as_it_is_described():
    assert outcomes() == {
        "sensitivity": True,
        "noise": True,
        "state": True,
        "isolation": None,
        "sampling": None,
        "correction": None,
    }


def on_host(state, x, is_padding_example=None):
    return state[0], state[1] - np.asarray(x).sum(0)


def drawing_on_host(state, x, is_padding_example=None):
    noise = np.random.default_rng().normal(size=20).astype(np.float32)
    return state[0], state[1] - clipped(state[1], x, is_padding_example) - NOISE * noise


def asking_the_host(state, x, is_padding_example=None):
    shape = jax.ShapeDtypeStruct((20,), jnp.float32)
    noise = jax.pure_callback(lambda: np.zeros(20, np.float32), shape)
    return state[0], state[1] - clipped(state[1], x, is_padding_example) - noise


@pytest.mark.parametrize("step", [on_host, drawing_on_host, asking_the_host])
def test_a_step_that_jax_cannot_follow_is_not_tested(step):
    assert set(outcomes(step=step).values()) == {None}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_value_that_the_host_gets_is_not_tested(capsys):
    def telling(state, x, is_padding_example=None):
        jax.debug.print("{}", clipped(state[1], x, is_padding_example).sum())
        return step(state, x, is_padding_example)

    finding = audit.state(pipeline(telling))
    assert finding.passed is None and "tells the host" in finding.sentence


def test_a_start_that_cannot_be_traced_is_not_tested():
    start = lambda key: (key, jnp.full(20, float(jax.random.key_data(key)[0])))
    assert audit.state(pipeline(init=start)).passed is None


def in_scan(state, x, is_padding_example=None):
    def body(params, key):
        return params - noised(key, clipped(params, x, is_padding_example)), None

    keys = jax.random.split(state[0], 3)
    return keys[0], jax.lax.scan(body, state[1], keys[1:])[0]


def in_cond(state, x, is_padding_example=None):
    key, step_key = jax.random.split(state[0])
    total = clipped(state[1], x, is_padding_example)
    add, is_added = lambda g: noised(step_key, g), jax.random.bernoulli(key)
    return key, state[1] - jax.lax.cond(is_added, add, jnp.zeros_like, total)


def in_while(state, x, is_padding_example=None):
    total = clipped(state[1], x, is_padding_example)
    body = lambda carry: (carry[0] + 1, carry[1] - noised(state[0], total))
    return state[0], jax.lax.while_loop(lambda c: c[0] < 2, body, (0, state[1]))[1]


@pytest.mark.parametrize(
    ("step", "passed"), [(in_scan, True), (in_cond, True), (in_while, None)]
)
def test_noise_is_found_in_scan_and_cond_but_not_in_loops(step, passed):
    """The length of a loop is unknown."""
    assert audit.state(pipeline(step)).passed is passed


def test_a_branch_that_depends_on_the_data_leaks():
    def branching(state, x, is_padding_example=None):
        key, params = step(state, x, is_padding_example)
        large = clipped(params, x, is_padding_example).sum() > 0
        return key, jax.lax.cond(large, lambda p: 1.01 * p, lambda p: p, params)

    finding = audit.state(pipeline(branching))
    assert finding.passed is False and "[1] is made of the data" in finding.sentence


@pytest.mark.slow
def test_a_step_without_a_mask_is_tried_by_replacement():
    unmasked = lambda state, x: step(state, x, jnp.zeros(len(x), bool))
    numbers = dict(l2_clip_norm=1.0, iterations=10, normalize_by=10)
    mechanism = dpadambc.FixedSizeGaussian(
        **numbers,
        noise_multiplier=MECHANISM.noise_multiplier / 2,
        batch_size=10,
        num_examples=100,
    )
    found = pipeline(unmasked, mechanism=mechanism)
    assert audit.run(found, checks=["sensitivity", "noise", "state"]).passed
    more = common.poisson_gaussian(noise_multiplier=2.5, normalize_by=10)
    too_much = pipeline(unmasked, mechanism=more)
    assert audit.run(too_much, checks=["sensitivity"]).passed is False


def test_noise_on_examples_is_not_the_noise():
    """It is too small for the gradient, and the step has no other."""

    def augmented(state, x, is_padding_example=None):
        key, shift = jax.random.split(state[0])
        x = x + jax.random.normal(shift, x.shape)
        return key, state[1] - clipped(state[1], x, is_padding_example)

    assert audit.state(pipeline(augmented)).passed is False


@pytest.mark.slow
def test_correction_is_checked_where_there_is_one():
    make = lambda level: (
        lambda key: optax.chain(
            dpadambc.add_dp_noise(NOISE, key=key), dpadambc.adam_bc(0.1, level)
        )
    )
    params = jnp.zeros(1_000)
    assert audit.correction(make(NOISE), params, MECHANISM).passed
    wrong = audit.correction(make(NOISE * 0.99), params, MECHANISM)
    assert wrong.passed is False and wrong.figure == pytest.approx(0.02, abs=5e-3)
    control = lambda key: optax.chain(
        dpadambc.privatize(MECHANISM, key=key),
        dpadambc.rms_bc(0.1, MECHANISM, correction=0.0),
    )
    of_control = audit.correction(control, params, MECHANISM)
    assert of_control.passed and "subtracted" not in str(of_control)
    none = lambda key: dpadambc.dp_adam(0.1, MECHANISM, key=key)
    assert audit.correction(none, params, MECHANISM).passed is None


def test_isolation_needs_an_axis_of_examples():
    alone = lambda w, x: jnp.tanh(x @ w)
    assert audit.isolation(alone, PARAMS, (X,)).passed
    sorted_ = lambda w, x: jnp.sort(x @ w + x[:, 0])
    assert audit.isolation(sorted_, PARAMS, (X,)).passed is False
    with pytest.raises(ValueError, match="fun"):
        audit.isolation(lambda w, x: alone(w, x).mean(), PARAMS, (X,))


def test_a_loss_that_the_engine_refuses_is_a_failure():
    """A collective over the examples."""
    loss = lambda w, x: jax.lax.pmean(w @ x, "batch")
    found = pipeline(
        per_example=lambda w, x: jax.vmap(
            lambda x: dpadambc.per_example_grad(loss, return_values=True)(w, x[None])[
                0
            ],
            axis_name="batch",
        )(x),
        params=PARAMS,
    )
    (finding,) = audit.run(found, checks=["isolation"]).findings
    assert finding.passed is False and "one example alone" in finding.sentence


def test_noise_that_is_taken_out_again_is_found():
    def cancelling(state, x, is_padding_example=None):
        key, step_key = jax.random.split(state[0])
        total = clipped(state[1], x, is_padding_example)
        private = noised(step_key, total)
        return key, state[1] - (private - noised(step_key, jnp.zeros(20)))

    finding = audit.state(pipeline(cancelling))
    assert finding.passed is False and "hardly the keys" in finding.sentence


@pytest.mark.slow
@pytest.mark.parametrize("factor", [common.thorough(1.0), 0.5])
def test_each_parameter_is_compared_with_its_own_noise(factor):
    """Ten and more of them: the order of a program is not that of its sorted paths."""
    levels = {f"p{number}": (1.0 + number) * NOISE for number in range(12)}
    levels["p0"] *= factor
    # Each has a share of the bound: the noise of the first decides.
    shares = {n: x / levels["p0"] / 12**0.5 * factor for n, x in levels.items()}

    def step(state, x, is_padding_example=None):
        key, params = state
        key, *keys = jax.random.split(key, 13)
        total = clipped(sum(params.values())[:20], x, is_padding_example)
        grad = jnp.pad(total, (0, 10))
        private = {
            name: noised(own, grad * shares[name], level)
            for (name, level), own in zip(levels.items(), keys, strict=True)
        }
        return key, jax.tree.map(jnp.subtract, params, private)

    init = lambda key: (key, {name: jnp.zeros(30) for name in levels})
    found = pipeline(step, init=init)
    assert audit.run(found, checks=["sensitivity", "noise", "state"]).passed


def adaptive(data_size, state, x, is_padding_example):
    """The bound follows the share that is clipped; the noise stays at the first."""
    (key, params), bound = state
    key, noise_key, share_key = jax.random.split(key, 3)
    mask = is_padding_example
    grads = jax.vmap(jax.grad(lambda w, x: 30 * w @ x), (None, 0))(params, x)
    norms = jnp.linalg.norm(grads, axis=1)
    is_used = jnp.isfinite(norms) & ~mask
    weights = jnp.where(is_used, jnp.minimum(1, bound / norms), 0)
    total = weights @ jnp.where(jnp.isfinite(grads), grads, 0) / 10
    share = jnp.sum(is_used & (norms > bound)) / data_size
    share += 0.1 * jax.random.normal(share_key)
    return (key, params - noised(noise_key, total)), bound * jnp.exp(share - 0.5)


@pytest.mark.slow
def test_a_bound_that_outgrows_its_noise_is_found_with_all_examples():
    """It shrinks where nobody is in the batch."""
    begin = lambda key: (init(key), jnp.ones([]))
    of_all = pipeline(lambda *a, **k: adaptive(8, *a, **k), init=begin)
    (finding,) = audit.run(of_all, checks=["noise"]).findings
    found = {part.check: part.passed for part in finding.parts[-1].parts}
    assert found["sensitivity of later steps"] is False


@pytest.mark.slow
@pytest.mark.parametrize("is_constant", [True, False])
def test_a_bound_that_rises_and_falls_again_is_found_at_its_highest(is_constant):
    rises = optax.cosine_onecycle_schedule(60, peak_value=25.0, div_factor=25.0)
    bound = 1.0 if is_constant else rises
    clip = optax.inject_hyperparams(
        dpadambc.clip_per_example, static_args=("normalize_by",)
    )
    make = lambda key: optax.chain(
        clip(l2_clip_norm=bound, normalize_by=10),
        dpadambc.add_dp_noise(NOISE, key=key),
        optax.sgd(0.1),
    )
    of_chain = audit.Pipeline.of_chain(
        lambda w, x: w @ x, PARAMS, (20 * X,), MECHANISM, make
    )
    (finding,) = audit.run(of_chain, checks=["noise"]).findings
    found = {part.check: part.passed for part in finding.parts[-1].parts}
    assert found["sensitivity of later steps"] is is_constant

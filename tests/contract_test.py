"""Contracts that every public optimizer keeps, one row for each."""

import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from tests import common

MECHANISM = common.poisson_gaussian(
    noise_multiplier=0.5, sampling_prob=0.1, iterations=100, normalize_by=4.0
)
SCHEDULED = common.poisson_gaussian(
    noise_multiplier=optax.linear_schedule(1.0, 0.5, 10),
    sampling_prob=0.1,
    iterations=100,
    normalize_by=4.0,
)

ROWS = {
    "dp_sgd": (dpadambc.dp_sgd, {}),
    "dp_sgd momentum": (dpadambc.dp_sgd, dict(momentum=0.9)),
    "dp_sgd nesterov": (dpadambc.dp_sgd, dict(momentum=0.9, nesterov=True)),
    "dp_adam": (dpadambc.dp_adam, {}),
    "dp_adam eps_root": (dpadambc.dp_adam, dict(eps=0.0, eps_root=1e-8)),
    "dp_adam_bc": (dpadambc.dp_adam_bc, {}),
    "dp_adam_bc absolute": (dpadambc.dp_adam_bc, dict(variance_floor=1e-8)),
    "dp_adam nesterov": (dpadambc.dp_adam, dict(nesterov=True)),
    "dp_adam_bc nesterov": (
        dpadambc.dp_adam_bc,
        dict(nesterov=True, correction=0.5),
    ),
    "dp_adamw": (dpadambc.dp_adamw, dict(weight_decay=0.1)),
    "dp_adamw_bc": (dpadambc.dp_adamw_bc, dict(weight_decay=0.1)),
    "dp_adamw_bc mask": (
        dpadambc.dp_adamw_bc,
        dict(
            weight_decay=0.1, mask=lambda p: jax.tree.map(lambda x: jnp.ndim(x) > 1, p)
        ),
    ),
    "dp2_rmsprop": (
        dpadambc.contrib.dp2_rmsprop,
        dict(interval=1, preconditioned_interval=2, preconditioned_clip_norm=1.0),
    ),
}
BATCH = 6
DTYPES = ["float32", "bfloat16", "float16"]


def make(name, *, learning_rate=0.1, mechanism=MECHANISM, seed=0, **kwargs):
    factory, row = ROWS[name]
    key = jax.random.key(seed)
    return factory(learning_rate, mechanism, key=key, **{**row, **kwargs})


def params_of(dtype=jnp.float32):
    return {"w": jnp.ones((3, 2), dtype), "b": jnp.full((2,), 0.5, dtype)}


def gradients_of(params, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda p: jnp.asarray(rng.normal(size=(BATCH, *p.shape)), p.dtype)
    return per_example(jax.tree.map(draw, params))


def per_example(arrays, size=BATCH):
    """Nothing of them is padding."""
    return dpadambc.as_per_example(arrays, is_padding_example=jnp.zeros(size, bool))


def take_steps(tx, params, steps=3, **kwargs):
    """Parameters and state after some steps."""
    state = tx.init(params)
    for seed in range(steps):
        updates, state = tx.update(gradients_of(params, seed), state, params, **kwargs)
        params = optax.apply_updates(params, updates)
    return params, state


# Of which the other rows are parts: each public optimizer once, with most options.
QUICK = {"dp_sgd nesterov", "dp_adam_bc", "dp_adamw_bc mask", "dp2_rmsprop"}
SLOW = {"dp_adam eps_root", "dp_adamw"}  # parts of these


def _row(name):
    if name in QUICK:
        return name
    return common.slow(name) if name in SLOW else common.thorough(name)


every_row = pytest.mark.parametrize("name", [*map(_row, ROWS)])


def test_every_optimizer_has_a_row_that_is_not_left_to_the_thorough():
    assert {ROWS[name][0] for name in QUICK | SLOW} == {f for f, _ in ROWS.values()}


@every_row
def test_second_call_does_not_recompile(name):
    tx, params = make(name, mechanism=SCHEDULED), params_of()
    step = jax.jit(chex.assert_max_traces(tx.update, n=1))
    state = tx.init(params)
    for seed in range(3):
        updates, state = step(gradients_of(params, seed), state, params)
        params = optax.apply_updates(params, updates)


@every_row
@pytest.mark.parametrize("dtype", DTYPES)
def test_updates_have_the_dtype_of_parameters_and_state_keeps_its_own(name, dtype):
    tx, params = make(name), params_of(dtype)
    state = tx.init(params)
    updates, new_state = tx.update(gradients_of(params), state, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
    for leaf in jax.tree.leaves(new_state):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            assert leaf.dtype == jnp.float32
    chex.assert_tree_all_finite(updates)


@pytest.mark.slow
@every_row
def test_double_precision_stays_double(name, x64):
    params = params_of(jnp.float64)
    after, state = take_steps(make(name), params)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, params)
    assert not any(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state))


@every_row
@pytest.mark.parametrize(
    "dtype", ["float32", common.slow("bfloat16"), common.thorough("float16")]
)
def test_runs_in_scan_and_cond_as_in_a_loop(name, dtype):
    tx, params = make(name, mechanism=SCHEDULED), params_of(dtype)
    batches = jax.tree.map(
        lambda *g: jnp.stack(g), *[gradients_of(params, seed) for seed in range(3)]
    )

    def step(carry, gradients):
        def update(carry):
            params, state = carry
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        return jax.lax.cond(True, update, lambda c: c, carry), None

    (scanned, _), _ = jax.lax.scan(step, (params, tx.init(params)), batches)
    looped, _ = take_steps(tx, params)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    chex.assert_trees_all_close(scanned, looped, rtol=tolerance, atol=tolerance)


@every_row
def test_same_key_same_result_other_key_other_result(name):
    params = params_of()
    one, _ = take_steps(make(name, seed=0), params)
    same, _ = take_steps(make(name, seed=0), params)
    other, _ = take_steps(make(name, seed=1), params)
    chex.assert_trees_all_equal(one, same)
    assert (one["w"] != other["w"]).all()


@every_row
@pytest.mark.usefixtures("without_nonces")
def test_equals_itself_under_inject_hyperparams(name):
    factory, row = ROWS[name]
    static = ("mask",) if "mask" in row else ()
    inject = optax.inject_hyperparams(factory, static_args=static)
    tx = inject(0.1, MECHANISM, key=jax.random.key(0), **row)
    params = params_of()
    injected, state = take_steps(tx, params)
    plain, _ = take_steps(make(name), params)
    # Traced, 1 - b2 is rounded to float32, which is 5e-5 off.
    chex.assert_trees_all_close(injected, plain, rtol=1e-4, atol=1e-5)
    # The learning rate can be set by hand.
    state.hyperparams["learning_rate"] = jnp.float32(0.0)
    updates, _ = tx.update(gradients_of(params), state, params)
    assert not any(leaf.any() for leaf in jax.tree.leaves(updates))


@every_row
def test_double_precision_mode_keeps_float32_parameters_in_scan(name, x64):
    tx, params = make(name), params_of(jnp.float32)
    gradients = gradients_of(params)

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), None

    (after, _), _ = jax.lax.scan(step, (params, tx.init(params)), length=2)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, params)


@pytest.mark.slow
@every_row
def test_injection_can_keep_the_first_key_out_of_the_state(name):
    """Whoever had it could draw all noise again."""
    factory, row = ROWS[name]
    static = ("key", "mask") if "mask" in row else ("key",)
    inject = optax.inject_hyperparams(factory, static_args=static)
    key = jax.random.key(0)
    tx = inject(0.1, MECHANISM, key=key, **row)
    _, state = take_steps(tx, params_of())
    keys = [
        jax.random.key_data(x).tolist()
        for x in jax.tree.leaves(state)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    ]
    assert len(keys) == 1
    assert jax.random.key_data(key).tolist() not in keys


@every_row
def test_takes_python_numbers_for_parameters(name):
    tx, params = make(name), {"w": 1.0}
    gradients = per_example({"w": jnp.ones(BATCH)})
    updates, _ = tx.update(gradients, tx.init(params), params)
    assert jnp.shape(updates["w"]) == ()


@every_row
def test_refuses_a_mask_that_would_be_lost(name):
    params = params_of()
    gradients, mask = gradients_of(params), jnp.ones(BATCH, bool)
    tx = make(name)
    with pytest.raises(
        TypeError, match="as is_padding_example, got is_padding_examples"
    ):
        tx.update(gradients, tx.init(params), params, is_padding_examples=mask)
    expected, _ = tx.update(gradients, tx.init(params), params)
    for other in (mask, jnp.ones(BATCH), np.ones(BATCH, int)):
        found, _ = tx.update(gradients, tx.init(params), params, weights=other)
        chex.assert_trees_all_equal(found, expected)


@every_row
def test_injected_hyperparameters_do_not_recompile(name):
    factory, row = ROWS[name]
    static = ("mask",) if "mask" in row else ()
    inject = optax.inject_hyperparams(factory, static_args=static)
    schedule = optax.linear_schedule(0.1, 0.01, 5)
    tx = inject(schedule, MECHANISM, key=jax.random.key(0), **row)
    params = params_of()
    step, state = jax.jit(chex.assert_max_traces(tx.update, n=1)), tx.init(params)
    for seed in range(3):
        updates, state = step(gradients_of(params, seed), state, params)


@every_row
def test_learning_rate_may_be_a_schedule(name):
    schedule = lambda count: jnp.where(count < 1, 0.1, 0.0)
    params = params_of()
    once, _ = take_steps(make(name, learning_rate=schedule), params, steps=1)
    thrice, _ = take_steps(make(name, learning_rate=schedule), params, steps=3)
    assert (once["w"] != params["w"]).all()
    chex.assert_trees_all_equal(once, thrice)


@every_row
def test_is_refused_for_a_part_of_the_parameters(name):
    """What is masked out would be released as it is; two parts have sqrt(2) C."""
    params = params_of()
    part = optax.masked(make(name), {"w": True, "b": False})
    parts = optax.multi_transform(
        {"kernel": make(name), "bias": make(name)}, {"w": "kernel", "b": "bias"}
    )
    for tx in (part, parts):
        with pytest.raises(
            ValueError, match="Expected all parameters that are trained"
        ):
            tx.init(params)


@pytest.mark.slow
@every_row
def test_accepts_extra_arguments_of_others(name):
    tx, params = make(name), params_of()
    with_extra, _ = take_steps(tx, params, temperature=1.0, something_else="x")
    plain, _ = take_steps(tx, params)
    chex.assert_trees_all_equal(with_extra, plain)


@every_row
def test_padding_reaches_the_clip_through_the_chain(name):
    tx, params = make(name), params_of()
    mask = jnp.arange(BATCH) >= 4
    gradients = gradients_of(params)
    masked, _ = tx.update(gradients, tx.init(params), params, is_padding_example=mask)
    short = jax.tree.map(lambda g: g[:4], gradients)
    cut, _ = tx.update(short, tx.init(params), params)
    chex.assert_trees_all_close(masked, cut, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@every_row
def test_donated_state_can_be_made_again_from_the_same_key(name):
    tx, params = make(name), params_of()
    step = jax.jit(tx.update, donate_argnums=1)
    first, state = step(gradients_of(params), tx.init(params), params)
    step(gradients_of(params), state, params)
    again, _ = step(gradients_of(params), tx.init(params), params)
    chex.assert_trees_all_equal(first, again)


@pytest.mark.slow
@every_row
def test_state_survives_pickling(name):
    tx, params = make(name), params_of()
    _, state = take_steps(tx, params)
    restored = pickle.loads(pickle.dumps(state))
    gradients = gradients_of(params, 9)
    expected, _ = tx.update(gradients, state, params)
    found, _ = tx.update(gradients, restored, params)
    chex.assert_trees_all_equal(found, expected)


@every_row
def test_survives_optax_map_params(name):
    tx, params = make(name), params_of()
    state = tx.init(params)
    doubled = optax.tree.map_params(tx, lambda p: p + 1, state)
    assert jax.tree.structure(doubled) == jax.tree.structure(state)


@every_row
@pytest.mark.parametrize("empty", [True, False], ids=["empty", "all padding"])
def test_a_step_without_examples_is_pure_noise(name, empty):
    """A Poisson batch can be empty."""
    tx, params = make(name), params_of()
    gradients = gradients_of(params)
    if empty:
        gradients = jax.tree.map(lambda g: g[:0], gradients)
    mask = jnp.ones(0 if empty else BATCH, bool)
    updates, _ = tx.update(gradients, tx.init(params), params, is_padding_example=mask)
    chex.assert_tree_all_finite(updates)
    assert updates["w"].all()


@every_row
def test_optax_multi_steps_cannot_add_noise_for_each_part_of_a_batch(name):
    """It would average over examples before they are clipped, and is refused."""
    tx, params = optax.MultiSteps(make(name), 2), params_of()
    with pytest.raises(ValueError, match="averaged over the batch cannot be clipped"):
        tx.update(gradients_of(params), tx.init(params), params)


@every_row
def test_minimises_a_quadratic_without_noise(name):
    quiet = common.poisson_gaussian(
        l2_clip_norm=1e3,
        noise_multiplier=0.0,
        sampling_prob=1.0,
        iterations=1,
        normalize_by=float(BATCH),
    )
    learning_rate = 0.02 if name.startswith(("dp_sgd", "dp_rms")) else 0.05
    tx = make(name, mechanism=quiet, learning_rate=learning_rate)
    # Decay pulls to zero, so the minimum is put there.
    loss_fn = lambda p, x: sum(jnp.sum((leaf * x) ** 2) for leaf in jax.tree.leaves(p))
    grad_fn = dpadambc.per_example_grad(loss_fn)
    params = params_of()
    state, batch = tx.init(params), jnp.ones(BATCH)

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(grad_fn(params, batch), state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.lax.scan(step, (params, state), length=400)
    assert optax.tree.norm(params) < 0.05


@pytest.mark.parametrize(
    "factory",
    [
        dpadambc.dp_sgd,
        dpadambc.dp_adam,
        dpadambc.dp_adam_bc,
        dpadambc.dp_adamw,
        dpadambc.dp_adamw_bc,
    ],
    ids=lambda f: f.__name__,
)
def test_wrong_arguments_are_refused(factory):
    key = jax.random.key(0)
    with pytest.raises(
        TypeError, match="Expected mechanism to be a dpadambc mechanism"
    ):
        factory(0.1, 1.0, key=key)
    with pytest.raises(TypeError, match="got <class .*PoissonGaussian"):
        factory(0.1, dpadambc.PoissonGaussian, key=key)
    with pytest.raises(TypeError, match="key"):
        factory(0.1, MECHANISM)
    with pytest.raises(TypeError, match="Expected key to be a typed JAX key, got 0"):
        factory(0.1, MECHANISM, key=0)


@every_row
@pytest.mark.usefixtures("without_nonces")
def test_state_and_update_are_functions_of_the_noised_gradient_alone(name):
    """Two batches with the same clipped sum leave the same state and update."""
    tx, params = make(name), params_of()
    one = gradients_of(params)
    order = jnp.array([3, 1, 0, 5, 4, 2])
    two = jax.tree.map(lambda g: g[order], one)
    # Batches that differ in their examples but, both far above C, in nothing else.
    scaled = lambda c: per_example(
        jax.tree.map(lambda g: c * g, dpadambc.materialize(one))
    )
    loud, louder = scaled(1e4), scaled(1e6)
    for a, b in [(one, two), (loud, louder)]:
        (u, s), (v, t) = (tx.update(g, tx.init(params), params) for g in (a, b))
        chex.assert_trees_all_close(u, v, rtol=1e-3, atol=1e-5)
        s, t = common.plain((s, t))
        chex.assert_trees_all_close(s, t, rtol=1e-3, atol=1e-6)


@every_row
def test_without_noise_the_state_tracks_only_the_clipped_sum_of_the_batch(name):
    """No leaf of the state has a batch axis, or the norm of an example."""
    tx, params = make(name), params_of()
    _, state = take_steps(tx, params)
    allowed = {(), *(p.shape for p in jax.tree.leaves(params))}
    assert {jnp.shape(leaf) for leaf in jax.tree.leaves(state)} <= allowed

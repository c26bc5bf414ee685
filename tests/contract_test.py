"""The contract of every stage and optimizer: one table, one row a line.

A row is held to the contracts of Optax (structures, dtypes, `jax.jit`, `jax.vmap`,
`optax.inject_hyperparams`, meshes) and, if it takes per-example gradients, to those of
a private optimizer.
"""

import contextlib
import functools
import inspect
import operator
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dpadambc
from dpadambc import contrib
from tests import api_test, common

KEY = jax.random.key(0)
NUMBERS = dict(sampling_prob=0.1, iterations=100, normalize_by=4.0)
MECHANISM = common.poisson_gaussian(noise_multiplier=0.5, **NUMBERS)
SCHEDULE = optax.linear_schedule(1.0, 0.5, 10)
SCHEDULED = common.poisson_gaussian(noise_multiplier=SCHEDULE, **NUMBERS)


class Row(NamedTuple):
    """A factory and its arguments, and how many arrays are in its state."""

    factory: Callable[..., optax.GradientTransformation]
    options: dict[str, Any]
    moments: int = 0  # for each parameter, of its shape
    others: int = 0  # of other shapes


def scaled(mechanism, key, eps):
    inner = dpadambc.privatize(mechanism, key=key)
    return contrib.scale_then_privatize(inner, eps=eps)


def delayed(mechanism, key, interval, preconditioned_clip_norm):
    return contrib.delayed_preconditioner(
        dpadambc.privatize(mechanism, key=key),
        interval=interval,
        l2_clip_norm=1.0,
        preconditioned_clip_norm=preconditioned_clip_norm,
    )


def is_matrix(params):
    return jax.tree.map(lambda p: jnp.ndim(p) > 1, params)


RATE = dict(learning_rate=0.1)
PRIVATE = dict(mechanism=MECHANISM, key=KEY)
CHAIN = RATE | PRIVATE
LEVEL = dict(noise_stddev=MECHANISM.noise_stddev)
NOISE = LEVEL | dict(key=KEY)
CLIP = dict(l2_clip_norm=1.0, normalize_by=4.0)
DECAY = dict(weight_decay=0.1)
MASK = dict(mask=is_matrix)
NESTEROV = dict(momentum=0.9, nesterov=True)
MOVES = dict(mechanism=SCHEDULED, nesterov=True)
PHASES = dict(interval=1, preconditioned_clip_norm=1.0)
FILTER = dict(numerator=(0.1, 0.1), denominator=(1.0, -0.8))
TWO = dict(coefficients=(1.0, -0.5))
BANDS = dict(strategy_coefficients=(1.0, 0.5))
FACTORED = dict(min_dim_size_to_factor=2)

ROWS = {
    "dp_sgd": Row(dpadambc.dp_sgd, CHAIN),
    "dp_sgd nesterov": Row(dpadambc.dp_sgd, CHAIN | NESTEROV, 1),
    "dp_adam": Row(dpadambc.dp_adam, CHAIN, 2),
    "dp_adam_bc": Row(dpadambc.dp_adam_bc, CHAIN, 2),
    "dp_adam_bc scheduled": Row(dpadambc.dp_adam_bc, CHAIN | MOVES, 2),
    "dp_adamw": Row(dpadambc.dp_adamw, CHAIN | DECAY, 2),
    "dp_adamw_bc": Row(dpadambc.dp_adamw_bc, CHAIN | DECAY | MASK, 2),
    "adam_bc": Row(dpadambc.adam_bc, RATE | LEVEL, 2),
    "adamw_bc": Row(dpadambc.adamw_bc, RATE | LEVEL | DECAY, 2),
    "rms_bc": Row(dpadambc.rms_bc, RATE | LEVEL, 1),
    "privatize": Row(dpadambc.privatize, PRIVATE),
    "clip_per_example": Row(dpadambc.clip_per_example, CLIP),
    "add_dp_noise": Row(dpadambc.add_dp_noise, NOISE),
    "scale_by_adam_bc": Row(dpadambc.scale_by_adam_bc, LEVEL, 2),
    "scale_by_rms_bc": Row(dpadambc.scale_by_rms_bc, LEVEL, 1),
    "add_decoupled_weight_decay": Row(dpadambc.add_decoupled_weight_decay, DECAY),
    "round_stochastically": Row(dpadambc.round_stochastically, dict(key=KEY)),
    "contrib.adafactor_bc": Row(contrib.adafactor_bc, RATE | LEVEL, 1),
    "contrib.ademamix_bc": Row(contrib.ademamix_bc, RATE | LEVEL, 3),
    "contrib.dp2_rmsprop": Row(contrib.dp2_rmsprop, CHAIN | PHASES, 2),
    "contrib.delayed_preconditioner": Row(delayed, PRIVATE | PHASES, 2),
    "contrib.scale_then_privatize": Row(scaled, PRIVATE | dict(eps=0.1), 1),
    "contrib.add_correlated_noise": Row(contrib.add_correlated_noise, NOISE | TWO),
    "contrib.add_banded_noise": Row(contrib.add_banded_noise, NOISE | BANDS, 1),
    "contrib.scale_by_adafactor_bc": Row(contrib.scale_by_adafactor_bc, LEVEL, 1),
    "contrib.scale_by_adafactor_bc factored": Row(
        contrib.scale_by_adafactor_bc, LEVEL | FACTORED, 0, 3
    ),
    "contrib.scale_by_ademamix_bc": Row(contrib.scale_by_ademamix_bc, LEVEL, 3),
    "contrib.low_pass": Row(contrib.low_pass, FILTER, 1),
}
OPTIMIZERS = [name for name, row in ROWS.items() if "learning_rate" in row.options]
TAKES_SUMS = [
    "add_dp_noise",
    "contrib.add_correlated_noise",
    "contrib.add_banded_noise",
]
PRIVATE_ROWS = [name for name, row in ROWS.items() if "mechanism" in row.options]
TAKES_EXAMPLES = ["clip_per_example", *PRIVATE_ROWS]
# Arguments that `optax.inject_hyperparams` has to leave as they are.
STATIC = {"mask", "min_dim_size_to_factor"}
# Of these the other rows are parts, or the same chain.
LEADING = {"dp_sgd nesterov", "dp_adam", "dp_adamw_bc"} | {
    *("clip_per_example", "round_stochastically")
}


def dtype_of(name):
    """A dtype in which the row does something."""
    return "bfloat16" if name == "round_stochastically" else "float32"


def rows(names, *values, quick=LEADING, mark=common.slow):
    """A row for each name, slow unless it is one of `quick`."""
    marked = [
        (name, *values) if name in quick else mark(name, *values) for name in names
    ]
    return [x[0] if x == (x[0],) else x for x in marked]


every_row = pytest.mark.parametrize("name", ROWS)
every_private_row = pytest.mark.parametrize("name", PRIVATE_ROWS)


OPENED = optax.stateless(lambda updates, _: common.arrays(updates))


def make(name, key=KEY, wrap=lambda factory: factory, **changes):
    """The transformation of a row; its updates are arrays."""
    factory, options, *_ = ROWS[name]
    options = options | (dict(key=key) if "key" in options else {}) | changes
    tx = wrap(factory)(**options)
    is_clip = name == "clip_per_example"
    return optax.chain(tx, OPENED) if is_clip else tx


def whole(name, key=KEY, **options):
    """From per-example gradients on, with noise."""
    tx = make(name, key, **options)
    if name in TAKES_EXAMPLES:
        return tx
    if name in TAKES_SUMS:
        return optax.chain(dpadambc.clip_per_example(**CLIP), tx)
    return optax.chain(dpadambc.privatize(MECHANISM, key=key), tx)


def injected(factory):
    """With hyperparameters in the state."""
    static = STATIC & inspect.signature(factory).parameters.keys()
    inject = functools.partial(optax.inject_hyperparams, static_args=sorted(static))
    return inject(factory, hyperparam_dtype=jnp.dtype("float32"))


def params_of(dtype="float32"):
    w = jnp.linspace(-1, 1, 32, dtype=dtype).reshape(8, 4)
    return {"w": w, "b": jnp.full(4, 0.5, dtype)}


def loss_fn(params, x):
    return jnp.sum(jnp.tanh(x @ params["w"] + params["b"]) ** 2)


def batch_of(seed, size=16):
    """The last three examples are padding."""
    x = np.random.default_rng(seed).normal(size=(size, 8)).astype(np.float32)
    return x, np.arange(size) >= size - 3


BATCHES = [batch_of(seed) for seed in range(3)]


def stacked(batches):
    return jax.tree.map(lambda *x: jnp.stack(x), *batches)


def stepper(tx, gradient=None):
    """A step of `jax.lax.scan`."""
    gradient = gradient or dpadambc.per_example_grad(loss_fn)

    def step(carry, batch):
        params, state = carry
        x, padding = batch
        gradients = gradient(params, x, is_padding_example=padding)
        updates, state = tx.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), updates

    return step


def start(tx, params):
    return params, tx.init(params)


def take_steps(step, carry, batches=BATCHES):
    for batch in batches:
        carry, _ = step(carry, batch)
    return carry


def traced_once(tx, dtype):
    step = jax.jit(chex.assert_max_traces(stepper(tx), n=1))
    return take_steps(step, start(tx, params_of(dtype)))


@functools.cache
def on_one_device(name, dtype):
    """Parameters and state after the batches, for which a step was traced once."""
    return plain(traced_once(whole(name), dtype))


def plain(tree):
    """On the host, keys as numbers."""
    return jax.tree.map(np.asarray, common.plain(tree))


def assert_close(a, b, dtype="float32", tolerance=1e-4):
    tolerance = tolerance if dtype == "float32" else 2e-2
    chex.assert_trees_all_close(plain(a), plain(b), rtol=tolerance, atol=tolerance)


def test_every_public_transformation_has_a_row():
    kinds = optax.GradientTransformation, optax.GradientTransformationExtraArgs
    public = {
        f
        for module in (dpadambc, contrib)
        for f in (getattr(module, name) for name in api_test.names_of(module))
        if inspect.isfunction(f) and inspect.signature(f).return_annotation in kinds
    }
    # These take another transformation, and are in a row by the functions above.
    public -= {contrib.delayed_preconditioner, contrib.scale_then_privatize}
    assert len(public) > 20
    assert public <= {row.factory for row in ROWS.values()}


# Structures, shapes and dtypes: nothing is computed.

TREES = {
    "array": lambda dtype: jnp.ones((3, 2), dtype),
    "dict": params_of,
    "tuples": lambda dtype: (jnp.ones((3, 2), dtype), (jnp.ones((), dtype), ())),
    "none": lambda dtype: {"w": jnp.ones(2, dtype), "frozen": None},
    "empty": lambda dtype: {},
}
DTYPES = ["float16", "bfloat16", "float32", "float64"]
every_tree_or_dtype = pytest.mark.parametrize(
    ("tree", "dtype"),
    [(tree, "bfloat16") for tree in TREES if tree != "dict"]
    + [("dict", dtype) for dtype in DTYPES],
)


def shapes_of(tree, **options):
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, **options)
    return jax.tree.map(shape, tree)


def kinds(tree):
    """All that has to stay for a compiled program to be used again."""
    is_weak = lambda x: getattr(x, "weak_type", False)  # keys do not say
    return jax.tree.map(lambda x: (x.shape, x.dtype, is_weak(x)), tree)


def sums_of(name, gradient):
    """A gradient, as the row takes it."""
    return dpadambc.as_clipped_sum(gradient, **CLIP) if name in TAKES_SUMS else gradient


def inputs_of(name, params, size=6):
    """Gradients of examples, their clipped sum, or a gradient."""
    if name not in TAKES_EXAMPLES:
        return sums_of(name, jax.tree.map(jnp.ones_like, params))
    arrays = jax.tree.map(lambda p: jnp.ones((size, *p.shape), p.dtype), params)
    return dpadambc.as_per_example(arrays, is_padding_example=jnp.zeros(size, bool))


@every_row
@every_tree_or_dtype
def test_init_needs_shapes_alone(name, tree, dtype):
    with jax.enable_x64(dtype == "float64"):
        init, params = make(name).init, TREES[tree](dtype)
        shapes = shapes_of(params)
        given_shapes, traced = init(shapes), jax.eval_shape(init, shapes)
        expected = kinds(init(params))
    assert kinds(given_shapes) == kinds(traced) == expected


def after_a_step(tx, gradients, params):
    """Updates and state, and the state after a branch that may not be taken."""
    state = tx.init(params)

    def step(params, state, gradients):
        updates, new_state = tx.update(gradients, state, params)
        new_params = optax.apply_updates(params, updates)
        chosen = jax.lax.cond(
            True, lambda: (new_params, new_state), lambda: (params, state)
        )
        return updates, new_state, chosen

    return state, *jax.eval_shape(step, params, state, gradients)


@every_row
@every_tree_or_dtype
def test_updates_are_like_parameters_and_the_state_keeps_its_precision(
    name, tree, dtype
):
    with jax.enable_x64(dtype == "float64"):
        params = TREES[tree](dtype)
        gradients = inputs_of(name, params)
        before, updates, after, _ = after_a_step(make(name), gradients, params)
    assert kinds(after) == kinds(before)
    chex.assert_trees_all_equal_shapes(updates, params)
    if name in OPTIMIZERS:
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
    floats = [
        x for x in jax.tree.leaves(after) if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    at_least = jnp.promote_types(dtype, jnp.float32)
    if name in PRIVATE_ROWS or dtype == "float64":
        assert {x.dtype for x in floats} <= {at_least}
    # No leaf has a batch axis, or the norm of an example.
    if not ROWS[name].others:
        shapes = {(), *(p.shape for p in jax.tree.leaves(params))}
        assert {x.shape for x in floats} <= shapes


def test_state_that_does_not_stay_is_seen():
    """Negative control: moments in bfloat16, of a gradient in float32."""
    params = params_of("bfloat16")
    tx = optax.chain(make("privatize"), optax.trace(0.9))
    with pytest.raises(TypeError, match="cond"):
        after_a_step(tx, inputs_of("privatize", params), params)


@every_row
def test_double_precision_mode_keeps_float32_parameters(name, x64):
    tx, params = make(name), params_of(jnp.float32)
    before, updates, after, _ = after_a_step(tx, inputs_of(name, params), params)
    assert kinds(after) == kinds(before)
    applied = jax.eval_shape(optax.apply_updates, params, updates)
    chex.assert_trees_all_equal_shapes_and_dtypes(applied, params)


@every_row
def test_map_params_finds_the_moments(name):
    tx, params = make(name), params_of()
    found = optax.tree.map_params(
        tx, lambda x: "moment", tx.init(params), transform_non_params=lambda x: "other"
    )
    number = jax.tree.leaves(found).count("moment")
    row = ROWS[name]
    assert number == row.moments * len(jax.tree.leaves(params)) + row.others


# Numbers, on one device.


@pytest.mark.parametrize("name", rows(ROWS, quick=["dp_adamw_bc"]))
@pytest.mark.usefixtures("without_nonces")
def test_scanned_and_vmapped_over_keys_is_each_key_by_itself(name):
    dtype = dtype_of(name)

    def run(key):
        tx = whole(name, key)
        step, carry = stepper(tx), start(tx, params_of(dtype))
        carry, _ = jax.lax.scan(step, carry, stacked(BATCHES))
        return optax.tree.unwrap_random_key_data(carry)

    together = jax.jit(jax.vmap(run))(jnp.stack([jax.random.key(1), KEY]))
    other, one = (jax.tree.map(operator.itemgetter(i), together) for i in range(2))
    assert_close(one, on_one_device(name, dtype), dtype)
    # Negative control: another key is another run, where there is noise.
    gap = jnp.abs(one[0]["w"] - other[0]["w"]).max()
    assert gap > 0.02 if name != "clip_per_example" else gap == 0


@pytest.mark.parametrize(
    ("name", "dtype"),
    [x for name in ROWS for x in rows([name], dtype_of(name))]
    + [common.thorough(name, "bfloat16") for name in ROWS],
)
@pytest.mark.usefixtures("without_nonces")
def test_steps_compile_once_and_are_the_same_with_hyperparameters_injected(name, dtype):
    tx = whole(name, wrap=injected)
    params, state = traced_once(tx, dtype)
    expected, _ = on_one_device(name, dtype)
    # Traced, 1 - b2 is rounded to float32, which is 5e-5 off.
    assert_close(params, expected, dtype, tolerance=1e-3)
    if name in OPTIMIZERS:
        state = optax.tree.set(state, learning_rate=jnp.float32(0.0))
        _, updates = stepper(tx)((params, state), BATCHES[0])
        assert not any(leaf.any() for leaf in jax.tree.leaves(updates))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_take_schedules_and_the_arguments_of_others(name):
    params, tx = params_of(), make(name)
    gradients = inputs_of(name, params)
    schedule = lambda count: jnp.where(count < 1, 0.1, 0.0)
    scheduled = make(name, learning_rate=schedule)
    others = dict(step_of_another=1, something_else="x")
    updates, state = scheduled.update(
        gradients, scheduled.init(params), params, **others
    )
    expected, _ = tx.update(gradients, tx.init(params), params)
    chex.assert_trees_all_close(updates, expected, rtol=1e-6)
    updates, _ = scheduled.update(gradients, state, params)
    assert not any(leaf.any() for leaf in jax.tree.leaves(updates))


@pytest.mark.parametrize(
    "name", [n for n in ROWS if n not in {*TAKES_EXAMPLES, *TAKES_SUMS}]
)
def test_behind_the_noise_a_part_is_as_the_whole(name):
    """`optax.masked` and `optax.multi_transform` work on what is private already."""
    params, labels = params_of(), {"w": "kernel", "b": "bias"}
    gradients = jax.tree.map(lambda p: p + 0.1, params)
    parts = {label: make(name) for label in labels.values()}
    splits = optax.multi_transform(parts, labels)
    masked = optax.masked(make(name), {"w": True, "b": False})
    one, two, all_of_it = (
        tx.update(gradients, tx.init(params), params)[0]
        for tx in (splits, masked, make(name))
    )
    if name != "round_stochastically":  # whose draws are of the whole tree
        assert_close(one, all_of_it)
        assert_close(two["w"], all_of_it["w"])
    np.testing.assert_array_equal(two["b"], gradients["b"])


# On a mesh.

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
SPECS = {"w": P(None, "model"), "b": P("model")}
COMPILED = []


def _count(event, *_, **__):
    if event.endswith("backend_compile_duration"):
        COMPILED.append(event)


jax.monitoring.register_event_duration_secs_listener(_count)


@contextlib.contextmanager
def on_mesh(kind, dtype="float32", enter=True):
    """Parameters split over features, batches over examples."""
    names, axis_types = ("data", "model"), (KINDS[kind],) * 2
    mesh = jax.make_mesh((4, 2), names, axis_types=axis_types)
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    with jax.set_mesh(mesh) if enter else contextlib.nullcontext():
        params = jax.tree.map(put, params_of(dtype), SPECS)
        yield params, jax.tree.map(lambda x: put(x, P("data")), BATCHES)


def compilations(step, carry, batches):
    """How many each step needs, and the last carry."""
    counts = []
    for batch in batches:
        before = len(COMPILED)
        carry, _ = step(carry, batch)
        counts.append(len(COMPILED) - before)
    return counts, carry


@functools.cache
def compilations_of_adam(kind, enter):
    def gradient(params, x, is_padding_example):
        return jax.grad(lambda p: jax.vmap(loss_fn, (None, 0))(p, x).mean())(params)

    with on_mesh(kind, enter=enter) as (params, batches):
        tx = optax.adam(0.1)
        step = jax.jit(stepper(tx, gradient))
        return compilations(step, start(tx, params), batches)[0]


def types(tree):
    """With the sharding, where axes are Explicit."""
    return jax.tree.map(jax.typeof, tree)


@pytest.fixture
def without_cached_results(each_array_is_drawn_alone):
    on_one_device.cache_clear()
    yield
    on_one_device.cache_clear()


@pytest.mark.parametrize(
    ("name", "kind", "enter"),
    [
        x
        for kind in KINDS
        for x in rows(ROWS, kind, True, quick=(), mark=common.thorough)
    ]
    + [common.slow(name, kind, True) for name in sorted(LEADING) for kind in KINDS]
    + [("dp_adamw_bc", kind, False) for kind in KINDS],
)
@pytest.mark.usefixtures("without_nonces", "without_cached_results")
def test_steps_on_a_mesh_are_those_of_one_device(name, kind, enter):
    dtype = dtype_of(name)
    with on_mesh(kind, dtype, enter) as (params, batches):
        tx = whole(name)
        step, begin = stepper(tx), start(tx, params)
        counts, carry = compilations(jax.jit(step), begin, batches)
        if enter:
            assert types(carry) == types(begin)
            scan = functools.partial(jax.lax.scan, step)
            scanned, _ = jax.jit(scan)(begin, stacked(batches))
            assert types(scanned) == types(begin)
            assert_close(scanned, on_one_device(name, dtype), dtype)
    assert counts == compilations_of_adam(kind, enter)
    assert_close(carry, on_one_device(name, dtype), dtype)


@pytest.mark.parametrize(
    "name",
    rows(sorted(LEADING), quick=["dp_adamw_bc"])
    # JAX compiles the loop of correlated noise over earlier draws anew.
    + [
        common.thorough(n)
        for n in sorted(ROWS.keys() - LEADING)
        if "correlated" not in n
    ],
)
def test_steps_that_are_not_jitted_compile_once(name):
    tx = whole(name)
    batches = [batch_of(i) for i in range(4)]
    counts, _ = compilations(stepper(tx), start(tx, params_of()), batches)
    assert counts[2:] == [0, 0], counts


def test_the_count_sees_another_compilation():
    """Negative control: the batch grows."""
    tx = whole("dp_sgd")
    step, carry = jax.jit(stepper(tx)), start(tx, params_of())
    counts, _ = compilations(step, carry, [batch_of(0), batch_of(1), batch_of(1, 32)])
    assert counts[0] and not counts[1] and counts[2]


def moments(state):
    """The arrays in it that are split, by shape, and their number."""
    is_split = lambda x: x.ndim and x.dtype != jnp.uint32  # the words of a key
    leaves = [*filter(is_split, jax.tree.leaves(state))]
    return {(x.shape, x.sharding) for x in leaves}, len(leaves)


INITS = {
    "arrays": lambda init, params: init(params),
    "jitted": lambda init, params: jax.jit(init)(params),
    "shapes": lambda init, params: init(
        jax.tree.map(lambda x: shapes_of(x, sharding=x.sharding), params)
    ),
    "traced": jax.eval_shape,
}


@pytest.mark.parametrize(
    "name",
    common.rest_slow((name for name, row in ROWS.items() if row.moments), quick=8),
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", common.slow("bfloat16")])
def test_moments_begin_where_those_of_adam_do(name, kind, dtype):
    for how, given in INITS.items():
        with on_mesh(kind, dtype) as (params, _):
            found, number = moments(given(make(name).init, params))
            expected, _ = moments(given(optax.adam(0.1).init, params))
        assert found == expected and number == 2 * ROWS[name].moments, how
        if how in ("arrays", "shapes"):
            specs = {shape: sharding.spec for shape, sharding in found}
            assert specs == {(8, 4): SPECS["w"], (4,): SPECS["b"]}


@pytest.mark.slow
@every_row
@pytest.mark.parametrize("dtype", ["float32", common.thorough("bfloat16")])
def test_explicit_types_are_the_same_by_hand_and_traced(name, dtype):
    with on_mesh("explicit", dtype) as (params, _):
        tx = make(name)
        state, gradients = tx.init(params), sums_of(name, params)
        if name in TAKES_EXAMPLES:
            each = jax.tree.map(lambda p: jnp.stack([p] * 4), params)
            padding = jnp.zeros(4, bool)
            gradients = dpadambc.as_per_example(each, is_padding_example=padding)
        updates, after = tx.update(gradients, state, params)
        traced = jax.eval_shape(tx.update, gradients, state, params)
        assert types(jax.jit(tx.init)(params)) == types(state) == types(after)
    assert types((updates, after)) == types(traced)
    assert jax.tree.map(lambda x: x.sharding.spec, updates) == SPECS


# Private optimizers: rows that take per-example gradients and add noise.

SIZE = 6


def per_example(arrays):
    """Nothing of them is padding."""
    size = len(jax.tree.leaves(arrays)[0])
    return dpadambc.as_per_example(arrays, is_padding_example=jnp.zeros(size, bool))


def arrays_of(params, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda p: jnp.asarray(rng.normal(size=(SIZE, *p.shape)), p.dtype)
    return jax.tree.map(draw, params)


def first_step(name, gradients, params=None, **extra_args):
    params, tx = params_of() if params is None else params, make(name)
    return tx.update(gradients, tx.init(params), params, **extra_args)


@every_private_row
def test_takes_python_numbers_for_parameters(name):
    updates, _ = first_step(name, per_example({"w": jnp.ones(SIZE)}), {"w": 1.0})
    assert jnp.shape(updates["w"]) == ()


@every_private_row
def test_a_mask_under_another_name_is_refused(name):
    gradients, mask = per_example(arrays_of(params_of())), jnp.ones(SIZE, bool)
    with pytest.raises(TypeError, match="is_padding_example"):
        first_step(name, gradients, is_padding_examples=mask)
    # Near misses: arguments of others that are as long as the batch.
    expected = first_step(name, gradients)[0]
    for other in (mask, np.ones(SIZE, int)):
        found, _ = first_step(name, gradients, weights=other)
        chex.assert_trees_all_equal(found, expected)


@every_private_row
def test_is_refused_for_a_part_of_the_parameters(name):
    """A part left out would be released without noise; two parts have sqrt(2) C."""
    part = optax.masked(make(name), {"w": True, "b": False})
    both = {"kernel": make(name), "bias": make(name)}
    parts = optax.multi_transform(both, {"w": "kernel", "b": "bias"})
    for tx in (part, parts):
        with pytest.raises(ValueError, match="params"):
            tx.init(params_of())


@every_private_row
def test_the_average_of_several_batches_is_refused(name):
    """`optax.MultiSteps` would average over examples before they are clipped."""
    params, tx = params_of(), optax.MultiSteps(make(name), 2)
    with pytest.raises(TypeError, match="gradient"):
        tx.update(per_example(arrays_of(params)), tx.init(params), params)


@every_private_row
def test_padding_reaches_the_clip_through_the_chain(name):
    arrays, mask = arrays_of(params_of()), jnp.arange(SIZE) >= 4
    masked, _ = first_step(name, per_example(arrays), is_padding_example=mask)
    cut, _ = first_step(name, per_example(jax.tree.map(lambda g: g[:4], arrays)))
    chex.assert_trees_all_close(masked, cut, rtol=1e-5, atol=1e-6)


@every_private_row
@pytest.mark.parametrize("size", [0, SIZE], ids=["empty", "all padding"])
def test_a_step_without_examples_is_pure_noise(name, size):
    gradients = per_example(jax.tree.map(lambda g: g[:size], arrays_of(params_of())))
    mask = jnp.ones(size, bool)
    updates, _ = first_step(name, gradients, is_padding_example=mask)
    chex.assert_tree_all_finite(updates)
    assert updates["w"].all()


@every_private_row
@pytest.mark.usefixtures("without_nonces")
def test_state_and_update_are_functions_of_the_noised_gradient_alone(name):
    """Two batches with the same clipped sum leave the same state and update."""
    arrays, order = arrays_of(params_of()), jnp.array([3, 1, 0, 5, 4, 2])
    batch = lambda fun: per_example(jax.tree.map(fun, arrays))
    pairs = [
        (batch(lambda g: g), batch(lambda g: g[order])),
        # Both far above C, the examples differ in nothing that is left.
        (batch(lambda g: 1e4 * g), batch(lambda g: 1e6 * g)),
    ]
    for pair in pairs:
        (one, state), (two, other) = (first_step(name, batch) for batch in pair)
        chex.assert_trees_all_close(one, two, rtol=1e-3, atol=1e-5)
        state, other = common.plain((state, other))
        chex.assert_trees_all_close(state, other, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
@every_private_row
def test_the_first_key_can_be_kept_out_of_the_state(name):
    """Whoever had it could draw all noise again."""
    static = STATIC & inspect.signature(ROWS[name].factory).parameters.keys()
    wrap = lambda f: optax.inject_hyperparams(f, static_args=[*static, "key"])
    tx, params = make(name, wrap=wrap), params_of()
    _, state = tx.update(per_example(arrays_of(params)), tx.init(params), params)
    words = [x for x in jax.tree.leaves(state) if x.dtype == jnp.uint32]
    assert words and all((x != jax.random.key_data(KEY)).any() for x in words)


@pytest.mark.slow
@every_private_row
def test_a_state_survives_pickling_and_is_made_again_after_donation(name):
    tx, params = make(name), params_of()
    gradients = per_example(arrays_of(params))
    step = jax.jit(tx.update, donate_argnums=1)
    first, state = step(gradients, tx.init(params), params)
    restored = pickle.loads(pickle.dumps(state))
    expected, found = (step(gradients, s, params)[0] for s in (state, restored))
    chex.assert_trees_all_equal(found, expected)
    again, _ = step(gradients, tx.init(params), params)
    chex.assert_trees_all_equal(first, again)


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n in PRIVATE_ROWS])
def test_minimizes_a_quadratic_without_noise(name):
    quiet = common.poisson_gaussian(
        l2_clip_norm=1e3,
        noise_multiplier=0.0,
        sampling_prob=1.0,
        iterations=1,
        normalize_by=float(SIZE),
    )
    rate = 0.02 if "sgd" in name else 0.05
    tx = make(name, mechanism=quiet, learning_rate=rate)
    # Decay pulls to zero, so the minimum is put there.
    loss_fn = lambda p, x: sum(jnp.sum((leaf * x) ** 2) for leaf in jax.tree.leaves(p))
    step = stepper(tx, dpadambc.per_example_grad(loss_fn))
    batch = jnp.ones(SIZE), jnp.zeros(SIZE, bool)
    params = {"w": jnp.ones((3, 2)), "b": jnp.full(2, 0.5)}
    run = lambda carry: jax.lax.scan(lambda c, _: step(c, batch), carry, length=400)
    (params, _), _ = jax.jit(run)(start(tx, params))
    assert optax.tree.norm(params) < 0.05


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n in PRIVATE_ROWS])
def test_wrong_arguments_are_refused(name):
    factory = ROWS[name].factory
    options = {k: v for k, v in ROWS[name].options.items() if k not in CHAIN}
    for mechanism in (1.0, dpadambc.PoissonGaussian):
        with pytest.raises(TypeError, match="mechanism"):
            factory(0.1, mechanism, key=KEY, **options)
    with pytest.raises(TypeError, match="key"):
        factory(0.1, MECHANISM, **options)
    with pytest.raises(TypeError, match="key"):
        factory(0.1, MECHANISM, key=0, **options)

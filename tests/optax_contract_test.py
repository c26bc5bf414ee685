"""What Optax asks of its optimizers, asked of ours, and theirs behind our noise."""

import contextlib
import functools
import inspect
import operator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dpadambc
from dpadambc import contrib, optimizers, transforms
from tests import common

KEY = jax.random.key(0)
MECHANISM = common.poisson_gaussian(
    noise_multiplier=0.5, sampling_prob=0.1, iterations=100, normalize_by=4.0
)
PRIVATE = dict(mechanism=MECHANISM, key=KEY)
LEVEL = dict(noise_stddev=MECHANISM.noise_stddev)
RATE = dict(learning_rate=0.1)
PHASES = dict(interval=1, preconditioned_clip_norm=1.0)


def scale_then_privatize(mechanism, key, eps):
    inner = dpadambc.privatize(mechanism, key=key)
    return dpadambc.contrib.scale_then_privatize(inner, eps=eps)


ROWS = {
    "dp_sgd": (dpadambc.dp_sgd, RATE | PRIVATE),
    "dp_sgd momentum": (dpadambc.dp_sgd, RATE | PRIVATE | dict(momentum=0.9)),
    "dp_adam": (dpadambc.dp_adam, RATE | PRIVATE),
    "dp_adam_bc": (dpadambc.dp_adam_bc, RATE | PRIVATE),
    "dp_adamw": (dpadambc.dp_adamw, RATE | PRIVATE | dict(weight_decay=0.1)),
    "dp_adamw_bc": (dpadambc.dp_adamw_bc, RATE | PRIVATE | dict(weight_decay=0.1)),
    "dp2_rmsprop": (dpadambc.contrib.dp2_rmsprop, RATE | PRIVATE | PHASES),
    "adam_bc": (dpadambc.adam_bc, RATE | LEVEL),
    "adamw_bc": (dpadambc.adamw_bc, RATE | LEVEL | dict(weight_decay=0.1)),
    "rms_bc": (dpadambc.rms_bc, RATE | LEVEL),
    "contrib.ademamix_bc": (contrib.ademamix_bc, RATE | LEVEL),
    "contrib.adafactor_bc": (contrib.adafactor_bc, RATE | LEVEL),
    "privatize": (dpadambc.privatize, PRIVATE),
    "contrib.scale_then_privatize": (scale_then_privatize, PRIVATE | dict(eps=0.1)),
    "clip_per_example": (
        dpadambc.clip_per_example,
        dict(l2_clip_norm=1.0, normalize_by=4.0),
    ),
    "add_dp_noise": (dpadambc.add_dp_noise, LEVEL | dict(key=KEY)),
    "contrib.add_correlated_noise": (
        contrib.add_correlated_noise,
        LEVEL | dict(key=KEY, coefficients=(1.0, -0.5)),
    ),
    "contrib.add_banded_noise": (
        contrib.add_banded_noise,
        LEVEL | dict(key=KEY, strategy_coefficients=(1.0, 0.5)),
    ),
    "scale_by_adam_bc": (dpadambc.scale_by_adam_bc, LEVEL),
    "scale_by_rms_bc": (dpadambc.scale_by_rms_bc, LEVEL),
    "contrib.scale_by_ademamix_bc": (contrib.scale_by_ademamix_bc, LEVEL),
    "contrib.scale_by_adafactor_bc": (contrib.scale_by_adafactor_bc, LEVEL),
    "contrib.scale_by_adafactor_bc factored": (
        contrib.scale_by_adafactor_bc,
        LEVEL | dict(min_dim_size_to_factor=2),
    ),
    "contrib.low_pass": (
        contrib.low_pass,
        dict(numerator=(0.1, 0.1), denominator=(1.0, -0.8)),
    ),
    "add_decoupled_weight_decay": (
        dpadambc.add_decoupled_weight_decay,
        dict(weight_decay=0.1),
    ),
    "round_stochastically": (dpadambc.round_stochastically, dict(key=KEY)),
}
# How many arrays of the state there are for each parameter.
MOMENTS = {
    # Of two bands: the noise of one earlier step.
    "contrib.add_banded_noise": 1,
    "dp_sgd momentum": 1,
    "dp_adam": 2,
    "dp_adam_bc": 2,
    "dp_adamw": 2,
    "dp_adamw_bc": 2,
    "dp2_rmsprop": 2,
    "adam_bc": 2,
    "adamw_bc": 2,
    "rms_bc": 1,
    "contrib.scale_then_privatize": 1,
    "scale_by_adam_bc": 2,
    "scale_by_rms_bc": 1,
    "contrib.ademamix_bc": 3,
    "contrib.scale_by_ademamix_bc": 3,
    "contrib.adafactor_bc": 1,
    "contrib.scale_by_adafactor_bc": 1,
    "contrib.low_pass": 1,
}
# How many arrays there are of other shapes than the parameters'.
FACTORED = {"contrib.scale_by_adafactor_bc factored": 3}
IS_FULL = {name for name, (_, kwargs) in ROWS.items() if "learning_rate" in kwargs}
TAKES_EXAMPLES = {"clip_per_example"} | {
    name for name, (_, kwargs) in ROWS.items() if "mechanism" in kwargs
}
TAKES_SUMS = {
    "add_dp_noise",
    "contrib.add_correlated_noise",
    "contrib.add_banded_noise",
}

# Of which the others are parts, or the same chain.
LEADING = {
    "dp_sgd momentum",
    "dp_adam",
    "dp_adamw_bc",
    "clip_per_example",
    "round_stochastically",
}


def slow_unless(is_quick, *values):
    return pytest.param(*values, marks=() if is_quick else pytest.mark.slow)


def dtype_of(name):
    """In which it does something."""
    return "bfloat16" if name == "round_stochastically" else "float32"


every_row = pytest.mark.parametrize("name", ROWS)
leading_rows = pytest.mark.parametrize(
    "name", [slow_unless(name in LEADING, name) for name in ROWS]
)
every_row_and_dtype = pytest.mark.parametrize(
    ("name", "dtype"),
    [
        slow_unless(name in LEADING, name, dtype)
        if dtype == dtype_of(name)
        else common.thorough(name, dtype)
        for name in ROWS
        for dtype in ("float32", "bfloat16")
    ],
)
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
every_kind = pytest.mark.parametrize("kind", KINDS)


OPENED = optax.stateless(lambda updates, params: dpadambc.materialize(updates))


def make(name, key=KEY, wrap=lambda factory: factory):
    """Its updates are arrays."""
    factory, kwargs = ROWS[name]
    tx = wrap(factory)(**kwargs | (dict(key=key) if "key" in kwargs else {}))
    return optax.chain(tx, OPENED) if name == "clip_per_example" else tx


def whole(name, key=KEY, **options):
    """From per-example gradients on, with noise."""
    tx = make(name, key, **options)
    if name in TAKES_EXAMPLES:
        return tx
    if name in TAKES_SUMS:
        return optax.chain(dpadambc.clip_per_example(1.0, normalize_by=4.0), tx)
    # The key of one purpose may be that of another.
    return optax.chain(dpadambc.privatize(MECHANISM, key=key), tx)


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
    return jax.tree.map(lambda *x: np.stack(x), *batches)


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


def plain(tree):
    """On the host, keys as numbers."""
    return jax.tree.map(np.asarray, common.plain(tree))


@functools.cache
def on_one_device(name, dtype):
    """Parameters and state after the batches, for which a step was traced once."""
    return plain(traced_once(whole(name), dtype))


def traced_once(tx, dtype):
    step = jax.jit(chex.assert_max_traces(stepper(tx), n=1))
    return take_steps(step, start(tx, params_of(dtype)))


def assert_close(a, b, dtype="float32", tolerance=1e-4):
    tolerance = tolerance if dtype == "float32" else 2e-2
    chex.assert_trees_all_close(plain(a), plain(b), rtol=tolerance, atol=tolerance)


def test_every_public_transformation_has_a_row():
    kinds = optax.GradientTransformation, optax.GradientTransformationExtraArgs
    public = {
        f
        for module in (dpadambc, optimizers, transforms)
        for f in (getattr(module, name) for name in module.__all__)
        if inspect.isfunction(f) and inspect.signature(f).return_annotation in kinds
    }
    # They take another transformation, and have rows as `dp2_rmsprop` and above.
    public -= {contrib.delayed_preconditioner, contrib.scale_then_privatize}
    assert public <= {factory for factory, _ in ROWS.values()}


# Structures, shapes and dtypes, for which nothing has to be computed.

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
    """What has to stay for a compiled program to be used again."""
    is_weak = lambda x: getattr(x, "weak_type", False)  # keys do not say
    return jax.tree.map(lambda x: (x.shape, x.dtype, is_weak(x)), tree)


def sums_of(name, gradient):
    """A gradient, as what it takes."""
    if name not in TAKES_SUMS:
        return gradient
    return dpadambc.as_clipped_sum(gradient, l2_clip_norm=1.0, normalize_by=4.0)


def inputs_of(name, params, size=6):
    """What goes in: gradients of examples, their clipped sum, or a gradient."""
    if name not in TAKES_EXAMPLES:
        return sums_of(name, jax.tree.map(jnp.ones_like, params))
    arrays = jax.tree.map(lambda p: jnp.ones((size, *p.shape), p.dtype), params)
    padding = jnp.zeros(size, bool)
    return dpadambc.as_per_example(arrays, is_padding_example=padding)


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
def test_updates_are_shaped_like_parameters_and_state_stays(name, tree, dtype):
    with jax.enable_x64(dtype == "float64"):
        params = TREES[tree](dtype)
        gradients = inputs_of(name, params)
        before, updates, after, _ = after_a_step(make(name), gradients, params)
    assert kinds(after) == kinds(before)
    chex.assert_trees_all_equal_shapes(updates, params)
    if name in IS_FULL:
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)


def test_state_that_does_not_stay_is_seen():
    """The negative control: moments in bfloat16, of a gradient in float32."""
    params = params_of("bfloat16")
    tx = optax.chain(make("privatize"), optax.trace(0.9))
    with pytest.raises(TypeError, match="cond branches must have equal output types"):
        after_a_step(tx, inputs_of("privatize", params), params)


@every_row
def test_map_params_finds_the_moments(name):
    tx, params = make(name), params_of()
    found = optax.tree.map_params(
        tx, lambda x: "moment", tx.init(params), transform_non_params=lambda x: "other"
    )
    number = jax.tree.leaves(found).count("moment")
    moments = MOMENTS.get(name, 0) * len(jax.tree.leaves(params))
    assert number == moments + FACTORED.get(name, 0)


# Numbers, on one device.


@pytest.mark.slow
@leading_rows
@pytest.mark.usefixtures("without_nonces")
def test_steps_by_hand_are_those_compiled(name):
    gradient, dtype = jax.jit(dpadambc.per_example_grad(loss_fn)), dtype_of(name)
    tx = whole(name)
    by_hand = take_steps(stepper(tx, gradient), start(tx, params_of(dtype)))
    assert_close(by_hand, on_one_device(name, dtype), dtype)


@pytest.mark.slow
@leading_rows
@pytest.mark.usefixtures("without_nonces")
def test_vmapped_over_keys_is_each_key_by_itself(name):
    dtype = dtype_of(name)

    def run(key):
        tx = whole(name, key)
        step, carry = stepper(tx), start(tx, params_of(dtype))
        carry, _ = jax.lax.scan(step, carry, stacked(BATCHES))
        return optax.tree.unwrap_random_key_data(carry)

    together = jax.jit(jax.vmap(run))(jnp.stack([jax.random.key(1), KEY]))
    other, one = (jax.tree.map(operator.itemgetter(i), together) for i in range(2))
    assert_close(one, on_one_device(name, dtype), dtype)
    # The negative control: another key is another run, where there is noise.
    gap = jnp.abs(one[0]["w"] - other[0]["w"]).max()
    assert gap > 0.02 if name != "clip_per_example" else gap == 0


@every_row_and_dtype
@pytest.mark.usefixtures("without_nonces")
@pytest.mark.usefixtures("without_nonces")
def test_steps_compile_once_and_are_the_same_with_hyperparameters_injected(name, dtype):
    arguments = inspect.signature(ROWS[name][0]).parameters
    inject = functools.partial(
        optax.inject_hyperparams,
        static_args=[x for x in ("min_dim_size_to_factor",) if x in arguments],
        hyperparam_dtype=jnp.dtype("float32"),
    )
    params, _ = traced_once(whole(name, wrap=inject), dtype)
    expected, _ = on_one_device(name, dtype)
    # Traced, 1 - b2 is rounded to float32, which is 5e-5 off.
    assert_close(params, expected, dtype, tolerance=1e-3)


@pytest.mark.parametrize("name", sorted(IS_FULL))
def test_full_optimizers_take_schedules_and_the_arguments_of_others(name):
    factory, kwargs = ROWS[name]
    schedule = optax.constant_schedule(kwargs["learning_rate"])
    params = params_of()
    gradients = inputs_of(name, params)
    scheduled = factory(**kwargs | dict(learning_rate=schedule))
    updates, _ = scheduled.update(
        gradients, scheduled.init(params), params, step_of_another=1, something_else="x"
    )
    tx = make(name)
    expected, _ = tx.update(gradients, tx.init(params), params)
    chex.assert_trees_all_close(updates, expected, rtol=1e-6)


# On a mesh.

SPECS = {"w": P(None, "model"), "b": P("model")}
COMPILED = []


def _count(event, *_, **__):
    if event.endswith("backend_compile_duration"):
        COMPILED.append(event)


jax.monitoring.register_event_duration_secs_listener(_count)


@contextlib.contextmanager
def on_mesh(kind, dtype="float32", enter=True):
    """Parameters split over features, batches over examples."""
    names, kinds = ("data", "model"), (KINDS[kind],) * 2
    mesh = jax.make_mesh((4, 2), names, axis_types=kinds)
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    with jax.set_mesh(mesh) if enter else contextlib.nullcontext():
        params = jax.tree.map(put, params_of(dtype), SPECS)
        yield params, jax.tree.map(lambda x: put(x, P("data")), BATCHES)


def compilations(step, carry, batches):
    """How many each step needs, and what comes out."""
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


@pytest.mark.parametrize(
    ("name", "kind", "enter"),
    [
        common.slow(name, kind, True)
        if name in LEADING
        else common.thorough(name, kind, True)
        for name in ROWS
        for kind in KINDS
    ]
    + [("dp_adamw_bc", kind, False) for kind in KINDS],
)
@pytest.mark.usefixtures("without_nonces")
@pytest.mark.usefixtures("without_nonces")
def test_steps_on_a_mesh_are_those_of_one_device(name, kind, enter):
    dtype = dtype_of(name)
    with on_mesh(kind, dtype, enter) as (params, batches):
        tx = whole(name)
        begin = start(tx, params)
        counts, carry = compilations(jax.jit(stepper(tx)), begin, batches)
    assert counts == compilations_of_adam(kind, enter)
    assert_close(carry, on_one_device(name, dtype), dtype)
    if enter:
        assert types(carry) == types(begin)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        slow_unless(name in LEADING, name, kind)
        if kind == "explicit"
        else common.thorough(name, kind)
        for name in ROWS
        for kind in KINDS
    ],
)
@pytest.mark.usefixtures("without_nonces")
def test_scanned_steps_on_a_mesh_are_those_of_one_device(name, kind):
    dtype = dtype_of(name)
    with on_mesh(kind, dtype) as (params, batches):
        tx = whole(name)
        begin = start(tx, params)
        together = jax.tree.map(lambda *x: jnp.stack(x), *batches)
        carry, _ = jax.jit(functools.partial(jax.lax.scan, stepper(tx)))(
            begin, together
        )
    assert types(carry) == types(begin)
    assert_close(carry, on_one_device(name, dtype), dtype)


@pytest.mark.parametrize(
    "name",
    [slow_unless(name == "dp_adamw_bc", name) for name in sorted(LEADING)]
    + [
        common.thorough(name)
        for name in ROWS
        # Whose loop over earlier draws JAX compiles anew.
        if name not in LEADING | {"contrib.add_correlated_noise"}
    ],
)
def test_steps_that_are_not_jitted_compile_once(name):
    """As a beginner calls them; the control is below."""
    tx = whole(name)
    batches = [batch_of(i) for i in range(4)]
    counts, _ = compilations(stepper(tx), start(tx, params_of()), batches)
    assert counts[2:] == [0, 0], counts


def test_the_count_sees_what_compiles_again():
    """The negative control: the batch grows."""
    tx = whole("dp_sgd")
    step, carry = jax.jit(stepper(tx)), start(tx, params_of())
    counts, _ = compilations(step, carry, [batch_of(0), batch_of(1), batch_of(1, 32)])
    assert counts[0] and not counts[1] and counts[2]


def moments(state):
    """The arrays in it that are split, by shape."""
    leaves = [x for x in jax.tree.leaves(state) if x.ndim]
    return {(x.shape, x.sharding) for x in leaves}, len(leaves)


INITS = {
    "arrays": lambda init, params: init(params),
    "jitted": lambda init, params: jax.jit(init)(params),
    "shapes": lambda init, params: init(
        jax.tree.map(lambda x: shapes_of(x, sharding=x.sharding), params)
    ),
    "traced": jax.eval_shape,
}


@pytest.mark.parametrize("name", common.rest_slow(MOMENTS, quick=8))
@every_kind
@pytest.mark.parametrize("dtype", ["float32", common.slow("bfloat16")])
def test_moments_begin_where_those_of_adam_do(name, kind, dtype):
    for how, given in INITS.items():
        with on_mesh(kind, dtype) as (params, _):
            found, number = moments(given(make(name).init, params))
            expected, _ = moments(given(optax.adam(0.1).init, params))
        assert found == expected and number == 2 * MOMENTS[name], how
        if how in ("arrays", "shapes"):
            specs = {shape: sharding.spec for shape, sharding in found}
            assert specs == {(8, 4): SPECS["w"], (4,): SPECS["b"]}


@pytest.mark.slow
@every_row_and_dtype
def test_explicit_types_are_the_same_by_hand_and_traced(name, dtype):
    with on_mesh("explicit", dtype) as (params, _):
        tx = make(name)
        state, gradients = tx.init(params), sums_of(name, params)
        if name in TAKES_EXAMPLES:
            rows = jax.tree.map(lambda p: jnp.stack([p] * 4), params)
            padding = jnp.zeros(4, bool)
            gradients = dpadambc.as_per_example(rows, is_padding_example=padding)
        updates, after = tx.update(gradients, state, params)
        traced = jax.eval_shape(tx.update, gradients, state, params)
        assert types(jax.jit(tx.init)(params)) == types(state) == types(after)
    assert types((updates, after)) == types(traced)
    specs = jax.tree.map(lambda x: x.sharding.spec, updates)
    assert specs == SPECS


# Any optimizer of Optax, on the private gradient.

GIVEN = {
    "noisy_sgd": dict(key=1),
    "lbfgs": dict(linesearch=None),
    "schedule_free": dict(base_optimizer=optax.sgd(1e-3)),
}
LEFT_OUT = {
    "dpsgd": "clips and adds noise itself",
    "momo": "takes the value of the loss, which is not private",
    "momo_adam": "takes the value of the loss, which is not private",
    "optimistic_adam": "is deprecated, and optimistic_adam_v2 is here",
    "sophia": "calls the loss, which is not private",
}  # `polyak_sgd`, which takes the value too, has no learning_rate.


def optimizers_of(module):
    for name, factory in sorted(vars(module).items()):
        if name.startswith(("_", "scale_by")):
            continue
        if inspect.isfunction(factory) or isinstance(factory, functools.partial):
            if "learning_rate" in inspect.signature(factory).parameters:
                yield name, factory


FOUND = dict(optimizers_of(optax)) | dict(optimizers_of(optax.contrib))
OPTIMIZERS = {
    name: functools.partial(factory, learning_rate=1e-3, **GIVEN.get(name, {}))
    for name, factory in FOUND.items()
    if name not in LEFT_OUT
} | {
    "mechanize": lambda: optax.contrib.mechanize(optax.sgd(1.0)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-3), 2),
    "muon and adam_bc": lambda: optax.multi_transform(
        {"muon": optax.contrib.muon(1e-3), "adam_bc": dpadambc.adam_bc(1e-3, 0.125)},
        {"w": "muon", "b": "adam_bc"},
    ),
    "masked": lambda: optax.masked(optax.adam(1e-3), {"w": True, "b": False}),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-3), 3),
}
# One for each form of state and arguments; `make test-thorough` has the others.
FORMS = {
    *("adafactor", "adamw", "lbfgs", "lion", "muon", "schedule_free"),
    *("mechanize", "MultiSteps", "masked", "apply_if_finite"),
}
every_optimizer = pytest.mark.parametrize(
    "name", [x if x in FORMS else common.thorough(x) for x in OPTIMIZERS]
)


def test_the_search_finds_the_optimizers_of_optax():
    known = "adafactor adam adamw lamb lars lion nadam rmsprop sgd sm3 yogi"
    contributed = "adopt cocob dadapt_adamw dog muon prodigy schedule_free_adamw"
    assert {*known.split(), *contributed.split()} <= OPTIMIZERS.keys()
    assert LEFT_OUT.keys() <= FOUND.keys() and len(OPTIMIZERS) > 40
    assert FORMS <= OPTIMIZERS.keys()


def gradients_of(seed, *, sign=1, apart=0):
    """Of one step, none of which is clipped; `apart` moves examples, not their sum."""
    rng, batch = np.random.default_rng(seed), {}
    move = np.array([1, -1, 2, -2, 0, 0]) * apart
    for name, shape in dict(w=(3, 2), b=(2,)).items():
        # Numbers that are summed without rounding, in whatever order.
        rows = sign * rng.integers(8, 16, (6, *shape))
        rows = rows + move.reshape(6, *(1 for _ in shape))
        padding = np.full((1, *shape), 1000 * apart)
        batch[name] = np.concatenate([rows, padding]).astype(np.float32) / 64
    return batch, np.arange(7) == 6


def differ(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return any((x != y).any() for x, y in pairs)


@pytest.mark.slow
def test_batches_apart_have_the_same_clipped_sum():
    params = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}
    (one, padding), (other, _) = gradients_of(0), gradients_of(0, apart=1)
    assert all((one[leaf] != other[leaf]).any() for leaf in params)
    clip, sums = make("clip_per_example"), []
    for batch in (one, other):
        batch = dpadambc.as_per_example(batch, is_padding_example=padding)
        sums.append(clip.update(batch, clip.init(params), params)[0])
    assert not differ(*sums)


def private_run(name):
    """A step of `jax.lax.scan`, and where to start."""
    tx = optax.chain(make("privatize"), OPTIMIZERS[name]())
    examples = lambda _, x, **mask: dpadambc.as_per_example(x, **mask)
    params = {"w": jnp.full((3, 2), 0.5, "float32"), "b": jnp.ones(2, "float32")}
    return stepper(tx, examples), start(tx, params)


@pytest.mark.slow
@every_optimizer
def test_any_optimizer_of_optax_may_follow_and_sees_the_private_gradient_alone(name):
    step, begin = private_run(name)
    compiled = jax.jit(chex.assert_max_traces(step, n=1))

    def run(**options):
        carry, updates = begin, []
        for seed in range(3):
            carry, update = compiled(carry, gradients_of(seed, **options))
            updates.append(update)
        return carry, updates

    carry, updates = run()
    assert kinds(carry) == kinds(begin)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates[-1], begin[0])
    chex.assert_tree_all_finite(updates)
    # Of batches with the same clipped sum, all that it makes is the same.
    chex.assert_trees_all_equal(plain(run(apart=1)), plain((carry, updates)))
    assert differ(run(sign=-1)[1], updates)
    batches = stacked([gradients_of(seed) for seed in range(3)])
    scanned, _ = jax.eval_shape(functools.partial(jax.lax.scan, step), begin, batches)
    assert kinds(scanned) == kinds(begin)


@pytest.mark.slow
@every_optimizer
def test_any_optimizer_of_optax_gives_the_same_in_scan(name):
    step, begin = private_run(name)
    batches = [gradients_of(seed) for seed in range(3)]
    looped = take_steps(jax.jit(step), begin, batches)
    scanned, _ = jax.jit(functools.partial(jax.lax.scan, step))(begin, stacked(batches))
    assert_close(scanned, looped, tolerance=1e-5)

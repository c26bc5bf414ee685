"""A run trains the program it was given, and an equal one compiles nothing."""

import collections
import contextlib
import functools
import gc
import pathlib
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dpadambc
from dpadambc import clipping, graphs, training
from dpadambc.core import identity
from dpadambc.core import programs as core_programs
from tests import common

RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 3)).astype(np.float32)
DATA = X, X @ np.array([1.0, -2.0, 0.5], np.float32)
MECHANISM = common.poisson_gaussian(iterations=8)
OPTIMIZER = dpadambc.adam_bc(0.1, MECHANISM.noise_stddev)
SGD = optax.sgd(0.1)


def loss_fn(w, x, y):
    return (w @ x - y) ** 2


class Rows:
    """A source."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return 200

    def __getitem__(self, index):
        return tuple(column[index] for column in self.data)


def fit(loss_fn=loss_fn, mechanism=MECHANISM, optimizer=OPTIMIZER, **options):
    options = {
        "params": jnp.zeros(3),
        "data": DATA,
        "key": jax.random.key(0),
        "steps_per_call": 4,
        "target_delta": 1e-5,
    } | options
    params, data = options.pop("params"), options.pop("data")
    return training.fit(loss_fn, params, data, mechanism, optimizer, **options)


EVENTS = collections.Counter()
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **_: EVENTS.update([name])
)


@contextlib.contextmanager
def compilations():
    """A list, of how many programs were compiled until the end of the block."""
    name = "/jax/core/compile/backend_compile_duration"
    before, found = EVENTS[name], []
    yield found
    found.append(EVENTS[name] - before)


def anew(**options):
    """The same run, with no program of an earlier one."""
    core_programs._compiled_once.cache_clear()
    return fit(**options)


def assert_same(result, other):
    chex.assert_trees_all_equal(common.plain(result.state), common.plain(other.state))


SECOND = {
    "the same": {},
    "another key": {"key": jax.random.key(1)},
    "another start": {"params": jnp.ones(3)},
    "other data": {"data": (X[::-1].copy(), X.sum(1))},
    "a budget": {"target_epsilon": MECHANISM.epsilon(1e-5, iterations=4) + 1e-3},
    "an equal optimizer": {"optimizer": dpadambc.adam_bc(0.1, MECHANISM.noise_stddev)},
    "an equal mechanism": {
        "mechanism": common.poisson_gaussian(l2_clip_norm=1, iterations=8)
    },
}


@pytest.mark.parametrize(
    "is_source", [False, common.slow(True)], ids=["arrays", "source"]
)
@pytest.mark.parametrize(
    "options", common.rest_slow(SECOND.values(), quick=2), ids=SECOND
)
def test_a_second_run_compiles_nothing_and_is_what_it_would_be(options, is_source):
    if is_source:
        options = options | {"data": Rows(options.get("data", DATA))}
        anew(data=Rows(DATA))
    else:
        anew()
    with compilations() as found:
        second = fit(**options)
    assert found == [0]
    assert_same(second, anew(**options))


def counted_fit(*args, **options):
    """A run, and the number of programs that it compiled."""
    with compilations() as found:
        result = fit(*args, **options)
    return result, found[0]


class Scaled:
    """A loss that reads an attribute."""

    scale = 1.0

    def loss(self, w, x, y):
        return self.scale * loss_fn(w, x, y)


def with_scale(scale, w, x, y):
    return jnp.sum(scale) * loss_fn(w, x, y)


SCALE = 1.0


def read_a_global(w, x, y):
    return SCALE * loss_fn(w, x, y)


def attribute():
    model = Scaled()
    yield model.loss
    model.scale = 5.0
    yield model.loss


def global_variable():
    global SCALE
    yield read_a_global
    SCALE = 5.0
    yield read_a_global
    SCALE = 1.0


def array_changed_in_place():
    scale = np.ones(1, np.float32)
    closure = lambda w, x, y: jnp.sum(jnp.asarray(scale)) * loss_fn(w, x, y)
    yield closure
    scale[:] = 5
    yield closure


def partial():
    for scale in (1.0, 5.0):
        yield functools.partial(with_scale, jnp.full(1, scale))


def closure():
    for scale in (jnp.ones(1), jnp.full(1, 5.0)):
        yield lambda w, x, y, scale=scale: with_scale(scale, w, x, y)


def derivative():
    """The two have one value, and derivatives that a program shows once it has them."""
    for scale in (1.0, 5.0):
        own = jax.custom_jvp(lambda x: x)
        own.defjvp(lambda x, dx, scale=scale: (x[0], scale * dx[0]))
        yield lambda w, x, y, own=own: own(loss_fn(w, x, y))


CHANGED = attribute, global_variable, array_changed_in_place, partial, closure
CHANGED = *CHANGED, derivative
LINEAR = common.poisson_gaussian(noise_multiplier=0.0, l2_clip_norm=1e4, iterations=1)


@pytest.mark.guarantee
@pytest.mark.parametrize("losses", CHANGED, ids=lambda losses: losses.__name__)
def test_a_run_trains_what_its_loss_reads_now(losses, one_identity):
    """The step that was compiled before is that of another loss."""
    options = dict(mechanism=LINEAR, optimizer=SGD, steps_per_call=1)
    one, five = (fit(loss, **options).params for loss in losses())
    np.testing.assert_allclose(five, 5 * one, rtol=1e-5)
    assert np.abs(one).max() > 0


@pytest.mark.guarantee
def test_a_run_takes_what_its_optimizer_reads_now(one_identity):
    """And the identity of the run, by which a checkpoint knows it, says so."""
    rate = 1.0
    update = lambda grads, state, params=None: (
        jax.tree.map(lambda g: -rate * g, grads),
        state,
    )
    optimizer = optax.GradientTransformation(lambda params: (), update)
    step = training.Step(loss_fn, LINEAR, optimizer)

    def programs():
        traced = identity.traced_programs(step, jnp.zeros(3), None, DATA)
        return list(map(identity.of_program, traced))

    options = dict(mechanism=LINEAR, optimizer=optimizer, steps_per_call=1)
    one, before = fit(**options).params, programs()
    assert programs() == before
    rate = 5.0
    np.testing.assert_allclose(fit(**options).params, 5 * one, rtol=1e-5)
    assert programs() != before


def in_jit():
    return jax.jit(loss_fn)


def partially():
    return functools.partial(with_scale, jnp.ones(1))


def of_an_object():
    return Scaled().loss


def a_lambda():
    scale = np.ones(2, np.float32)
    return lambda w, x, y: with_scale(jnp.asarray(scale), w, x, y)


@pytest.mark.parametrize("make", [in_jit, partially, of_an_object, a_lambda])
def test_equal_losses_and_optimizers_made_twice_compile_once(make):
    options = lambda: dict(optimizer=optax.adam(0.1), steps_per_call=1)
    first, some = counted_fit(make(), **options())
    second, none = counted_fit(make(), **options())
    assert none == 0
    assert_same(first, second)


def test_a_loss_that_calls_back_is_compiled_each_time():
    """The text of a program does not show which function it calls."""
    heard = []

    def loss(name):
        def calls(w, x, y):
            jax.debug.callback(lambda _: heard.append(name), x[0])
            return loss_fn(w, x, y)

        return calls

    for name in ("a", "b"):
        _, number = counted_fit(loss(name), steps_per_call=1, optimizer=SGD)
        jax.effects_barrier()
        assert number > 0 and set(heard) == {name}
        heard.clear()


def test_settings_of_jax_are_told_apart():
    options = dict(optimizer=optax.adam(0.1), steps_per_call=1)
    first, _ = counted_fit(**options)
    with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
        _, number = counted_fit(**options)
    assert number > 0
    again, none = counted_fit(**options)
    assert none == 0
    assert_same(first, again)


ANOTHER = {
    "clip norm": {"l2_clip_norm": 0.5},
    "noise": {"noise_multiplier": 1.5},
    "sampling": {"sampling_prob": 0.2},
    "rule": {"clip_rule": clipping.Automatic()},
    "normalizer": {"normalize_by": 60},
    "iterations": {"iterations": 16},
}
ANOTHER = {
    name: {"mechanism": common.poisson_gaussian(**numbers)}
    for name, numbers in ANOTHER.items()
} | {
    "nodes": {"mechanism": graphs.NodePoissonGaussian(**vars(MECHANISM), max_terms=1)},
    "loss": {"loss_fn": lambda w, x, y: (w @ x + y) ** 2},
    "microbatches": {"microbatch_size": 16},
    "size": {"data": (X[:100], X[:100].sum(1))},
    "optimizer": {"optimizer": dpadambc.adam_bc(0.2, MECHANISM.noise_stddev)},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", common.rest_slow(ANOTHER.values(), quick=4), ids=ANOTHER
)
def test_another_step_is_compiled(options):
    """The control of the test above, and none gets the program of another."""
    anew()
    with compilations() as found:
        other = fit(**options)
    assert found[0] > 0
    assert_same(other, anew(**options))


LEVEL = 1.0


class ReadsMore(dpadambc.PoissonGaussian):
    """A mechanism of somebody else, whose noise depends on a variable."""

    @property
    def noise_stddev(self):
        return LEVEL


@pytest.mark.slow
@pytest.mark.guarantee
@pytest.mark.parametrize("kind", ["schedule", "subclass"])
def test_the_noise_is_that_of_now(kind):
    """Epsilon is of the schedule as it is now, and so must the noise be."""
    global LEVEL
    mechanism = ReadsMore(**vars(MECHANISM))
    if kind == "schedule":
        mechanism = common.poisson_gaussian(
            iterations=8, noise_multiplier=lambda step: LEVEL + 0 * step
        )
    options = {"mechanism": mechanism, "optimizer": SGD}
    runs = []
    for level in (0.5, 4.0):
        LEVEL = level
        runs.append(fit(**options))
    assert (runs[0].epsilon > 2 * runs[1].epsilon) == (kind == "schedule")
    assert_same(runs[1], anew(**options))
    with pytest.raises(AssertionError):
        assert_same(*runs)


OURS = {
    dpadambc.PoissonGaussian: dict(sampling_prob=0.25),
    dpadambc.TruncatedPoissonGaussian: dict(
        sampling_prob=0.25, truncated_batch_size=60, num_examples=200
    ),
    dpadambc.FixedSizeGaussian: dict(batch_size=50, num_examples=200),
    graphs.NodePoissonGaussian: dict(sampling_prob=0.25, max_terms=2),
    graphs.NodeFixedSizeGaussian: dict(batch_size=50, num_examples=200, max_terms=2),
}
NUMBERS = dict(l2_clip_norm=1.0, noise_multiplier=1.0, normalize_by=50)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OURS)
def test_no_step_of_ours_depends_on_how_many_there_are(kind):
    programs = set()
    for iterations in (8, 16):
        mechanism = kind(**NUMBERS, **OURS[kind], iterations=iterations)
        step = training.Step(loss_fn, mechanism, SGD)
        state = step.init(jnp.zeros(3), key=jax.random.key(0))
        batch = training.draw_batch(mechanism, state, 200)
        rows = batch.gather(DATA), batch.is_padding_example
        programs.add(identity.of_program(jax.make_jaxpr(step)(state, *rows)))
    assert len(programs) == 1


class NotHashable:
    """A loss that has arrays."""

    __hash__ = None  # pyright: ignore

    def __init__(self):
        self.scale = jnp.ones(3)

    def __call__(self, w, x, y):
        return loss_fn(self.scale * w, x, y)


@pytest.mark.slow
def test_a_loss_that_has_no_hash_is_compiled_each_time():
    loss = NotHashable()
    first = fit(loss)
    loss.scale = 2 * loss.scale
    with pytest.raises(AssertionError):
        assert_same(fit(loss), first)


@pytest.mark.slow
def test_programs_on_devices_are_told_apart():
    def of_eight(params, x, y):
        return (params["w"][:3] @ x - y) ** 2

    def options(number, split):
        devices = np.array(jax.devices()[:number])
        mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
        params = {"w": jnp.zeros(8)}
        if split:
            whole = training.fully_sharded(params, mesh, "data")
            params = jax.device_put(params, whole)
        data = training.Sharded(DATA, NamedSharding(mesh, P("data")))
        return {"loss_fn": of_eight, "params": params, "data": data}

    kinds = [(2, False), (2, True), (4, True)]
    first = [fit(**options(*kind)) for kind in kinds]
    for kind, expected in zip(kinds, first, strict=True):
        with compilations() as found:
            second = fit(**options(*kind))
        assert found == [0]
        assert_same(second, expected)
        placed, before = (run.state.params["w"].sharding for run in (second, expected))
        assert placed == before
    assert len({str(run.state.params["w"].sharding) for run in first}) == 3


@pytest.mark.slow
def test_no_program_holds_data():
    data = tuple(jnp.asarray(column) + 0 for column in DATA)
    fit(data=data)
    arrays = weakref.ref(data[0])
    del data
    gc.collect()
    assert arrays() is None


def test_the_key_of_a_run_is_in_no_program(tmp_path):
    """A cache of compiled programs on disk would have it."""
    words = [123456789, 987654321]
    key = jax.random.wrap_key_data(jnp.array(words, jnp.uint32), impl="threefry2x32")

    def has_the_key():
        texts = [path.read_text() for path in pathlib.Path(tmp_path).iterdir()]
        assert texts
        return any(str(word) in text for text in texts for word in words)

    jax.config.update("jax_dump_ir_to", str(tmp_path))
    try:
        anew(key=key)
        assert not has_the_key()
        # Negative control.
        jax.jit(lambda x: x + jax.random.normal(key))(jnp.zeros(3))
        assert has_the_key()
    finally:
        jax.config.update("jax_dump_ir_to", "")


@pytest.mark.slow
def test_what_becomes_of_a_mechanism_later_does_not_reach_its_program():
    """It is frozen, and may be changed by force all the same."""
    first = common.poisson_gaussian(iterations=8)
    anew(mechanism=first, steps_per_call=1)
    object.__setattr__(first, "noise_multiplier", 1e-6)
    second = fit(mechanism=MECHANISM, steps_per_call=4)
    assert_same(second, anew(mechanism=MECHANISM, steps_per_call=4))

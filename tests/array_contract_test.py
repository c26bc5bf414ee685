"""The contract of every public function of arrays: one row each.

By hand and compiled it is the same, and it is traced once, whatever the values. It
changes none of its arguments, and double precision stays double. The rows of stages and
optimizers are those of `contract_test`.
"""

import inspect
import itertools
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import dpadambc
from dpadambc import audit, clipping, contrib, diagnostics, graphs, training
from dpadambc.core import mechanism
from dpadambc.diagnostics import not_private
from tests import api_test, common, contract_test

NUMBERS = dict(l2_clip_norm=1.0, noise_multiplier=1.0, iterations=8, normalize_by=5)
MECHANISM = common.poisson_gaussian()
SCHEDULED = common.poisson_gaussian(
    noise_multiplier=optax.linear_schedule(2.0, 1.0, 10), normalize_by=5
)
ALLOCATED = dpadambc.RandomAllocationGaussian(**NUMBERS, batches_per_epoch=4)
CORRELATED = contrib.CorrelatedGaussian(
    **NUMBERS, noising_coefficients=(1.0, -0.5), batches_per_epoch=4
)
BANDED = contrib.BandedGaussian(
    **NUMBERS, strategy_coefficients=(1.0, 0.5), sampling_prob=0.5
)
CLIPPED = dict(l2_clip_norm=1.0, normalize_by=5)
ADAM_BC = dpadambc.scale_by_adam_bc(0.1)
MESH = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))


def loss_fn(params, x):
    return jnp.sum((x @ params["w"] + params["b"]) ** 2)


def loss_with_key(params, x, *, key):
    del key
    return loss_fn(params, x)


STEP = training.Step(loss_fn, MECHANISM, optax.adam(0.1))
AUGMENTED = training.with_augmentations(
    loss_with_key, lambda key, x: (x + jax.random.normal(key, x.shape),), 3
)


class Draws:
    """Arguments, in arrays of NumPy that cannot be written to."""

    def __init__(self, seed, dtype="float32"):
        self.rng, self.dtype = np.random.default_rng(seed), jnp.dtype(dtype)
        self.key = jax.random.key(seed)

    def __call__(self, *shape):
        return self._fixed(self.rng.normal(size=shape).astype(self.dtype))

    def positive(self, *shape):
        return self._fixed(np.abs(self(*shape)))

    def below_one(self):
        return self._fixed(self.rng.uniform(0.5, 1.0, ()).astype(self.dtype))

    def integers(self, low, high, *shape):
        return self._fixed(self.rng.integers(low, high, shape, np.int32))

    def padding(self, size=5):
        return self._fixed(self.rng.permutation(size) < 2)

    def params(self, *batch):
        return {"w": self(*batch, 3, 2), "b": self(*batch, 2)}

    def batch(self):
        return dpadambc.Batch(self.integers(0, 4, 5), self.padding(), num_examples=4)

    def readout(self):
        fields = diagnostics.Readout._fields
        return diagnostics.Readout(*(self.positive() for _ in fields))

    def snapshot(self):
        rows = {"w": self.readout(), "b": self.readout()}
        rest = (self() for _ in diagnostics.Snapshot._fields[2:])
        return diagnostics.Snapshot(self.integers(0, 9), rows, *rest)

    def _fixed(self, x):
        x = np.asarray(x)
        x.flags.writeable = False
        return x


def stage(name):
    """A step of a transformation, from its first state."""
    tx = contract_test.make(name)

    def fun(gradients, padding, params):
        if name in contract_test.TAKES_EXAMPLES:
            gradients = dpadambc.as_per_example(gradients, is_padding_example=padding)
        else:
            gradients = jax.tree.map(lambda g: g[0], gradients)
            gradients = contract_test.sums_of(name, gradients)
        return tx.update(gradients, tx.init(params), params)

    return fun, lambda d: (d.params(5), d.padding(), d.params())


def of_examples(transformation, **options):
    fun = transformation(loss_fn, **options)
    opened = lambda params, x, padding: common.arrays(
        fun(params, x, is_padding_example=padding)
    )
    return opened, lambda d: (d.params(), d(5, 3), d.padding())


def vouched(gradient):
    return dpadambc.as_clipped_sum(gradient, **CLIPPED)


def noised(mechanism):
    """The second step, which may take a part of the first back."""

    def fun(gradient, key, step):
        tx, summed = mechanism.add_noise(key=key), vouched(gradient)
        _, state = tx.update(summed, tx.init(gradient), gradient)
        return tx.update(summed, state, gradient)[0], mechanism.noise_stddev(step)

    return fun, lambda d: (d.params(), d.key, d.integers(0, 9))


def in_halves(gradients, padding, params, key):
    """A private gradient whose clip and noise are called one by one."""
    gradients = dpadambc.as_per_example(gradients, is_padding_example=padding)
    halves = SCHEDULED.private_gradient(key)
    state = halves.init(params)
    return halves.add_noise(halves.clip(gradients, state, params), state, params)


def drawn(mechanism):
    fun = lambda key, step: mechanism.sample_step(key, step, num_examples=20)
    return fun, lambda d: (d.key, d.integers(0, 8))


def weight(rule):
    return rule.weight, lambda d: (d.positive(), d.positive())


def read(name):
    """A property of a readout."""
    return lambda readout: getattr(readout, name), lambda d: (d.readout(),)


def after_a_step(gradient):
    return ADAM_BC.update(gradient, ADAM_BC.init(gradient))[1]


def clean_moments(params, gradient):
    moments = not_private.init_clean_moments(params)
    return not_private.update_clean_moments(moments, gradient)


def preconditioned(params, public, x):
    """The gradients of a loss that its public examples precondition."""
    found = contrib.kronecker_preconditioner(
        loss_fn, params, public_examples=(public,), damping=0.1
    )
    return jax.grad(contrib.preconditioned(loss_fn, found))(params, x)


def statistics(gradients, padding):
    seen = not_private.gradient_statistics(
        dpadambc.as_per_example(gradients), MECHANISM, is_padding_example=padding
    )
    return seen, seen.signal_to_noise


def of_subgraphs(members):
    found = graphs.Subgraphs(jnp.asarray(members), max_terms=3)
    return found.degrees, found.is_padding


def started(params, key):
    state = STEP.init(params, key=key)
    batch = training.draw_batch(MECHANISM, state, num_examples=20)
    return state, batch, training.releasable(state)


CANARIES = audit.GradientCanaries(
    {"w": np.zeros((3, 2)), "b": np.zeros(2)}, num_canaries=3, l2_clip_norm=1.0
)


def summed_by(gradient):
    tx = CANARIES.with_sum(optax.sgd(0.1))
    return tx.update(gradient, tx.init(gradient))


# By the names of what it covers: a function, and its arguments from `Draws`.
# fmt: off
ROWS = {name: stage(name) for name in contract_test.ROWS} | {
    "as_per_example PerExampleGradient.materialize": (
        lambda g, padding: common.arrays(dpadambc.as_per_example(g, is_padding_example=padding)),
        lambda d: (d.params(5), d.padding())),
    "materialize": (lambda g: dpadambc.materialize(dpadambc.as_per_example(g)), lambda d: (d.params(5),)),
    "per_example_norms": (lambda g: dpadambc.per_example_norms(dpadambc.as_per_example(g)), lambda d: (d.params(5),)),
    "as_clipped_sum ClippedSum.value ClippedSum.plus": (
        lambda one, other: vouched(one).plus(vouched(other)).value,
        lambda d: (d(3, 2), d(3, 2))),
    "ClippedSum.sum_over": (
        jax.shard_map(lambda x: vouched(x).sum_over("i").value, mesh=MESH, in_specs=PartitionSpec("i"), out_specs=PartitionSpec()),
        lambda d: (d(4, 3),)),
    "per_example_grad": of_examples(dpadambc.per_example_grad, return_values=True),
    "ClippedGrad.__call__": of_examples(dpadambc.clipped_grad, **CLIPPED),
    "clipped_grad": of_examples(dpadambc.clipped_grad, return_values=True, microbatch_size=2, **CLIPPED),
    "RelativeFloor.variance": (dpadambc.RelativeFloor(0.5).variance, lambda d: (d.positive(), d.below_one(), d.integers(1, 9))),
    "Batch.gather": (lambda batch, data: batch.gather(data), lambda d: (d.batch(), d.params(4))),
    "Mechanism.sample": (lambda key: MECHANISM.sample_step(key, 0, num_examples=20), lambda d: (d.key,)),
    "Mechanism.sample_step": drawn(ALLOCATED),
    "Mechanism.private_gradient": (in_halves, lambda d: (d.params(5), d.padding(), d.params(), d.key)),
    "Mechanism.add_noise Mechanism.noise_stddev": noised(SCHEDULED),
    "Mechanism.noise_variance": (SCHEDULED.noise_variance, lambda d: (d.integers(0, 9),)),
    "clipping.ClipRule.weight clipping.Flat.weight": weight(clipping.Flat()),
    "clipping.Automatic.weight": weight(clipping.Automatic()),
    "clipping.PerGroup.weight": weight(clipping.PerGroup("all", {"all": 1.0})),
    "graphs.gather": (graphs.gather, lambda d: (d(6, 3), d.integers(-1, 6, 4, 2))),
    "graphs.Subgraphs.degrees graphs.Subgraphs.is_padding": (of_subgraphs, lambda d: (d.integers(-1, 6, 4, 2),)),
    "diagnostics.snapshot": (lambda gradient: diagnostics.snapshot(after_a_step(gradient)), lambda d: (d.params(),)),
    "diagnostics.Snapshot.share_at_floor": (lambda snapshot: snapshot.share_at_floor, lambda d: (d.snapshot(),)),
    "diagnostics.Readout.signal": read("signal"),
    "diagnostics.Readout.signal_stderr": read("signal_stderr"),
    "diagnostics.not_private.gradient_statistics diagnostics.not_private.GradientStatistics.signal_to_noise": (
        statistics, lambda d: (d.params(5), d.padding())),
    "diagnostics.not_private.init_clean_moments diagnostics.not_private.update_clean_moments": (
        clean_moments, lambda d: (d.params(), d.params())),
    "diagnostics.not_private.snapshot": (
        lambda *args: not_private.snapshot(clean_moments(*args), noise_stddev=0.1),
        lambda d: (d.params(), d.params())),
    "training.Step.init training.Step.__call__": (
        lambda params, key, x, padding: STEP(STEP.init(params, key=key), x, padding),
        lambda d: (d.params(), d.key, (d(5, 3),), d.padding())),
    "training.draw_batch training.releasable": (started, lambda d: (d.params(), d.key)),
    "training.PublicScore.per_example training.NoisyScore.per_example": (
        lambda params, x: training.PublicScore(loss_fn, (x,)).per_example(params, (), (x,)),
        lambda d: (d.params(), d(5, 3))),
    "training.with_augmentations": (
        lambda params, x, key: AUGMENTED(params, x, key=key),
        lambda d: (d.params(), d(3), d.key)),
    "training.with_rows": (
        lambda *args: training.with_rows(loss_with_key)(*args[:-1], key=args[-1]),
        lambda d: (d.params(), d(4, 3), jnp.arange(4) > 1, d.key)),
    "training.with_compute_dtype": (training.with_compute_dtype(loss_fn, jnp.bfloat16), lambda d: (d.params(), d(3))),
    "audit.GradientCanaries.with_sum": (summed_by, lambda d: (d.params(),)),
    "audit.GradientCanaries.loss": (
        CANARIES.loss(loss_fn),
        lambda d: (d.params(), d.integers(-1, 3), d(3))),
    "contrib.CorrelatedGaussian.add_noise contrib.CorrelatedGaussian.noise_stddev": noised(CORRELATED),
    "contrib.BandedGaussian.add_noise contrib.BandedGaussian.noise_stddev": noised(BANDED),
    "contrib.BandedGaussian.sample_step": drawn(BANDED),
    "contrib.PerSampleAdaptive.weight": weight(contrib.PerSampleAdaptive()),
    "contrib.low_pass_noise_stddev": (
        contrib.low_pass_noise_stddev(optax.linear_schedule(1.0, 0.5, 4), (0.5,), (1.0, -0.5)),
        lambda d: (d.integers(0, 9),)),
    "contrib.kronecker_preconditioner contrib.preconditioned contrib.KroneckerPreconditioner.untouched": (
        preconditioned, lambda d: (d.params(), d(5, 3), d(3))),
    "contrib.with_prediction": (contrib.with_prediction(loss_fn), lambda d: (d.params(), d.params(), d(3))),
}
# fmt: on
ON_THE_HOST = {
    "recipe": "makes a mechanism and an optimizer, of public numbers",
    "Mechanism.accounted_as": "returns a mechanism",
    "accounting.Accountant.composed": "returns an accountant of dp-accounting",
    "audit.GradientCanaries.insert": "makes data longer by a number that is drawn",
    "audit.Pipeline.of_chain": "returns a pipeline to audit",
    "audit.Pipeline.of_fit": "returns a pipeline to audit",
    "graphs.subgraphs": "reads edges, in NumPy",
    "training.fully_sharded": "returns shardings",
    "training.group_by_user": "reads ids, and the shapes have their number",
    "training.load_release": "reads a file",
    "training.PublicScore.compose": "returns an event",
    "training.SearchResult.params": "returns what a search found",
    "training.secret_key": "draws from the operating system",
}
# The methods of these classes have tests like those of this table in `tests/contrib`.
ELSEWHERE = {"contrib.QuantileClipping", "contrib.SlackClipping"}
# In double precision these return numbers in single.
IN_SINGLE = {
    "training.with_compute_dtype": "is asked to",
    "diagnostics.snapshot": "has shares, of booleans",
    "diagnostics.not_private.snapshot": "has shares, of booleans",
    "diagnostics.not_private.gradient_statistics"
    " diagnostics.not_private.GradientStatistics.signal_to_noise": "has shares too",
}
TOLERANCES = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 3e-2}
# Of the transformations, those of which the others are parts.
QUICK = ROWS.keys() - (contract_test.ROWS.keys() - contract_test.LEADING)


def row(name, dtype):
    if dtype == "float32" and name in QUICK:
        return name, dtype
    is_thorough = dtype != "float32" and name not in QUICK
    return (common.thorough if is_thorough else common.slow)(name, dtype)


@pytest.mark.parametrize(
    ("name", "dtype"), [row(name, dtype) for name in ROWS for dtype in TOLERANCES]
)
@pytest.mark.usefixtures("without_nonces")
def test_compiled_once_it_is_as_by_hand_off_the_device_and_on_it(name, dtype):
    fun, arguments = ROWS[name]
    with jax.enable_x64(dtype == "float64"):
        host, device = (arguments(Draws(seed, dtype)) for seed in range(2))
        if dtype == "bfloat16":  # in which NumPy promotes by rules of its own
            host = jax.device_put(host)
        tolerance = dict(rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
        calls = host, jax.device_put(device)
        common.assert_jit_changes_nothing(fun, *calls, **tolerance)


@pytest.mark.parametrize("name", ROWS)
def test_double_precision_stays_double(name, x64):
    fun, arguments = ROWS[name]
    leaves = jax.tree.leaves(jax.eval_shape(fun, *arguments(Draws(0, "float64"))))
    floats = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    assert (name in IN_SINGLE) == any(x.dtype != jnp.float64 for x in floats)


def increased(x):
    x += 1
    return x


is_traced = lambda x: isinstance(x, jax.core.Tracer)
number = itertools.count()
BROKEN = {
    "counts": (lambda x: x + next(number), AssertionError),
    "is another where it is traced": (lambda x: x + is_traced(x), AssertionError),
    "is in another dtype where it is traced": (
        lambda x: x.astype("float16") if is_traced(x) else x,
        AssertionError,
    ),
    "writes to its argument": (increased, ValueError),
    "depends on a value": (
        lambda x: x if x[0] > 0 else -x,
        jax.errors.TracerBoolConversionError,
    ),
}


@pytest.mark.parametrize(("fun", "error"), BROKEN.values(), ids=BROKEN)
def test_a_function_that_is_not_the_same_is_seen(fun, error):
    """Negative controls."""
    calls = [(Draws(seed)(3),) for seed in range(2)]
    with pytest.raises(error):
        common.assert_jit_changes_nothing(fun, *calls)
    common.assert_jit_changes_nothing(lambda x: x + 1, *calls)
    with pytest.raises(AssertionError, match="traced > 1 times"):
        common.assert_jit_changes_nothing(lambda x: x + 1, *calls, (Draws(0)(4),))


def functions():
    """Public ones, methods and properties too, by name."""
    for name, value in api_test.objects().items():
        name = name.removeprefix("dpadambc.")
        if inspect.isfunction(value):
            yield name, value
        if inspect.isfunction(value) or name in ELSEWHERE:
            continue
        # The public mechanism adds the ways to make one to that of `core`.
        core = vars(mechanism.Mechanism) if name == "Mechanism" else {}
        for attribute, member in (core | vars(value)).items():
            member = getattr(member, "fget", getattr(member, "__func__", member))
            is_public = not attribute.startswith("_") or attribute == "__call__"
            if is_public and inspect.isfunction(member):
                yield f"{name}.{attribute}", member


def returns_arrays(function):
    """By its annotation: arrays, classes with them, functions of them, or any."""
    returned = inspect.signature(function).return_annotation
    if isinstance(returned, str):
        returned = function.__globals__.get(returned, returned)
    several = typing.get_args(returned) if typing.get_origin(returned) is tuple else ()
    parts = [returned, *several]
    words = f"{parts} {[getattr(part, '__annotations__', '') for part in parts]}"
    words = words.replace("dict[str, typing.Any]", "")  # JSON
    return re.search(r"\bArray|typing\.Any|Callable|Transform", words)


def without_a_row(rows):
    found = {name for name, function in functions() if returns_arrays(function)}
    assert ON_THE_HOST.keys() <= found
    return found - ON_THE_HOST.keys() - set(" ".join(rows).split())


def test_every_public_function_of_arrays_has_a_row():
    assert not without_a_row(ROWS)
    # Negative control.
    some = {"Batch.gather", "dp_adamw", "graphs.gather"}
    assert without_a_row(ROWS.keys() - some) >= some

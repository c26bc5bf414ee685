"""What every public function of arrays keeps, one row for each.

By hand and compiled it is the same, and it is traced once, whatever the values. It
changes none of its arguments, and double precision stays double.
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
from dpadambc import (
    audit,
    clipping,
    contrib,
    diagnostics,
    graphs,
    theory,
    training,
    transforms,
)
from dpadambc.contrib import BandedGaussian, CorrelatedGaussian
from dpadambc.diagnostics import not_private
from dpadambc.mechanisms import sampling
from tests import api_test, common, optax_contract_test

MECHANISM = common.poisson_gaussian()
SCHEDULED = common.poisson_gaussian(
    noise_multiplier=optax.linear_schedule(2.0, 1.0, 10)
)
ALLOCATED = dpadambc.RandomAllocationGaussian(
    l2_clip_norm=1.0,
    noise_multiplier=1.0,
    batches_per_epoch=4,
    iterations=8,
    normalize_by=5,
)
CORRELATED = CorrelatedGaussian(
    l2_clip_norm=1.0,
    noise_multiplier=1.0,
    noising_coefficients=(1.0, -0.5),
    batches_per_epoch=4,
    iterations=8,
    normalize_by=5,
)
BANDED = BandedGaussian(
    l2_clip_norm=1.0,
    noise_multiplier=1.0,
    strategy_coefficients=(1.0, 0.5),
    sampling_prob=0.5,
    iterations=8,
    normalize_by=5,
)
CLIPPED = dict(l2_clip_norm=1.0, normalize_by=5)
ADAM_BC = dpadambc.scale_by_adam_bc(0.1)


def loss_fn(params, x):
    return jnp.sum((x @ params["w"] + params["b"]) ** 2)


def loss_with_key(params, x, *, key):
    del key
    return loss_fn(params, x)


STEP = training.Step(loss_fn, MECHANISM, optax.adam(0.1))


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
        return diagnostics.Readout(
            *(self.positive() for _ in diagnostics.Readout._fields)
        )

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
    tx = optax_contract_test.make(name)

    def fun(gradients, padding, params):
        if name in optax_contract_test.TAKES_EXAMPLES:
            gradients = dpadambc.as_per_example(gradients, is_padding_example=padding)
        else:
            gradients = jax.tree.map(lambda g: g[0], gradients)
            gradients = optax_contract_test.sums_of(name, gradients)
        return tx.update(gradients, tx.init(params), params)

    return fun, lambda d: (d.params(5), d.padding(), d.params())


def of_examples(transformation, **options):
    fun = transformation(loss_fn, **options)

    def materialized(params, x, padding):
        return dpadambc.materialize(fun(params, x, is_padding_example=padding))

    return materialized, lambda d: (d.params(), d(5, 3), d.padding())


def vouched(gradient):
    return dpadambc.as_clipped_sum(gradient, **CLIPPED)


def sampled(sample, **options):
    return lambda key: sample(key, num_examples=20, **options), lambda d: (d.key,)


def delayed_step(gradients, padding, params):
    """The second, which divides by what came out of the first."""
    tx = contrib.delayed_preconditioner(
        optax_contract_test.make("privatize"),
        interval=1,
        l2_clip_norm=1.0,
        preconditioned_clip_norm=1.0,
    )
    gradients = dpadambc.as_per_example(gradients, is_padding_example=padding)
    _, state = tx.update(gradients, tx.init(params), params)
    return tx.update(gradients, state, params)


def correlated_step(gradient, key, step):
    """The second, which takes a part of the first back."""
    tx = CORRELATED.add_noise(key=key)
    summed = vouched(gradient)
    _, state = tx.update(summed, tx.init(gradient), gradient)
    return *tx.update(summed, state, gradient), CORRELATED.noise_stddev(step)


def banded_step(gradient, key, step):
    """The second, which takes a part of the first back."""
    tx = BANDED.add_noise(key=key)
    summed = vouched(gradient)
    _, state = tx.update(summed, tx.init(gradient), gradient)
    return *tx.update(summed, state, gradient), BANDED.noise_stddev(step)


def key_of_noise(mechanism):
    noise = lambda key: mechanism.add_noise(key=key).init(jnp.zeros(2))
    return lambda key: jax.random.key_data(noise(key).rng_key)


def moved_bound(bound):
    moves = common.poisson_gaussian(clip_rule=contrib.SlackClipping())
    state = dpadambc.privatize(moves, key=jax.random.key(0)).init(bound)
    found = diagnostics.clip_bound(moves, state._replace(l2_clip_norm=bound))
    return found.l2_clip_norm, found.relative_to_start


def after_a_step(gradient):
    return ADAM_BC.update(gradient, ADAM_BC.init(gradient))[1]


def clean_moments(params, gradient):
    moments = not_private.init_clean_moments(params)
    return not_private.update_clean_moments(moments, gradient)


def preconditioned(params, public, x):
    """The gradients of a loss, and those that its public examples precondition."""
    found = contrib.kronecker_preconditioner(
        loss_fn, params, public_examples=(public,), damping=0.1
    )
    return jax.grad(contrib.preconditioned(loss_fn, found))(params, x)


def statistics(gradients, padding):
    seen = not_private.gradient_statistics(
        gradients, MECHANISM, is_padding_example=padding
    )
    return seen, seen.signal_to_noise


# By the names of what it covers: a function, and its arguments from `Draws`.
ROWS = {name: stage(name) for name in optax_contract_test.ROWS} | {
    "as_per_example materialize PerExampleGradient.materialize": (
        lambda g, padding: dpadambc.materialize(
            dpadambc.as_per_example(g, is_padding_example=padding)
        ),
        lambda d: (d.params(5), d.padding()),
    ),
    "as_clipped_sum ClippedSum.value ClippedSum.plus": (
        lambda one, other: vouched(one).plus(vouched(other)).value,
        lambda d: (d(3, 2), d(3, 2)),
    ),
    "ClippedSum.sum_over": (
        lambda x: jax.shard_map(
            lambda x: vouched(x).sum_over("i").value,
            mesh=jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,)),
            in_specs=PartitionSpec("i"),
            out_specs=PartitionSpec(),
        )(x),
        lambda d: (d(4, 3),),
    ),
    "per_example_norms": (
        lambda *args: dpadambc.per_example_norms(
            dpadambc.per_example_grad(loss_fn)(*args)
        ),
        lambda d: (d.params(), d(5, 3)),
    ),
    "per_example_grad": of_examples(dpadambc.per_example_grad),
    "per_example_value_and_grad": of_examples(dpadambc.per_example_value_and_grad),
    "contrib.kronecker_preconditioner contrib.preconditioned"
    " gradients.KroneckerPreconditioner.untouched": (
        preconditioned,
        lambda d: (d.params(), d(5, 3), d(3)),
    ),
    "clipped_grad": of_examples(dpadambc.clipped_grad, **CLIPPED),
    "clipped_value_and_grad clipping.ClippedGrad.__call__": of_examples(
        dpadambc.clipped_value_and_grad, method="vmap", microbatch_size=2, **CLIPPED
    ),
    "clipping.Flat.weight clipping.ClipRule.weight": (
        clipping.Flat().weight,
        lambda d: (d.positive(), d.positive()),
    ),
    "clipping.Automatic.weight": (
        clipping.Automatic().weight,
        lambda d: (d.positive(), d.positive()),
    ),
    "clipping.PerSampleAdaptive.weight": (
        clipping.PerSampleAdaptive().weight,
        lambda d: (d.positive(), d.positive()),
    ),
    "clipping.PerGroup.weight": (
        clipping.PerGroup("all", {"all": 1.0}).weight,
        lambda d: (d.positive(), d.positive()),
    ),
    "RelativeFloor.variance": (
        dpadambc.RelativeFloor(0.5).variance,
        lambda d: (d.positive(), d.below_one(), d.integers(1, 9)),
    ),
    "transforms.corrected_second_moment": (
        transforms.corrected_second_moment,
        lambda d: (d.positive(3, 2), d.positive(), d.positive()),
    ),
    "transforms.stochastic_round": (
        lambda key, x: transforms.stochastic_round(key, x, "bfloat16"),
        lambda d: (d.key, d(3, 2)),
    ),
    "contrib.is_preconditioned": (
        lambda count: contrib.is_preconditioned(count, 1, 2),
        lambda d: (d.integers(0, 9, 5),),
    ),
    "contrib.low_pass_noise_stddev": (
        contrib.low_pass_noise_stddev(
            optax.linear_schedule(1.0, 0.5, 4), (0.5,), (1.0, -0.5)
        ),
        lambda d: (d.integers(0, 9),),
    ),
    "contrib.delayed_preconditioner": (
        delayed_step,
        lambda d: (d.params(5), d.padding(), d.params()),
    ),
    "contrib.add_correlated_noise Mechanism.add_noise"
    " mechanisms.CorrelatedGaussian.add_noise"
    " mechanisms.CorrelatedGaussian.noise_stddev": (
        correlated_step,
        lambda d: (d.params(), d.key, d.integers(0, 9)),
    ),
    "contrib.add_banded_noise mechanisms.BandedGaussian.add_noise"
    " mechanisms.BandedGaussian.noise_stddev": (
        banded_step,
        lambda d: (d.params(), d.key, d.integers(0, 9)),
    ),
    "transforms.AddBandedNoiseState.rng_key": (
        key_of_noise(BANDED),
        lambda d: (d.key,),
    ),
    "transforms.AddCorrelatedNoiseState.rng_key": (
        key_of_noise(common.correlated_gaussian()),
        lambda d: (d.key,),
    ),
    "mechanisms.sampling.cyclic_poisson_sample": (
        lambda key, step: BANDED.sample_step(key, step, num_examples=20),
        lambda d: (d.key, d.integers(0, 8)),
    ),
    "Batch.gather": (
        lambda batch, data: batch.gather(data),
        lambda d: (d.batch(), d.params(4)),
    ),
    "Mechanism.sample": sampled(MECHANISM.sample),
    "Mechanism.sample_step": (
        lambda key, step: ALLOCATED.sample_step(key, step, num_examples=20),
        lambda d: (d.key, d.integers(0, 8)),
    ),
    "Mechanism.noise_stddev Mechanism.noise_variance": (
        lambda step: (SCHEDULED.noise_stddev(step), SCHEDULED.noise_variance(step)),
        lambda d: (d.integers(0, 9),),
    ),
    "mechanisms.sampling.poisson_sample": sampled(
        sampling.poisson_sample, sampling_prob=0.25
    ),
    "mechanisms.sampling.truncated_poisson_sample": sampled(
        sampling.truncated_poisson_sample, sampling_prob=0.25, truncated_batch_size=4
    ),
    "mechanisms.sampling.fixed_size_sample": sampled(
        sampling.fixed_size_sample, batch_size=5
    ),
    "mechanisms.sampling.random_allocation_sample": (
        lambda key, step: sampling.random_allocation_sample(
            key, step, num_examples=20, batches_per_epoch=4
        ),
        lambda d: (d.key, d.integers(0, 8)),
    ),
    "graphs.gather": (
        graphs.gather,
        lambda d: (d(6, 3), d.integers(-1, 6, 4, 2)),
    ),
    "graphs.Subgraphs.degrees graphs.Subgraphs.is_padding": (
        lambda members: (
            found := graphs.Subgraphs(jnp.asarray(members), max_terms=3),
            found.degrees,
            found.is_padding,
        ),
        lambda d: (d.integers(-1, 6, 4, 2),),
    ),
    "diagnostics.clip_bound": (moved_bound, lambda d: (d.positive(),)),
    "diagnostics.snapshot": (
        lambda gradient: diagnostics.snapshot(after_a_step(gradient)),
        lambda d: (d.params(),),
    ),
    "diagnostics.stack": (
        lambda *snapshots: diagnostics.stack(snapshots),
        lambda d: (d.snapshot(), d.snapshot()),
    ),
    "diagnostics.Snapshot.share_at_floor": (
        lambda snapshot: snapshot.share_at_floor,
        lambda d: (d.snapshot(),),
    ),
    "diagnostics.Readout.signal": (
        lambda readout: readout.signal,
        lambda d: (d.readout(),),
    ),
    "diagnostics.Readout.signal_stderr": (
        lambda readout: readout.signal_stderr,
        lambda d: (d.readout(),),
    ),
    "diagnostics.Readout.noise_to_signal": (
        lambda readout: readout.noise_to_signal,
        lambda d: (d.readout(),),
    ),
    "diagnostics.not_private.gradient_statistics"
    " diagnostics.not_private.GradientStatistics.signal_to_noise": (
        statistics,
        lambda d: (d.params(5), d.padding()),
    ),
    "diagnostics.not_private.init_clean_moments"
    " diagnostics.not_private.update_clean_moments": (
        clean_moments,
        lambda d: (d.params(), d.params()),
    ),
    "diagnostics.not_private.snapshot": (
        lambda *args: not_private.snapshot(clean_moments(*args), noise_stddev=0.1),
        lambda d: (d.params(), d.params()),
    ),
    "theory.noise_variance": (
        theory.noise_variance,
        lambda d: (d.positive(3), d.positive(3), d.positive(3)),
    ),
    "theory.noise_bound": (
        lambda stddev: theory.noise_bound(stddev, 10, 100),
        lambda d: (d.positive(3),),
    ),
    "theory.first_moment_spread": (
        theory.first_moment_spread,
        lambda d: (d.positive(3), d.below_one(), d.integers(1, 9, 3)),
    ),
    "theory.second_moment_spread": (
        theory.second_moment_spread,
        lambda d: (d.positive(3), d.below_one(), d.integers(1, 9, 3)),
    ),
    "theory.second_moment_bias": (
        lambda variances: theory.second_moment_bias(variances, 0.9),
        lambda d: (d.positive(4),),
    ),
    "theory.correlated_noise_variances": (
        theory.correlated_noise_variances,
        lambda d: (d(3), d.positive(4)),
    ),
    "theory.correlated_second_moment_spread": (
        theory.correlated_second_moment_spread,
        lambda d: (d(3), d.positive(4), d.below_one(), d(4)),
    ),
    "theory.second_moment_deviation": (
        theory.second_moment_deviation,
        lambda d: (d.positive(3), d.integers(1, 9, 3)),
    ),
    "theory.sign_descent_ratio": (
        theory.sign_descent_ratio,
        lambda d: (d(3), d.positive(3)),
    ),
    "theory.corrected_sign_descent_ratio": (
        theory.corrected_sign_descent_ratio,
        lambda d: (d(3), d.positive(3)),
    ),
    "theory.equivalent_sgdm_schedule": (
        theory.equivalent_sgdm_schedule(0.1, 0.1),
        lambda d: (d.integers(1, 9),),
    ),
    "training.Step.init training.Step.__call__": (
        lambda params, key, x, padding: STEP(STEP.init(params, key=key), x, padding),
        lambda d: (d.params(), d.key, (d(5, 3),), d.padding()),
    ),
    "training.draw_batch training.releasable": (
        lambda params, key: (
            state := STEP.init(params, key=key),
            training.draw_batch(MECHANISM, state, num_examples=20),
            training.releasable(state),
        ),
        lambda d: (d.params(), d.key),
    ),
    "training.PublicScore.per_example training.NoisyScore.per_example": (
        lambda params, x: training.PublicScore(loss_fn, (x,)).per_example(
            params, (), (x,)
        ),
        lambda d: (d.params(), d(5, 3)),
    ),
    "training.with_augmentations": (
        lambda params, x, key: training.with_augmentations(
            loss_with_key, lambda key, x: (x + jax.random.normal(key, x.shape),), 3
        )(params, x, key=key),
        lambda d: (d.params(), d(3), d.key),
    ),
    "contrib.with_prediction": (
        contrib.with_prediction(loss_fn),
        lambda d: (d.params(), d.params(), d(3)),
    ),
    "training.with_rows": (
        lambda params, x, padding, key: training.with_rows(loss_with_key)(
            params, x, padding, key=key
        ),
        lambda d: (d.params(), d(4, 3), jnp.arange(4) > 1, d.key),
    ),
    "training.with_compute_dtype": (
        training.with_compute_dtype(loss_fn, jnp.bfloat16),
        lambda d: (d.params(), d(3)),
    ),
    "audit.with_sum": (
        lambda gradient: (tx := audit.with_sum(optax.sgd(0.1))).update(
            gradient, tx.init(gradient)
        ),
        lambda d: (d.params(),),
    ),
    "audit.GradientCanaries.loss": (
        audit.GradientCanaries(
            {"w": np.zeros((3, 2)), "b": np.zeros(2)}, num_canaries=3, l2_clip_norm=1.0
        ).loss(loss_fn),
        lambda d: (d.params(), d.integers(-1, 3), d(3)),
    ),
}
ON_THE_HOST = {
    "audit.GradientCanaries.insert": "makes data longer by a number that is drawn",
    "audit.Pipeline.of_chain": "returns what is to be audited",
    "audit.Pipeline.of_fit": "returns what is to be audited",
    "clipping.ParameterCost.kind": "has no arrays",
    "graphs.subgraphs": "reads edges, in NumPy",
    "training.fully_sharded": "returns shardings",
    "training.group_by_user": "reads ids, and how many there are is in the shapes",
    "training.load_release": "reads a file",
    "training.secret_key": "draws from the operating system",
}

# In double precision they return numbers in single.
IN_SINGLE = {
    "transforms.stochastic_round": "rounds",
    "training.with_compute_dtype": "is asked to",
    "diagnostics.snapshot": "has shares, of booleans",
    "diagnostics.not_private.snapshot": "has shares, of booleans",
    "diagnostics.not_private.gradient_statistics"
    " diagnostics.not_private.GradientStatistics.signal_to_noise": "has shares too",
}
TOLERANCES = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 3e-2}
# Of the transformations, those of which the others are parts.
QUICK = ROWS.keys() - (optax_contract_test.ROWS.keys() - optax_contract_test.LEADING)
every_row = pytest.mark.parametrize("name", ROWS)


every_row_and_dtype = pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        if dtype == "float32" and name in QUICK
        else common.thorough(name, dtype)
        if dtype != "float32" and name not in QUICK
        else common.slow(name, dtype)
        for name in ROWS
        for dtype in TOLERANCES
    ],
)


@every_row_and_dtype
@pytest.mark.usefixtures("without_nonces")
def test_compiled_once_it_is_as_by_hand_off_the_device_and_on_it(name, dtype):
    fun, arguments = ROWS[name]
    with jax.enable_x64(dtype == "float64"):
        host, device = (arguments(Draws(seed, dtype)) for seed in range(2))
        if dtype == "bfloat16":  # in which NumPy promotes by rules of its own
            host = jax.device_put(host)
        common.assert_jit_changes_nothing(
            fun,
            *(host, jax.device_put(device)),
            rtol=TOLERANCES[dtype],
            atol=TOLERANCES[dtype],
        )


@every_row
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
    "counts": (lambda x: x + next(number), AssertionError, "assert_trees_all_close"),
    "is another where it is traced": (
        lambda x: x + is_traced(x),
        *(AssertionError, "assert_trees_all_close"),
    ),
    "is in another dtype where it is traced": (
        lambda x: x.astype("float16") if is_traced(x) else x,
        *(AssertionError, "dtypes"),
    ),
    "writes to its argument": (increased, ValueError, "read-only"),
    "depends on a value": (
        lambda x: x if x[0] > 0 else -x,
        *(jax.errors.TracerBoolConversionError, "Attempted boolean"),
    ),
}


@pytest.mark.parametrize(("fun", "error", "match"), BROKEN.values(), ids=BROKEN)
def test_what_is_not_the_same_is_seen(fun, error, match):
    """Negative controls."""
    calls = [(Draws(seed)(3),) for seed in range(2)]
    with pytest.raises(error, match=match):
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
            continue
        for attribute, member in vars(value).items():
            member = getattr(member, "fget", getattr(member, "__func__", member))
            is_public = not attribute.startswith("_") or attribute == "__call__"
            if is_public and inspect.isfunction(member):
                yield f"{name}.{attribute}", member


def returns_arrays(function):
    """By its annotation: arrays, classes with them, functions of them, or any."""
    returned = inspect.signature(function, eval_str=True).return_annotation
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
    some = {"Batch.gather", "dp_adamw", "graphs.gather", "theory.noise_bound"}
    assert without_a_row(ROWS.keys() - some) >= some - {"dp_adamw"}

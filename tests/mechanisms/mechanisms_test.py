"""A mechanism checks its numbers, and refuses what it cannot account for."""

import dataclasses
import pickle

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from dpadambc import NeighboringRelation, accounting, training
from dpadambc.contrib import BandedGaussian, CorrelatedGaussian, QuantileClipping
from dpadambc.core import mechanism
from tests import common

ADD = NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE = NeighboringRelation.REPLACE_ONE
SPECIAL = NeighboringRelation.REPLACE_SPECIAL

COMMON = dict(l2_clip_norm=1.0, noise_multiplier=2.0, iterations=100, normalize_by=50.0)
POISSON = dict(COMMON, sampling_prob=0.05)
SIZED = dict(COMMON, batch_size=50, num_examples=1_000)
ALLOCATED = dict(COMMON, batches_per_epoch=20)
TRUNCATED = dict(POISSON, truncated_batch_size=60, num_examples=1_000)

ALL = {
    dpadambc.PoissonGaussian: POISSON,
    dpadambc.TruncatedPoissonGaussian: TRUNCATED,
    dpadambc.FixedSizeGaussian: SIZED,
    dpadambc.ShuffledGaussian: SIZED,
    dpadambc.RandomAllocationGaussian: ALLOCATED,
    CorrelatedGaussian: dict(ALLOCATED, noising_coefficients=(1.0, -0.8)),
    BandedGaussian: dict(POISSON, strategy_coefficients=(1.0, 0.5)),
}


@pytest.mark.parametrize("cls", ALL)
def test_a_mechanism_is_a_frozen_value(cls):
    one, two = cls(**ALL[cls]), cls(**ALL[cls])
    assert one == two
    assert hash(one) == hash(two)
    assert pickle.loads(pickle.dumps(one)) == one
    assert "neighboring_relation" in repr(one)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.noise_multiplier = 0.0
    assert dataclasses.replace(one, noise_multiplier=3.0).noise_multiplier == 3.0


@pytest.mark.parametrize("array", [np.float32, np.array, jnp.array])
@pytest.mark.parametrize("cls", ALL)
def test_numbers_that_are_arrays_become_those_of_python(cls, array):
    """Arrays have no hash, and NumPy's float32 rounds what is computed of it."""
    numbers = ALL[cls]
    arrays = {n: array(v) if isinstance(v, float) else v for n, v in numbers.items()}
    plain = {
        n: float(v) if isinstance(numbers[n], float) else v for n, v in arrays.items()
    }
    one, two = cls(**arrays), cls(**plain)
    assert one == two
    assert hash(one) == hash(two)
    assert {type(getattr(one, n)) for n in numbers} <= {float, int, tuple}
    assert one.dp_event() == two.dp_event()


def test_a_field_of_a_subclass_may_be_made_from_others():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class WithExpected(dpadambc.PoissonGaussian):
        expected: float = dataclasses.field(init=False)

        def __post_init__(self):
            super().__post_init__()
            object.__setattr__(self, "expected", self.sampling_prob * 1_000)

    assert WithExpected(**POISSON).expected == 50


def test_a_number_of_low_precision_is_refused():
    with pytest.raises(TypeError, match="sampling_prob"):
        dpadambc.PoissonGaussian(**{**POISSON, "sampling_prob": jnp.bfloat16(0.05)})


@pytest.mark.parametrize("cls", list(ALL)[:5])
def test_noise_is_the_multiplier_times_the_sensitivity(cls):
    mechanism = cls(**ALL[cls])
    bound = dpadambc.sensitivity(
        1.0, normalize_by=50.0, neighboring_relation=mechanism.neighboring_relation
    )
    assert mechanism.sensitivity == bound
    assert mechanism.noise_stddev == 2.0 * bound


SUPPORTED = {
    (dpadambc.PoissonGaussian, ADD): "pld rdp",
    (dpadambc.PoissonGaussian, SPECIAL): "pld rdp",
    (dpadambc.PoissonGaussian, REPLACE): "pld",
    (dpadambc.TruncatedPoissonGaussian, SPECIAL): "pld",
    (dpadambc.TruncatedPoissonGaussian, REPLACE): "pld",
    (dpadambc.FixedSizeGaussian, REPLACE): "pld rdp",
    (dpadambc.ShuffledGaussian, REPLACE): "pld rdp",
    (dpadambc.ShuffledGaussian, SPECIAL): "pld rdp",
    (dpadambc.RandomAllocationGaussian, ADD): "pld",
    (dpadambc.RandomAllocationGaussian, SPECIAL): "pld",
    (CorrelatedGaussian, ADD): "pld rdp",
    (CorrelatedGaussian, REPLACE): "pld rdp",
    (CorrelatedGaussian, SPECIAL): "pld rdp",
    (BandedGaussian, ADD): "pld rdp",
    (BandedGaussian, SPECIAL): "pld rdp",
    (BandedGaussian, REPLACE): "pld",
}


@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.__name__)
@pytest.mark.parametrize("relation", NeighboringRelation, ids=lambda r: r.name)
def test_every_combination_is_accounted_for_or_refused_with_a_reason(cls, relation):
    accountants = SUPPORTED.get((cls, relation), "").split()
    if not accountants:
        with pytest.raises(ValueError, match="neighboring_relation"):
            cls(**ALL[cls], neighboring_relation=relation)
        return
    mechanism = cls(**ALL[cls], neighboring_relation=relation)
    assert [x.name for x in mechanism.accountants] == accountants
    for accountant in (accounting.PLD, accounting.RDP):
        if accountant in mechanism.accountants:
            assert 0 < mechanism.epsilon(1e-5, accountant=accountant) < 100
        else:
            with pytest.raises(ValueError, match=repr(accountant)):
                mechanism.epsilon(1e-5, accountant=accountant)


def test_truncation_costs_little_where_it_is_rare():
    free = dpadambc.PoissonGaussian(**POISSON, neighboring_relation=SPECIAL).epsilon(
        1e-5
    )
    of = lambda cap: dpadambc.TruncatedPoissonGaussian(
        **{**TRUNCATED, "truncated_batch_size": cap}
    ).epsilon(1e-5)
    assert of(1_000) == pytest.approx(free, rel=1e-6)
    assert of(120) == pytest.approx(free, rel=1e-3)
    assert of(55) > 1.05 * free


def test_shuffled_epochs_cost_far_more_than_poisson_sampling():
    """Most published runs shuffle, and state the epsilon of Poisson sampling."""
    steps = dict(iterations=200)
    shuffled = dpadambc.ShuffledGaussian(
        **{**SIZED, **steps}, neighboring_relation=SPECIAL
    )
    poisson = dpadambc.PoissonGaussian(**{**POISSON, **steps})
    assert shuffled.noise_stddev == poisson.noise_stddev
    assert shuffled.epsilon(1e-5) > 4 * poisson.epsilon(1e-5)


def test_an_epoch_that_is_begun_counts_in_full():
    mechanism = dpadambc.ShuffledGaussian(**SIZED)
    counts = [mechanism.dp_event(n).count for n in (1, 20, 21, 40)]
    assert counts == [1, 1, 2, 2]


def test_fixed_size_sampling_under_replacement_uses_the_doubled_sensitivity():
    """A batch of everything is the Gaussian mechanism of sensitivity 2 C."""
    fixed = dpadambc.FixedSizeGaussian(
        **{**SIZED, "batch_size": 1_000, "iterations": 1}
    )
    full = dpadambc.PoissonGaussian(
        **{**POISSON, "sampling_prob": 1.0, "iterations": 1},
        neighboring_relation=REPLACE,
    )
    assert fixed.noise_stddev == full.noise_stddev
    exact = full.epsilon(1e-5)
    assert fixed.epsilon(1e-5) == pytest.approx(exact, rel=1e-3)
    assert exact <= fixed.epsilon(1e-5, accountant=accounting.RDP) < 1.3 * exact


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "unknown"),
    [
        common.slow(dpadambc.TruncatedPoissonGaussian, "noise_multiplier"),
        (dpadambc.FixedSizeGaussian, "noise_multiplier"),
        common.slow(dpadambc.FixedSizeGaussian, "iterations"),
        (dpadambc.ShuffledGaussian, "noise_multiplier"),
        common.slow(dpadambc.ShuffledGaussian, "iterations"),
        (dpadambc.RandomAllocationGaussian, "noise_multiplier"),
        common.slow(dpadambc.RandomAllocationGaussian, "iterations"),
        (CorrelatedGaussian, "noise_multiplier"),
        (BandedGaussian, "noise_multiplier"),
        common.slow(BandedGaussian, "iterations"),
        (BandedGaussian, "sampling_prob"),
    ],
)
def test_every_mechanism_calibrates(cls, unknown):
    numbers = {k: v for k, v in ALL[cls].items() if k != unknown}
    mechanism = cls.calibrate(target_epsilon=4.0, target_delta=1e-5, **numbers)
    assert 3 < mechanism.epsilon(1e-5) <= 4.0


BAD = [
    (dict(l2_clip_norm=-1.0), ValueError, "l2_clip_norm"),
    (dict(l2_clip_norm=float("nan")), ValueError, "l2_clip_norm"),
    (dict(l2_clip_norm=float("inf")), ValueError, "l2_clip_norm"),
    (dict(l2_clip_norm="1"), TypeError, "l2_clip_norm"),
    (dict(noise_multiplier=-0.1), ValueError, "noise_multiplier"),
    (dict(noise_multiplier=float("nan")), ValueError, "noise_multiplier"),
    (dict(noise_multiplier=None), TypeError, "noise_multiplier"),
    (dict(sampling_prob=1.2), ValueError, "sampling_prob"),
    (dict(sampling_prob=-0.1), ValueError, "sampling_prob"),
    (dict(sampling_prob=True), TypeError, "sampling_prob"),
    (dict(sampling_prob=jnp.array(True)), TypeError, "sampling_prob"),
    (dict(iterations=0), ValueError, "iterations"),
    (dict(iterations=10.0), TypeError, "iterations"),
    (dict(normalize_by=0.0), ValueError, "normalize_by"),
    (dict(neighboring_relation="add"), ValueError, "neighboring_relation"),
]


@pytest.mark.parametrize(("changed", "error", "match"), BAD)
def test_refuses_numbers_out_of_range(changed, error, match):
    with pytest.raises(error, match=match):
        dpadambc.PoissonGaussian(**{**POISSON, **changed})


def test_refuses_sizes_out_of_range():
    for cls in (dpadambc.FixedSizeGaussian, dpadambc.ShuffledGaussian):
        with pytest.raises(ValueError, match="num_examples"):
            cls(**{**SIZED, "num_examples": 49})
    with pytest.raises(ValueError, match="truncated_batch_size"):
        dpadambc.TruncatedPoissonGaussian(**{**TRUNCATED, "truncated_batch_size": 0})
    with pytest.raises(TypeError, match="noise_multiplier"):
        dpadambc.ShuffledGaussian(**{**SIZED, "noise_multiplier": lambda step: 1.0})
    with pytest.raises(TypeError, match="iterations"):
        dpadambc.PoissonGaussian(**POISSON).dp_event(1.5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Silent(dpadambc.PoissonGaussian):
    """With noise of its own, which is none: to see who asks for it."""

    noise_stddev = 0.0

    def add_noise(self, *, key):
        return dpadambc.add_dp_noise(0.0, key=key)


@pytest.mark.parametrize("cls", [dpadambc.PoissonGaussian, _Silent])
def test_all_that_adds_noise_asks_the_mechanism_for_it(cls):
    mechanism = cls(**{**POISSON, "sampling_prob": 1.0})
    params, key, x = jnp.zeros(3), jax.random.key(0), jnp.zeros((4, 3))
    padding = jnp.zeros(4, bool)
    tx = dpadambc.privatize(mechanism, key=key)
    grads = dpadambc.per_example_grad(lambda w, x: w @ x)(params, x)
    updates, _ = tx.update(grads, tx.init(params), params, is_padding_example=padding)
    step = training.Step(lambda w, x: w @ x, mechanism, optax.sgd(1.0))
    state, _ = step(step.init(params, key=key), (x,), padding)
    assert bool(updates.any()) == bool(state.params.any()) == (cls is not _Silent)


class _Own(dpadambc.Mechanism):
    """A mechanism of a user: its event and its draw, and nothing else."""

    relations = {ADD: (accounting.PLD,)}

    def _event(self, steps, noise_multiplier):
        return dp_accounting.GaussianDpEvent(noise_multiplier / steps**0.5)

    def _draw(self, key, step, num_examples):
        indices = jax.random.permutation(key, num_examples)
        return dpadambc.Batch(indices, jnp.zeros(num_examples, bool), num_examples)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OwnGaussian(_Own):
    l2_clip_norm: float
    noise_multiplier: float
    iterations: int
    normalize_by: float
    neighboring_relation: NeighboringRelation = ADD


@pytest.mark.guarantee
def test_a_mechanism_is_an_event_and_a_draw_and_all_else_follows():
    own = _OwnGaussian(**COMMON)
    all_take_part = dpadambc.PoissonGaussian(**POISSON | {"sampling_prob": 1.0})
    assert own.noise_stddev == all_take_part.noise_stddev
    exact = all_take_part.epsilon(1e-5)
    assert own.epsilon(1e-5) == pytest.approx(exact, rel=1e-3)
    batch = next(own.batches(jax.random.key(0), num_examples=9))
    assert sorted(batch.indices) == list(range(9))
    # A class that does not say that its steps are alone has one key for the run.
    same = own.sample_step(jax.random.key(0), 7, num_examples=9)
    assert (same.indices == batch.indices).all()
    with pytest.raises(TypeError, match="abstract"):
        dpadambc.Mechanism()


def overriding(cls, owners):
    """The names that another class of its bases defines than the owner."""
    definers = {name: [c for c in cls.__mro__ if name in vars(c)] for name in owners}
    return {name for name, found in definers.items() if found != [owners[name]]}


def test_all_but_the_event_and_the_draw_is_final():
    of_core = (
        *("sensitivity", "noise_variance", "sample_step", "batches", "dp_event"),
        *("epsilon", "known_size"),
    )
    owners = dict.fromkeys(of_core, mechanism.Mechanism)
    owners |= dict.fromkeys(("calibrate", "of_epochs"), dpadambc.Mechanism)
    noise = {"noise_stddev", "add_noise", "private_gradient", "has_independent_noise"}
    own_noise = dict.fromkeys(noise, mechanism.Mechanism)
    for cls in (*ALL, dpadambc.graphs.NodePoissonGaussian, QuantileClipping):
        assert not overriding(cls, owners)
        is_of_contrib = cls.__module__.startswith("dpadambc.contrib")
        assert bool(overriding(cls, own_noise)) == is_of_contrib


def test_a_draw_of_its_own_may_depend_on_those_of_other_steps():
    class Dealt(dpadambc.FixedSizeGaussian):
        def _draw(self, key, step, num_examples):
            return super()._draw(key, step, num_examples)

    class Named(dpadambc.FixedSizeGaussian):
        pass

    assert not Dealt.draws_steps_alone
    assert Named.draws_steps_alone and dpadambc.FixedSizeGaussian.draws_steps_alone

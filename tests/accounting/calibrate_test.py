"""Calibration meets its target from below; users' numbers become fields."""

import math

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

import dpadambc
from dpadambc import NeighboringRelation, accounting
from tests import common

ADD = NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE = NeighboringRelation.REPLACE_ONE
SPECIAL = NeighboringRelation.REPLACE_SPECIAL


def poisson(**changed):
    numbers = dict(noise_multiplier=1.5, sampling_prob=0.02, iterations=500)
    common_numbers = dict(l2_clip_norm=1.0, normalize_by=100.0)
    return dpadambc.PoissonGaussian(**common_numbers | numbers | changed)


SOLVED = {
    "noise_multiplier": (dict(sampling_prob=0.02, iterations=500), 0.999),
    "sampling_prob": (dict(noise_multiplier=1.5, iterations=500), 1.001),
    "iterations": (dict(noise_multiplier=1.5, sampling_prob=0.02), None),
}


@pytest.mark.slow
@pytest.mark.parametrize("unknown", SOLVED)
@pytest.mark.parametrize(
    ("accountant", "target"),
    [
        (accounting.PLD, 6.0),
        (accounting.RDP, 0.5),
        common.slow(accounting.PLD, 0.5),
        common.slow(accounting.RDP, 6.0),
    ],
)
def test_calibration_never_exceeds_and_nearly_meets_its_target(
    unknown, target, accountant
):
    given, factor = SOLVED[unknown]
    mechanism = dpadambc.PoissonGaussian.calibrate(
        target_epsilon=target,
        target_delta=1e-5,
        l2_clip_norm=1.0,
        normalize_by=9.0,
        accountant=accountant,
        **given,
    )
    assert mechanism.epsilon(1e-5, accountant=accountant) <= target
    solution = getattr(mechanism, unknown)
    slightly_worse = solution + 1 if factor is None else solution * factor
    worse = poisson(**{**given, unknown: slightly_worse})
    assert worse.epsilon(1e-5, accountant=accountant) > target


def test_all_examples_may_take_part_where_the_target_allows_it():
    mechanism = dpadambc.PoissonGaussian.calibrate(
        target_epsilon=5.0,
        target_delta=1e-5,
        l2_clip_norm=1.0,
        normalize_by=1.0,
        noise_multiplier=50.0,
        iterations=10,
    )
    assert mechanism.sampling_prob == 1.0


def test_a_target_may_need_a_great_deal_of_noise():
    mechanism = dpadambc.PoissonGaussian.calibrate(
        target_epsilon=1e-3,
        target_delta=1e-9,
        sampling_prob=1.0,
        iterations=10**6,
        l2_clip_norm=1.0,
        normalize_by=100,
    )
    assert mechanism.noise_multiplier > 2**20
    assert 0.999e-3 < mechanism.epsilon(1e-9) <= 1e-3


def test_a_target_over_which_epsilon_jumps_is_refused_with_both_ends():
    """Below this delta Rényi orders of dp-accounting give nothing from 0 to 0.019."""
    numbers = dict(sampling_prob=1e-3, iterations=10**6)
    given = dict(l2_clip_norm=1.0, normalize_by=1.0, target_delta=1e-12, **numbers)
    with pytest.raises(ValueError, match=r"from 0 to 0\.0193\. Ask for more"):
        dpadambc.PoissonGaussian.calibrate(target_epsilon=1e-3, **given)
    enough = dpadambc.PoissonGaussian.calibrate(target_epsilon=0.02, **given)
    assert enough.epsilon(1e-12) <= 0.02


def test_orders_that_dp_accounting_leaves_out_are_not_printed(caplog):
    numbers = dict(sampling_prob=0.5, iterations=4, accountant=accounting.RDP)
    targets = dict(target_epsilon=8.0, target_delta=1e-5)
    given = dict(l2_clip_norm=1.0, normalize_by=1.0)
    found = dpadambc.PoissonGaussian.calibrate(**targets, **numbers, **given)
    assert "converge" not in caplog.text
    found.epsilon(1e-6, accountant=accounting.RDP)
    assert "converge" in caplog.text


def test_a_target_that_cannot_be_reached_is_an_error():
    with pytest.raises(ValueError, match="target_epsilon"):
        dpadambc.PoissonGaussian.calibrate(
            target_epsilon=0.01,
            target_delta=1e-9,
            l2_clip_norm=1.0,
            normalize_by=1.0,
            noise_multiplier=1.0,
            sampling_prob=0.5,
        )


@pytest.mark.parametrize(
    "given",
    [
        {},
        dict(sampling_prob=0.1),
        dict(noise_multiplier=1.0, sampling_prob=0.1, iterations=5),
    ],
)
def test_calibration_solves_for_exactly_one_number(given):
    with pytest.raises(TypeError, match="all but one"):
        dpadambc.PoissonGaussian.calibrate(
            target_epsilon=1.0,
            target_delta=1e-5,
            l2_clip_norm=1.0,
            normalize_by=1.0,
            **given,
        )


def test_calibration_names_the_accountant_that_cannot_do_it():
    with pytest.raises(ValueError, match="accounting.RDP"):
        dpadambc.PoissonGaussian.calibrate(
            target_epsilon=1.0,
            target_delta=1e-5,
            l2_clip_norm=1.0,
            normalize_by=1.0,
            sampling_prob=0.1,
            iterations=10,
            neighboring_relation=REPLACE,
            accountant=accounting.RDP,
        )


def test_targets_of_a_calibration_may_be_arrays():
    calibrated = lambda of: dpadambc.PoissonGaussian.calibrate(
        target_epsilon=of(3.0),
        target_delta=of(2.0**-17),
        sampling_prob=0.1,
        iterations=10,
        l2_clip_norm=1.0,
        normalize_by=100,
    )
    assert calibrated(jnp.float32) == calibrated(np.array) == calibrated(float)


SIZES = dict(batch_size=20, num_examples=1_000)
CALIBRATED = [
    (dpadambc.PoissonGaussian, ADD, {}, True),
    (dpadambc.PoissonGaussian, REPLACE, {}, True),
    (dpadambc.FixedSizeGaussian, REPLACE, SIZES, False),
    (dpadambc.ShuffledGaussian, SPECIAL, SIZES, False),
    (dpadambc.graphs.NodePoissonGaussian, ADD, dict(max_terms=3), True),
    (dpadambc.graphs.NodePoissonGaussian, REPLACE, dict(max_terms=2), True),
    (dpadambc.graphs.NodeFixedSizeGaussian, REPLACE, SIZES | dict(max_terms=3), False),
]


@pytest.mark.slow
@hypothesis.settings(max_examples=12)
@hypothesis.given(
    kind=st.sampled_from(CALIBRATED),
    unknown=st.sampled_from(["noise_multiplier", "iterations", "sampling_prob"]),
    z=st.floats(1.0, 4.0),
    q=st.floats(0.005, 0.2),
    iterations=st.integers(1, 300),
    target=st.floats(0.8, 8.0),
    delta=st.sampled_from([1e-4, 1e-6, 1e-9]),
)
def test_no_mechanism_is_calibrated_beyond_its_target(
    kind, unknown, z, q, iterations, target, delta
):
    cls, relation, sizes, is_poisson = kind
    numbers = dict(noise_multiplier=z, iterations=iterations)
    numbers |= dict(sampling_prob=q) if is_poisson else {}
    unknown = unknown if unknown in numbers else "noise_multiplier"
    del numbers[unknown]
    given = dict(
        l2_clip_norm=1.0,
        normalize_by=1.0,
        neighboring_relation=relation,
        **numbers,
        **sizes,
    )
    targets = dict(target_epsilon=target, target_delta=delta)
    try:
        mechanism = cls.calibrate(**targets, **given)
    except ValueError as error:
        assert "target_epsilon" in str(error)
        hypothesis.assume(False)
    spent = mechanism.epsilon(delta)
    assert spent <= target
    if unknown == "noise_multiplier":
        assert spent >= 0.998 * target


def of_epochs(cls=dpadambc.PoissonGaussian, **numbers):
    common = dict(l2_clip_norm=1.0, noise_multiplier=1.0)
    return cls.of_epochs(**{**common, **numbers})


@pytest.mark.parametrize(
    ("epochs", "batch_size", "num_examples", "steps"),
    [
        (30, 1024, 60_000, 1758),  # 1757.8
        (1, 100, 1_000, 10),
        (0.1, 1, 10, 1),  # a tenth of ten, not a little more
        (3, 1, 1, 3),
        (0.7, 1, 10, 7),
        (0.701, 1, 10, 8),
    ],
)
def test_steps_are_rounded_up(epochs, batch_size, num_examples, steps):
    made = of_epochs(epochs=epochs, batch_size=batch_size, num_examples=num_examples)
    assert made.iterations == steps
    assert made.sampling_prob == batch_size / num_examples
    assert made.normalize_by == batch_size


def test_an_epoch_that_deals_all_examples_is_a_whole_number_of_steps():
    numbers = dict(epochs=30, batch_size=1024, num_examples=60_000)
    dealt = of_epochs(dpadambc.ShuffledGaussian, **numbers)
    assert dealt.iterations == 30 * 59
    drawn = of_epochs(dpadambc.FixedSizeGaussian, **numbers)
    assert drawn.iterations == 1758
    assert (drawn.batch_size, drawn.num_examples) == (1024, 60_000)
    allocated = of_epochs(dpadambc.RandomAllocationGaussian, **numbers)
    assert (allocated.batches_per_epoch, allocated.iterations) == (59, 30 * 59)
    twice = of_epochs(dpadambc.RandomAllocationGaussian, participations=2, **numbers)
    assert (twice.batches_per_epoch, twice.iterations) == (118, 30 * 118)
    # In the 32 bits that these come in, twice as many have no place.
    many = dict(num_examples=np.int32(2_000_000_000), batch_size=np.int32(10**6))
    rest = dict(epochs=1, participations=np.int32(2))
    allocated = of_epochs(dpadambc.RandomAllocationGaussian, **rest, **many)
    assert allocated.iterations == 4_000
    assert type(allocated.batches_per_epoch) is type(allocated.iterations) is int
    # All of the dealt epochs are counted, and no more.
    one_more = of_epochs(
        dpadambc.ShuffledGaussian, **{**numbers, "epochs": None}, iterations=1771
    )
    assert dealt.dp_event().count == 30
    assert one_more.dp_event().count == 31


@pytest.mark.slow
def test_calibrate_takes_the_same_numbers():
    target = dict(target_epsilon=3.0, target_delta=1e-5, accountant=accounting.RDP)
    fields = dict(l2_clip_norm=1.0, batch_size=100, num_examples=2_000)
    found = dpadambc.PoissonGaussian.calibrate(**target, **fields, epochs=3)
    same = dpadambc.PoissonGaussian.calibrate(
        **target, l2_clip_norm=1.0, sampling_prob=0.05, iterations=60, normalize_by=100
    )
    assert found == same
    steps = dpadambc.PoissonGaussian.calibrate(
        **target, **fields, noise_multiplier=found.noise_multiplier
    )
    assert steps.iterations == 60
    own = dpadambc.PoissonGaussian.calibrate(
        **target, **fields, epochs=3, normalize_by=99
    )
    assert own.normalize_by == 99
    with pytest.raises(ValueError, match="target_delta"):
        dpadambc.PoissonGaussian.calibrate(
            **{**target, "target_delta": 1e-3}, **fields, epochs=3
        )


@pytest.mark.parametrize(
    ("numbers", "error", "message"),
    [
        (dict(epochs=2), TypeError, "epochs"),
        (dict(epochs=2, sampling_prob=0.1), TypeError, "epochs"),
        (dict(batch_size=9, iterations=1), TypeError, "batch_size"),
        (dict(batch_size=9, num_examples=8, iterations=1), ValueError, "batch_size"),
        (
            dict(batch_size=0, num_examples=8, iterations=1),
            ValueError,
            "batch_size|epochs",
        ),
        (dict(batch_size=9, num_examples=0, iterations=1), ValueError, "num_examples"),
        (dict(batch_size=9, num_examples=9.5, iterations=1), TypeError, "num_examples"),
        (
            dict(batch_size=2, num_examples=8, sampling_prob=0.25, iterations=1),
            TypeError,
            "sampling_prob",
        ),
        (
            dict(batch_size=2, num_examples=8, epochs=1, iterations=4),
            TypeError,
            "iterations",
        ),
        (dict(batch_size=2, num_examples=8, epochs=0), ValueError, "epochs"),
        (
            dict(batch_size=2, num_examples=8, epochs=math.nan),
            ValueError,
            "batch_size|epochs",
        ),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(numbers, error, message):
    with pytest.raises(error, match=message):
        of_epochs(**numbers)
    target = dict(target_epsilon=1.0, target_delta=1e-5, l2_clip_norm=1.0)
    with pytest.raises(error, match=message):
        dpadambc.PoissonGaussian.calibrate(**target, **numbers)

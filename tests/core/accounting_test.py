"""Epsilon agrees with closed forms, published values and itself."""

import math

import dp_accounting
import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize
import scipy.special
import scipy.stats
from dp_accounting import pld

import dpadambc
from dpadambc import NeighboringRelation, accounting
from dpadambc.core.accounting import PLD, levels_of, rounding_of
from tests import common

ADD = NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE = NeighboringRelation.REPLACE_ONE
SPECIAL = NeighboringRelation.REPLACE_SPECIAL

NUMBERS = dict(
    l2_clip_norm=1.0,
    noise_multiplier=1.5,
    sampling_prob=0.02,
    iterations=500,
    normalize_by=100.0,
)


def poisson(**changed):
    return dpadambc.PoissonGaussian(**{**NUMBERS, **changed})


def gaussian_epsilon(noise_multiplier, delta):
    """The exact epsilon of one Gaussian mechanism (Balle and Wang, 2018)."""
    z = noise_multiplier
    cdf = scipy.stats.norm.cdf
    gap = lambda e: cdf(0.5 / z - e * z) - np.exp(e) * cdf(-0.5 / z - e * z) - delta
    return scipy.optimize.brentq(gap, 0, 500)


@pytest.mark.parametrize("relation", [ADD, REPLACE, SPECIAL])
@pytest.mark.parametrize("z", [0.7, 2.0, 8.0])
def test_without_sampling_it_is_the_gaussian_mechanism(relation, z):
    """Under every relation the multiplier is in units of the sensitivity."""
    mechanism = poisson(
        noise_multiplier=z * 10,
        sampling_prob=1.0,
        iterations=100,
        neighboring_relation=relation,
    )
    exact = gaussian_epsilon(z, 1e-5)
    assert mechanism.epsilon(1e-5) == pytest.approx(exact, rel=1e-3)
    by_rdp = mechanism.epsilon(1e-5, accountant=accounting.RDP)
    assert exact <= by_rdp <= 1.25 * exact


@pytest.mark.guarantee
@pytest.mark.parametrize("relation", [ADD, REPLACE, SPECIAL])
@pytest.mark.parametrize("iterations", [1, 1_000])
def test_a_delta_of_the_size_of_rounding_does_not_halve_the_sensitivity(
    iterations, relation
):
    """There the bound is that of Rényi divergences, which are in another unit."""
    z = 2.0 * iterations**0.5
    mechanism = poisson(
        noise_multiplier=z,
        sampling_prob=1.0,
        iterations=iterations,
        neighboring_relation=relation,
    )
    composed = accounting.compose([(mechanism, 1), (mechanism, iterations - 1)])
    spent = 0.0
    for delta in (1e-10, 1e-12, 1e-14, 1e-15, 1e-16):
        for whole in (mechanism, composed):
            assert whole.epsilon(delta) >= max(spent, gaussian_epsilon(2.0, delta))
        spent = mechanism.epsilon(delta)
    # No accountant by Rényi divergences is listed for REPLACE_ONE.
    assert (spent < np.inf) == (relation != REPLACE)


@pytest.mark.parametrize("accountant", [accounting.PLD, accounting.RDP])
def test_replace_one_costs_more_than_add_or_remove_for_the_same_noise(accountant):
    numbers = dict(sampling_prob=1.0, iterations=10)
    added = poisson(noise_multiplier=20.0, **numbers)
    replaced = poisson(noise_multiplier=10.0, neighboring_relation=REPLACE, **numbers)
    assert added.noise_stddev == replaced.noise_stddev
    assert added.sensitivity * 2 == replaced.sensitivity
    ratio = replaced.epsilon(1e-5, accountant=accountant) / added.epsilon(
        1e-5, accountant=accountant
    )
    assert ratio > 1.9


@pytest.mark.parametrize("steps", [2, 3, 9, 10, 11, 1_000])
def test_steps_are_composed_as_often_as_they_are_taken(steps):
    """In one power, as dp-accounting does it, whatever the number is made of."""
    step = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(2.0))
    event = dp_accounting.SelfComposedDpEvent(step, steps)
    bound = PLD.on_fine_grid(event, ADD, 1e-5)
    plain = pld.PLDAccountant(ADD, bound.interval).compose(step, steps)
    left = 1e-5 - rounding_of(event)
    assert bound.epsilon == pytest.approx(plain.get_epsilon(left), rel=1e-12)


@pytest.mark.parametrize(("steps", "excess"), [(10**6, 5e-3), (10**8, 20.0)])
def test_very_many_steps_are_a_gaussian_mechanism(steps, excess):
    """From above, and in seconds: a power of so many digits would take minutes."""
    z = 0.03 * math.sqrt(steps)
    epsilon = poisson(noise_multiplier=z, sampling_prob=0.01, iterations=steps).epsilon
    mu = 0.01 * math.sqrt(steps * math.expm1(z**-2))
    exact = gaussian_epsilon(1 / mu, 1e-5)
    assert exact <= epsilon(1e-5) <= (1 + excess) * exact


@pytest.mark.parametrize(
    ("z", "logged", "at_one_in_48", "rdp_z"),
    [
        (4.6484375, 0.9770438, 0.995369, 5.0),
        (1.8505859375, 2.9339568, 2.991029, 1.962890625),
        (1.063232421875, 6.8595499, 6.997635, 1.112060546875),
    ],
)
def test_published_cifar_runs(z, logged, at_one_in_48, rdp_z):
    """Batch 1024, 70 epochs. Their accountant adds its error bound of 0.01."""
    run = dict(noise_multiplier=z, iterations=3_360)
    for q, published in [(1024 / 50_000, logged), (1 / 48, at_one_in_48)]:
        ours = poisson(sampling_prob=q, **run).epsilon(1e-5)
        assert published - 0.012 <= ours <= published
    target = round(at_one_in_48)
    by_rdp = poisson(
        sampling_prob=1 / 48, iterations=3_360, noise_multiplier=rdp_z
    ).epsilon(1e-5, accountant=accounting.RDP)
    # Their search stops within 0.01 of the target or so, on coarser orders.
    assert by_rdp == pytest.approx(target, rel=0.02)


@pytest.mark.parametrize(
    ("z", "q", "iterations", "delta", "published"),
    [
        (0.4, 1 / 2146, 10_730, 1 / 2146, 6.988),
        (0.4, 1 / 2146, 10_730, 1e-5, 10.07),
        (1.0, 256 / 50_000, 30 * 195, 1e-5, 2.375),
    ],
    ids=["SNLI", "SNLI at 1e-5", "DP-Adam against SGDM"],
)
def test_published_renyi_epsilons(z, q, iterations, delta, published):
    mechanism = poisson(noise_multiplier=z, sampling_prob=q, iterations=iterations)
    ours = mechanism.epsilon(delta, accountant=accounting.RDP)
    assert ours == pytest.approx(published, rel=0.003)


@pytest.mark.parametrize(
    ("l2_clip_norm", "z", "normalize_by", "variance"),
    [
        (0.1, 0.4, 256, 2.44140625e-8),
        (1.0, 1.0, 256, 1.52587890625e-5),
        (0.1, 0.4, 255, 2.46059208e-8),
        (1.0, 4.6484375, 1024, 2.0607e-5),
        (1.0, 1.8505859375, 1024, 3.2660e-6),
        (1.0, 1.063232421875, 1024, 1.0781e-6),
    ],
)
def test_published_noise_variances(l2_clip_norm, z, normalize_by, variance):
    mechanism = poisson(
        l2_clip_norm=l2_clip_norm, noise_multiplier=z, normalize_by=normalize_by
    )
    assert mechanism.noise_variance == pytest.approx(variance, rel=3e-5)
    assert mechanism.noise_variance == mechanism.noise_stddev**2


def test_the_event_is_dp_accountings_by_value():
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(0.02, dp_accounting.GaussianDpEvent(1.5)),
        500,
    )
    assert poisson().dp_event() == event
    assert poisson().dp_event(0) == dp_accounting.NoOpDpEvent()
    assert poisson(sampling_prob=1.0).dp_event(3) == dp_accounting.SelfComposedDpEvent(
        dp_accounting.GaussianDpEvent(1.5), 3
    )


@hypothesis.settings(max_examples=5)
@hypothesis.given(
    z=st.floats(0.6, 5.0),
    q=st.floats(0.001, 0.3),
    iterations=st.integers(1, 2_000),
    accountant=st.sampled_from([accounting.PLD, accounting.RDP]),
)
def test_epsilon_is_monotone_in_every_argument(z, q, iterations, accountant):
    base = dict(noise_multiplier=z, sampling_prob=q, iterations=iterations)
    of = lambda delta=1e-6, **changed: poisson(**{**base, **changed}).epsilon(
        delta, accountant=accountant
    )
    slack = 1 + 1e-6
    assert of(noise_multiplier=1.2 * z) <= of() * slack
    assert of(sampling_prob=1.2 * q) * slack >= of()
    assert of(iterations=2 * iterations) * slack >= of()
    assert of(1e-4) <= of() * slack


def test_no_noise_is_no_privacy():
    for accountant in (accounting.PLD, accounting.RDP):
        assert (
            poisson(noise_multiplier=0.0).epsilon(1e-5, accountant=accountant) == np.inf
        )
    schedule = lambda step: jnp.where(step == 7, 0.0, 2.0)
    assert poisson(noise_multiplier=schedule).epsilon(1e-5) == np.inf


def test_no_participation_is_full_privacy():
    assert poisson(sampling_prob=0.0).epsilon(1e-5) == 0
    assert poisson().epsilon(1e-5, iterations=0) == 0


def test_a_schedule_is_grouped_into_equal_steps():
    schedule = optax.piecewise_constant_schedule(2.0, {100: 0.5, 300: 0.5})
    assert levels_of(schedule, 500) == {0.5: 200, 1.0: 200, 2.0: 100}
    mechanism = poisson(noise_multiplier=schedule)
    parts = [
        dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(0.02, dp_accounting.GaussianDpEvent(z)),
            n,
        )
        for z, n in [(0.5, 200), (1.0, 200), (2.0, 100)]
    ]
    assert mechanism.dp_event() == dp_accounting.ComposedDpEvent(parts)
    assert mechanism.noise_stddev(0) == pytest.approx(2.0 / 100)
    assert mechanism.noise_stddev(400) == pytest.approx(0.5 / 100)
    assert mechanism.noise_variance(0) == pytest.approx((2.0 / 100) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    [
        optax.linear_schedule(3.0, 1.0, 400),
        common.thorough(optax.exponential_decay(2.0, 100, 0.7)),
    ],
    ids=["linear", "exponential"],
)
def test_a_smooth_schedule_is_rounded_down_to_few_levels(schedule):
    counts = levels_of(schedule, 500)
    values = np.sort(np.array([float(schedule(t)) for t in range(500)]))
    rounded = np.sort(np.repeat(list(counts), list(counts.values())))
    assert len(counts) <= 64
    assert len(rounded) == 500
    assert (rounded <= values * (1 + 1e-6)).all()
    assert (rounded > 0.96 * values).all()
    # So epsilon is an upper bound. It is a close one: of every ten steps, take the
    # noise of all for that of the least noisy, and epsilon is at most 9 % less.
    levels, tens = np.unique(values[9::10], return_counts=True)
    event = dp_accounting.ComposedDpEvent(
        [
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.PoissonSampledDpEvent(
                    0.02, dp_accounting.GaussianDpEvent(z)
                ),
                10 * int(n),
            )
            for z, n in zip(levels, tens, strict=True)
        ]
    )
    below = accounting.epsilon(
        event, target_delta=1e-5, neighboring_relation=ADD, accountant=accounting.RDP
    )
    grouped = poisson(noise_multiplier=schedule).epsilon(
        1e-5, accountant=accounting.RDP
    )
    assert below <= grouped < 1.09 * below


def test_a_schedule_with_a_negative_value_is_refused():
    schedule = optax.linear_schedule(1.0, -1.0, 100)
    with pytest.raises(ValueError, match="noise_multiplier"):
        poisson(noise_multiplier=schedule).epsilon(1e-5)


def test_a_delta_of_a_whole_example_is_refused():
    with pytest.raises(ValueError, match="target_delta"):
        poisson().epsilon(1e-3, num_examples=1_000)
    poisson().epsilon(1e-3, num_examples=500)
    fixed = dpadambc.ShuffledGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        batch_size=5,
        num_examples=1_000,
        iterations=1,
        normalize_by=5.0,
    )
    with pytest.raises(ValueError, match="target_delta"):
        fixed.epsilon(1e-3)


@pytest.mark.parametrize("bad", [0.0, 1.0, -1e-5, float("nan")])
def test_refuses_a_delta_outside_its_range(bad):
    with pytest.raises(ValueError, match="target_delta"):
        poisson().epsilon(bad)


@pytest.mark.slow
def test_few_participations_over_many_steps_are_accounted_for_tightly():
    """On a grid of 1e-4 this epsilon comes out twice as large."""
    mechanism = poisson(noise_multiplier=5.0, sampling_prob=1e-4, iterations=10**6)
    assert mechanism.epsilon(1e-6) == pytest.approx(0.072, abs=0.002)
    assert mechanism.epsilon(1e-6, accountant=accounting.RDP) == pytest.approx(
        0.081, abs=0.002
    )


def test_a_low_precision_schedule_is_accounted_for_as_it_is_run():
    schedule = lambda step: jnp.asarray(1.1, jnp.bfloat16)
    mechanism = poisson(noise_multiplier=schedule, normalize_by=0.99)
    (z,) = levels_of(schedule, 10)
    assert mechanism.noise_stddev(3) == pytest.approx(z / 0.99, rel=1e-6)


def exact_delta(z, epsilon, q=1.0, lost=0.0):
    """Hockey-stick divergence of N(0, 1) and the mixture that adds 1 or, if lost, 2."""
    x = np.linspace(-12, 14, 400_001)
    pdf = lambda mean: scipy.stats.norm.pdf(x, mean / z)
    other = (1 - q) * pdf(0) + q * ((1 - lost) * pdf(1) + lost * pdf(2))
    width = x[1] - x[0]
    return [
        np.sum(np.maximum(p - np.exp(epsilon) * r, 0)) * width
        for p, r in [(other, pdf(0)), (pdf(0), other)]
    ]


def test_truncated_epsilon_covers_the_pair_it_is_stated_for():
    """All ten examples are drawn; only a full batch of ten others loses one."""
    numbers = dict(NUMBERS, sampling_prob=1.0, iterations=1, noise_multiplier=1.0)
    mechanism = dpadambc.TruncatedPoissonGaussian(
        **numbers, truncated_batch_size=10, num_examples=10
    )
    assert mechanism.neighboring_relation is SPECIAL
    epsilon = mechanism.epsilon(1e-5)
    assert max(exact_delta(1.0, epsilon)) <= 1.02e-5
    # Negative control: had an eleventh been added, it would have pushed one out.
    assert max(exact_delta(1.0, epsilon, lost=10 / 11)) > 1e-2
    with pytest.raises(ValueError, match="neighboring_relation"):
        dpadambc.TruncatedPoissonGaussian(
            **numbers,
            truncated_batch_size=10,
            num_examples=10,
            neighboring_relation=ADD,
        )


class OwnEvent(accounting.ReadableDpEvent):
    """A Gaussian, as a user may write an event: without an __eq__ of its own."""

    rate = 1.0

    def __init__(self, noise_multiplier):
        object.__setattr__(self, "noise_multiplier", noise_multiplier)

    def privacy_losses(self, interval):
        return dp_accounting.pld.privacy_loss_distribution.from_gaussian_mechanism(
            self.noise_multiplier, value_discretization_interval=interval
        )

    def renyi_divergences(self, orders):
        return orders / (2 * self.noise_multiplier**2)


@pytest.mark.parametrize("accountant", [accounting.PLD, accounting.RDP])
def test_an_event_of_ones_own_has_its_own_epsilon(accountant):
    """To dp-accounting all events of such a class are equal, and have one hash."""
    assert OwnEvent(10.0) == OwnEvent(1.0)
    for z in (10.0, 1.0, 0.0):
        own, known = (
            accounting.epsilon(
                event,
                target_delta=1e-5,
                neighboring_relation=ADD,
                accountant=accountant,
            )
            for event in (OwnEvent(z), dp_accounting.GaussianDpEvent(z))
        )
        assert own == pytest.approx(known, rel=1e-3)


def test_delta_may_be_an_array():
    mechanism = common.poisson_gaussian()
    assert mechanism.epsilon(np.float32(1e-5)) == mechanism.epsilon(
        float(np.float32(1e-5))
    )


def loss_cells(q, z, relation, width):
    """The mass of each cell of losses under P, of the Poisson-subsampled Gaussian."""
    moved = 0.5 if relation == REPLACE else 1.0  # in sensitivities
    shifted = lambda x, mean: np.logaddexp(
        np.log1p(-q), np.log(q) + mean * (x - mean / 2) / z**2
    )
    other = -moved if relation == REPLACE else 0.0
    lower = lambda x: shifted(x, other) if other else 0.0
    x = np.linspace(-14 * z, 14 * z + 1, 400_001)
    loss = shifted(x, moved) - lower(x)
    first, last = np.floor(loss[0] / width), np.ceil(loss[-1] / width)
    numbers = np.arange(first, last + 1)
    edges = np.interp(numbers * width, loss, x)
    masses = np.zeros(len(edges) - 1)
    for mean, weight in ((0.0, 1 - q), (moved, q)):
        left, right = (edges - mean) / z, (mean - edges) / z
        masses += weight * np.where(
            left[1:] < 0,
            np.diff(scipy.stats.norm.cdf(left)),
            -np.diff(scipy.stats.norm.cdf(right)),
        )
    return numbers[:-1], masses


def tilted_epsilon(q, z, relation, steps, delta, width):
    """Epsilon with each loss in the middle of its cell, composed around that epsilon.

    Of the distribution under P, times exp(tilt * loss), rounding is relative to delta.
    """
    numbers, masses = loss_cells(q, z, relation, width)
    losses = (numbers + 0.5) * width
    with np.errstate(divide="ignore"):
        logs = np.log(masses)
    log_mgf = lambda tilt: steps * scipy.special.logsumexp(logs + tilt * losses)
    tilts = np.geomspace(0.1, 30, 200)
    tilt = tilts[np.argmin([(log_mgf(t) - np.log(delta)) / t for t in tilts])]
    tilted = np.exp(logs + tilt * losses - log_mgf(tilt) / steps)
    size = 2 ** int(np.ceil(np.log2(120 / width)))
    circle = np.zeros(size)
    np.add.at(circle, numbers.astype(int) % size, tilted)
    composed = np.maximum(np.fft.irfft(np.fft.rfft(circle) ** steps, size), 0)
    center = int(steps * tilted @ losses / width - steps / 2)
    sums = center + (np.arange(size) - center + size // 2) % size - size // 2
    total = (sums + steps / 2) * width
    log_probs = np.log(np.maximum(composed, 1e-300)) + log_mgf(tilt) - tilt * total

    def gap(epsilon):
        above = total > epsilon
        shares = -np.expm1(epsilon - total[above])
        return np.log(np.exp(log_probs[above]) @ shares / delta)

    return scipy.optimize.brentq(gap, 0.1, 100)


@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize(
    "delta", [1e-10, *map(common.slow, [1e-9, 1e-11, 1e-12, 1e-14])]
)
def test_epsilon_at_a_rare_delta_is_no_less_than_it_is(relation, delta):
    """With the rounding of plain FFTs it is up to 7 % less."""
    z, q, steps = 1.0, 0.01, 100_000
    coarse, fine = (
        tilted_epsilon(q, z, relation, steps, delta, width) for width in (2e-4, 1e-4)
    )
    exact = fine + (fine - coarse) / 3  # the error falls with the square of the width
    assert exact == pytest.approx(fine, rel=1e-4)
    mechanism = poisson(
        noise_multiplier=z,
        sampling_prob=q,
        iterations=steps,
        neighboring_relation=relation,
    )
    bound = mechanism.epsilon(delta)
    assert bound >= exact * (1 - 1e-5)
    if delta >= 1e-10:
        assert bound <= 1.05 * exact
    elif relation == REPLACE:
        assert bound == np.inf  # there is no bound by Rényi divergences
    else:
        assert bound <= 1.2 * exact

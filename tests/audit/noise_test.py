"""`audit.noise` on all stages that add noise, and on noise of another kind."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

import dpadambc
from dpadambc import audit
from dpadambc.audit import draws, noise_tests, statistics
from tests import common

PARAMS = {"w": jnp.zeros((100, 10)), "b": jnp.zeros(10)}
MECHANISM = common.poisson_gaussian()
NOISE = MECHANISM.noise_stddev


def added(key, stddev=NOISE):
    return dpadambc.add_dp_noise(stddev, key=key)


def vouched(key=None):
    """Vouches for a clipped sum: stages before the noise take arrays."""
    numbers = dict(l2_clip_norm=MECHANISM.l2_clip_norm, normalize_by=1.0)
    return optax.stateless(lambda g, _: dpadambc.as_clipped_sum(g, **numbers))


def then_adam(*stages):
    """A chain of stages, each made of the key."""
    return lambda key: optax.chain(*(stage(key) for stage in stages), optax.adam(0.1))


def audited(*stages, mechanism=MECHANISM, params=PARAMS):
    return audit.noise(then_adam(*stages), params, mechanism)


def parts(finding):
    return {part.check: part.passed for part in finding.parts}


@pytest.mark.parametrize("z", [common.slow(1e-7), common.slow(1.0), common.slow(50.0)])
def test_the_noise_is_the_mechanisms(z):
    mechanism = common.poisson_gaussian(noise_multiplier=z)
    level = functools.partial(added, stddev=mechanism.noise_stddev)
    finding = audited(level, mechanism=mechanism)
    assert finding.passed and len(finding.parts) == 7


@pytest.mark.parametrize(
    "impl",
    [common.slow("threefry2x32"), common.slow("rbg"), common.thorough("unsafe_rbg")],
)
def test_any_kind_of_key_will_do(impl):
    seed = lambda key: jax.random.key_data(key)[0]
    make = lambda key: added(jax.random.key(seed(key), impl=impl))
    assert audited(make).passed


@pytest.mark.thorough
def test_two_million_coordinates_of_a_parameter_are_independent():
    assert audited(added, params=jnp.zeros((1400, 1500))).passed


@pytest.mark.slow
def test_parts_of_multi_transform_with_one_key_have_noise_of_their_own():
    def make(key):
        part = lambda: optax.chain(vouched(), added(key), optax.sgd(0.1))
        return optax.multi_transform(
            {"x": part(), "y": part()}, {"w": "x", "b": "y", "v": "x"}
        )

    params = {"w": jnp.zeros(500), "b": jnp.zeros(500), "v": jnp.zeros(500)}
    assert audit.noise(make, params, MECHANISM).passed


@pytest.mark.slow
def test_schedules_are_read_step_by_step():
    schedule = optax.linear_schedule(1.0, 0.2, 3)
    mechanism = common.poisson_gaussian(noise_multiplier=schedule)
    level = functools.partial(added, stddev=mechanism.noise_stddev)
    assert audited(level, mechanism=mechanism).passed
    assert parts(audited(added, mechanism=mechanism))["noise level"]
    falls = functools.partial(added, stddev=mechanism.noise_stddev)
    assert parts(audited(falls))["noise level"] is False


@pytest.mark.parametrize("factor", [0.5, common.slow(0.99)])
def test_too_little_noise_is_found(factor):
    finding = audited(functools.partial(added, stddev=factor * NOISE))
    assert finding.passed is False and parts(finding)["noise level"] is False


@pytest.mark.slow
def test_noise_for_groups_is_as_low_as_its_lowest():
    lower = functools.partial(added, stddev={"w": NOISE, "b": NOISE / 2})
    higher = functools.partial(added, stddev={"w": NOISE, "b": NOISE * 2})
    assert parts(audited(lower))["noise level"] is False
    assert audited(higher).passed


@pytest.mark.slow
def test_the_scale_before_and_after_the_noise():
    before, after = (lambda key: optax.scale(2.0)), (lambda key: optax.scale(0.5))
    assert parts(audited(before, vouched, added))["noise level"] is False
    assert audited(added, after).passed
    assert audited(after, vouched, added).passed  # more noise than claimed is no breach


def test_noise_from_the_host_is_not_tested():
    """NumPy draws it once, while JAX traces the update; a callback is not followed."""
    rng = np.random.default_rng(0)

    def drawn(x):
        return x + NOISE * rng.normal(size=x.shape).astype(np.float32)

    def called(x):
        draw = lambda: rng.normal(size=x.shape).astype(np.float32)
        return x + jax.pure_callback(draw, jax.ShapeDtypeStruct(x.shape, x.dtype))

    for add in (drawn, called):
        stage = optax.stateless(lambda g, _, add=add: jax.tree.map(add, g))
        assert audited(lambda key, stage=stage: stage).passed is None


def test_no_noise_is_found_and_no_claim_is_not_tested():
    assert parts(audited())["noise coverage"] is False
    silent = common.poisson_gaussian(noise_multiplier=0.0)
    assert audited(added, mechanism=silent).passed is None


@pytest.mark.slow
def test_frozen_parameters_need_no_noise():
    frozen = lambda key: optax.masked(optax.set_to_zero(), {"w": False, "b": True})
    assert audited(added, frozen).passed
    assert audited(frozen, added).passed


@pytest.mark.parametrize(
    "values",
    [
        np.random.default_rng(0).normal(size=10_000),
        np.random.default_rng(0).uniform(-1.7, 1.7, 999),
        np.array([np.inf, -np.inf, 0.0]),
        np.zeros(50),
    ],
    ids=["normal", "uniform", "infinite", "constant"],
)
def test_the_distance_between_quantiles_is_that_of_all_numbers(values):
    figure, _ = statistics.kolmogorov_smirnov(values)
    expected = scipy.stats.kstest(values, "norm").statistic
    assert expected - 1 / 2**18 - 1e-12 <= figure <= expected + 1e-12


def test_nan_has_no_distance():
    figure, bound = statistics.kolmogorov_smirnov(np.array([0.0, np.nan]))
    assert not figure <= bound


def test_false_alarms_and_misses_are_as_often_as_stated(monkeypatch):
    """Of each statistic, at rates that 400 repetitions can measure."""
    monkeypatch.setattr(statistics, "FALSE_ALARM", 0.05)
    monkeypatch.setattr(statistics, "MISS", 0.2)
    runs, n = 400, 2_000

    def by_distribution(rng):
        figure, bound = statistics.kolmogorov_smirnov(rng.normal(size=n))
        return figure > bound

    def by_correlation(rng, shift=0.0):
        one, two = rng.normal(size=(2, n))
        two = two + shift / np.sqrt(n) * one
        return abs(statistics.correlation(one, two)) > statistics.normal_bound()

    def by_spread(rng, shift=0.0):
        error = statistics.spread_of_stddev(n)
        stddev = np.sqrt(np.mean(rng.normal(size=n) ** 2)) * (1 + shift * error)
        return abs(stddev - 1) > statistics.normal_bound() * error

    def share(test, **shift):
        seeds = map(np.random.default_rng, range(runs))
        return sum(test(rng, **shift) for rng in seeds) / runs

    errors = lambda rate: 3 * np.sqrt(rate * (1 - rate) / runs)
    for test in (by_distribution, by_correlation, by_spread):
        assert share(test) <= 0.05 + errors(0.05)
    for test in (by_correlation, by_spread):
        assert share(test, shift=statistics.detected()) >= 0.8 - errors(0.2)


def test_repetitions_are_found_at_any_scale_and_nothing_else():
    rows = np.random.default_rng(0).normal(size=(50, 1000))
    repeated, runs = statistics.repetitions(list(rows))
    assert repeated == 0 and runs == 50 * 995
    again = [*rows, -3.0 * rows[7][100:120]]
    assert 10 <= statistics.repetitions(again)[0] <= 15


def of_later_steps(stage, size):
    mechanism = common.poisson_gaussian(iterations=400)
    finding = audited(stage, mechanism=mechanism, params=jnp.zeros(size))
    return parts(finding.parts[-1])


@pytest.mark.slow
@pytest.mark.parametrize(("period", "passed"), [(400, True), (10, False)])
def test_noise_that_comes_again_is_found_in_a_small_model(period, passed):
    """A step of five parameters has fewer numbers than are compared."""

    def repeating(key):
        def update(updates, step, params=None):
            own = jax.random.fold_in(key, step % period)
            return updates + NOISE * jax.random.normal(own, updates.shape), step + 1

        return optax.GradientTransformation(lambda params: jnp.zeros([], int), update)

    found = of_later_steps(repeating, size=5)
    assert found["noise of later steps, repetition"] is passed


@pytest.mark.slow
@pytest.mark.parametrize(("fade", "passed"), [(0.0, True), (0.5, False)])
def test_noise_that_fades_slowly_is_found_in_a_small_model(fade, passed):
    """No step by itself has so little that it could not be chance."""
    level = lambda step: NOISE * (1 - fade * jnp.minimum(step / 200, 1))
    found = of_later_steps(functools.partial(added, stddev=level), size=20)
    assert found["noise of later steps"] is passed


def test_a_correction_without_any_noise_fails_and_ends():
    """It takes out noise that nobody has added, and has no spread to compare with."""
    clip = dpadambc.clip_per_example(1.0, normalize_by=64)
    opened = optax.stateless(lambda sums, _: dpadambc.materialize(sums))
    make = lambda key: optax.chain(clip, opened, dpadambc.adam_bc(0.1, 0.5))
    mechanism = common.poisson_gaussian(normalize_by=64)
    assert audit.correction(make, jnp.zeros(10), mechanism).passed is False


def bits_of(values, summed=0.0, step=None):
    """The finding on the bits of noise that is drawn at one place, over one step."""
    totals = values + summed
    if step is not None:
        totals = np.round(totals / step) * step
    rows = lambda x: np.asarray(x, float).reshape(-1, 1, 1_000)
    drawn = draws.Drawn(
        values=rows(values),
        happened=np.ones((len(values) // 1_000, 1), bool),
        num_devices=1,
        start=[],
        totals=rows(totals),
    )
    return noise_tests._bits({(): drawn})


def test_random_bits_are_counted_and_float32_noise_has_too_few():
    rng, size = np.random.default_rng(0), 1_000_000
    wide = rng.normal(size=size)
    of_jax = np.asarray(jax.random.normal(jax.random.key(0), (size,)), float)
    assert not bits_of(of_jax, 0.3).passed
    assert "has 23 random bits" in bits_of(of_jax).sentence
    assert not bits_of(np.float32(wide)).passed
    # With few bits a grid is not enough.
    assert not bits_of(of_jax, 0.3, step=2.0**-8).passed
    right = bits_of(wide, 0.3, step=2.0**-8)
    assert right.passed and "a grid of 1/256 of the level" in right.sentence
    # Near misses: noise in float64 by hand, and too few draws to count bits.
    assert bits_of(wide, 0.3).passed and "on no grid" in bits_of(wide, 0.3).sentence
    assert bits_of(wide[:2_000]).passed and bits_of(of_jax[:2_000]).passed

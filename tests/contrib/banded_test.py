"""Cyclic batches and banded noise are as private as Poisson sampling on one part."""

import itertools
import math

import dp_accounting
import dp_accounting.pld
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
import scipy.stats

import dpadambc
from dpadambc import NeighboringRelation, accounting, audit, contrib
from dpadambc.contrib import BandedGaussian, strategies
from tests import common

C = (1.0, 0.6, 0.3)
NUMBERS = dict(
    l2_clip_norm=2.0,
    noise_multiplier=3.0,
    strategy_coefficients=C,
    sampling_prob=0.2,
    iterations=11,
    normalize_by=8.0,
)


def made(**changed):
    return BandedGaussian(**{**NUMBERS, **changed})


def dense(coefficients, n):
    column = np.zeros(n)
    column[: len(coefficients)] = coefficients[:n]
    return scipy.linalg.toeplitz(column, np.zeros(n))


# --- Epsilon ---


@pytest.mark.guarantee
@pytest.mark.parametrize(("steps", "turns"), [(1, 1), (3, 1), (4, 2), (11, 4), (12, 4)])
def test_epsilon_is_that_of_poisson_sampling_on_one_part(steps, turns):
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(
            0.2, dp_accounting.GaussianDpEvent(3.0 / math.sqrt(1 + 0.36 + 0.09))
        ),
        turns,
    )
    accountant = dp_accounting.pld.PLDAccountant().compose(event)
    expected = accountant.get_epsilon(1e-5)
    assert made().epsilon(1e-5, iterations=steps) == pytest.approx(expected, rel=1e-2)
    # The negative control: as if an example moved one row alone.
    one_row = made(strategy_coefficients=(1.0,)).epsilon(1e-5, iterations=turns)
    assert one_row < 0.9 * expected


def deltas(epsilon, means, probs, sigma):
    """Both hockey-stick divergences of a mixture of Gaussians from one at zero.

    By brute force, on a grid in the span of the means, which is all that matters.
    """
    means, probs = np.array(means), np.array(probs)
    _, s, basis = np.linalg.svd(means, full_matrices=False)
    means = np.concatenate([means, 0 * means[:1]]) @ basis[s > 1e-9].T
    rank = means.shape[1]
    axes = [
        np.linspace(m.min() - 8 * sigma, m.max() + 8 * sigma, (0, 801, 201, 61)[rank])
        for m in means.T
    ]
    points = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(axes))
    cell = math.prod(a[1] - a[0] for a in axes)
    normal = lambda mean: np.prod(scipy.stats.norm.pdf(points, mean, sigma), axis=1)
    p = sum(w * normal(mean) for w, mean in zip(probs, means, strict=False))
    q = normal(np.zeros(len(axes)))
    excess = lambda a, b: float(np.maximum(a - math.exp(epsilon) * b, 0).sum() * cell)
    return excess(p, q), excess(q, p)


def patterns(rates):
    """In which of the steps an example takes part, and how probably."""
    for taken in itertools.product(*([0, 1] if q else [0] for q in rates)):
        shares = (q if b else 1 - q for b, q in zip(taken, rates, strict=True))
        yield taken, math.prod(shares)


def worst_delta(epsilon, rates, coefficients, sigma):
    """Of a run that releases the sums with C^-1 z, by the dense C."""
    taken, probs = zip(*patterns(rates), strict=True)
    noising = np.linalg.inv(dense(coefficients, len(rates)))
    # Whitened by the noise that is added, which is C^-1 z.
    means = [np.linalg.solve(noising, np.float64(x)) for x in taken]
    return max(deltas(epsilon, means, probs, sigma))


@pytest.mark.guarantee
def test_delta_is_that_of_the_sums_that_are_released_by_brute_force():
    """Three steps and two parts: an example of part 0 is in steps 0 and 2, or not."""
    c, q, sigma, delta = (1.0, 0.8), 0.3, 1.5, 1e-3
    mechanism = made(
        strategy_coefficients=c,
        sampling_prob=q,
        noise_multiplier=sigma,
        iterations=4,
    )
    # A fourth step only completes the last turn: the bound is then attained.
    epsilon = mechanism.epsilon(delta)
    of_part_0 = worst_delta(epsilon, (q, 0, q, 0), c, sigma)
    assert of_part_0 == pytest.approx(delta, rel=2e-2)
    assert worst_delta(epsilon, (0, q, 0, q), c, sigma) <= of_part_0 * 1.001
    assert mechanism.epsilon(delta, iterations=3) == epsilon
    assert worst_delta(epsilon, (q, 0, q), c, sigma) <= of_part_0 * 1.001
    # The negative controls. Batches that are not cyclic, of the same rate in all steps;
    # and of the same expected size, where an example is rarely in two of one block.
    assert worst_delta(epsilon, (q, q, q), c, sigma) > 3 * delta
    small = mechanism.epsilon(1e-9, iterations=2)
    of_one_turn = worst_delta(small, (q, 0), c, sigma)
    assert of_one_turn == pytest.approx(1e-9, rel=0.1)
    assert worst_delta(small, (q / 2, q / 2), c, sigma) > 2 * of_one_turn
    # More bands than parts: rows of one participation and of the next overlap.
    assert worst_delta(epsilon, (q, 0, q, 0), (1.0, 0.8, 0.8), sigma) > 1.3 * delta


@pytest.mark.guarantee
def test_where_all_of_a_part_take_part_it_is_one_gaussian():
    """The dense twin, whitened by the covariance of the noise that is added."""
    mechanism = made(sampling_prob=1.0, iterations=12)
    noise = 3.0 * np.linalg.inv(dense(C, 12))
    inverse = np.linalg.inv(noise @ noise.T)
    moved = [(np.arange(12) % 3 == part).astype(float) for part in range(3)]
    mu = np.sqrt(max(v @ inverse @ v for v in moved))
    assert mu * 3.0 == pytest.approx(strategies.sensitivity(C, 12, separation=3))
    one = accounting.epsilon(
        dp_accounting.GaussianDpEvent(1 / mu),
        target_delta=1e-5,
        neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
    )
    assert mechanism.epsilon(1e-5) == pytest.approx(one, rel=1e-3)


@pytest.mark.parametrize("relation", NeighboringRelation)
def test_one_band_is_dp_sgd(relation):
    numbers = {k: v for k, v in NUMBERS.items() if k != "strategy_coefficients"}
    numbers["neighboring_relation"] = relation
    one, poisson = made(strategy_coefficients=(1,), **numbers), dpadambc.PoissonGaussian
    poisson = poisson(**numbers)
    assert one.epsilon(1e-5) == poisson.epsilon(1e-5)
    assert float(one.noise_stddev(7)) == pytest.approx(poisson.noise_stddev)
    assert one.pads_batches
    assert not made(strategy_coefficients=(1,), sampling_prob=1.0).pads_batches
    assert made(sampling_prob=1.0).pads_batches


def test_epsilon_never_decreases_with_steps_and_is_infinite_without_noise():
    mechanism = made()
    found = [mechanism.epsilon(1e-5, iterations=n) for n in (0, 1, 3, 4, 11, 40)]
    assert found[0] == 0
    assert np.all(np.diff(found) >= 0)
    assert found[1] == found[2] < found[3]
    assert made(noise_multiplier=0.0).epsilon(1e-5) == np.inf
    assert made(iterations=1).noise_stddev(0) == made(iterations=99).noise_stddev(0)


def test_epochs_batch_sizes_and_targets():
    numbers = dict(
        strategy_coefficients=C, l2_clip_norm=1.0, num_examples=1_000, batch_size=50
    )
    mechanism = BandedGaussian.of_epochs(epochs=3, noise_multiplier=1.0, **numbers)
    assert mechanism.sampling_prob == pytest.approx(3 * 50 / 1_000)
    assert mechanism.iterations == 60
    assert mechanism.normalize_by == 50
    found = BandedGaussian.calibrate(
        target_epsilon=3.0, target_delta=1e-5, epochs=3, **numbers
    )
    assert 2.99 < found.epsilon(1e-5) <= 3
    with pytest.raises(ValueError, match="batch_size"):
        BandedGaussian.of_epochs(
            epochs=3, noise_multiplier=1.0, **numbers | dict(batch_size=400)
        )


# --- Batches ---


def steps_of_examples(batches, num_examples):
    """For each example, in which steps it takes part."""
    found = [[] for _ in range(num_examples)]
    for step, batch in enumerate(batches):
        for i in batch.indices[~batch.is_padding_example]:
            found[i].append(step)
    return found


def comes_too_early(batches, num_examples, parts):
    """How many examples are in steps that are no multiple of the parts away."""
    found = steps_of_examples(batches, num_examples)
    return sum(len({t % parts for t in steps}) > 1 for steps in found)


@pytest.mark.guarantee
def test_an_example_is_only_in_steps_of_its_part_and_there_independently():
    n, q, cycles = 400, 0.4, 60
    mechanism = made(sampling_prob=q, iterations=3 * cycles)
    dealt = []
    for seed in (0, 1):
        batches = list(mechanism.batches(jax.random.key(seed), num_examples=n))
        assert comes_too_early(batches, n, 3) == 0
        found = steps_of_examples(batches, n)
        assert all(min(np.diff(s), default=3) >= 3 for s in found)
        dealt.append([s[0] % 3 for s in found])
        # All parts, evenly: 3 sigma of a multinomial share is 9 of 133.
        assert np.ptp(np.bincount(dealt[-1], minlength=3)) < 60
        counts = np.array([len(s) for s in found])
        expected = cycles * q * (1 - q)
        assert np.var(counts) == pytest.approx(expected, rel=5 * (2 / n) ** 0.5)
        total = scipy.stats.binom(n * cycles, q)
        assert abs(counts.sum() - total.mean()) < 5 * total.std()
        # One turn says nothing of the next.
        took = np.array([[t in s for t in range(s[0] % 3, 180, 3)] for s in found])
        both = (took[:, 1:] & took[:, :-1]).mean()
        assert both == pytest.approx(q**2, abs=5 * 0.4 / took.size**0.5)
    assert dealt[0] != dealt[1]
    # The negative control: Poisson batches of the same expected size.
    poisson = dpadambc.PoissonGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        sampling_prob=q / 3,
        iterations=3 * cycles,
        normalize_by=1,
    ).batches(jax.random.key(0), num_examples=n)
    assert comes_too_early(list(poisson), n, 3) > 0.9 * n


def test_batches_hold_every_example_that_is_drawn():
    """With one shape for all, of which no batch is cut."""
    mechanism = made(sampling_prob=1.0)
    batches = list(mechanism.batches(jax.random.key(0), num_examples=50))
    assert len({b.indices.shape for b in batches}) == 1
    found = steps_of_examples(batches, 50)
    assert all(s == list(range(s[0], 11, 3)) for s in found)
    assert {s[0] for s in found} == {0, 1, 2}


@pytest.mark.guarantee
def test_the_audit_tells_cyclic_batches_from_others():
    n = 600
    mechanism = made(sampling_prob=0.3, iterations=30)
    draw = lambda made: lambda seed: made.batches(jax.random.key(seed), num_examples=n)
    check = lambda loader: audit.sampling(loader, mechanism, num_examples=n).word
    assert check(draw(mechanism)) == "pass"
    # The negative controls: not cyclic, by fewer parts, by too large a probability,
    # and with the parts dealt anew.
    poisson = dpadambc.PoissonGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        sampling_prob=0.1,
        iterations=30,
        normalize_by=1,
    )
    assert check(draw(poisson)) == "FAIL"
    for parts, prob in ((2, 0.2), (3, 0.36)):
        wrong = made(
            strategy_coefficients=(1.0,) + (parts - 1) * (0.0,),
            sampling_prob=prob,
            iterations=30,
        )
        assert check(draw(wrong)) == "FAIL"
    cycle = made(sampling_prob=0.3, iterations=6)
    dealt_anew = lambda seed: (
        batch
        for key in jax.random.split(jax.random.key(seed), 5)
        for batch in cycle.batches(key, num_examples=n)
    )
    assert check(dealt_anew) == "FAIL"


# --- Noise ---


@pytest.mark.guarantee
def test_the_correction_follows_the_noise_that_is_added():
    mechanism = made(noise_multiplier=20.0)
    params = jnp.zeros(50_000)
    summed = dpadambc.as_clipped_sum(
        params,
        l2_clip_norm=mechanism.l2_clip_norm,
        normalize_by=mechanism.normalize_by,
    )
    tx = mechanism.add_noise(key=jax.random.key(0))
    adam = dpadambc.scale_by_adam_bc(mechanism.noise_stddev, b1=0.9, b2=0.5)

    def step(states, _):
        noised, noise_state = tx.update(summed, states[0], params)
        _, adam_state = adam.update(noised, states[1], params)
        return (noise_state, adam_state), noised

    states = tx.init(params), adam.init(params)
    (_, state), drawn = jax.jit(lambda s: jax.lax.scan(step, s, length=6))(states)
    expected = [float(mechanism.noise_stddev(t)) for t in range(6)]
    level = 20 * 2 / 8
    by_rows = level * np.linalg.norm(np.linalg.inv(dense(C, 6)), axis=1)
    np.testing.assert_allclose(expected, by_rows, rtol=1e-6)
    # The last step is as the dense matrix has it, where the first coefficients are
    # zero for long too.
    for c in (strategies.banded_square_root(8), (1.0, *40 * (0.0,), 0.5)):
        last = np.linalg.norm(np.linalg.inv(dense(c, 600))[-1])
        one = made(strategy_coefficients=c, noise_multiplier=1.0, normalize_by=2.0)
        assert float(one.noise_stddev(599)) == pytest.approx(last, rel=1e-6)
    np.testing.assert_allclose(np.std(drawn, axis=1), expected, rtol=0.02)
    np.testing.assert_allclose(state.nu.mean(), state.noise_variance, rtol=0.03)
    # The negative control: the level of the draws alone is too little.
    assert state.nu.mean() > 1.2 * level**2 * (1 - 0.5**6)


def test_the_sum_of_steps_has_less_noise_at_no_more_epsilon():
    """With the same epochs and batch size."""
    found = []
    for bands, z in ((1, 0.66), (4, 1.05)):
        mechanism = BandedGaussian.of_epochs(
            noise_multiplier=z,
            strategy_coefficients=strategies.banded_square_root(bands),
            l2_clip_norm=1.0,
            batch_size=500,
            num_examples=50_000,
            epochs=4,
        )
        d = np.linalg.inv(dense(mechanism.strategy_coefficients, 400))
        found.append((mechanism.epsilon(1e-5), z * np.linalg.norm(d.sum(axis=0))))
    (epsilon, white), (of_bands, correlated) = found
    assert of_bands < epsilon
    assert correlated < 0.8 * white


# --- Training ---


def loss_fn(w, x):
    return jnp.sum((w - x) ** 2)


DATA = (np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32),)


@pytest.mark.slow
def test_fit_trains_with_it_and_goes_on_bit_for_bit(tmp_path):
    common.assert_fit_goes_on_bit_for_bit(made, tmp_path)


def test_it_is_a_value_whose_runs_compose():
    mechanism = made(strategy_coefficients=np.array([1.0, 0.5]))
    assert mechanism == made(strategy_coefficients=[1, 0.5])
    assert hash(mechanism) == hash(made(strategy_coefficients=(1.0, 0.5)))
    # Two runs are composed, and no longer run: their noise is not taken back.
    spent = accounting.compose([mechanism, mechanism])
    assert spent.dp_event() == dp_accounting.ComposedDpEvent(
        [dp_accounting.SelfComposedDpEvent(mechanism.dp_event(), 2)]
    )


def test_wrong_use_is_an_error():
    for error, wrong in [
        (TypeError, dict(noise_multiplier=lambda step: 1.0)),
        (ValueError, dict(strategy_coefficients=(2.0, -1.0))),
        (ValueError, dict(strategy_coefficients=(1.0, 3.0))),
        (ValueError, dict(sampling_prob=1.5)),
    ]:
        with pytest.raises(error, match=[*wrong][0]):
            made(**wrong)
    many = (1.0, *2**16 * (0.0,))
    with pytest.raises(ValueError, match="parts"):
        made(strategy_coefficients=many)
    with pytest.raises(ValueError, match="mechanism"):
        contrib.SlackClipping(made())
    make = lambda key: dpadambc.dp_adam_bc(0.1, made(), key=key)
    with pytest.raises(ValueError, match="mechanism.*BandedGaussian"):
        audit.noise(make, jnp.zeros(10), made())

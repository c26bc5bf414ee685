"""Random allocation: who takes part when, and an epsilon that a simulation confirms."""

import dataclasses
import functools

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.integrate
import scipy.stats
from jax.sharding import NamedSharding, PartitionSpec

import dpadambc
from dpadambc import accounting, training
from dpadambc.mechanisms._random_allocation import RandomAllocationDpEvent

RELATION = dpadambc.NeighboringRelation
ADD = RELATION.ADD_OR_REMOVE_ONE


def mechanism(**changes):
    numbers = dict(
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        batches_per_epoch=15,
        iterations=75,
        normalize_by=10.0,
    )
    return dpadambc.RandomAllocationGaussian(**numbers | changes)


def deltas(event, epsilon, interval=1e-3):
    """The bound on delta at an epsilon, of an example that goes and one that comes."""
    losses = event.privacy_losses(interval)
    pmfs = losses._pmf_remove, losses._pmf_add
    return [pmf.get_delta_for_epsilon(epsilon) for pmf in pmfs]


def mean_and_error(terms):
    return terms.mean(), terms.std() / np.sqrt(len(terms))


# Accounting, against what is computed in another way.


def ratios(rng, num, z, b, *, with_example, epochs=1):
    """Logarithms of dP/dQ of so many runs, under P or under Q."""
    x = rng.standard_normal((num, epochs, b), np.float32)
    if with_example:
        x[..., 0] += 1 / z  # any step, by symmetry
    return np.log(np.exp(x / z - 0.5 / z**2).mean(-1)).sum(-1, dtype=float)


def simulated(num, z, b, epsilon, *, epochs=1, seed=0):
    """Both deltas, each with its standard error."""
    rng = np.random.default_rng(seed)
    under_p = ratios(rng, num, z, b, with_example=True, epochs=epochs)
    under_q = ratios(rng, num, z, b, with_example=False, epochs=epochs)
    # E_Q(Y - a)+ is E_P(1 - a / Y)+.
    removed = np.maximum(-np.expm1(epsilon - under_p), 0)
    added = np.maximum(-np.expm1(epsilon + under_q), 0)
    return mean_and_error(removed), mean_and_error(added)


@pytest.mark.parametrize(
    ("z", "b", "epsilon"),
    [(1.0, 15, 1.0), (1.0, 15, 0.3), (0.5, 40, 0.5), (3.0, 4, 0.1), (0.3, 15, 2.0)],
)
def test_delta_of_an_epoch_is_that_of_a_simulation(z, b, epsilon):
    bounds = deltas(RandomAllocationDpEvent(z, b), epsilon)
    found = simulated(200_000, z, b, epsilon)
    for bound, (delta, error) in zip(bounds, found, strict=True):
        assert bound >= delta - 4 * error
        assert bound <= 1.01 * delta + 4 * error


def test_a_simulation_tells_what_is_claimed_for_other_sampling_or_too_few_epochs():
    """Negative control: Poisson sampling may leave an example out of an epoch."""
    z, b, epsilon = 0.3, 15, 0.5
    step = dp_accounting.PoissonSampledDpEvent(1 / b, dp_accounting.GaussianDpEvent(z))
    event = dp_accounting.SelfComposedDpEvent(step, b)
    losses = accounting.PLD.on_fine_grid(event, ADD, 1e-2).losses
    claimed = losses.get_delta_for_epsilon(epsilon)
    (delta, error), _ = simulated(50_000, z, b, epsilon)
    assert claimed < delta - 50 * error
    one = max(deltas(RandomAllocationDpEvent(1.0, b), epsilon))
    (delta, error), _ = simulated(50_000, 1.0, b, epsilon, epochs=2)
    assert one < delta - 10 * error


# z, epochs, the epsilon of a simulation at delta 1e-4, and that of Poisson sampling.
SIMULATED = [(1.0, 5, 2.93, 3.39), (2.0, 30, 2.73, 2.83)]


@pytest.mark.slow
@pytest.mark.parametrize(("z", "epochs", "expected", "poisson"), SIMULATED)
def test_epsilon_of_many_epochs_is_that_of_a_simulation(z, epochs, expected, poisson):
    made = mechanism(noise_multiplier=z, iterations=15 * epochs)
    epsilon = made.epsilon(1e-4)
    assert epsilon == pytest.approx(expected, rel=0.01)
    of_poisson = dpadambc.PoissonGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=z,
        sampling_prob=1 / 15,
        iterations=15 * epochs,
        normalize_by=10.0,
    )
    assert of_poisson.epsilon(1e-4) == pytest.approx(poisson, abs=0.01)
    num = 100_000 // epochs
    losses = accounting.PLD.on_fine_grid(made.dp_event(), ADD, 1e-4).losses
    bound = losses.get_delta_for_epsilon(epsilon / 2)
    found = simulated(num, z, 15, epsilon / 2, epochs=epochs)
    assert all(bound >= delta - 4 * error for delta, error in found)
    delta, error = max(found)  # the bound is of the worse direction
    assert bound <= 1.02 * delta + 4 * error


@pytest.mark.parametrize("z", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_two_steps_are_as_integrated(z, epsilon):
    s, alpha = 1 / z, np.exp(epsilon)
    ndtr = scipy.stats.norm.cdf

    def above(c):  # E(Y_2 - c)+
        if c <= 0:
            return 1 - c
        d = -np.log(c) / s + s / 2
        return ndtr(d) - c * ndtr(d - s)

    def integrate(f):
        g = lambda x: f(np.exp(s * x - s**2 / 2)) * scipy.stats.norm.pdf(x)
        # Where the second log-normal has nothing left to add or to miss.
        edge = [np.log(2 * a) / s + s / 2 for a in (alpha, 1 / alpha)]
        ends = np.unique(np.clip([-9, *edge, s + 9], -9, s + 9))
        return sum(
            scipy.integrate.quad(g, *pair, epsabs=1e-15, limit=200)[0]
            for pair in zip(ends[:-1], ends[1:], strict=True)
        )

    removed = integrate(lambda y: above(2 * alpha - y) / 2)
    # (c - Y)+ = c - Y + (Y - c)+, times alpha / 2, for c = 2 / alpha - y.
    added = integrate(
        lambda y: alpha / 2 * max(2 / alpha - y - 1 + above(2 / alpha - y), 0)
    )
    bounds = deltas(RandomAllocationDpEvent(z, 2), epsilon, 1e-4)
    np.testing.assert_array_less([removed, added], np.array(bounds) + 1e-13)
    np.testing.assert_allclose(bounds, [removed, added], rtol=3e-2, atol=1e-13)


def test_one_batch_an_epoch_and_as_many_participations_as_batches_are_no_sampling():
    full = dpadambc.PoissonGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=4.0,
        sampling_prob=1.0,
        iterations=12,
        normalize_by=10.0,
    ).epsilon(1e-5)
    numbers = dict(noise_multiplier=4.0, iterations=12)
    for b in (1, 3):
        made = mechanism(batches_per_epoch=b, participations=b, **numbers)
        assert made.epsilon(1e-5) == full
        assert not made.pads_batches
    assert mechanism(batches_per_epoch=3, **numbers).epsilon(1e-5) < 0.7 * full


@functools.cache
def simulated_participations(z, b, k, epsilon, num=100_000):
    """Both deltas of one epoch, from the exact ratio: the mean over all sets."""
    rng = np.random.default_rng(0)
    found = []
    for with_example in (True, False):
        x = rng.standard_normal((num, b))
        x[:, :k] += with_example / z
        y = np.exp(x / z - 0.5 / z**2)
        sums = np.zeros((k + 1, num))  # elementary symmetric polynomials
        sums[0] = 1
        for column in y.T:
            sums[1:] += column * sums[:-1]
        ratio = sums[k] / scipy.special.comb(b, k)
        alpha = np.exp(epsilon)
        terms = 1 - alpha / ratio if with_example else 1 - alpha * ratio
        found.append(mean_and_error(np.maximum(terms, 0)))
    return found


@pytest.mark.parametrize(("b", "k"), [(5, 2), (12, 3), (4, 3)])
def test_several_participations_are_bounded_from_above(b, k):
    z, epsilon = 1.0, 1.0
    made = mechanism(batches_per_epoch=b, participations=k, iterations=b)
    losses = accounting.PLD.on_fine_grid(made.dp_event(), ADD, 1e-4).losses
    bounds = [
        pmf.get_delta_for_epsilon(epsilon)
        for pmf in (losses._pmf_remove, losses._pmf_add)
    ]
    for bound, (delta, error) in zip(
        bounds, simulated_participations(z, b, k, epsilon), strict=True
    ):
        assert delta - 4 * error <= bound <= 1.35 * delta
    # Negative control: one participation does not cover them.
    one = max(deltas(RandomAllocationDpEvent(z, b), epsilon))
    assert one < max(simulated_participations(z, b, k, epsilon))[0] / 1.5


def test_later_steps_that_depend_on_earlier_outputs_gain_nothing():
    """The example adds all of C, or none, as the first outputs say."""
    z, b, epsilon, num = 0.7, 3, 0.5, 400_000
    bounds = deltas(RandomAllocationDpEvent(z, b), epsilon)
    rng = np.random.default_rng(1)
    for with_example, bound in zip((True, False), bounds, strict=True):
        where = rng.integers(b, size=num)
        largest, likelihood = 0.0, []
        for j in range(b):
            a = np.where(largest > 1.0, 0.3, 1.0) / z
            x = rng.standard_normal(num) + a * (with_example & (where == j))
            likelihood.append(np.exp(a * x - a**2 / 2))
            largest = np.maximum(largest, x)
        y = np.mean(likelihood, axis=0)
        alpha = np.exp(epsilon)
        terms = 1 - alpha / y if with_example else 1 - alpha * y
        delta, error = mean_and_error(np.maximum(terms, 0))
        assert 0.5 * bound < delta < bound + 4 * error


@pytest.mark.parametrize(("z", "b"), [(0.3, 9_999), (1.0, 500), (10.0, 10_000)])
def test_no_mass_is_lost_and_the_mean_stays(z, b):
    """Under Q all masses, and under P all with what is at infinity, add to one."""
    losses = RandomAllocationDpEvent(z, b).privacy_losses(1e-3)
    for pmf in (losses._pmf_remove, losses._pmf_add):
        assert pmf._probs.min() >= 0
        assert 0 <= pmf._infinity_mass < 1e-18
        assert abs(pmf._probs.sum() - 1) < 1e-12
    remove, add = losses._pmf_remove, losses._pmf_add
    # One pair of distributions, read in two directions.
    grid = (np.arange(remove.size) + remove._lower_loss) * 1e-3
    np.testing.assert_allclose(remove._probs * np.exp(-grid), add._probs[::-1])


@pytest.mark.slow
def test_epsilon_grows_with_epochs_and_falls_with_noise_and_batches():
    of = lambda **changes: mechanism(**changes).epsilon(1e-5)
    by_epochs = [of(iterations=15 * n) for n in (1, 2, 8)]
    by_noise = [of(noise_multiplier=z) for z in (2.0, 1.0, 0.5)]
    by_batches = [of(batches_per_epoch=b, iterations=5 * b) for b in (16, 4, 2, 1)]
    by_participations = [of(participations=k) for k in (1, 2, 7, 8, 15)]
    for values in (by_epochs, by_noise, by_batches, by_participations):
        assert values == sorted(values) and values[0] < 0.9 * values[-1]


def test_an_epoch_that_is_begun_counts_in_full():
    counts = [mechanism().dp_event(n).count for n in (1, 15, 16, 75)]
    assert counts == [1, 1, 2, 5]


def test_what_is_not_accounted_for_is_refused():
    with pytest.raises(ValueError, match="accounting.RDP"):
        mechanism().epsilon(1e-5, accountant=accounting.RDP)
    for error, wrong in [
        (ValueError, dict(neighboring_relation=RELATION.REPLACE_ONE)),
        (TypeError, dict(noise_multiplier=lambda step: 1.0)),
        (ValueError, dict(batches_per_epoch=0)),
        (ValueError, dict(participations=16)),
        (ValueError, dict(batches_per_epoch=65537)),
    ]:
        with pytest.raises(error, match=[*wrong][0]):
            mechanism(**wrong)


@pytest.mark.slow
@pytest.mark.guarantee
def test_noise_of_any_size_has_an_epsilon():
    of = lambda z: mechanism(noise_multiplier=z, iterations=15).epsilon(1e-5)
    assert of(0.0) == np.inf
    gaussian = dp_accounting.GaussianDpEvent(0.02)
    assert of(0.02) == pytest.approx(
        accounting.epsilon(gaussian, target_delta=1e-5, neighboring_relation=ADD)
    )
    assert 0 <= of(1e12) < 1e-3


# Sampling.

N, B = 300, 6


def on_device(k=1, epochs=1, seed=0):
    made = mechanism(batches_per_epoch=B, participations=k, iterations=B * epochs)
    return list(made.batches(jax.random.key(seed), num_examples=N))


def participation(batches):
    """Who took part in which step of which epoch, shape (epochs, B, N)."""
    out = np.zeros((len(batches), N), bool)
    for row, batch in zip(out, batches, strict=True):
        taken = batch.indices[~batch.is_padding_example]
        np.testing.assert_array_equal(batch.indices == -1, batch.is_padding_example)
        assert batch.indices.dtype == np.int32
        assert len(np.unique(taken)) == len(taken)
        row[taken] = True
    return out.reshape(-1, B, N)


@pytest.mark.slow
@pytest.mark.guarantee
@pytest.mark.parametrize("k", [1, 2, 4, B])
def test_each_example_takes_part_so_often_an_epoch_in_uniform_steps(k):
    epochs = 40
    took_part = participation(on_device(k, epochs))
    assert (took_part.sum(1) == k).all()
    # Every set of steps is as likely as any other.
    codes = np.einsum("ebn,b->en", took_part, 2 ** np.arange(B))
    _, counts = np.unique(codes, return_counts=True)
    assert len(counts) == scipy.special.comb(B, k)
    if k < B:
        assert scipy.stats.chisquare(counts).pvalue > 1e-4
        # Epochs are independent, and so are examples.
        overlap = (took_part[1:] & took_part[:-1]).sum(1)
        for other in (overlap, (took_part[..., 1:] & took_part[..., :-1]).sum(1)):
            expected = k * k / B
            variance = expected * (1 - k / B) * (B - k) / (B - 1)
            shift = abs(other.mean() - expected) * np.sqrt(other.size / variance)
            assert shift < 4.5


def test_batches_have_one_shape_that_holds_them():
    (size,) = {len(batch.indices) for batch in on_device(1, 40)}
    assert size == int(scipy.stats.binom.isf(1e-15, N, 1 / B))


def test_a_key_for_each_step_is_another_sampling():
    """The negative control: an example takes part any number of times."""
    made = mechanism(batches_per_epoch=B, iterations=B)
    draw = jax.jit(lambda *args: made.sample_step(*args, num_examples=N))
    keys = jax.random.split(jax.random.key(0), B)
    batches = [jax.device_get(draw(key, step)) for step, key in enumerate(keys)]
    often = participation(batches).sum((0, 1))
    assert often.max() > 1 and often.min() == 0


# Training.

X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
Y = X @ np.array([1.0, -2.0, 0.5], np.float32)
MECHANISM = mechanism(
    batches_per_epoch=8, participations=2, iterations=20, normalize_by=75.0
)


class Source:
    """The same data one by one; it counts who was asked for."""

    def __init__(self):
        self.asked = np.zeros(N, int)

    def __len__(self):
        return N

    def __getitem__(self, index):
        self.asked[index] += 1
        return X[index], Y[index]


class Killed(Exception):
    pass


def fit(folder=None, *, data=(X, Y), made=MECHANISM, **options):
    return training.fit(
        lambda w, x, y: (w @ x - y) ** 2,
        jnp.zeros(3),
        data,
        made,
        optax.sgd(0.3),
        key=jax.random.key(0),
        target_delta=1e-5,
        checkpoints=training.Checkpoints(folder, every=10) if folder else None,
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_call", [3, 1])
def test_a_run_goes_on_within_an_epoch_with_the_same_bits(tmp_path, steps_per_call):
    def killed(progress):
        if progress.iterations >= 13:
            raise Killed

    options = dict(steps_per_call=steps_per_call)
    with pytest.raises(Killed):
        fit(tmp_path, callbacks=killed, **options)
    again = fit(tmp_path, **options)
    assert again.resumed_from % 8  # in the middle of an epoch
    np.testing.assert_array_equal(again.params, fit(**options).params)
    assert again.epsilon == MECHANISM.epsilon(1e-5)
    assert again.epsilon == MECHANISM.epsilon(1e-5, iterations=24)  # whole epochs


@pytest.mark.slow
def test_a_run_of_another_allocation_is_refused(tmp_path):
    fit(tmp_path)
    for name, value in (("participations", 1), ("batches_per_epoch", 9)):
        with pytest.raises(ValueError, match=name):
            fit(tmp_path, made=dataclasses.replace(MECHANISM, **{name: value}))


@pytest.mark.slow
@pytest.mark.usefixtures("without_nonces")
def test_a_source_and_a_mesh_train_as_arrays_do():
    mesh = jax.make_mesh(
        (len(jax.devices()),), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    split = NamedSharding(mesh, PartitionSpec("data"))
    expected = fit().params
    for data in (Source(), training.Sharded((X, Y), split)):
        np.testing.assert_allclose(fit(data=data).params, expected, rtol=1e-4)


def test_fit_gives_each_example_to_so_many_steps_of_an_epoch():
    source, asked = Source(), []
    fit(data=source, callbacks=lambda progress: asked.append(source.asked.copy()))
    assert (asked[15] - asked[7] == 2).all()
    assert ((asked[19] - asked[15]) <= 2).all()  # half an epoch


def test_draw_batch_draws_each_epoch_whole():
    step = training.Step(lambda w, x: w @ x, MECHANISM, optax.sgd(0.1))
    state = step.init(jnp.zeros(3), key=jax.random.key(0))
    draw = jax.jit(lambda s: training.draw_batch(MECHANISM, s, num_examples=N))
    at = lambda step: dataclasses.replace(state, step=jnp.int32(step))
    count = np.zeros((2, N), int)
    for step in range(16):
        indices, padding = map(np.asarray, draw(at(step)))
        count[step // 8, indices[~padding]] += 1
    assert (count == 2).all()


@pytest.mark.guarantee
def test_its_event_is_refused_for_one_example_in_place_of_any_other():
    """It came out as if the example had been removed, which moves half as far."""
    mechanism = dpadambc.RandomAllocationGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        batches_per_epoch=10,
        iterations=10,
        normalize_by=1.0,
    )
    event, relations = mechanism.dp_event(), dpadambc.NeighboringRelation
    numbers = dict(target_delta=1e-3)
    for relation in (relations.REPLACE_ONE, relations.REPLACE_SPECIAL):
        with pytest.raises(ValueError, match="neighboring_relation"):
            accounting.epsilon(event, neighboring_relation=relation, **numbers)
    own = accounting.epsilon(
        event, neighboring_relation=relations.ADD_OR_REMOVE_ONE, **numbers
    )
    assert own == mechanism.epsilon(1e-3)

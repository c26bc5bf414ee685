"""One key draws a batch once (A21), where that can be seen without reading it."""

import contextlib
import dataclasses
import gc
import itertools
import secrets
import warnings

import jax
import numpy as np
import pytest

import dpadambc
from dpadambc import audit
from dpadambc.mechanisms import (
    _draws,
    accounting,
    correlated,
    sampling,
)
from tests import common

pytestmark = [
    pytest.mark.guarantee,
    pytest.mark.filterwarnings("error:Expected a generator of its own"),
]

N = 8
POISSON = common.poisson_gaussian(sampling_prob=0.5, iterations=6)
ALLOCATED = dpadambc.RandomAllocationGaussian(
    l2_clip_norm=1.0,
    noise_multiplier=1.0,
    batches_per_epoch=3,
    iterations=6,
    normalize_by=2.0,
)
AGAIN = "Expected a new key for each batch, got one that has drawn"
CONSTANT = "Expected a new key for each batch, got a constant"
GENERATOR = "Expected a generator of its own for each run"


def draw(key, mechanism=POISSON, num_examples=N):
    return mechanism.sample(key, num_examples=num_examples)


def draw_step(key, step, mechanism=POISSON):
    return mechanism.sample_step(key, step, num_examples=N)


def test_a_key_that_draws_twice_is_warned_of():
    key = jax.random.key(0)
    first = draw(key)
    with pytest.warns(UserWarning, match=AGAIN):
        second = draw(key)
    np.testing.assert_array_equal(first.indices, second.indices)


def test_a_key_that_is_compiled_in_is_warned_of():
    key = jax.random.key(0)
    step = jax.jit(lambda x: x + draw(key).indices)
    with pytest.warns(UserWarning, match=CONSTANT):
        step(0)

    def turn(carry, _):
        return carry, draw(key).indices

    with pytest.warns(UserWarning, match=CONSTANT):
        _, drawn = jax.lax.scan(turn, 0, length=3)
    assert (drawn == drawn[:1]).all()  # what it did


@pytest.mark.parametrize("mechanism", [POISSON, ALLOCATED], ids=["Poisson", "epochs"])
def test_steps_that_begin_anew_with_each_epoch_are_warned_of(mechanism):
    key = jax.random.key(0)
    epoch = [draw_step(key, step, mechanism) for step in range(3)]
    with pytest.warns(UserWarning, match="Expected each step of a run once.*step 0"):
        again = draw_step(key, np.int64(0), mechanism)
    np.testing.assert_array_equal(epoch[0].indices, again.indices)


def on_the_host(rng, mechanism=POISSON, num_examples=N):
    return list(mechanism.batches(rng, num_examples=num_examples))


def with_sizes(rng):
    sizes = sampling.padded_sizes(N, POISSON.sampling_prob)
    return list(POISSON.batches(rng, num_examples=N, batch_sizes=sizes))


@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.MT19937, np.random.SFC64])
@pytest.mark.parametrize("batches", [on_the_host, with_sizes])
def test_a_generator_that_is_made_again_is_warned_of(batches, kind):
    seed = secrets.randbits(64)  # one that no other test has had
    made = lambda: np.random.Generator(kind(seed))
    first = batches(made())
    with pytest.warns(UserWarning, match=GENERATOR):
        again = batches(made())
    for before, after in zip(first, again, strict=True):
        np.testing.assert_array_equal(before.indices, after.indices)


@pytest.mark.parametrize("rng", [np.random, np.random.RandomState(0), 0])
def test_what_is_no_generator_is_refused(rng):
    with pytest.raises(TypeError, match="Expected rng to be a numpy.random.Generator"):
        POISSON.batches(rng, num_examples=N)


def test_a_generator_that_goes_on_is_not():
    rng = np.random.default_rng(secrets.randbits(64))
    for _ in range(3):
        on_the_host(rng)
    side_by_side = (
        POISSON.batches(rng, num_examples=N),
        POISSON.batches(rng, num_examples=N),
    )
    list(zip(*side_by_side, strict=True))


CORRELATED = correlated.CorrelatedGaussian(
    l2_clip_norm=1.0,
    noise_multiplier=1.0,
    noising_coefficients=(1.0, -0.5),
    batches_per_epoch=4,
    iterations=8,
    normalize_by=10,
)


def test_a_generator_that_deals_anew_in_each_epoch_is_warned_of():
    """What follows from one order does not from several."""
    rng = np.random.default_rng(secrets.randbits(64))
    made = lambda rng: list(CORRELATED.batches(rng, num_examples=100))
    first = made(rng)
    with pytest.warns(UserWarning, match="One call of batches is the whole run"):
        second = made(rng)
    # Negative control: the first epochs differ, those of one call do not.
    same = lambda a, b: np.array_equal(a.indices, b.indices)
    assert same(first[0], first[4]) and not same(first[0], second[0])
    made(np.random.default_rng(secrets.randbits(64)))


SHUFFLED = dpadambc.ShuffledGaussian(
    l2_clip_norm=1.0,
    noise_multiplier=1.0,
    batch_size=3,
    num_examples=N,
    iterations=8,
    normalize_by=3.0,
)
dealt = pytest.mark.parametrize(
    "mechanism", [ALLOCATED, SHUFFLED], ids=["RA", "shuffled"]
)


@dealt
def test_a_generator_that_deals_anew_within_an_epoch_is_warned_of(mechanism):
    """`next(mechanism.batches(rng))` in each step: each time all are dealt anew."""
    rng = np.random.default_rng(secrets.randbits(64))
    first = lambda: next(mechanism.batches(rng, num_examples=N))
    took_part = np.zeros(N, int)
    for step in range(mechanism.iterations):
        told = pytest.warns(UserWarning, match="drawn 1 batches of a run of")
        with told if step else contextlib.nullcontext():
            batch = first()
        took_part[batch.indices[~batch.is_padding_example]] += 1
    # Negative control: in one call each takes part once in an epoch.
    whole, rng = np.zeros(N, int), np.random.default_rng(secrets.randbits(64))
    for batch in mechanism.batches(rng, num_examples=N):
        whole[batch.indices[~batch.is_padding_example]] += 1
    epochs = -(-mechanism.iterations // 3)
    assert whole.max() <= epochs
    assert len(set(took_part)) > 1


@dealt
def test_a_generator_that_deals_whole_epochs_is_not(mechanism):
    rng = np.random.default_rng(secrets.randbits(64))
    for _ in range(2):
        on_the_host(rng, mechanism)
        list(itertools.islice(mechanism.batches(rng, num_examples=N), 3))
    list(itertools.islice(mechanism.batches(rng, num_examples=N), 2))
    on_the_host(rng, dataclasses.replace(mechanism, iterations=5))  # another
    with _draws.forgotten():
        list(
            itertools.islice(
                mechanism.batches(np.random.default_rng(0), num_examples=N), 1
            )
        )


def test_a_generator_of_other_data_is_not():
    seed = secrets.randbits(64)
    for num_examples in (N, N + 1):
        on_the_host(np.random.default_rng(seed), num_examples=num_examples)


def test_batches_of_another_mechanism_are_drawn_of_the_same_numbers():
    seed = secrets.randbits(64)
    on_the_host(np.random.default_rng(seed))
    with pytest.warns(UserWarning, match=GENERATOR):
        on_the_host(np.random.default_rng(seed), ALLOCATED)


def test_the_warning_names_the_line_of_the_caller():
    key, seed = jax.random.key(0), secrets.randbits(64)
    on_host = lambda: on_the_host(np.random.default_rng(seed))
    for call in (lambda: draw(key), lambda: draw_step(key, 0), on_host):
        call()
        with pytest.warns(UserWarning) as told:
            call()
        assert {warning.filename for warning in told} == {__file__}


def test_a_run_is_not():
    key = jax.random.key(0)
    for step in range(6):
        draw_step(key, step)
        draw(jax.random.fold_in(key, step))
    draw(key)
    draw(key, num_examples=N + 1)  # of other data
    in_turn = jax.jit(lambda key, step: draw_step(key, step).indices)
    of_its_own = jax.jit(lambda key: draw(key).indices)
    with_constant = jax.jit(lambda step: draw_step(key, step).indices)
    for step in range(3):
        in_turn(key, step)
        of_its_own(jax.random.fold_in(key, step))
        with_constant(step)
    jax.vmap(of_its_own)(jax.random.split(key, 3))
    jax.lax.scan(lambda _, i: (0, draw_step(key, i).indices), 0, np.arange(3))


@pytest.mark.parametrize(
    "full_batch",
    [
        common.poisson_gaussian(sampling_prob=1.0, iterations=6),
        dpadambc.FixedSizeGaussian(
            l2_clip_norm=1.0,
            noise_multiplier=1.0,
            batch_size=N,
            num_examples=N,
            iterations=6,
            normalize_by=float(N),
        ),
    ],
    ids=["Poisson", "fixed size"],
)
def test_where_all_take_part_there_is_nothing_to_draw(full_batch):
    key = jax.random.key(0)
    for _ in range(2):
        draw(key, full_batch)
        draw_step(key, 0, full_batch)


def test_keys_that_are_gone_are_forgotten():
    known = len(_draws._DRAWN)
    key = jax.random.key(0)
    draw(key)
    assert len(_draws._DRAWN) == known + 1
    del key
    gc.collect()
    assert len(_draws._DRAWN) <= known


def test_what_one_batch_spends():
    """Negative control: an epoch of 10 batches, ten times, has a tenth of the noise."""
    numbers = dict(sampling_prob=0.01, iterations=100)
    stated = common.poisson_gaussian(**numbers).epsilon(1e-5)
    spent = common.poisson_gaussian(
        **numbers | {"iterations": 10}, noise_multiplier=10**-0.5
    ).epsilon(1e-5)
    assert spent > 10 * stated


def test_what_an_epoch_taken_ten_times_spends():
    """Negative control: 50 batches, with a tenth of the noise's variance."""
    stated = common.poisson_gaussian(sampling_prob=0.02, iterations=500)
    spent = common.poisson_gaussian(
        sampling_prob=0.02, iterations=50, noise_multiplier=10**-0.5
    )
    assert stated.epsilon(1e-5) == pytest.approx(2.77, abs=0.01)
    assert spent.epsilon(1e-5) == pytest.approx(26.1, abs=0.1)


def test_what_runs_with_the_same_batches_spend():
    """Negative control: a sum of eight, in which who takes part does so in all."""
    run = dict(sampling_prob=0.05, iterations=200)
    stated = accounting.compose(
        [common.poisson_gaussian(**run, noise_multiplier=2)] * 8
    )
    together = common.poisson_gaussian(**run, noise_multiplier=2 / 8**0.5)
    assert stated.epsilon(1e-5) == pytest.approx(4.8, abs=0.1)
    assert together.epsilon(1e-5) == pytest.approx(10.3, abs=0.1)


def test_an_audit_may_draw_the_same_again():
    loader = lambda seed: POISSON.batches(np.random.default_rng(seed), num_examples=N)
    for _ in range(2):
        audit.sampling(loader, POISSON, num_examples=N)


def test_nothing_else_is_told():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw(jax.random.key(0))


def test_an_audit_is_no_run_that_another_draws_again():
    loader = lambda seed: POISSON.batches(np.random.default_rng(seed), num_examples=300)
    before = list(loader(0))
    audit.sampling(loader, POISSON, num_examples=300)
    list(loader(1))
    assert len(before) == POISSON.iterations
    with pytest.warns(UserWarning, match=GENERATOR):  # negative control
        list(loader(0))

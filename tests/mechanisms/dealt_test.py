"""Batches that follow from one key are drawn with one (A21)."""

import contextlib
import functools
import secrets

import jax
import numpy as np
import pytest

import dpadambc
from dpadambc.mechanisms import BandedGaussian, CorrelatedGaussian
from tests import common

pytestmark = pytest.mark.guarantee

N = 8
POISSON = common.poisson_gaussian(sampling_prob=0.5, iterations=6)
ALLOCATED = dpadambc.RandomAllocationGaussian(
    l2_clip_norm=1.0,
    noise_multiplier=1.0,
    batches_per_epoch=3,
    iterations=6,
    normalize_by=2.0,
)
BANDED = BandedGaussian(
    l2_clip_norm=1.0,
    noise_multiplier=1.0,
    strategy_coefficients=(1.0, 0.5),
    sampling_prob=0.5,
    iterations=6,
    normalize_by=2.0,
)
CORRELATED = CorrelatedGaussian(
    l2_clip_norm=1.0,
    noise_multiplier=1.0,
    noising_coefficients=(1.0, -0.5),
    batches_per_epoch=3,
    iterations=6,
    normalize_by=2.0,
)
SPLIT = "Expected one run_key for all steps"
of_one_key = pytest.mark.parametrize(
    "mechanism",
    [ALLOCATED, BANDED, CORRELATED],
    ids=lambda x: type(x).__name__,
)


def draw_step(key, step, mechanism):
    return mechanism.sample_step(key, step, num_examples=N)


@of_one_key
def test_a_key_that_is_split_for_each_step_is_warned_of(mechanism):
    key = jax.random.key(secrets.randbits(32))
    for step in range(3):
        key, subkey = jax.random.split(key)
        told = (
            pytest.warns(UserWarning, match=SPLIT) if step else contextlib.nullcontext()
        )
        with told:
            draw_step(subkey, step, mechanism)


@of_one_key
def test_one_key_for_all_steps_is_not(mechanism):
    seeds = [secrets.randbits(32) for _ in range(2)]
    for step in range(6):
        for seed in seeds:  # in turns, each time made anew
            draw_step(jax.random.key(seed), step, mechanism)
    key = jax.random.key(secrets.randbits(32))
    for step in range(6):
        draw_step(key, step, mechanism)


@of_one_key
def test_other_examples_within_a_run_are_warned_of(mechanism):
    """All are dealt anew then, and one is in two batches that follow on each other."""
    key = jax.random.key(secrets.randbits(32))
    draw = lambda step, n: mechanism.sample_step(key, step, num_examples=n)
    draw(0, N)
    with pytest.warns(UserWarning, match="Expected 8 examples in all steps.* got 9 at"):
        draw(1, N + 1)
    draw(2, N + 1)


@of_one_key
def test_two_runs_of_one_key_on_two_data_sets_are_not(mechanism):
    key = jax.random.key(secrets.randbits(32))
    mechanism.sample_step(key, 0, num_examples=N)
    for step in range(3):
        for num_examples in (N + 1, N + 2):
            mechanism.sample_step(key, step, num_examples=num_examples)


def test_other_examples_are_not_where_an_epoch_deals_its_own():
    key = jax.random.key(secrets.randbits(32))
    for step in range(6):
        draw = functools.partial(ALLOCATED.sample_step, key, step)
        draw(num_examples=N + step // ALLOCATED.batches_per_epoch)
    key = jax.random.key(secrets.randbits(32))
    for step in range(6):  # whose steps are independent
        POISSON.sample_step(key, step, num_examples=N + step)


def test_a_key_for_each_epoch_is_not_where_epochs_are_independent():
    for epoch in range(2):
        key = jax.random.key(secrets.randbits(32))
        for step in range(3 * epoch, 3 * epoch + 3):
            draw_step(key, step, ALLOCATED)


def test_where_steps_are_independent_a_split_key_is_not():
    key = jax.random.key(0)
    for step in range(6):
        key, subkey = jax.random.split(key)
        draw_step(subkey, step, POISSON)


def test_what_a_split_key_did():
    """Negative control: an example takes part any number of times in an epoch."""
    key, took_part = jax.random.key(0), np.zeros(N, int)
    for step in range(ALLOCATED.batches_per_epoch):
        draw = functools.partial(ALLOCATED._sample_step, num_examples=N)
        key, subkey = jax.random.split(key)
        batch = draw(subkey, step)
        took_part[np.asarray(batch.indices)[~np.asarray(batch.is_padding_example)]] += 1
    assert took_part.min() == 0
    assert took_part.max() > ALLOCATED.participations

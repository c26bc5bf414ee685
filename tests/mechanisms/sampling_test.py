"""Who takes part follows the distribution that the accountant assumes."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import dpadambc
from dpadambc.core import sampling

N, Q, STEPS = 200, 0.1, 2_000
NUMBERS = dict(l2_clip_norm=1.0, noise_multiplier=1.0, normalize_by=2.0)
NUMBERS |= dict(iterations=STEPS)
SIZED = NUMBERS | dict(batch_size=30, num_examples=N)
CUT = NUMBERS | dict(sampling_prob=Q, truncated_batch_size=22, num_examples=N)
POISSON = dpadambc.PoissonGaussian(**NUMBERS, sampling_prob=Q)
MECHANISMS = {
    "poisson": POISSON,
    "truncated": dpadambc.TruncatedPoissonGaussian(**CUT),
    "fixed size": dpadambc.FixedSizeGaussian(**SIZED),
    "shuffled": dpadambc.ShuffledGaussian(**SIZED),
    "random allocation": dpadambc.RandomAllocationGaussian(
        **NUMBERS, batches_per_epoch=7
    ),
}


@functools.cache
def drawn(name, seed=0):
    """The batches of a run: indices of shape (steps, size)."""
    mechanism, key = MECHANISMS[name], jax.random.key(seed)
    draw = lambda step: mechanism.sample_step(key, step, num_examples=N)
    batches = jax.jit(lambda: jax.lax.map(draw, jnp.arange(STEPS)))()
    indices, padding = (
        np.asarray(batches.indices),
        np.asarray(batches.is_padding_example),
    )
    np.testing.assert_array_equal(indices == -1, padding)
    assert indices.dtype == np.int32 and padding.dtype == bool
    return indices


def participation(indices):
    """Which examples took part in which step, shape (steps, N)."""
    out = np.zeros((len(indices), N), bool)
    for row, batch in zip(out, indices, strict=True):
        taken = batch[batch >= 0]
        assert len(np.unique(taken)) == len(taken)
        row[taken] = True
    return out


def p_of_counts(counts, n, q):
    """The p value of counts that are binomial, by their sum and their spread."""
    total, size = counts.sum(), counts.size
    by_sum = scipy.stats.binomtest(int(total), n * size, q).pvalue
    spread = ((counts - n * q) ** 2).sum() / (n * q * (1 - q))
    return min(
        by_sum,
        2 * min(scipy.stats.chi2.cdf(spread, size), scipy.stats.chi2.sf(spread, size)),
    )


@pytest.mark.guarantee
def test_poisson_batches_have_each_example_independently_with_its_probability():
    took_part = participation(drawn("poisson"))
    assert p_of_counts(took_part.sum(0), STEPS, Q) > 1e-4
    assert p_of_counts(took_part.sum(1), N, Q) > 1e-4
    both = took_part[1:] & took_part[:-1]
    assert p_of_counts(both.sum(1), N, Q**2) > 1e-4
    # The negative controls: another probability, and batches of one size.
    assert p_of_counts(took_part.sum(1), N, 1.03 * Q) < 1e-4
    fixed = participation(drawn("fixed size"))
    assert p_of_counts(fixed.sum(1), N, 30 / N) < 1e-4


@pytest.mark.guarantee
def test_truncated_batches_are_poisson_batches_with_a_cap():
    sizes = participation(drawn("truncated")).sum(1)
    binomial = scipy.stats.binom(N, Q)
    expected = STEPS * np.append(binomial.pmf(np.arange(12, 22)), binomial.sf(21))
    counts = np.bincount(sizes, minlength=23)[12:23]
    rest = STEPS - expected.sum()
    found = scipy.stats.chisquare([*counts, STEPS - counts.sum()], [*expected, rest])
    assert found.pvalue > 1e-4
    full = participation(drawn("truncated"))[sizes == 22]
    # Whoever is cut is as likely to be one as another.
    assert p_of_counts(full.sum(0), len(full), 22 / N) > 1e-4


@pytest.mark.guarantee
def test_batches_of_fixed_size_are_uniform_subsets():
    took_part = participation(drawn("fixed size"))
    assert (took_part.sum(1) == 30).all()
    assert p_of_counts(took_part.sum(0), STEPS, 30 / N) > 1e-4
    pairs = (took_part[:, 1:] & took_part[:, :-1]).sum(0)
    assert p_of_counts(pairs, STEPS, 30 * 29 / (N * (N - 1))) > 1e-4


@pytest.mark.guarantee
def test_shuffled_epochs_use_every_example_once_each_in_a_fresh_order():
    length = MECHANISMS["shuffled"].batches_per_epoch
    epochs = participation(drawn("shuffled"))[: STEPS // length * length]
    epochs = epochs.reshape(-1, length, N)
    assert (epochs.sum(1) == 1).all()
    assert (epochs.sum(2) == [30, 30, 30, 30, 30, 30, 20]).all()
    first = epochs[:, 0].sum(0)
    assert p_of_counts(first, len(epochs), 30 / N) > 1e-4
    again = (epochs[1:, 0] & epochs[:-1, 0]).sum(1)
    assert again.mean() == pytest.approx(4.5, abs=0.6)


@pytest.mark.parametrize("name", MECHANISMS)
def test_batches_are_the_draws_of_sample_step_as_numpy_arrays(name):
    batches = MECHANISMS[name].batches(jax.random.key(0), num_examples=N)
    for batch, indices in zip(batches, drawn(name)[:5], strict=False):
        assert isinstance(batch.indices, np.ndarray)
        np.testing.assert_array_equal(batch.indices, indices)
    other = next(MECHANISMS[name].batches(jax.random.key(1), num_examples=N))
    assert (other.indices != drawn(name)[0]).any()


def test_a_mechanism_draws_once_for_each_of_its_iterations_in_one_program():
    short = dpadambc.PoissonGaussian(**NUMBERS | {"iterations": 3}, sampling_prob=0.3)
    total = lambda indices, mask: jnp.sum(indices, where=~mask)
    step = jax.jit(chex.assert_max_traces(total, n=1))
    assert (
        len([step(*b) for b in short.batches(jax.random.key(0), num_examples=N)]) == 3
    )


@pytest.mark.parametrize("n", [1, 5, 100, 10**6])
@pytest.mark.parametrize("q", [1e-6, 0.02, 0.3, 0.99])
def test_batches_overflow_less_than_once_in_1e15_steps(n, q):
    size = sampling.padded_size(n, q)
    overflow = scipy.stats.binom.sf([size, size - 1], n, q)
    assert overflow[0] <= 1e-15
    # The negative control: one less would not do.
    assert overflow[1] > 1e-15


@pytest.mark.parametrize("q", [0.0, 1.0, jnp.float32(1.0)])
def test_sampling_probabilities_of_zero_and_one(q):
    batch = sampling.poisson_batch(jax.random.key(0), N, q)
    assert np.sum(~batch.is_padding_example) == q * N


def test_sampling_never_exceeds_a_small_probability():
    """A float32 uniform would, by up to 2**-23."""
    q = 1e-6
    words = np.uint32(q * 2**32)
    assert words / 2**32 <= q
    assert words / 2**32 == pytest.approx(q, rel=3e-4)


@pytest.mark.parametrize("name", ["truncated", "fixed size", "shuffled"])
def test_another_size_than_epsilon_is_for_is_refused(name):
    for draw in (
        MECHANISMS[name].batches,
        lambda key, **n: MECHANISMS[name].sample_step(key, 0, **n),
    ):
        with pytest.raises(ValueError, match="num_examples"):
            draw(jax.random.key(0), num_examples=N + 1)


def test_keys_that_are_not_typed_and_sizes_that_are_none_are_refused():
    for key in (jnp.zeros(2, jnp.uint32), np.random.default_rng(0), 0):
        with pytest.raises(TypeError, match="key"):
            POISSON.sample_step(key, 0, num_examples=N)
        with pytest.raises(TypeError, match="key"):
            POISSON.batches(key, num_examples=N)
    with pytest.raises(TypeError, match="num_examples"):
        POISSON.batches(jax.random.key(0), num_examples=2.5)

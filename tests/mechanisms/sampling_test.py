"""Who takes part follows the distribution that the accountant assumes."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import dpadambc
from dpadambc.core import bernoulli
from dpadambc.mechanisms import sampling

N, Q, STEPS = 200, 0.1, 4_000


def host_poisson(seed=0, n=N, q=Q, steps=STEPS, batch_sizes=None):
    return list(
        sampling.poisson_batches(jax.random.key(seed),
            num_examples=n,
            sampling_prob=q,
            iterations=steps,
            batch_sizes=batch_sizes,
        )
    )


def device(sample_fn, seed=0, steps=STEPS, **kwargs):
    keys = jax.random.split(jax.random.key(seed), steps)
    indices, mask = jax.jit(jax.vmap(lambda key: sample_fn(key, **kwargs)))(keys)
    return [
        sampling.Batch(i, m, kwargs["num_examples"])
        for i, m in zip(*map(np.asarray, (indices, mask)), strict=True)
    ]


def device_poisson(**kwargs):
    return device(
        sampling.poisson_sample, **{"num_examples": N, "sampling_prob": Q, **kwargs}
    )


def participation(batches, n=N):
    """Which examples took part in which step, shape (steps, n)."""
    out = np.zeros((len(batches), n), bool)
    for row, batch in zip(out, batches, strict=True):
        taken = batch.indices[~batch.is_padding_example]
        assert len(np.unique(taken)) == len(taken)
        row[taken] = True
    return out


@pytest.mark.parametrize("draw", [host_poisson, device_poisson])
def test_padding_is_minus_one_and_masked(draw):
    for batch in draw(steps=50):
        assert batch.indices.dtype == np.int32
        assert batch.is_padding_example.dtype == bool
        np.testing.assert_array_equal(batch.indices == -1, batch.is_padding_example)


def test_host_batches_have_the_shape_of_device_batches():
    (size,) = {len(b.indices) for b in device_poisson(steps=2)}
    assert {len(b.indices) for b in host_poisson()} == {size}


def test_a_sample_that_does_not_fit_is_never_cut(monkeypatch):
    # As if one in ten did not fit, rather than one in 1e15.
    monkeypatch.setattr(sampling, "_OVERFLOW_PROB", 0.1)
    batches = host_poisson()
    sizes = {len(b.indices) for b in batches}
    assert sizes == {int(scipy.stats.binom.isf(0.1, N, Q)), N}
    monkeypatch.undo()
    np.testing.assert_array_equal(participation(batches), participation(host_poisson()))


def test_several_sizes_give_the_least_that_holds_a_batch():
    sizes = sampling.padded_sizes(N, Q)
    batches = host_poisson(batch_sizes=sizes)
    for batch in batches:
        present = np.sum(~batch.is_padding_example)
        assert len(batch.indices) == min(n for n in sizes if n >= present)
    assert len({len(b.indices) for b in batches}) > 1
    np.testing.assert_array_equal(participation(batches), participation(host_poisson()))


def test_a_seed_draws_what_a_comparison_with_its_uniforms_does():
    """So nothing but the padding depends on the sizes."""
    rng = np.random.default_rng(0)
    for batch in host_poisson(steps=20):
        chosen = np.flatnonzero(rng.random(N) < Q)
        np.testing.assert_array_equal(batch.indices[~batch.is_padding_example], chosen)


def test_a_step_on_the_batches_of_a_mechanism_is_compiled_once():
    mechanism = dpadambc.PoissonGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        sampling_prob=Q,
        iterations=100,
        normalize_by=20,
    )

    def sums(traces, **options):
        chex.clear_trace_counter()
        total = lambda indices, mask: jnp.sum(indices, where=~mask)
        step = jax.jit(chex.assert_max_traces(total, n=traces))
        batches = mechanism.batches(jax.random.key(0), num_examples=N, **options)
        return [int(step(*batch)) for batch in batches]

    sizes = sampling.padded_sizes(N, Q)
    assert sums(traces=1) == sums(traces=len(sizes), batch_sizes=sizes)
    # Negative control.
    with pytest.raises(AssertionError, match="traced > 1 times"):
        sums(traces=1, batch_sizes=sizes)


@pytest.mark.parametrize(
    ("batch_sizes", "error"),
    [
        ((), ValueError),
        ((30,), ValueError),
        ((N, 30), ValueError),
        ((30, 30, N), ValueError),
        ((30, N - 1), ValueError),
        ((-1, N), ValueError),
        ((30.5, N), TypeError),
    ],
)
def test_sizes_that_do_not_hold_every_batch_are_refused(batch_sizes, error):
    with pytest.raises(error, match="Expected .*batch_sizes"):
        host_poisson(batch_sizes=batch_sizes)
    assert host_poisson(batch_sizes=(30, N + 1), steps=1)


@pytest.mark.parametrize("n", [0, 1, 5, 100, 10**6])
@pytest.mark.parametrize("q", [0.0, 1e-6, 0.3, 1.0])
def test_padded_sizes_hold_every_batch(n, q):
    sizes = sampling.padded_sizes(n, q)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == n


@pytest.mark.parametrize("n", [1, 5, 100, 10**6])
@pytest.mark.parametrize("q", [1e-6, 0.02, 0.3, 0.99])
def test_device_batches_overflow_less_than_once_in_1e15_steps(n, q):
    draw = lambda: sampling.poisson_sample(
        jax.random.key(0), num_examples=n, sampling_prob=q
    )
    (size,) = jax.eval_shape(draw).indices.shape
    overflow = scipy.stats.binom.sf([size, size - 1], n, q)
    assert overflow[0] <= 1e-15
    # Negative control: one less would not do.
    assert overflow[1] > 1e-15


@pytest.mark.parametrize("q", [0.0, 1.0])
def test_sampling_probabilities_of_zero_and_one(q):
    for batch in [
        *host_poisson(q=q, steps=3),
        *device_poisson(sampling_prob=q, steps=3),
    ]:
        assert np.sum(~batch.is_padding_example) == q * N


def test_device_sampling_never_exceeds_a_small_probability():
    """A float32 uniform would, by up to 2**-23."""
    q = 1e-6
    words = np.uint32(q * 2**32)
    assert words / 2**32 <= q
    assert words / 2**32 == pytest.approx(q, rel=3e-4)
    _, selected = bernoulli.selection_bits(jax.random.key(0), 10, 1.0)
    assert selected.all()


def test_device_sampling_takes_array_probabilities():
    batch = sampling.poisson_sample(
        jax.random.key(0), num_examples=N, sampling_prob=jnp.float32(0.1)
    )
    assert 0 < np.sum(~batch.is_padding_example) < N


def test_device_sampling_runs_in_scan_without_recompiling():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def run(key):
        step = lambda carry, k: (
            carry,
            sampling.poisson_sample(k, num_examples=N, sampling_prob=Q),
        )
        return jax.lax.scan(step, None, jax.random.split(key, 10))[1]

    first, second = run(jax.random.key(0)), run(jax.random.key(1))
    assert first.indices.shape == second.indices.shape
    assert (first.indices != second.indices).any()


def test_device_refuses_a_size_that_would_cut_batches():
    with pytest.raises(ValueError, match="use truncated_poisson_sample with Truncated"):
        device_poisson(size=30, steps=1)


def host_truncated(steps=STEPS, cap=22):
    return list(
        sampling.truncated_poisson_batches(jax.random.key(0),
            num_examples=N,
            sampling_prob=Q,
            truncated_batch_size=cap,
            iterations=steps,
        )
    )


def device_truncated(steps=STEPS, cap=22):
    return device(
        sampling.truncated_poisson_sample,
        steps=steps,
        num_examples=N,
        sampling_prob=Q,
        truncated_batch_size=cap,
    )


@pytest.mark.parametrize("draw", [host_truncated, device_truncated])
def test_truncation_to_more_than_there_is_pads(draw):
    for batch in draw(steps=3, cap=N + 10):
        assert len(batch.indices) == N + 10
        assert np.sum(~batch.is_padding_example) <= N


def test_shuffled_epochs_use_every_example_once_each():
    batches = list(
        sampling.shuffled_batches(jax.random.key(0), num_examples=10, batch_size=4, iterations=7
        )
    )
    assert [np.sum(~b.is_padding_example) for b in batches] == [4, 4, 2, 4, 4, 2, 4]
    took_part = participation(batches, 10)
    assert (took_part[:3].sum(0) == 1).all()
    assert (took_part[3:6].sum(0) == 1).all()
    assert (took_part[0] != took_part[3]).any()


def test_mechanisms_draw_from_their_own_numbers():
    numbers = dict(
        l2_clip_norm=1.0, noise_multiplier=1.0, iterations=3, normalize_by=2.0
    )
    rng = np.random.default_rng
    poisson = dpadambc.PoissonGaussian(sampling_prob=Q, **numbers)
    for mine, plain in zip(
        poisson.batches(rng(0), num_examples=N), host_poisson(steps=3), strict=True
    ):
        np.testing.assert_array_equal(mine.indices, plain.indices)
    draw = lambda made, size: made.sample_step(jax.random.key(0), 0, num_examples=size).indices
    assert draw(poisson, N).shape == (sampling.padded_sizes(N, Q)[2],)
    truncated = dpadambc.TruncatedPoissonGaussian(
        sampling_prob=Q, truncated_batch_size=22, num_examples=N, **numbers
    )
    fixed = dpadambc.FixedSizeGaussian(batch_size=20, num_examples=N, **numbers)
    shuffled = dpadambc.ShuffledGaussian(batch_size=20, num_examples=N, **numbers)
    for mechanism, size in [(truncated, 22), (fixed, 20), (shuffled, 20)]:
        batches = mechanism.batches(rng(0), num_examples=N)
        assert [len(b.indices) for b in batches] == [size] * 3
        with pytest.raises(ValueError, match=f"Expected num_examples={N}, the size"):
            mechanism.batches(rng(0), num_examples=N + 1)
    assert draw(truncated, N).shape == (22,)
    assert draw(fixed, N).shape == (20,)
    with pytest.raises(ValueError, match=f"Expected num_examples={N}, the size"):
        draw(fixed, N - 1)
    with pytest.raises(TypeError, match="deals all batches of an epoch from one"):
        draw(shuffled, N)


def test_opacus_expected_batch_size_is_not_truncated():
    """int(N q) gives 6 for N = 1000 and batch 7 by way of the loader's length."""
    batches = host_poisson(n=1000, q=7 / 1000, steps=STEPS)
    sizes = np.array([np.sum(~b.is_padding_example) for b in batches])
    assert abs(sizes.mean() - 7) < 4 * np.sqrt(7 / STEPS)
    assert abs(sizes.mean() - 6) > 10 * np.sqrt(7 / STEPS)


@pytest.mark.parametrize("bad", [-0.1, 1.2, float("nan")])
def test_refuses_a_probability_outside_its_range(bad):
    match = r"Expected sampling_prob in \[0, 1\], got sampling_prob"
    with pytest.raises(ValueError, match=match):
        host_poisson(q=bad)
    with pytest.raises(ValueError, match=match):
        device_poisson(sampling_prob=bad, steps=1)


def test_refuses_batches_larger_than_the_data():
    kwargs = dict(num_examples=3, batch_size=4, iterations=1)
    for draw in (sampling.fixed_size_batches, sampling.shuffled_batches):
        with pytest.raises(ValueError, match="Expected batch_size <= num_examples"):
            draw(np.random.default_rng(0), **kwargs)


def test_refuses_keys_that_are_not_typed():
    with pytest.raises(TypeError, match="to be a typed JAX key"):
        sampling.poisson_sample(
            jnp.zeros(2, jnp.uint32), num_examples=N, sampling_prob=Q
        )

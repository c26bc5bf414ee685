"""A batch that several devices or processes draw, with keys of their own or one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from scipy import optimize, stats

import dpadambc
from tests.attacks import (
    BATCH,
    MECHANISM,
    PARAMS,
    RNG,
    C,
    clipped_grad,
    mechanism,
    mesh_of,
    of_fixed_size,
)

pytestmark = pytest.mark.guarantee


ROWS = jnp.asarray(RNG.normal(size=(2 * BATCH, 8)), jnp.float32)


def drawn_by_devices(
    key_of, axes=("data",), mechanism=MECHANISM, spread=False, **options
):
    """The sum over two devices, and which rows took part, one line for each."""

    def step(w, x):
        batch = mechanism.sample_step(key_of("data"), 0, num_examples=len(x))
        examples, mask = batch.gather(x), batch.is_padding_example
        grads = clipped_grad()(w, examples, is_padding_example=mask)
        took_part = jnp.zeros(len(x), bool).at[batch.indices].max(~mask)
        if spread:
            grads, took_part = jax.lax.pcast((grads, took_part), "data", to="varying")
        return grads.sum_over("data"), took_part[None]

    mapped = jax.shard_map(
        step,
        mesh=mesh_of(("data",), (2,)),
        in_specs=(P(), P(*axes)),
        out_specs=(P(), P("data")),
        **options,
    )
    return jax.jit(mapped)(PARAMS, ROWS)


def of_all(axis_name):
    return jax.random.key(0)


def of_each(axis_name):
    return jax.random.fold_in(jax.random.key(0), jax.lax.axis_index(axis_name))


def test_a25_one_key_for_the_rows_of_all_devices_is_refused():
    with pytest.raises(ValueError, match="key of its own for each device"):
        drawn_by_devices(of_all)


def test_a25_a_key_for_each_device_is_not():
    _, took_part = drawn_by_devices(of_each)
    assert (took_part[0] != took_part[1]).any()


def test_a25_where_all_devices_have_the_same_rows_they_draw_the_same():
    _, took_part = drawn_by_devices(of_all, axes=(), spread=True)
    np.testing.assert_array_equal(took_part[0], took_part[1])


def test_a25_what_a_key_for_each_device_and_the_same_rows_did():
    """Negative control: a row may be in both batches, and so twice in the sum."""
    _, took_part = drawn_by_devices(of_each, axes=())
    assert (took_part[0] & took_part[1]).any()


def test_a25_one_batch_that_is_split_over_devices_is_not():
    """Drawn outside: each device takes its part of it, from the same rows."""

    def outside(w, x, batch):
        return clipped_sum(w, x, batch).sum_over("data")

    def clipped_sum(w, x, batch):
        mask = batch.is_padding_example
        return clipped_grad()(w, batch.gather(x), is_padding_example=mask)

    drawn = MECHANISM.sample_step(jax.random.key(3), 0, num_examples=len(ROWS))
    indices = jnp.pad(drawn.indices, (0, len(drawn.indices) % 2), constant_values=-1)
    batch = dpadambc.Batch(indices, indices < 0, len(ROWS))
    mapped = jax.shard_map(
        outside,
        mesh=mesh_of(("data",), (2,)),
        in_specs=(P(), P(), P("data")),
        out_specs=P(),
    )
    expected = clipped_sum(PARAMS, ROWS, batch)
    together = jax.jit(mapped)(PARAMS, ROWS, batch)
    np.testing.assert_allclose(together.value, expected.value, rtol=1e-4, atol=1e-6)


def test_a25_a_batch_of_a_device_has_the_structure_of_others():
    def step(x):
        key = jax.random.fold_in(jax.random.key(3), jax.lax.axis_index("data"))
        draw = lambda: MECHANISM.sample_step(key, 0, num_examples=len(x))
        nobody = jnp.full_like(draw().indices, -1)
        by_hand = lambda: dpadambc.Batch(nobody, nobody < 0, len(x))
        batch = jax.lax.cond(x.sum() > jnp.inf, draw, by_hand)
        return jax.lax.psum(batch.gather(x).sum(), "data")

    mesh = mesh_of(("data",), (2,))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P())
    assert jax.jit(mapped)(ROWS) == 0


def test_a25_batches_of_one_size_are_drawn_from_the_rows_of_each_device():
    fixed = of_fixed_size(batch_size=4)
    _, took_part = drawn_by_devices(of_each, mechanism=fixed)
    np.testing.assert_array_equal(took_part.sum(1), 4)


def test_a25_where_all_examples_take_part_there_is_nothing_to_draw():
    _, took_part = drawn_by_devices(of_all, mechanism=mechanism(sampling_prob=1.0))
    assert took_part.all()


@pytest.mark.slow
def test_a25_what_one_key_did():
    """Negative control: with check_vma=False nobody knows whose rows they are."""
    _, took_part = drawn_by_devices(of_all, check_vma=False)
    assert 0 < took_part[0].sum() < BATCH
    np.testing.assert_array_equal(took_part[0], took_part[1])


def test_a25_what_it_spends():
    """Negative control: with many devices it is known in which steps a row takes part.

    In k of 100 steps, k binomial, the noise is all that hides it.
    """
    delta, q = 1e-5, 0.01
    stated = mechanism(sampling_prob=q, iterations=100).epsilon(delta)
    k = np.arange(1, 101)
    mu = np.sqrt(k)

    def delta_at(epsilon):
        ahead = stats.norm.cdf(mu / 2 - epsilon / mu)
        behind = np.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)
        return np.sum(stats.binom.pmf(k, 100, q) * (ahead - behind))

    spent = optimize.brentq(lambda epsilon: delta_at(epsilon) - delta, 0.1, 30)
    assert spent == pytest.approx(8.6, abs=0.1)
    assert stated == pytest.approx(0.72, abs=0.01)


def test_a30_what_several_draws_in_one_step_spend():
    """Negative control: with four, how often a row is in the sum is binomial."""
    q, delta = 0.1, 1e-5
    stated = mechanism(sampling_prob=q, iterations=1).epsilon(delta)
    x = np.linspace(-12.0, 16.0, 100_001)

    def delta_of(num_devices):
        k = np.arange(num_devices + 1)
        density = stats.norm.pdf(x[:, None], k) @ stats.binom.pmf(k, num_devices, q)
        ahead = density - np.exp(stated) * stats.norm.pdf(x)
        return np.sum(np.maximum(ahead, 0)) * (x[1] - x[0])

    assert delta_of(1) == pytest.approx(delta, rel=0.01)
    assert delta_of(4) > 1_000 * delta


def test_a31_what_one_batch_on_four_devices_spends():
    """Negative control: an example moves the sum four times as far."""
    epsilon = lambda z: mechanism(
        sampling_prob=0.1, noise_multiplier=z, iterations=50
    ).epsilon(1e-5)
    assert epsilon(1.0) == pytest.approx(5.15, abs=0.05)
    assert epsilon(1 / 4) == pytest.approx(110, abs=1)


def test_a32_what_a_source_of_its_own_in_each_process_did():
    """Negative control: each half of a batch is of another source."""
    first, second = np.eye(2)
    person = -first

    def half_from_each(drawn):
        indices = np.append(drawn, np.full(8 - len(drawn), -1))
        batch = dpadambc.Batch(indices, indices < 0, num_examples=10)
        one = [person if i == 0 else first for i in batch.indices[:4]]
        other = np.tile(second, (4, 1))
        return np.concatenate([one, other])[~batch.is_padding_example].sum(0)

    without = half_from_each([3, 5, 6, 8, 9])
    assert np.linalg.norm(half_from_each([0, 3, 5, 6, 8, 9]) - without) > 2 * C

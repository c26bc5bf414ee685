"""A key used again leaves no sum bare: noise depends on the sum that it hides."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dpadambc
from dpadambc import contrib, graphs, training
from dpadambc.core import clip, keys
from tests import common
from tests.core import checksums_test

pytestmark = pytest.mark.guarantee

KEY = jax.random.key(3)
SIZE = 20_000
ZEROS = jnp.zeros(SIZE)
MAKERS = {
    "independent": functools.partial(dpadambc.add_dp_noise, 1.0),
    "correlated": functools.partial(contrib.add_correlated_noise, 1.0, (1.0, -0.5)),
    "banded": functools.partial(contrib.add_banded_noise, 1.0, (1.0, 0.5)),
    "node-level": graphs.NodePoissonGaussian(
        l2_clip_norm=1.0,
        noise_multiplier=1 / 3,
        sampling_prob=0.1,
        iterations=4,
        normalize_by=1.0,
        max_terms=2,
    ).add_noise,
}
every_noise = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def noised(tx, state, arrays):
    """The noised sums and the next state."""
    return tx.update(common.summed(arrays), state)


def first(make, arrays, key=KEY):
    """The first noised sums of a run."""
    tx = make(key=key)
    return noised(tx, tx.init(arrays), arrays)[0]


def noise_of(make, arrays, key=KEY):
    return np.float64(first(make, arrays, key)) - np.float64(arrays)


def moved(arrays):
    """Another sum: one coordinate differs by 1e-6."""
    return arrays.at[5].add(1e-6)


def assert_independent(one, two):
    """Noise of one level, of which nothing is left in common."""
    correlation = np.corrcoef(np.ravel(one), np.ravel(two))[0, 1]
    assert abs(correlation) < 4 / np.size(one) ** 0.5
    ratio = np.std(one - two) / np.std(one)
    assert ratio == pytest.approx(2**0.5, rel=4 / np.size(one) ** 0.5)


@every_noise
def test_two_sums_with_one_key_have_independent_noise(make):
    one, two = noise_of(make, ZEROS), noise_of(make, moved(ZEROS))
    assert np.std(one) == pytest.approx(1.0, rel=0.03)
    assert_independent(one, two)


@every_noise
def test_without_nonces_their_difference_is_bare(make, without_nonces):
    """The negative control."""
    difference = first(make, 1 + ZEROS) - first(make, ZEROS)
    np.testing.assert_allclose(difference, 1, atol=1e-5)


@every_noise
def test_equal_sums_have_equal_noise(make):
    """All that a reused key shows is that they are equal."""
    x = jax.random.normal(jax.random.key(0), (50,))
    np.testing.assert_array_equal(first(make, x), first(make, jnp.array(x)))
    assert (first(make, x) != first(make, x, jax.random.key(4))).all()


@every_noise
def test_the_key_that_is_carried_on_does_not_depend_on_the_sum(make):
    tx = make(key=KEY)
    one, two = (noised(tx, tx.init(ZEROS), x)[1] for x in (ZEROS, moved(ZEROS)))
    words = [np.asarray(state.key_data) for state in (one, two)]
    np.testing.assert_array_equal(*words)
    assert (words[0] != tx.init(ZEROS).key_data).any()


def test_a_reused_key_shows_no_sum_by_its_level():
    """With one draw at two levels, the sum is what both have in common."""
    at = lambda level: first(functools.partial(dpadambc.add_dp_noise, level), ZEROS)
    assert_independent(np.float64(at(1.0)), np.float64(at(2.0)) / 2)
    scheduled = at(lambda count: 1.0 + count)
    np.testing.assert_array_equal(at(1.0), scheduled)


@pytest.mark.parametrize(
    "make", [contrib.add_correlated_noise, contrib.add_banded_noise]
)
def test_a_reused_key_shows_no_earlier_sum_by_coefficients_or_the_step_before(make):
    """Were the draw of a step of two runs the same, the step before it were bare."""

    def second(coefficients, earlier):
        tx = make(1.0, coefficients, key=KEY)
        _, state = noised(tx, tx.init(ZEROS), earlier)
        return np.float64(noised(tx, state, ZEROS)[0])

    band = (1.0, -0.5)
    drawn = second(band, ZEROS)
    np.testing.assert_array_equal(drawn, second(band, ZEROS))
    assert_independent(drawn, second(band, 1 + ZEROS))
    other = second((1.0, -0.25), ZEROS)
    assert abs(np.corrcoef(drawn, other)[0, 1]) < 4 / SIZE**0.5


@every_noise
def test_init_in_a_compiled_epoch(make):
    """Each epoch began with the same key, and had the same noise."""
    tx, sums = make(key=KEY), jnp.stack([ZEROS, moved(ZEROS), ZEROS, 1 + ZEROS])

    @jax.jit
    def epoch(sums):
        def step(state, x):
            out, state = noised(tx, state, x)
            return state, out - x

        return jax.lax.scan(step, tx.init(ZEROS), sums)[1]

    one, two = np.float64(epoch(sums[:2])), np.float64(epoch(sums[2:] + 1e-3))
    for step in range(2):
        assert_independent(one[step], two[step])


@every_noise
def test_a_state_stacked_and_vmapped(make):
    tx, sums = make(key=KEY), jnp.stack([ZEROS, moved(ZEROS), ZEROS])
    states = jax.tree.map(lambda x: jnp.stack([x] * 3), tx.init(ZEROS))
    together, states = jax.vmap(functools.partial(noised, tx))(states, sums)
    again, _ = jax.vmap(functools.partial(noised, tx))(states, sums)
    for out in (together, again):
        one, two, equal = np.float64(out - sums)
        assert_independent(one, two)
        np.testing.assert_array_equal(one, equal)
    assert abs(together[0] - again[0]).max() > 0.1


def noise_on_each_device(out, sums):
    """Of each device, with its own replica."""
    parts = zip(out.addressable_shards, sums.addressable_shards, strict=True)
    return [np.asarray(a.data) - np.asarray(b.data) for a, b in parts]


@every_noise
@pytest.mark.parametrize("kind", checksums_test.KINDS)
def test_devices_whose_replicas_differ_have_one_noise(make, kind):
    mesh = jax.make_mesh((8,), ("a",), (checksums_test.KINDS[kind],))
    sums = checksums_test.replicas(mesh, P())
    tx = make(key=KEY)
    state = tx.init(jnp.zeros(sums.shape))
    update = lambda state, sums: noised(tx, state, sums)[0]
    with jax.set_mesh(mesh):
        in_mesh = jax.jit(update)(state, sums)
    for out in (in_mesh, jax.jit(update)(state, sums)):
        first_one, *others = noise_on_each_device(out, sums)
        for other in others:
            np.testing.assert_allclose(first_one, other, atol=1e-6)


def test_without_agreement_devices_have_noise_of_their_own(monkeypatch):
    """The negative control."""
    monkeypatch.setattr(keys, "checksum", checksums_test.sums_of_each)
    mesh = jax.make_mesh((8,), ("a",), (AxisType.Auto,))
    sums = checksums_test.replicas(mesh, P())
    out = jax.jit(lambda sums: first(MAKERS["independent"], sums))(sums)
    one, two, *_ = noise_on_each_device(out, sums)
    assert np.abs(one - two).max() > 0.1


def test_in_shard_map_copies_have_one_noise_and_parts_their_own():
    make = MAKERS["independent"]
    mesh = jax.make_mesh((8,), ("a",), (AxisType.Auto,))
    tx = make(key=KEY)

    def of_copies(sums):
        return noised(tx, tx.init(sums), sums)[0]

    def of_parts(sums):
        state = tx.init(sums)
        key = jax.random.wrap_key_data(state.key_data)
        own = jax.random.fold_in(key, jax.lax.axis_index("a"))
        return noised(tx, state._replace(key_data=jax.random.key_data(own)), sums)[0]

    mapped = lambda fun, spec: jax.jit(
        jax.shard_map(fun, mesh=mesh, in_specs=spec, out_specs=spec)
    )
    sums = checksums_test.replicas(mesh, P())
    drawn = noise_on_each_device(mapped(of_copies, P())(sums), sums)
    for other in drawn[1:]:
        np.testing.assert_allclose(drawn[0], other, atol=1e-6)
    parts = np.float64(mapped(of_parts, P("a"))(jnp.zeros(8 * SIZE)))
    moved_parts = np.float64(mapped(of_parts, P("a"))(moved(jnp.zeros(8 * SIZE))))
    one, two, *_ = parts.reshape(8, SIZE)
    assert_independent(one, two)
    # A sum that differs on one device has other noise there, and nowhere else.
    assert_independent(one, moved_parts[:SIZE])
    np.testing.assert_array_equal(parts[SIZE:], moved_parts[SIZE:])


def test_microbatches_that_round_otherwise_have_other_noise():
    """And equal noise where the sums are equal: bits decide."""
    x = jax.random.normal(jax.random.key(0), (12, SIZE))
    params = jnp.zeros(SIZE)
    clipped = lambda size: (
        dpadambc.clipped_grad(
            lambda w, x: w @ x, l2_clip_norm=1.0, normalize_by=1.0, microbatch_size=size
        )(params, x).value
    )
    one, two = clipped(None), clipped(5)
    np.testing.assert_allclose(one, two, atol=1e-6)
    drawn = [np.float64(first(MAKERS["independent"], s)) - s for s in (one, two)]
    if (one == two).all():
        np.testing.assert_array_equal(*drawn)
    else:
        assert_independent(*drawn)


@every_noise
def test_a_pickled_state_goes_on_with_the_same_bits(make):
    tx = make(key=KEY)
    sums = jax.random.normal(jax.random.key(0), (3, 50))
    _, state = noised(tx, tx.init(sums[0]), sums[0])
    saved = pickle.dumps(jax.tree.map(np.asarray, state))
    loaded = jax.tree.map(jnp.asarray, pickle.loads(saved))
    for x in sums[1:]:
        expected, state = noised(tx, state, x)
        out, loaded = noised(tx, loaded, x)
        np.testing.assert_array_equal(out, expected)


def test_the_sum_that_moves_a_bound_is_a_part_of_what_is_hidden():
    mechanism = contrib.SlackClipping(common.poisson_gaussian())
    private = mechanism.private_gradient(KEY)
    state = private.init(ZEROS)
    sums = [clip.Sums(ZEROS, jnp.float32(n)) for n in (3, 4, 3)]
    drawn = [np.float64(private.add_noise(x, state)[0]) for x in sums]
    assert_independent(drawn[0], drawn[1])
    np.testing.assert_array_equal(drawn[0], drawn[2])


@every_noise
@pytest.mark.parametrize("kind", ["rbg", "unsafe_rbg"])
def test_keys_that_draw_from_the_first_are_refused_under_vmap(make, kind):
    keys = jax.random.split(jax.random.key(0, impl=kind), 2)
    tx, sums = make(key=keys[0]), jnp.stack([ZEROS, 1 + ZEROS])
    state = tx.init(ZEROS)
    states = jax.tree.map(lambda x: jnp.stack([x] * 2), state)
    calls = [
        lambda: jax.vmap(lambda key, x: first(make, x, key))(keys, sums),
        lambda: jax.vmap(lambda key: first(make, ZEROS, key))(keys),
        lambda: jax.vmap(functools.partial(noised, tx))(states, sums),
        lambda: jax.vmap(lambda x: noised(tx, state, x))(sums),
        lambda: jax.jit(jax.vmap(functools.partial(noised, tx)))(states, sums),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="key"):
            call()
    # Near misses: such a key without `vmap`, and beside what it maps over.
    drawn = jax.jit(lambda x: first(make, x, keys[0]))(ZEROS)
    assert np.std(drawn) == pytest.approx(1.0, rel=0.03)
    beside = jax.vmap(lambda x: x + first(make, ZEROS, keys[0])[0])(jnp.zeros(2))
    assert beside[0] == beside[1]


@every_noise
def test_keys_of_the_default_kind_pass_under_vmap(make):
    keys = jax.random.split(KEY, 2)
    one, two = np.float64(jax.vmap(lambda key: first(make, ZEROS, key))(keys))
    assert_independent(one, two)


@pytest.fixture
def debug_key_reuse():
    with jax.debug_key_reuse(True):
        yield


@every_noise
@pytest.mark.parametrize("is_jitted", [False, True])
def test_jax_sees_no_key_used_again(make, is_jitted, debug_key_reuse):
    params = {"a": jnp.zeros((3, 2)), "b": jnp.zeros(3)}
    tx = make(key=jax.random.key(1))
    update = functools.partial(noised, tx)
    update, state = jax.jit(update) if is_jitted else update, tx.init(params)
    for _ in range(3):
        _, state = update(state, params)
    # The negative control.
    key = jax.random.key(2)
    jax.random.normal(key)
    with pytest.raises(jax.errors.KeyReuseError):
        jax.random.normal(key)


@pytest.mark.parametrize(
    "mechanism",
    [
        common.poisson_gaussian(iterations=2),
        common.correlated_gaussian(),
        contrib.SlackClipping(common.poisson_gaussian(iterations=2)),
    ],
    ids=["independent", "correlated", "moving"],
)
def test_jax_sees_no_key_used_again_in_fit(mechanism, debug_key_reuse):
    training.fit(
        lambda w, x, *, key: jnp.sum((w - x) ** 2) + w @ jax.random.normal(key, (3,)),
        jnp.zeros(3),
        (np.ones((40, 3), np.float32),),
        mechanism,
        optax.sgd(0.1),
        key=jax.random.key(5),
        target_delta=1e-5,
        spent=(),
    )

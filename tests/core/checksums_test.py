"""A checksum sees every bit, its place and its leaf, and is the same on all devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dpadambc.core import keys

SIZE = 24
RNG = np.random.default_rng(0)
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def of(tree):
    return tuple(np.asarray(keys.checksum(tree)).tolist())


def some(seed, *shape):
    """Numbers as gradients have them, and numbers of few values."""
    rng = np.random.default_rng(seed)
    x = rng.choice([-1.0, 0.0, 0.5, 1.0], shape) if seed % 2 else rng.normal(size=shape)
    return x.astype(np.float32)


@given(st.integers(0, 2**20), st.permutations(range(SIZE)))
def test_a_permutation_shows(seed, order):
    x = some(seed, SIZE)
    permuted = x[np.array(order)]
    assert (of(x) == of(permuted)) == (x.tobytes() == permuted.tobytes())


@given(st.integers(0, 2**20), st.sets(st.integers(0, SIZE - 1), min_size=1))
def test_flipped_signs_show(seed, flipped):
    x = some(seed, SIZE)
    changed = x.copy()
    changed[list(flipped)] *= -1
    assert of(x) != of(changed)


@given(st.integers(0, 2**20), st.integers(0, SIZE - 1), st.integers(0, 31))
def test_one_bit_shows(seed, place, bit):
    x = some(seed, SIZE)
    changed = x.copy()
    changed.view(np.uint32)[place] ^= np.uint32(1 << bit)
    assert of(x) != of(changed)


@given(st.integers(0, 2**20), st.integers(1, 5))
def test_rows_and_leaves_that_move_show(seed, by):
    x, y = some(seed, 6, 4), some(seed + 2, 6, 4)
    rolled = np.roll(x, by, axis=0)
    assert (of(x) == of(rolled)) == (x.tobytes() == rolled.tobytes())
    assert (of([x, y]) == of([y, x])) == (x.tobytes() == y.tobytes())
    assert (of([x[:by], x[by:]]) != of(x)) and of([x[:1], x[1:]]) != of([x[:2], x[2:]])


def test_all_pairs_of_signs_and_of_places_have_checksums_of_their_own():
    """Sums of mixed words: two changes must not cancel."""
    x = np.ones(128, np.float32)
    x[::3] = 0.5
    first, second = np.triu_indices(128, 1)
    row = np.arange(len(first))
    signs, places = np.tile(x, (2, len(first), 1))
    signs[row, first] *= -1
    signs[row, second] *= -1
    places[row, first], places[row, second] = x[second], x[first]
    moved = places[(places != x).any(1)]
    found = jax.vmap(keys.checksum)(np.concatenate([x[None], signs, moved]))
    for words in (found, found[:, :1], found[:, 1:]):
        number = len(np.unique(words, axis=0))
        # Of one word alone, 0.02 pairs are equal by chance.
        assert number >= len(found) - 1
    assert len(np.unique(found, axis=0)) == len(found)


ARRAYS = {
    "float64": np.float64([1, -2, np.nextafter(1, 2)]),
    "int64": np.int64([1, -(2**40), 3]),
    "complex128": np.complex128([1, 1j, -1]),
    "float32": np.float32([1, -2, np.nextafter(np.float32(1), np.float32(2))]),
    "float16": np.float16([1, 2, 3]),
    "bfloat16": jnp.asarray([1, 2, 3], jnp.bfloat16),
    "float8": jnp.asarray([1, 2, 3], jnp.float8_e4m3fn),
    "float4": jnp.asarray([1, -2, 3], jnp.float4_e2m1fn),
    "int4": jnp.asarray([1, -2, 3], jnp.int4),
    "int8": np.int8([1, -1, 3]),
    "uint16": np.uint16([1, 2, 3]),
    "bool": np.array([True, False, False]),
    "complex64": np.complex64([1, 1j, -1]),
    "key": jax.random.split(jax.random.key(0), 3),
    "rbg": jax.random.split(jax.random.key(0, impl="rbg"), 3),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_any_dtype_jitted_vmapped_and_scanned(name):
    with jax.enable_x64("64" in name or name == "complex128"):
        x = jnp.asarray(ARRAYS[name])
        expected = np.stack([of(row) for row in x])
        assert len(np.unique(expected, axis=0)) == len({str(row) for row in x})
        scanned = jax.lax.scan(lambda _, row: (_, keys.checksum(row)), 0, x)[1]
        np.testing.assert_array_equal(jax.vmap(keys.checksum)(x), expected)
        np.testing.assert_array_equal(scanned, expected)
        assert of(x) == tuple(np.asarray(jax.jit(keys.checksum)(x)).tolist())
        assert of(x) != of(x[::-1])


def test_trees_without_numbers_and_gradients_pass():
    assert of(()) == of({"none": None}) == (0, 0)
    assert of(np.zeros((0, 3))) != of([np.zeros(0), np.zeros(0)])
    of_sum = lambda x: jnp.sum(x) * (keys.checksum(x)[0] * 0.0 + 1)
    np.testing.assert_array_equal(jax.grad(of_sum)(jnp.ones(3)), np.ones(3))


def replicas(mesh, spec, shape=(8, 4)):
    """Replicas that differ in a last bit."""
    sharding, x = NamedSharding(mesh, spec), some(0, *shape)
    parts = []
    for i, (device, index) in enumerate(
        sharding.addressable_devices_indices_map(shape).items()
    ):
        part = x[index].copy()
        part.flat[0] = np.nextafter(np.float32(0.5), np.float32(i % 3))
        parts.append(jax.device_put(part, device))
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def number_of_values(array):
    return len({np.asarray(part.data).tobytes() for part in array.addressable_shards})


def sums_of_each(tree):
    """What a checksum is where nothing makes devices agree."""
    sums = [keys._sums(keys._words(x)) for x in jax.tree.leaves(tree)]
    return keys._sums(jnp.stack(sums))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(8,), (4, 2)], ids=str)
@pytest.mark.parametrize("spec", [P(), P("a")], ids=str)
def test_devices_agree_whose_replicas_differ(kind, shape, spec):
    names = ("a", "b")[: len(shape)]
    mesh = jax.make_mesh(shape, names, (KINDS[kind],) * len(shape))
    x = replicas(mesh, spec)
    several = lambda x: keys.checksum({"x": x * 1, "y": jnp.ones(3), "z": x.sum()})
    for fun in (keys.checksum, several, jax.jit(several)):
        assert number_of_values(fun(x)) == 1
        with jax.set_mesh(mesh):
            assert number_of_values(fun(x)) == 1
    # Negative control.
    is_replicated = spec == P() or len(shape) == 2
    assert (number_of_values(jax.jit(sums_of_each)(x)) > 1) == is_replicated
    # And with equal replicas it does not matter which devices have the array.
    y = some(1, 8, 4)
    assert of(y) == of(jax.device_put(y, NamedSharding(mesh, spec)))


@pytest.mark.parametrize("kind", KINDS)
def test_in_shard_map_devices_agree_along_axes_along_which_nothing_varies(kind):
    mesh = jax.make_mesh((4, 2), ("a", "b"), (KINDS[kind],) * 2)
    mapped = lambda fun, spec, **options: jax.jit(
        jax.shard_map(
            lambda x: fun(x)[None],
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            **options,
        )
    )
    whole = mapped(keys.checksum, P())(replicas(mesh, P()))
    parts = mapped(keys.checksum, P("a"))(replicas(mesh, P("a")))
    assert number_of_values(whole) == 1
    assert number_of_values(parts) == 4
    assert number_of_values(mapped(sums_of_each, P())(replicas(mesh, P()))) > 1
    # With one axis of the mesh alone, the other is as outside.
    some_axes = jax.shard_map(
        keys.checksum, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"a"}
    )
    assert number_of_values(jax.jit(some_axes)(replicas(mesh, P()))) == 1


def test_a_tree_is_one_compiled_call_by_hand():
    leaves = [jnp.ones(3), jnp.ones((2, 2)), jnp.zeros(4)]
    traced = jax.make_jaxpr(keys.checksum)(leaves)
    assert [equation.primitive.name for equation in traced.eqns] == ["jit"]

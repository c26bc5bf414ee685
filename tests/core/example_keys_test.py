"""The key of an example is made of the example, and not of who else is in the batch."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpadambc
from dpadambc.core.keys import of_example
from tests import common

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 3)).astype(np.float32)


def loss_fn(w, x, key):
    return (w * x) @ jax.random.normal(key, x.shape)


def sum_of_clipped(x, **options):
    """With a key that everybody knows."""
    grad_fn = dpadambc.clipped_grad(
        loss_fn, l2_clip_norm=1.0, normalize_by=1.0, prng_argnum=2, **options
    )
    return np.asarray(grad_fn(jnp.ones(3), x, KEY).value)


def by_place(x):
    """The same, with keys by the place in the batch."""
    keys = jax.vmap(functools.partial(jax.random.fold_in, KEY))(jnp.arange(len(x)))
    clip = lambda g: g / jnp.maximum(1.0, jnp.linalg.norm(g))
    grads = jax.vmap(lambda x, key: clip(jax.grad(loss_fn)(jnp.ones(3), x, key)))
    return np.asarray(grads(x, keys).sum(0))


@pytest.mark.guarantee
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_draws_of_an_example_are_its_own_with_any_kind_of_key(impl):
    """What `jax.vmap` draws with others depends on all that it maps over."""
    grad_fn = dpadambc.per_example_grad(loss_fn, prng_argnum=2)
    key = jax.random.key(1, impl=impl)
    grads = lambda x: np.asarray(grad_fn(jnp.ones(3), x, key).materialize())
    # Programs of two batch sizes may round a normal otherwise.
    np.testing.assert_allclose(grads(X)[1:], grads(X[1:]), rtol=1e-6)
    other = grad_fn(jnp.ones(3), X, jax.random.key(2, impl=impl)).materialize()
    assert not np.isclose(grads(X), other).any()


@pytest.mark.guarantee
@pytest.mark.parametrize("size", [None, common.slow(5)])
def test_one_example_moves_the_sum_by_the_clip_norm_whoever_knows_the_key(size):
    """Negative control: by their place, all that stand behind it get other keys."""
    moved = {sum_of_clipped: [], by_place: []}
    options = {sum_of_clipped: {"microbatch_size": size}, by_place: {}}
    for of, distances in moved.items():
        whole = of(X, **options[of])
        for row in range(len(X)):
            rest = of(np.delete(X, row, axis=0), **options[of])
            distances.append(np.linalg.norm(whole - rest))
    assert max(moved[sum_of_clipped]) <= 1 + 1e-5
    assert max(moved[by_place]) > 3


ARRAYS = {
    "float32": X[0],
    "float64": X[0].astype(np.float64),
    "bfloat16": jnp.asarray(X[0], jnp.bfloat16),
    "int8": np.int8([1, -2, 3]),
    "int32": np.int32([1, -2, 3]),
    "uint16": np.uint16([1, 2, 3]),
    "float4": jnp.asarray([1, -2, 3], jnp.float4_e2m1fn),
    "int4": jnp.asarray([1, -2, 3], jnp.int4),
    "bool": np.array([True, False, True]),
    "complex": (X[0] + 1j * X[1]).astype(np.complex64),
    "key": jax.random.split(KEY, 3),
    "matrix": X[:2],
}


def words(key):
    return jax.random.key_data(key).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", ARRAYS)
def test_it_depends_on_every_number_of_an_example_and_its_place(name):
    x = jnp.asarray(ARRAYS[name])
    key_of = jax.jit(of_example)
    others = [x[::-1]]
    for i in range(len(x)):
        another = x[i] ^ True if name == "bool" else x[(i + 1) % len(x)]
        others.append(x.at[i].set(another))
    found = {tuple(words(key_of(KEY, other))) for other in [x, *others]}
    expected = {str(plain) for plain in map(np.asarray, map(numbers, [x, *others]))}
    assert len(found) == len(expected) > 1
    assert words(key_of(KEY, x)) == words(of_example(KEY, x))


def numbers(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


@hypothesis.given(
    st.lists(st.lists(st.integers(-3, 3), min_size=2, max_size=2), min_size=2)
)
def test_examples_that_differ_have_other_keys(rows):
    found = {
        tuple(words(of_example(KEY, {"x": x[0], "y": np.int8(x[1])}))) for x in rows
    }
    assert len(found) == len(set(map(tuple, rows)))


def test_an_example_without_numbers_has_a_key_too():
    empty = np.zeros((0, 3), np.float32)
    for example in ((), (empty,)):
        found = words(of_example(KEY, example))
        assert found == words(of_example(KEY, example)) != words(KEY)


def test_few_of_many_examples_have_the_same():
    """64 bits of them."""
    rows = np.random.default_rng(1).integers(0, 256, (20_000, 28)).astype(np.uint8)
    keys = jax.jit(jax.vmap(functools.partial(of_example, KEY)))(rows)
    assert len(np.unique(jax.random.key_data(keys), axis=0)) == len(rows)


def test_keys_of_another_step_are_others():
    one, other = (of_example(jax.random.key(i), X[0]) for i in (0, 1))
    assert words(one) != words(other)

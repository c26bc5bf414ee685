"""Arrays are known by their numbers, wherever these are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dpadambc._core import marks

X = np.random.default_rng(0).normal(size=(64, 40)).astype(np.float32)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [("a", None), (None, "b"), ("b", "a"), ()])
def test_the_mark_does_not_depend_on_how_an_array_is_split(kind, spec):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind, kind))
    split = jax.device_put(X, NamedSharding(mesh, PartitionSpec(*spec)))
    assert marks.of({"x": split}) == marks.of({"x": jnp.asarray(X)})
    with jax.set_mesh(mesh):
        assert marks.of({"x": split}) == marks.of({"x": jnp.asarray(X)})


def test_the_mark_depends_on_every_number_of_a_small_array_alone():
    changed = X.copy()
    changed[1, 1] += 1
    small, of = X[:6].copy(), lambda x: marks.of(jnp.asarray(x))
    small[1, 1] += 1
    assert of(small) != of(X[:6])
    assert of(changed) == of(X)
    closely = lambda x: marks.of(jnp.asarray(x), closely=True)
    assert closely(changed) != closely(X)


def test_the_mark_depends_on_shape_and_dtype_and_on_no_key():
    zeros = jnp.zeros(6)
    others = zeros.reshape(2, 3), zeros.astype(int), (zeros, zeros)
    assert len({marks.of(x) for x in (zeros, *others)}) == 4
    assert marks.of((zeros, jax.random.key(0))) == marks.of(zeros)

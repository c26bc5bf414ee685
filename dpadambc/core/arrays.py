"""Dtypes and the axes of `jax.shard_map`: facts of arrays.

Inside `jax.shard_map` JAX sums the gradient of replicated parameters over the devices.
Then a per-example gradient would be a sum over other devices' examples before it is
clipped. Parameters that vary over the devices, as the examples do, have gradients of
their own.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def at_least_float32(dtype: Any) -> jnp.dtype:
    """Returns the dtype, or float32 if that has fewer than 32 bits; keys stay keys."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return dtype
    return jnp.promote_types(dtype, jnp.float32)


def widen(x: Any) -> Any:
    """Casts an array, or the dtype of a shape, to at least float32."""
    dtype = at_least_float32(jnp.result_type(x))
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
    return jnp.asarray(x, dtype)


def positions(shape: tuple[int, ...]) -> jax.Array:
    """Numbers the coordinates by a sum of iotas, which any sharding can split."""
    number = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = np.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        number += stride * jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return number


def _varies(x: Any, axis_name: str) -> bool:
    """Returns whether each device along an axis has an array of its own."""
    try:
        jax.lax.pcast(x, axis_name, to="varying")
    except ValueError:  # it varies already
        return True
    return False


def _arrays(tree: Any) -> list[jax.Array]:
    return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]


def shard_map_axes() -> set[str]:
    """Returns the axes of the enclosing `jax.shard_map`."""
    return set(jax.sharding.get_abstract_mesh().manual_axes)


def varying_axes(tree: Any) -> tuple[str, ...]:
    """Returns the axes of `shard_map` over which any array of a tree varies."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(name for name in axes if any(_varies(x, name) for x in _arrays(tree)))


def make_varying(tree: Any, axes: tuple[str, ...]) -> Any:
    """Marks arrays as varying over the axes: each device has its own copy."""
    for name in axes:
        own = lambda x, name=name: (
            x if _varies(x, name) else jax.lax.pcast(x, name, to="varying")
        )
        tree = jax.tree.map(own, tree)
    return tree


def is_vma_known(x: jax.Array) -> bool:
    """Returns whether JAX tracks varying axes (`check_vma=True`)."""
    axes = tuple(shard_map_axes())
    return set(varying_axes(make_varying(x, axes))) == set(axes)


def invariant_axes(tree: Any) -> frozenset[str]:
    """Returns the axes along which all devices are known to have the same arrays.

    It returns none with `check_vma=False`, nor axes of `jax.vmap(axis_name=...)`.
    """
    if not all(map(is_vma_known, _arrays(tree))):
        return frozenset()
    return frozenset(shard_map_axes() - set(varying_axes(tree)))

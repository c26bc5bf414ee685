"""Dtypes, meshes and the axes of `jax.shard_map`: facts of arrays.

On a mesh with Explicit axes each array has its sharding in its type. Per-example
gradients say nothing of shardings, so they are computed with these axes as Auto ones,
and given a sharding at the end: gradients of examples that of the examples, sums that
of the parameters.

Inside `jax.shard_map` JAX sums the gradient of replicated parameters over the devices.
Then a per-example gradient would be a sum over other devices' examples before it is
clipped. Parameters that vary over the devices, as the examples do, have gradients of
their own.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec


def at_least_float32(dtype: Any) -> jnp.dtype:
    """The dtype itself if it has 32 bits or more, else float32; keys stay keys."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return dtype
    return jnp.promote_types(dtype, jnp.float32)


def widen(x: Any) -> Any:
    """An array, or a shape, in at least float32."""
    dtype = at_least_float32(jnp.result_type(x))
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
    return jnp.asarray(x, dtype)


def _sharding(x: Any) -> Any:
    return getattr(jax.typeof(x), "sharding", None)


def spec_of_examples(batches: Any) -> PartitionSpec:
    """The partition of axis 0 of the batches."""
    for x in jax.tree.leaves(batches):
        sharding = _sharding(x)
        if sharding is not None and len(sharding.spec) and sharding.spec[0] is not None:
            return PartitionSpec(sharding.spec[0])
    return PartitionSpec()


def specs_of(params: Any) -> Any:
    """The partition of each parameter."""
    spec = lambda x: getattr(_sharding(x), "spec", PartitionSpec())
    return jax.tree.map(spec, params)


def with_automatic_axes(fun: Callable[..., Any], out_specs: Any, *args: Any) -> Any:
    """Calls a function with the Explicit axes of a mesh as Auto ones.

    Args:
      fun: a function of arrays.
      out_specs: the `PartitionSpec` of its outputs, as a tree prefix.
      *args: if none of them is split along an Explicit axis, `fun` is called as it is.
    """
    is_spec = lambda spec: isinstance(spec, PartitionSpec)
    for x in jax.tree.leaves(args):
        sharding = _sharding(x)
        if sharding is not None and any(part is not None for part in sharding.spec):
            mesh, axes = sharding.mesh, sharding.mesh.explicit_axes
            if axes:
                place = functools.partial(NamedSharding, mesh)
                out = jax.tree.map(place, out_specs, is_leaf=is_spec)
                return jax.sharding.auto_axes(fun, axes=axes, out_sharding=out)(*args)
    return fun(*args)


def _varies(x: Any, axis_name: str) -> bool:
    """Whether each device along an axis has an array of its own."""
    try:
        jax.lax.pcast(x, axis_name, to="varying")
    except ValueError:  # it varies already
        return True
    return False


def _arrays(tree: Any) -> list[jax.Array]:
    return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]


def shard_map_axes() -> set[str]:
    """The axes of the enclosing `jax.shard_map`."""
    return set(jax.sharding.get_abstract_mesh().manual_axes)


def varying_axes(tree: Any) -> tuple[str, ...]:
    """The axes over which any array of a tree varies; none outside `shard_map`."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(name for name in axes if any(_varies(x, name) for x in _arrays(tree)))


def make_varying(tree: Any, axes: tuple[str, ...]) -> Any:
    """The same arrays, as ones that each device has for itself."""
    for name in axes:
        own = lambda x, name=name: (
            x if _varies(x, name) else jax.lax.pcast(x, name, to="varying")
        )
        tree = jax.tree.map(own, tree)
    return tree


def is_vma_known(x: jax.Array) -> bool:
    """Whether JAX tracks the axes over which an array varies (`check_vma=True`)."""
    axes = tuple(shard_map_axes())
    return set(varying_axes(make_varying(x, axes))) == set(axes)


def invariant_axes(tree: Any) -> frozenset[str]:
    """The axes along which all devices are known to have the same arrays.

    None with `check_vma=False`, nor for the axes of `jax.vmap(axis_name=...)`.
    """
    if not all(map(is_vma_known, _arrays(tree))):
        return frozenset()
    return frozenset(shard_map_axes() - set(varying_axes(tree)))

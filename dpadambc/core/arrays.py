"""At least float32 from the clip on, whatever the model computes in."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def at_least_float32(dtype: Any) -> jnp.dtype:
    """The dtype itself if it has 32 bits or more, else float32; keys stay keys."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return dtype
    return jnp.promote_types(dtype, jnp.float32)


def wide_zeros_like(tree: Any) -> Any:
    """Zeros in at least float32, with the shapes of a tree, which lie as it does."""

    def zeros(x: Any) -> jax.Array:
        return jnp.zeros_like(x, dtype=at_least_float32(jnp.result_type(x)))

    return jax.tree.map(zeros, tree)


def with_wide_state(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """The same optimizer, with state as for parameters in at least float32.

    Gradients come in at least float32, and moments in less would not keep their dtype.
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def init_fn(params):
        return optimizer.init(jax.tree.map(widen, params))

    return optax.GradientTransformationExtraArgs(init_fn, optimizer.update)


def widen(x: Any) -> Any:
    """In at least float32; a shape stays a shape."""
    dtype = at_least_float32(jnp.result_type(x))
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
    return jnp.asarray(x, dtype)


def round_to_dtype(x: jax.Array) -> jax.Array:
    """The number that its dtype has, where XLA may be working with more digits.

    By a round trip to float32: rounding in the dtype itself XLA takes for nothing to
    do, and leaves out before it decides how many digits to keep.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating) or jnp.finfo(x.dtype).bits >= 32:
        return x
    info = jnp.finfo(x.dtype)
    wide = x.astype(jnp.float32)
    return jax.lax.reduce_precision(wide, info.nexp, info.nmant).astype(x.dtype)


def _sharding(x: Any) -> Any:
    return getattr(jax.typeof(x), "sharding", None)


def _mesh(tree: Any) -> Any:
    """The mesh on which any array is split along an Explicit axis, or None."""
    for x in jax.tree.leaves(tree):
        sharding = _sharding(x)
        if sharding is not None and any(part is not None for part in sharding.spec):
            if AxisType.Explicit in getattr(sharding.mesh, "axis_types", ()):
                return sharding.mesh
    return None


def spec_of_examples(batches: Any) -> PartitionSpec:
    """How axis 0 of the batches is split."""
    for x in jax.tree.leaves(batches):
        sharding = _sharding(x)
        if sharding is not None and len(sharding.spec) and sharding.spec[0] is not None:
            return PartitionSpec(sharding.spec[0])
    return PartitionSpec()


def specs_of(params: Any) -> Any:
    """How each parameter is split."""
    of_one = lambda x: getattr(_sharding(x), "spec", PartitionSpec())
    return jax.tree.map(of_one, params)


def spec_of_gradients(examples: jax.Array, param: jax.Array) -> PartitionSpec:
    """How gradients of examples are split: as these are, or else as the parameter."""
    of_examples = spec_of_examples(examples)
    return of_examples if len(of_examples) else PartitionSpec(None, *specs_of(param))


def with_automatic_axes(fun: Callable[..., Any], out_specs: Any, *args: Any) -> Any:
    """A function's outputs, computed where the compiler chooses how arrays are split.

    Args:
      fun: of arrays.
      out_specs: of its outputs, a tree prefix of `PartitionSpec`.
      *args: if none of them is split along an Explicit axis, the function is called as
        it is.
    """
    mesh = _mesh(args)
    if mesh is None:
        return fun(*args)
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple(name for name, kind in kinds if kind == AxisType.Explicit)
    out_sharding = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        out_specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
    return jax.sharding.auto_axes(fun, axes=axes, out_sharding=out_sharding)(*args)


def _varies(x: Any, axis_name: str) -> bool:
    """Whether each device along an axis has an array of its own."""
    try:
        jax.lax.pcast(x, axis_name, to="varying")
    except ValueError:  # it does already
        return True
    return False


def shard_map_axes() -> set[str]:
    """The axes of the `jax.shard_map` that this is inside of."""
    return set(jax.sharding.get_abstract_mesh().manual_axes)


def varying_axes(tree: Any) -> tuple[str, ...]:
    """The axes over which any array of a tree varies; none outside of `shard_map`."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    return tuple(name for name in axes if any(_varies(x, name) for x in arrays))


def make_varying(tree: Any, axes: tuple[str, ...]) -> Any:
    """The same arrays, each device having its own."""
    for name in axes:
        own = lambda x, name=name: (
            x if _varies(x, name) else jax.lax.pcast(x, name, to="varying")
        )
        tree = jax.tree.map(own, tree)
    return tree


def invariant_axes(tree: Any) -> frozenset[str]:
    """The axes along which all devices have the same arrays, as far as JAX knows.

    With `check_vma=False` it does not, and with `jax.vmap(axis_name=...)` neither.
    """
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    if not all(map(is_vma_known, arrays)):
        return frozenset()
    return frozenset(shard_map_axes() - set(varying_axes(arrays)))


def is_vma_known(x: jax.Array) -> bool:
    """Whether JAX knows of an array along which axes it varies."""
    axes = tuple(shard_map_axes())
    return set(varying_axes(make_varying(x, axes))) == set(axes)

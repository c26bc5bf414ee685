"""On a mesh whose axes are Explicit, where each array has its sharding in its type.

Per-example gradients are written without a word on sharding, which the compiler then
chooses, as it does on a mesh with axes of the kind Auto. So they are computed with the
axes as such, and given the sharding in which they come out: gradients of examples as
the examples are, sums as the parameters are.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec


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


def split_as_examples(batches: Any) -> PartitionSpec:
    """How axis 0 of the batches is split."""
    for x in jax.tree.leaves(batches):
        sharding = _sharding(x)
        if sharding is not None and len(sharding.spec) and sharding.spec[0] is not None:
            return PartitionSpec(sharding.spec[0])
    return PartitionSpec()


def split_as(params: Any) -> Any:
    """How each parameter is split."""
    of_one = lambda x: getattr(_sharding(x), "spec", PartitionSpec())
    return jax.tree.map(of_one, params)


def split_as_gradients(examples: jax.Array, param: jax.Array) -> PartitionSpec:
    """How gradients of examples are split: as these are, or else as the parameter."""
    of_examples = split_as_examples(examples)
    return of_examples if len(of_examples) else PartitionSpec(None, *split_as(param))


def automatic(fun: Callable[..., Any], out_specs: Any, *args: Any) -> Any:
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

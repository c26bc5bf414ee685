"""The shardings of a run on a mesh of devices: no number depends on them.

The compiler partitions a step that is written for one device. Examples are split along
axis 0. A step uses parameters that are replicated over the axes of the examples, and
the sum of the gradients has the shardings of the parameters.

On a mesh with Explicit axes the type of each array has its sharding. Per-example
gradients declare no shardings, so they are computed with these axes as Auto ones, and
given a sharding at the end: that of the examples for gradients of examples, and that of
the parameters for sums.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dpadambc.core import modules


class Layout(NamedTuple):
    """The mesh of a run, or none, and the shardings on it.

    Attributes:
      mesh: its devices, with axes of type Auto.
      axes: the axes along which examples are split.
      params: the spec of each parameter.
      trained: the specs of the parameters that are trained.
    """

    mesh: Mesh | None = None
    axes: tuple[str, ...] = ()
    params: tuple[PartitionSpec, ...] = ()
    trained: tuple[PartitionSpec, ...] = ()


def named_sharding(sharding: Any) -> NamedSharding | None:
    """Returns a sharding on a mesh of devices, and None for any other."""
    is_named = isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
    return sharding if is_named else None


def sharding_of(x: Any) -> NamedSharding | None:
    """Returns the sharding of an array on a mesh, or None."""
    return named_sharding(getattr(x, "sharding", None))


def spec_of(x: Any) -> PartitionSpec:
    """Returns the spec of an array; an array on no mesh is replicated."""
    sharding = sharding_of(x)
    return PartitionSpec() if sharding is None else sharding.spec


def with_auto_axes(mesh: Any) -> Mesh:
    """Returns the mesh with axes of type Auto, over which the compiler partitions."""
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)


def axes_of(part: Any) -> tuple[str, ...]:
    """Returns the axes of the mesh in an entry of a spec."""
    return part if isinstance(part, tuple) else () if part is None else (part,)


def num_shards(layout: Layout) -> int:
    """Returns the number of shards of a batch."""
    if layout.mesh is None:
        return 1
    return math.prod(layout.mesh.shape[name] for name in layout.axes)


def spans_processes(layout: Layout) -> bool:
    """Returns whether the devices of the mesh belong to several processes."""
    devices = () if layout.mesh is None else layout.mesh.devices.flat
    return len({device.process_index for device in devices}) > 1


def shardings_of(tree: Any) -> list[NamedSharding]:
    """Returns the shardings of the arrays of a tree that are on a mesh."""
    return [s for s in map(sharding_of, jax.tree.leaves(tree)) if s is not None]


def layout_of(
    params: Any, others: Any, batches: Sequence[NamedSharding], wrt: Any = None
) -> Layout:
    """Returns the layout that arrays have been placed in.

    Args:
      params: the parameters.
      others: other arrays of the run.
      batches: the shardings along whose axis 0 the examples are split.
      wrt: which variables are trained; see `modules.split`.

    Raises:
      ValueError: if there are several meshes, or several ways to split the examples.
    """
    placed = [*shardings_of((params, others)), *batches]
    meshes = {with_auto_axes(s.mesh) for s in placed}
    splits = {axes_of(s.spec[0]) for s in batches if len(s.spec)} - {()}
    if len(meshes) > 1 or len(splits) > 1:
        raise ValueError(
            "Expected params, frozen and data on one mesh, and all arrays of data split"
            f" along the same axes, got {sorted(map(str, [*meshes, *splits]))}."
        )
    if not meshes:
        return Layout()
    specs = lambda tree: tuple(map(spec_of, jax.tree.leaves(tree)))
    return Layout(
        mesh=meshes.pop(),
        axes=splits.pop() if splits else (),
        params=specs(params),
        trained=specs(modules.split(params, wrt)[0]),
    )


def is_held_here(size: int, layout: Layout) -> np.ndarray:
    """Returns which rows of a batch the devices of this process hold, shape (size,)."""
    if not layout.axes:
        return np.ones(size, bool)
    is_held = np.zeros(size, bool)
    sharding = named(layout, PartitionSpec(layout.axes))
    for part in sharding.addressable_devices_indices_map((size,)).values():
        is_held[part] = True
    return is_held


def split_on_host(rows: np.ndarray, layout: Layout) -> Any:
    """Shards an array of the host along axis 0."""
    if not layout.axes:
        return rows
    sharding = named(layout, PartitionSpec(layout.axes))
    return jax.make_array_from_callback(rows.shape, sharding, rows.__getitem__)


def on_mesh(layout: Layout) -> contextlib.AbstractContextManager[Any]:
    """Sets the mesh for tracing, so that a loss may name its axes."""
    return jax.set_mesh(layout.mesh) if layout.mesh else contextlib.nullcontext()


def named(layout: Layout, spec: PartitionSpec) -> NamedSharding:
    """Returns a sharding on the mesh."""
    assert layout.mesh is not None
    return NamedSharding(layout.mesh, spec)


def placed(tree: Any, layout: Layout) -> Any:
    """Places arrays on the devices of a run; those on no mesh are replicated."""
    if layout.mesh is None:
        return jax.device_put(tree)
    shardings = jax.tree.map(lambda x: named(layout, spec_of(x)), tree)
    return jax.device_put(tree, shardings)


def constrained(
    tree: Any, layout: Layout, specs: PartitionSpec | Sequence[PartitionSpec]
) -> Any:
    """Constrains the tree to the shardings of one spec, or of one for each leaf."""
    if layout.mesh is None:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    several = len(leaves) * [specs] if isinstance(specs, PartitionSpec) else specs
    shardings = [named(layout, spec) for spec in several]
    return structure.unflatten(jax.lax.with_sharding_constraint(leaves, shardings))


def split(tree: Any, layout: Layout) -> Any:
    """Shards arrays of examples along axis 0."""
    return constrained(tree, layout, PartitionSpec(layout.axes))


def replicated(tree: Any, layout: Layout) -> Any:
    """Replicates the tree on every device."""
    return constrained(tree, layout, PartitionSpec())


def gathered_specs(layout: Layout) -> list[PartitionSpec]:
    """Returns the specs of parameters replicated over the axes of the examples.

    Otherwise the compiler may shard the features of a layer instead of its examples,
    and every device would hold the factors of the whole batch.
    """
    rest = lambda part: tuple(n for n in axes_of(part) if n not in layout.axes) or None
    return [PartitionSpec(*map(rest, spec)) for spec in layout.params]


def state_specs(state: Any, layout: Layout) -> list[PartitionSpec]:
    """Returns the specs of a state, with those of the parameters for their moments.

    A leaf whose path ends in that of a parameter of the same shape gets its spec; the
    others are replicated. Attributes of a module are keys of its state. (A wrong guess
    costs memory only.)
    """
    if layout.mesh is None:
        return []
    names = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    params = jax.tree_util.tree_leaves_with_path(state.params)
    known = {
        (names(path), x.shape): spec
        for (path, x), spec in zip(params, layout.params, strict=True)
    }

    def spec_of(path: tuple[Any, ...], x: Any) -> PartitionSpec:
        ends = ((names(path[i:]), x.shape) for i in range(len(path) + 1))
        return next((known[end] for end in ends if end in known), PartitionSpec())

    return [spec_of(*each) for each in jax.tree_util.tree_leaves_with_path(state)]


def block_on_cpu(tree: Any, layout: Layout) -> Any:
    """Blocks until the arrays are ready where devices share a pool of threads.

    On CPU the programs in flight can take all threads before each device has one, and
    XLA ends the process where a device waits for the others for long.
    """
    is_cpu = layout.mesh is not None and layout.mesh.devices.flat[0].platform == "cpu"
    return jax.block_until_ready(tree) if is_cpu else tree


def _sharding(x: Any) -> Any:
    return getattr(jax.typeof(x), "sharding", None)


def num_explicit_devices(tree: Any) -> int:
    """Returns the number of devices along the Explicit axes of the arrays' mesh.

    Arrays on no mesh have the mesh of `jax.set_mesh`.
    """
    found = [_sharding(x) for x in jax.tree.leaves(tree)]
    meshes = [jax.sharding.get_abstract_mesh(), *(x.mesh for x in found if x)]
    return max(math.prod(m.shape[name] for name in m.explicit_axes) for m in meshes)


def sharding_of_rows(x: Any, size: int) -> NamedSharding | None:
    """Returns the sharding of `size` rows of an array, by its type, or None.

    Raises:
      ValueError: if axis 0 is split over a number of devices that does not divide
      `size`.
    """
    sharding = _sharding(x)
    if sharding is None or not any(part is not None for part in sharding.spec):
        return None
    shards = math.prod(sharding.mesh.shape[name] for name in axes_of(sharding.spec[0]))
    if size % shards:
        raise ValueError(
            f"Expected a batch whose size the {shards} shards of data divide, got"
            f" {size}. Draw it with params, or a key, on the mesh of data, by"
            " jax.device_put or in jax.set_mesh."
        )
    return NamedSharding(sharding.mesh, sharding.spec)


def spec_of_examples(batches: Any) -> PartitionSpec:
    """Returns the partition of axis 0 of the batches."""
    for x in jax.tree.leaves(batches):
        sharding = _sharding(x)
        if sharding is not None and len(sharding.spec) and sharding.spec[0] is not None:
            return PartitionSpec(sharding.spec[0])
    return PartitionSpec()


def specs_of(params: Any) -> Any:
    """Returns the partition of each parameter."""
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

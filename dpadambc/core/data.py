"""The examples of a run, and the shardings of its arrays on a mesh of devices.

A step is written for one device, and the compiler partitions it. The constraints here
say what it cannot infer: examples are split along axis 0, a step uses parameters that
are replicated over the axes of the examples, and the sum of the gradients has the
shardings of the parameters. Noise is a function of the coordinate, so each device draws
its shard of one and the same noise, whatever the number of devices.
"""

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dpadambc.core.sampling import Batch


@dataclasses.dataclass(frozen=True)
class Sharded:
    """Data whose batches are split over the devices of a mesh.

    Arrays that are split along axis 0 themselves do not need it.

    Args:
      data: as for `fit`. Arrays on no mesh are replicated, and each device takes its
        part of a batch from its copy; of a source, each process fetches the examples
        that its devices need.
      sharding: of each batch along axis 0.

    Raises:
      ValueError: if the sharding is of another kind.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import NamedSharding, PartitionSpec
      >>> from dpadambc import training
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> data = training.Sharded(
      ...     (jnp.ones((1_001, 3)),), NamedSharding(mesh, PartitionSpec("data")))
    """

    data: Any = dataclasses.field(repr=False)  # may be people's
    sharding: NamedSharding

    def __post_init__(self):
        if _named(self.sharding) is None or len(self.sharding.spec) != 1:
            raise ValueError(
                "Expected sharding to be a NamedSharding of a mesh of devices that"
                " splits axis 0 alone, such as NamedSharding(mesh,"
                f" PartitionSpec('data')), got {self.sharding!r}."
            )


def is_source(data: Any) -> bool:
    """Whether the data are a source: examples by their index, and no arrays.

    It has `__len__` and `__getitem__`, such as a `MapDataset` of Grain. The example
    under an index must be the same each time. Otherwise a step that is repeated after
    an interruption would add its noise to another gradient. Augmentation belongs in the
    loss; see `with_augmentations`. A person must be under one index alone: in a data
    set that is repeated, or has several rows of one person, the guarantee is for a row.
    """
    if isinstance(data, tuple | list | dict | np.ndarray | jax.Array):
        return False
    return hasattr(data, "__len__") and hasattr(data, "__getitem__")


def arguments(examples: Any) -> tuple[Any, ...]:
    """The arguments of the loss: a dictionary is one."""
    return examples if isinstance(examples, tuple) else (examples,)


_FORM = (
    "Expected data to be a tuple of the arguments of loss_fn or a dictionary, of arrays"
    " of numbers with the examples along axis 0, or a source with __len__ and"
    " __getitem__, got {}. Give tables by to_numpy(), lists by np.asarray, text as"
    " numbers, and examples of several lengths padded to one."
)


def refuse_text(data: Any) -> None:
    """Raises for arrays without numbers, and for tables, without showing them."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(data):
        dtype = getattr(leaf, "dtype", None)
        is_text = isinstance(dtype, np.dtype) and dtype.kind in "OSUMm"
        if is_text or hasattr(leaf, "to_numpy"):
            got = f"dtype {dtype}" if is_text else type(leaf).__name__
            place = f"data{jax.tree_util.keystr(path)}"
            raise TypeError(_FORM.format(f"{got} at {place}"))


def num_examples(data: Any) -> int:
    """The number of examples, the same in every array."""
    refuse_text(data)
    if is_source(data):
        sizes = {(len(data),)}
    elif isinstance(data, tuple | dict):
        sizes = {jnp.shape(x)[:1] for x in jax.tree.leaves(data)}
    else:
        raise TypeError(_FORM.format(type(data).__name__))
    if len(sizes) != 1 or () in sizes:
        raise ValueError(_FORM.format(f"arrays of lengths {sorted(sizes)}"))
    ((size,),) = sizes
    if not 0 < size <= np.iinfo(np.int32).max:
        raise ValueError(
            f"Expected data with 1 to {np.iinfo(np.int32).max} examples, got {size}."
            " A source that is repeated has each example many times: give it once."
        )
    return size


def one_example(data: Any) -> tuple[Any, ...]:
    """The arguments of the loss for one example, arrays or shapes."""
    if is_source(data):
        return arguments(data[0])
    shape = lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[1:], jnp.result_type(x))
    return arguments(jax.tree.map(shape, data))


class Fetched(NamedTuple):
    """A batch of a source, with zeros for padding."""

    examples: Any
    is_padding_example: Any


def fetch(source: Any, batch: Batch, layout: "Layout") -> Fetched:
    """The examples of a batch from the host: in each process, those it needs."""
    padding = np.asarray(batch.is_padding_example)
    sharding = named(layout, PartitionSpec(layout.axes)) if layout.axes else None
    is_needed = np.full(padding.shape, sharding is None)
    if sharding is not None:
        for part in sharding.addressable_devices_indices_map(padding.shape).values():
            is_needed[part] = True
    is_needed &= ~padding
    chosen = np.asarray(batch.indices)[is_needed].tolist()
    rows = [source[i] for i in chosen or [0]]

    def column(*leaves):
        values = np.stack(leaves)
        found = np.zeros((len(padding), *values.shape[1:]), values.dtype)
        found[is_needed] = values[: len(chosen)]
        if sharding is None:
            return found
        return jax.make_array_from_callback(found.shape, sharding, found.__getitem__)

    return Fetched(jax.tree.map(column, *rows), batch.is_padding_example)


# Several devices.


class Layout(NamedTuple):
    """The mesh of a run, or none, and the shardings on it.

    Attributes:
      mesh: its devices, with axes of type Auto.
      axes: the axes along which examples are split.
      params: the spec of each parameter.
    """

    mesh: Mesh | None = None
    axes: tuple[str, ...] = ()
    params: tuple[PartitionSpec, ...] = ()


def _named(sharding: Any) -> NamedSharding | None:
    """A sharding on a mesh of devices; None for any other."""
    is_named = isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
    return sharding if is_named else None


def _sharding(x: Any) -> NamedSharding | None:
    return _named(getattr(x, "sharding", None))


def spec_of(x: Any) -> PartitionSpec:
    """The spec of an array; one on no mesh is replicated."""
    sharding = _sharding(x)
    return PartitionSpec() if sharding is None else sharding.spec


def _automatic(mesh: Any) -> Mesh:
    """The mesh with axes of type Auto, over which the compiler partitions."""
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)


def _axes(part: Any) -> tuple[str, ...]:
    """The axes of the mesh in an entry of a spec."""
    return part if isinstance(part, tuple) else () if part is None else (part,)


def layout_of(params: Any, frozen: Any, data: Any) -> Layout:
    """The layout of a run: that of the arrays that the user has placed on a mesh."""
    found = lambda tree: [s for s in map(_sharding, jax.tree.leaves(tree)) if s]
    examples = data.data if isinstance(data, Sharded) else data
    of_data = [] if is_source(examples) else found(examples)
    of_batches = [data.sharding] if isinstance(data, Sharded) else of_data
    meshes = {
        _automatic(s.mesh) for s in found((params, frozen)) + of_data + of_batches
    }
    splits = {_axes(s.spec[0]) for s in of_batches if len(s.spec)} - {()}
    if len(meshes) > 1 or len(splits) > 1:
        raise ValueError(
            "Expected params, frozen and data on one mesh, and all arrays of data split"
            f" along the same axes, got {sorted(map(str, [*meshes, *splits]))}."
        )
    if not meshes:
        return Layout()
    specs = [spec_of(x) for x in jax.tree.leaves(params)]
    return Layout(meshes.pop(), splits.pop() if splits else (), tuple(specs))


def num_shards(layout: Layout) -> int:
    """The number of shards of a batch."""
    if layout.mesh is None:
        return 1
    return math.prod(layout.mesh.shape[name] for name in layout.axes)


def spans_processes(layout: Layout) -> bool:
    """Whether the devices of the mesh are of several processes."""
    devices = () if layout.mesh is None else layout.mesh.devices.flat
    return len({device.process_index for device in devices}) > 1


def on_mesh(layout: Layout) -> contextlib.AbstractContextManager[Any]:
    """Sets the mesh for tracing, so that a loss may name its axes."""
    return jax.set_mesh(layout.mesh) if layout.mesh else contextlib.nullcontext()


def named(layout: Layout, spec: PartitionSpec) -> NamedSharding:
    """A sharding on the mesh."""
    assert layout.mesh is not None
    return NamedSharding(layout.mesh, spec)


def placed(tree: Any, layout: Layout) -> Any:
    """Arrays on the devices of a run: those on no mesh are replicated."""
    if layout.mesh is None:
        return jax.device_put(tree)
    shardings = jax.tree.map(lambda x: named(layout, spec_of(x)), tree)
    return jax.device_put(tree, shardings)


def constrained(
    tree: Any, layout: Layout, specs: PartitionSpec | Sequence[PartitionSpec]
) -> Any:
    """The tree with the shardings of one spec, or of one for each leaf."""
    if layout.mesh is None:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    several = len(leaves) * [specs] if isinstance(specs, PartitionSpec) else specs
    shardings = [named(layout, spec) for spec in several]
    return structure.unflatten(jax.lax.with_sharding_constraint(leaves, shardings))


def split(tree: Any, layout: Layout) -> Any:
    """Arrays of examples, each device with some of them."""
    return constrained(tree, layout, PartitionSpec(layout.axes))


def replicated(tree: Any, layout: Layout) -> Any:
    """The tree on every device."""
    return constrained(tree, layout, PartitionSpec())


def gathered_specs(layout: Layout) -> list[PartitionSpec]:
    """The specs of parameters that are replicated over the axes of the examples.

    Otherwise the compiler may shard the features of a layer instead of its examples,
    and every device would hold the factors of the whole batch.
    """
    rest = lambda part: tuple(n for n in _axes(part) if n not in layout.axes) or None
    return [PartitionSpec(*map(rest, spec)) for spec in layout.params]


def state_specs(state: Any, layout: Layout) -> list[PartitionSpec]:
    """The specs of a state: moments have those of the parameters that they are like.

    A leaf whose path ends in that of a parameter of the same shape gets its spec; the
    others are replicated. (A wrong guess costs memory only.)
    """
    if layout.mesh is None:
        return []
    params = jax.tree_util.tree_leaves_with_path(state.params)
    known = {
        (path, x.shape): spec
        for (path, x), spec in zip(params, layout.params, strict=True)
    }

    def spec_of(path: tuple[Any, ...], x: Any) -> PartitionSpec:
        ends = ((path[i:], x.shape) for i in range(len(path) + 1))
        return next((known[end] for end in ends if end in known), PartitionSpec())

    return [spec_of(*each) for each in jax.tree_util.tree_leaves_with_path(state)]


def padded(batch: Batch, layout: Layout, microbatch_size: int | None) -> Batch:
    """A batch with padding up to shards of equal sizes."""
    size, unit = len(batch.indices), num_shards(layout)
    if unit > 1 and microbatch_size is not None and microbatch_size < size:
        unit = microbatch_size
    if not (more := -size % unit):
        return batch
    return Batch(
        jnp.pad(batch.indices, (0, more), constant_values=-1),
        jnp.pad(batch.is_padding_example, (0, more), constant_values=True),
        batch.num_examples,
    )


def settled(tree: Any, layout: Layout) -> Any:
    """The arrays, waited for where the devices of a mesh share a pool of threads.

    On CPU the programs in flight can take all threads before each device has one, and
    XLA ends the process where a device waits for the others for long.
    """
    is_cpu = layout.mesh is not None and layout.mesh.devices.flat[0].platform == "cpu"
    return jax.block_until_ready(tree) if is_cpu else tree

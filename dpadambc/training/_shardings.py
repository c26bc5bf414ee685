"""The shardings of a run: of examples, parameters and moments on a device mesh.

A step is written for one device, and the compiler partitions it. The constraints here
say what it cannot infer: examples are sharded along axis 0, a step uses parameters that
are replicated over the axes of the examples, and the sum of the gradients has the
sharding of the parameters. Noise is a function of the coordinate, so each device draws
its shard of one and the same noise, whatever the number of devices.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dpadambc.core.sampling import Batch
from dpadambc.core.state import TrainState


def _automatic(mesh: Mesh) -> Mesh:
    """The same devices with axes of type Auto, over which the compiler partitions."""
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)


def _mesh_of(trees: Any, batch: NamedSharding | None) -> Mesh | None:
    """The mesh of all these shardings, if there is one."""
    shardings = [x.sharding for x in jax.tree.leaves(trees) if isinstance(x, jax.Array)]
    named = [s for s in (*shardings, batch) if isinstance(s, NamedSharding)]
    meshes = {_automatic(s.mesh) for s in named if isinstance(s.mesh, Mesh)}
    if len(meshes) > 1:
        raise ValueError(
            "Expected parameters, data, frozen and batch_sharding on one mesh, got"
            f" {sorted(map(str, meshes))}."
        )
    return meshes.pop() if meshes else None


def _names(part: Any) -> tuple[str, ...]:
    """The mesh axes in one entry of a `PartitionSpec`."""
    if part is None:
        return ()
    return part if isinstance(part, tuple) else (part,)


def _batch_axes(batch: NamedSharding | None) -> tuple[str, ...]:
    if batch is None:
        return ()
    if not isinstance(batch, NamedSharding) or not isinstance(batch.mesh, Mesh):
        raise TypeError(
            "Expected batch_sharding to be a jax.sharding.NamedSharding of a mesh of"
            f" devices, got {batch!r}."
        )
    if len(batch.spec) != 1:
        raise ValueError(
            "Expected batch_sharding to split axis 0, the examples, and no other, such"
            f" as NamedSharding(mesh, PartitionSpec('data')), got {batch.spec}."
        )
    return _names(batch.spec[0])


@dataclasses.dataclass(frozen=True, eq=False)
class Shardings:
    """The shardings of a run; without a mesh, all arrays are on one device."""

    mesh: Mesh | None = None
    batch_axes: tuple[str, ...] = ()  # mesh axes that shard the examples
    state: TrainState | None = None  # the sharding of each leaf

    @classmethod
    def of(
        cls, trees: Any, batch: NamedSharding | None, microbatch_size: int | None
    ) -> "Shardings":
        """Infers the mesh from the arrays that the user has placed on it."""
        shardings = cls(_mesh_of(trees, batch), _batch_axes(batch))
        if (microbatch_size or 0) % shardings.num_shards:
            raise ValueError(
                "Expected microbatch_size to be a multiple of the"
                f" {shardings.num_shards} shards of a batch, got {microbatch_size=}."
            )
        return shardings

    @property
    def spans_processes(self) -> bool:
        """Whether the devices of the mesh are of several processes."""
        devices = () if self.mesh is None else self.mesh.devices.flat
        return len({device.process_index for device in devices}) > 1

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Sets the mesh for tracing, so that a loss may name its axes."""
        if self.mesh is None:
            return contextlib.nullcontext()
        return jax.set_mesh(self.mesh)

    def finished(self, tree: Any) -> Any:
        """The arrays, waited for where the devices of the mesh share a pool of threads.

        On CPU the programs in flight can take all threads before each device has one,
        and XLA ends the process where a device waits for the others for long.
        """
        if self.mesh is not None and self.mesh.devices.flat[0].platform == "cpu":
            return jax.block_until_ready(tree)
        return tree

    def _named(self, *spec: Any) -> NamedSharding:
        assert self.mesh is not None
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def _sharding_of(self, x: Any) -> NamedSharding:
        """The sharding that an array has on the mesh; else replicated."""
        sharding = getattr(x, "sharding", None)
        return self._named(*getattr(sharding, "spec", ()))

    def device_put(self, tree: Any) -> Any:
        """Keeps the shardings of arrays on the mesh, and replicates the others."""
        if self.mesh is None:
            return jax.device_put(tree)
        return jax.device_put(tree, jax.tree.map(self._sharding_of, tree))

    @property
    def _name(self) -> Hashable:
        leaves, structure = jax.tree.flatten(self.state)
        return self.mesh, self.batch_axes, structure, tuple(leaves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shardings) and self._name == other._name

    def __hash__(self) -> int:
        return hash(self._name)

    def of_state(
        self, init: Callable[[optax.Params], TrainState], params: optax.Params
    ) -> "Shardings":
        """With those of a state, whose moments have the shardings of the parameters."""
        if self.mesh is None:
            return self
        shapes = jax.eval_shape(init, params)
        state = dataclasses.replace(
            jax.tree.map(lambda _: self._named(), shapes),
            params=jax.tree.map(self._sharding_of, params),
            opt_state=self._like_params(shapes.opt_state, params),
            average=self._like_params(shapes.average, params),
            noise=self._like_params(shapes.noise, params),
        )
        return dataclasses.replace(self, state=state)

    def _like_params(self, tree: Any, params: optax.Params) -> Any:
        """Shardings of a tree with subtrees like the parameters, such as moments.

        A leaf whose path ends in that of a parameter of the same shape gets its
        sharding; the others are replicated. (A wrong guess costs memory only.)
        """
        known = {
            (path, param.shape): self._sharding_of(param)
            for path, param in jax.tree_util.tree_leaves_with_path(params)
        }

        def sharding(path: tuple[Any, ...], x: Any) -> NamedSharding:
            ends = [(path[i:], x.shape) for i in range(len(path) + 1)]
            return next((known[e] for e in ends if e in known), self._named())

        return jax.tree_util.tree_map_with_path(sharding, tree)

    @property
    def batch_sharding(self) -> NamedSharding | None:
        """The sharding of arrays with the examples along axis 0."""
        return self._named(self.batch_axes) if self.batch_axes else None

    @property
    def num_shards(self) -> int:
        """The number of shards of a batch."""
        if self.mesh is None:
            return 1
        return math.prod(self.mesh.shape[name] for name in self.batch_axes)

    def padded(self, batch: Batch, microbatch_size: int | None) -> Batch:
        """Pads a batch until its shards have equal sizes."""
        if self.num_shards == 1:
            return batch
        size, unit = len(batch.indices), self.num_shards
        if microbatch_size is not None and microbatch_size < size:
            unit = microbatch_size
        more = -size % unit
        return Batch(
            jnp.pad(batch.indices, (0, more), constant_values=-1),
            jnp.pad(batch.is_padding_example, (0, more), constant_values=True),
            batch.num_examples,
        )

    def replicate(self, tree: Any) -> Any:
        """Constrains arrays to be replicated."""
        if self.mesh is None:
            return tree
        return jax.lax.with_sharding_constraint(tree, self._named())

    def shard_examples(self, examples: Any) -> Any:
        """Constrains arrays to be sharded by example."""
        if not self.batch_axes:
            return examples
        return jax.lax.with_sharding_constraint(examples, self.batch_sharding)

    def gather_params(self, params: optax.Params) -> optax.Params:
        """Constrains parameters to be replicated over the axes of the examples.

        Otherwise the compiler may shard the features of a layer instead of its
        examples, and every device would hold the factors of the whole batch.
        """
        if self.state is None or not self.batch_axes:
            return params

        def without_batch(sharding: NamedSharding) -> NamedSharding:
            rest = lambda part: tuple(
                n for n in _names(part) if n not in self.batch_axes
            )
            return self._named(*(rest(part) or None for part in sharding.spec))

        shardings = jax.tree.map(without_batch, self.state.params)
        return jax.lax.with_sharding_constraint(params, shardings)

    def scatter_gradient(self, gradient: optax.Updates) -> optax.Updates:
        """Constrains the summed gradient to the shardings of the parameters."""
        if self.state is None:
            return gradient
        return jax.lax.with_sharding_constraint(gradient, self.state.params)

    def constrain_state(self, state: TrainState) -> TrainState:
        """Constrains a state to the shardings of the one before."""
        if self.state is None:
            return state
        return jax.lax.with_sharding_constraint(state, self.state)

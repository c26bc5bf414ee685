"""Where a run lies: examples, parameters and moments over the devices of a mesh.

The program is written for one device, and the compiler splits it. What it cannot know
is said here: examples are split over the devices, the parameters that a step uses are
whole on each, and the sum of gradients goes to where the parameters lie. Noise is drawn
by coordinate, each device its own part of one draw, whatever the number of devices.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dpadambc.mechanisms.sampling import Batch
from dpadambc.training.state import TrainState


def fully_sharded(params: optax.Params, mesh: Mesh, axis_name: str) -> Any:
    """Splits each parameter over the devices along an axis of the mesh.

    Along its longest axis that the devices divide; where there is none, every device
    has the whole. Optimizers of `fit` split their moments in the same way.

    Args:
      params: arrays, or their shapes from `jax.eval_shape`.
      mesh: the devices.
      axis_name: the axis of the mesh.

    Returns:
      A `NamedSharding` for each parameter, for `jax.device_put(params, ...)`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dpadambc import training
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> shardings = training.fully_sharded(jnp.zeros((3, 8)), mesh, "data")
      >>> tuple(shardings.spec)
      (None, 'data')
    """
    size = mesh.shape[axis_name]

    def of_one(x: Any) -> NamedSharding:
        divisible = [axis for axis, n in enumerate(x.shape) if n and n % size == 0]
        if not divisible:
            return NamedSharding(mesh, PartitionSpec())
        longest = max(divisible, key=lambda axis: x.shape[axis])
        return NamedSharding(mesh, PartitionSpec(*[None] * longest, axis_name))

    return jax.tree.map(of_one, params)


def _automatic(mesh: Mesh) -> Mesh:
    """The same devices, with axes over which the compiler splits a program."""
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)


def _mesh_of(trees: Any, batch: NamedSharding | None) -> Mesh | None:
    """The one mesh on which all this lies, if any."""
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
    """The axes of a mesh along which one axis of an array is split."""
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
class Layout:
    """What lies where; without a mesh, all on one device."""

    mesh: Mesh | None = None
    batch_axes: tuple[str, ...] = ()  # of the mesh, over which examples are split
    state: TrainState | None = None  # the sharding of each leaf

    @classmethod
    def of(
        cls, trees: Any, batch: NamedSharding | None, microbatch_size: int | None
    ) -> "Layout":
        """The layout of arrays that the user has placed, for batches split so."""
        axes = _batch_axes(batch)
        layout = cls(_mesh_of(trees, batch), axes)
        if (microbatch_size or 0) % layout.parts:
            raise ValueError(
                f"Expected microbatch_size to be a multiple of the {layout.parts}"
                " devices that have a part of each microbatch, got"
                f" {microbatch_size=}."
            )
        return layout

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """In which all programs are compiled: a loss may name the axes of the mesh."""
        if self.mesh is None:
            return contextlib.nullcontext()
        return jax.set_mesh(self.mesh)

    def _on_mesh(self, *spec: Any) -> NamedSharding:
        assert self.mesh is not None
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def _where(self, x: Any) -> NamedSharding:
        """Where an array lies on the mesh already; else it is whole on each device."""
        sharding = getattr(x, "sharding", None)
        return self._on_mesh(*getattr(sharding, "spec", ()))

    def place(self, tree: Any) -> Any:
        """Puts arrays on the mesh, those that are not there already on each device."""
        if self.mesh is None:
            return jax.device_put(tree)
        return jax.device_put(tree, jax.tree.map(self._where, tree))

    def start(
        self,
        init: Callable[[optax.Params], TrainState],
        params: optax.Params,
    ) -> tuple["Layout", TrainState]:
        """The first state, with moments that lie as the parameters do."""
        params = self.place(params)
        # The first step gives the buffers of the state away, not those of the user.
        copied = lambda params: jax.tree.map(jnp.copy, init(params))
        if self.mesh is None:
            return self, jax.jit(copied)(params)
        shapes = jax.eval_shape(init, params)
        state = jax.tree.map(lambda _: self._on_mesh(), shapes)._replace(
            params=jax.tree.map(self._where, params),
            opt_state=self._as_params(shapes.opt_state, params),
            average=self._as_params(shapes.average, params),
        )
        started = jax.jit(copied, out_shardings=state)(params)
        return dataclasses.replace(self, state=state), started

    def _as_params(self, tree: Any, params: optax.Params) -> Any:
        """Where a tree lies that holds trees like the parameters, such as moments.

        A leaf with the path and the shape of a parameter lies where that does, the
        others are whole on each device. (A wrong guess would cost memory, no more.)
        """
        known = {
            (path, param.shape): self._where(param)
            for path, param in jax.tree_util.tree_leaves_with_path(params)
        }

        def where(path: tuple[Any, ...], x: Any) -> NamedSharding:
            ends = [(path[i:], x.shape) for i in range(len(path) + 1)]
            return next((known[e] for e in ends if e in known), self._on_mesh())

        return jax.tree_util.tree_map_with_path(where, tree)

    @property
    def batch_sharding(self) -> NamedSharding | None:
        """Of everything with the examples along axis 0."""
        return self._on_mesh(self.batch_axes) if self.batch_axes else None

    @property
    def parts(self) -> int:
        """Into how many a batch is split."""
        if self.mesh is None:
            return 1
        return math.prod(self.mesh.shape[name] for name in self.batch_axes)

    def padded(self, batch: Batch, microbatch_size: int | None) -> Batch:
        """With so much more padding that it splits into equal parts."""
        if self.parts == 1:
            return batch
        size, unit = len(batch.indices), self.parts
        if microbatch_size is not None and microbatch_size < size:
            unit = microbatch_size
        more = -size % unit
        return Batch(
            jnp.pad(batch.indices, (0, more), constant_values=-1),
            jnp.pad(batch.is_padding_example, (0, more), constant_values=True),
            batch.num_examples,
        )

    def everywhere(self, tree: Any) -> Any:
        """The whole on each device."""
        if self.mesh is None:
            return tree
        return jax.lax.with_sharding_constraint(tree, self._on_mesh())

    def split(self, examples: Any) -> Any:
        """Each device has its part of the examples."""
        if not self.batch_axes:
            return examples
        return jax.lax.with_sharding_constraint(examples, self.batch_sharding)

    def whole(self, params: optax.Params) -> optax.Params:
        """Parameters as a step uses them: not split over the devices of the examples.

        Else the compiler may split the features of a layer instead of its examples,
        and every device would have the factors of the whole batch.
        """
        if self.state is None or not self.batch_axes:
            return params

        def without_batch(sharding: NamedSharding) -> NamedSharding:
            rest = lambda part: tuple(
                n for n in _names(part) if n not in self.batch_axes
            )
            return self._on_mesh(*(rest(part) or None for part in sharding.spec))

        shardings = jax.tree.map(without_batch, self.state.params)
        return jax.lax.with_sharding_constraint(params, shardings)

    def summed(self, gradient: optax.Updates) -> optax.Updates:
        """The sum over all examples, each part where its parameters lie."""
        if self.state is None:
            return gradient
        return jax.lax.with_sharding_constraint(gradient, self.state.params)

    def kept(self, state: TrainState) -> TrainState:
        """A state that lies as the one before."""
        if self.state is None:
            return state
        return jax.lax.with_sharding_constraint(state, self.state)

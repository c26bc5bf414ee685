"""Shardings of batches, and of parameters that are too large for one device."""

import dataclasses
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dpadambc.core.mesh import named_sharding


@dataclasses.dataclass(frozen=True)
class Sharded:
    """Data whose batches are split over the devices of a mesh.

    Arrays that are themselves split along axis 0 do not need it.

    Args:
      data: the data of `fit`. Arrays on no mesh are replicated, and each device takes
        its part of a batch from its copy; from a source, each process fetches the
        examples that its devices need.
      sharding: the sharding of each batch along axis 0.

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
        if named_sharding(self.sharding) is None or len(self.sharding.spec) != 1:
            raise ValueError(
                "Expected sharding to be a NamedSharding of a mesh of devices that"
                " splits axis 0 alone, such as NamedSharding(mesh,"
                f" PartitionSpec('data')), got {type(self.sharding)}."
            )


def fully_sharded(params: optax.Params, mesh: Mesh, axis_name: str) -> Any:
    """Shards each parameter along an axis of the mesh, for `jax.device_put`.

    It shards the longest axis whose size the number of devices divides, and replicates
    a parameter that has none. `fit` gives the moments the shardings of the parameters.

    Args:
      params: arrays, or their shapes from `jax.eval_shape`.
      mesh: the devices.
      axis_name: the axis of the mesh.

    Returns:
      A `NamedSharding` for each parameter.

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

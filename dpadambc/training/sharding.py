"""A sharding for parameters that are too large for one device."""

from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


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

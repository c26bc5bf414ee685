"""A checksum of all bits of a tree of arrays, on which all devices agree."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dpadambc.core import shard_map
from dpadambc.engine import threefry

_SPLITS = {
    AxisType.Auto: jax.lax.with_sharding_constraint,
    AxisType.Explicit: jax.sharding.reshard,
}
_GOLDEN, _FIRST, _SECOND = map(np.uint32, (0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35))


@jax.jit
def of_tree(tree: Any) -> jax.Array:
    """64 bits of all numbers in a tree, their positions and the order of the leaves.

    Wrapping integer sums do not depend on the order of the additions, so no sharding
    changes the checksum. Shapes and dtypes are not part of it. Where the replicas of
    an array differ, all devices get the checksum of the first. In `jax.shard_map`,
    devices along an axis over which an array varies have checksums of their own.

    Returns:
      shape=(2,), uint32.
    """
    leaves = [_sums(_words(x)) for x in jax.tree.leaves(tree)]
    return _agreed(_sums(jnp.stack(leaves))) if leaves else jnp.zeros(2, jnp.uint32)


def folded_in(key: jax.Array, checksum: jax.typing.ArrayLike) -> jax.Array:
    """A key made of a key and a checksum."""
    for word in jnp.asarray(checksum):
        key = jax.random.fold_in(key, word)
    return key


def _words(x: Any) -> jax.Array:
    """The bits of an array, with a number of at most 32 of them in each element."""
    x = jax.lax.stop_gradient(jnp.asarray(x))
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 8:
        x = x.astype(jnp.float32)
    if jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize > 4:
        x = jax.lax.bitcast_convert_type(x, f"uint{min(8 * x.dtype.itemsize, 32)}")
    return x.astype(jnp.uint32)


def _sums(words: jax.Array) -> jax.Array:
    """Two sums over what each word and its position are mixed to.

    The first adds the finalizer of MurmurHash3, after which each bit depends on all;
    the second a product, in which two words that change places show too.
    """
    place = threefry.positions(words.shape) * _GOLDEN + _GOLDEN
    mixed = words ^ place
    mixed = (mixed ^ mixed >> 16) * _FIRST
    mixed = (mixed ^ mixed >> 13) * _SECOND
    mixed ^= mixed >> 16
    product = mixed * (mixed >> 16 ^ place)
    # Both in one pass over memory, which on a CPU takes all threads.
    add = lambda x, y: (x[0] + y[0], x[1] + y[1])
    zeros = np.uint32(0), np.uint32(0)
    return jnp.stack(jax.lax.reduce((mixed, product), zeros, add, range(words.ndim)))


def _agreed(checksum: jax.Array) -> jax.Array:
    """That of the first device: replicas may differ in a last bit.

    Each device puts its own in its part of a vector that is split over all of them.
    """
    mesh = jax.typeof(checksum).sharding.mesh
    for kind, split in _SPLITS.items():
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        axes = tuple(name for name, of_axis in kinds if of_axis == kind)
        number = math.prod(mesh.shape[name] for name in axes)
        if number > 1:
            of_each = jnp.broadcast_to(checksum, (number, 2))
            of_each = split(of_each, NamedSharding(mesh, PartitionSpec(axes)))
            is_first = jnp.arange(number)[:, None] == 0
            checksum = jnp.where(is_first, of_each, 0).sum(0, dtype=jnp.uint32)
    for name in sorted(shard_map.all_axes() - set(shard_map.varying_axes(checksum))):
        of_each = shard_map.varying(checksum, (name,))
        is_first = jax.lax.axis_index(name) == 0
        checksum = jax.lax.psum(jnp.where(is_first, of_each, 0), name)
    return checksum

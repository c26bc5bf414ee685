"""Keys made from keys and from checksums, so that no two draws share one."""

import hashlib
import math
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from dpadambc.core import arrays, chacha

_DEFAULT = "threefry2x32"
# Under `jax.vmap`, JAX draws from the first of several keys of these kinds.
DRAWS_FROM_THE_FIRST = ("rbg", "unsafe_rbg")
_GOLDEN, _FIRST, _SECOND = map(np.uint32, (0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35))


def the_same_everywhere(key: jax.Array) -> jax.Array:
    """Returns process 0's key, not committed to a device.

    Processes of one run with keys of their own would each draw other batches and other
    noise, and the sums of several would contain one example.
    """
    words = multihost_utils.broadcast_one_to_all(np.asarray(jax.random.key_data(key)))
    impl = jax.random.key_impl(key)
    return jax.random.wrap_key_data(jnp.asarray(np.asarray(words)), impl=impl)


def of_domain(key: jax.Array, name: str) -> jax.Array:
    """Derives a key for one purpose, distinct from other uses of the caller's key."""
    return jax.random.fold_in(key, zlib.crc32(f"dpadambc.{name}".encode()))


def words_of(text: str) -> np.ndarray:
    """Hashes a text to 64 bits, shape (2,), uint32."""
    return np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], np.uint32)


def folded_in(key: jax.Array, words: jax.typing.ArrayLike) -> jax.Array:
    """Makes a key of a key and two words, such as a checksum.

    Keys of the default kind and of ChaCha take one call of the block function, which
    takes two words; `jax.random.fold_in` takes one at a time, with zero for the other.
    """
    words = jnp.asarray(words, jnp.uint32)
    if jax.random.key_impl(key) == _DEFAULT:
        data = jax.extend.random.threefry_2x32(jax.random.key_data(key), words)
        # In JAX 0.10 the result does not say that it varies as its operands do.
        data = arrays.make_varying(data, arrays.varying_axes((key, words)))
        return jax.random.wrap_key_data(data, impl=_DEFAULT)
    if jax.random.key_impl(key) == chacha.KIND:
        data = chacha.folded_in(jax.random.key_data(key), words)
        return jax.random.wrap_key_data(data, impl=chacha.KIND)
    return jax.random.fold_in(jax.random.fold_in(key, words[0]), words[1])


def of_example(key: jax.Array, example: Any) -> jax.Array:
    """Derives a key for an example of a batch; equal bits give equal keys.

    It does not depend on the position in the batch. Otherwise one more example would
    change the keys of all examples behind it, and with them their gradients.

    From keys of kind "rbg", JAX draws in a way that depends on the other operands of
    `jax.vmap`, and a loss needs no cipher: examples then get keys of the default kind.
    """
    if jax.random.key_impl(key) in (*DRAWS_FROM_THE_FIRST, chacha.KIND):
        words = checksum(jax.random.key_data(key))
        key = jax.random.wrap_key_data(words, impl=_DEFAULT)
    return folded_in(key, checksum(example))


def of_leaves(key: jax.Array, tree: Any) -> jax.Array:
    """Derives a key for each leaf of a tree, shape (number of leaves,).

    Keys are distinct by position and by path. The position separates the leaves of one
    tree with certainty. The path separates the parts of `optax.multi_transform`, where
    each part counts from zero and all may have been given the same key.
    """
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    names = [zlib.crc32(jax.tree_util.keystr(path).encode()) for path in paths]
    words = np.array([*enumerate(names)], np.uint32).reshape(-1, 2)
    if jax.random.key_impl(key) == _DEFAULT:
        return jax.vmap(folded_in, (None, 0))(key, words)
    # Other kinds give other keys under `jax.vmap`, which need not be distinct.
    return jnp.stack([folded_in(key, each) for each in words])


@jax.custom_batching.custom_vmap
def _of_one_run(key: jax.Array, leaves: Sequence[jax.Array]) -> jax.Array:
    del leaves
    return key


@_of_one_run.def_vmap
def _(axis_size, are_batched, key, leaves):
    is_key_batched, are_leaves_batched = are_batched
    if (kind := str(jax.random.key_impl(key))) in DRAWS_FROM_THE_FIRST:
        raise ValueError(f"Expected a key of {_DEFAULT} under jax.vmap, got {kind}.")
    if any(are_leaves_batched) and not is_key_batched:
        raise ValueError(
            f"Expected a key for each of {axis_size} runs, got one. Map over keys too."
        )
    return _of_one_run(key, leaves), is_key_batched


def of_one_run(key: jax.Array, tree: Any) -> jax.Array:
    """Returns the key; raises where `jax.vmap` maps over the tree and not the key."""
    leaves = jax.tree.leaves(jax.lax.stop_gradient(tree))
    # A function unknown to `jax_debug_key_reuse` would mark the key as used.
    return jax.random.clone(_of_one_run(jax.random.clone(key), leaves))


@jax.jit
def checksum(tree: Any) -> jax.Array:
    """Hashes the numbers of a tree, their positions and the order of leaves to 64 bits.

    Wrapping integer sums do not depend on the order of the additions, so no sharding
    changes the checksum. Shapes and dtypes are not part of it. Where the replicas of
    an array differ, all devices get the checksum of the first. In `jax.shard_map`,
    devices along an axis over which an array varies have checksums of their own.

    Returns:
      shape=(2,), uint32.
    """
    leaves = [_sums(_words(x)) for x in jax.tree.leaves(tree)]
    return _agreed(_sums(jnp.stack(leaves))) if leaves else jnp.zeros(2, jnp.uint32)


def _words(x: Any) -> jax.Array:
    """Returns the bits of an array, at most 32 of them in each element."""
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
    """Computes two sums over words that are mixed with their positions.

    The first adds the finalizer of MurmurHash3, after which each bit depends on all.
    The second adds a product, so that it detects two words that change places.
    """
    place = arrays.positions(words.shape) * _GOLDEN + _GOLDEN
    mixed = words ^ place
    mixed = (mixed ^ mixed >> 16) * _FIRST
    mixed = (mixed ^ mixed >> 13) * _SECOND
    mixed ^= mixed >> 16
    product = mixed * (mixed >> 16 ^ place)
    # Both sums in one pass over memory, which on a CPU uses all threads.
    add = lambda x, y: (x[0] + y[0], x[1] + y[1])
    zeros = np.uint32(0), np.uint32(0)
    return jnp.stack(jax.lax.reduce((mixed, product), zeros, add, range(words.ndim)))


def _agreed(checksum: jax.Array) -> jax.Array:
    """Returns the first device's checksum, since replicas may differ in a last bit.

    Each device writes its own to its entry of a vector that is split over all devices.
    """
    mesh = jax.typeof(checksum).sharding.mesh
    for axes, split in (
        (mesh.auto_axes, jax.lax.with_sharding_constraint),
        (mesh.explicit_axes, jax.sharding.reshard),
    ):
        number = math.prod(mesh.shape[name] for name in axes)
        if number > 1:
            each = jnp.broadcast_to(checksum, (number, 2))
            each = split(each, NamedSharding(mesh, PartitionSpec(axes)))
            is_first = jnp.arange(number)[:, None] == 0
            checksum = jnp.where(is_first, each, 0).sum(0, dtype=jnp.uint32)
    for name in sorted(arrays.shard_map_axes() - set(arrays.varying_axes(checksum))):
        each = arrays.make_varying(checksum, (name,))
        is_first = jax.lax.axis_index(name) == 0
        checksum = jax.lax.psum(jnp.where(is_first, each, 0), name)
    return checksum

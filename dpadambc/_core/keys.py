"""Keys made from keys, so that no two draws have the same."""

import zlib
from typing import Any

import jax


def of_domain(key: jax.Array, name: str) -> jax.Array:
    """A key for one purpose: what else is drawn with the caller's repeats none of it.

    Initial parameters, say, or the noise where this is the key of the rounding.
    """
    return jax.random.fold_in(key, zlib.crc32(f"dpadambc.{name}".encode()))


def _of_leaf(key: jax.Array, index: int, path: Any) -> jax.Array:
    """Distinct by position and by path.

    The index tells the leaves of one tree apart for certain. The path does so across
    the parts of `optax.multi_transform`, where each part counts from zero and all may
    have been given the same key.
    """
    name = jax.tree_util.keystr(path).encode()
    return jax.random.fold_in(jax.random.fold_in(key, index), zlib.crc32(name))


def per_leaf(key: jax.Array, tree: Any) -> Any:
    """A key for each leaf of a tree."""
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    keys = [_of_leaf(key, index, path) for index, (path, _) in enumerate(paths)]
    return jax.tree.unflatten(structure, keys)

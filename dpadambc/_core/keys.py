"""Keys made from keys, so that no two draws have the same."""

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def of_domain(key: jax.Array, name: str) -> jax.Array:
    """A key for one purpose: what else is drawn with the caller's repeats none of it.

    Initial parameters, say, or the noise where this is the key of the rounding.
    """
    return jax.random.fold_in(key, zlib.crc32(f"dpadambc.{name}".encode()))


def _fold_in_each(key: jax.Array, data: Sequence[int]) -> jax.Array:
    """A key for each number; of one key, or of one for each."""
    words = np.asarray(data, np.uint32)
    if jax.random.key_impl(key) == "threefry2x32":
        return jax.vmap(jax.random.fold_in, (0 if key.ndim else None, 0))(key, words)
    # Other kinds give other keys under `jax.vmap`, which need not be distinct.
    keys = key if key.ndim else [key] * len(words)
    return jnp.stack(list(map(jax.random.fold_in, keys, words)))


def of_leaves(key: jax.Array, tree: Any) -> jax.Array:
    """A key for each leaf of a tree, shape (number of leaves,).

    Distinct by position and by path. The position tells the leaves of one tree apart
    for certain. The path does so across the parts of `optax.multi_transform`, where
    each part counts from zero and all may have been given the same key.
    """
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    names = [jax.tree_util.keystr(path).encode() for path in paths]
    return _fold_in_each(
        _fold_in_each(key, range(len(names))), list(map(zlib.crc32, names))
    )


def per_leaf(key: jax.Array, tree: Any) -> Any:
    """The tree with a key in place of each leaf."""
    structure = jax.tree.structure(tree)
    return structure.unflatten(of_leaves(key, tree)) if structure.num_leaves else tree

"""Keys made from keys, so that no two draws have the same."""

import hashlib
import secrets
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.experimental import multihost_utils


def secret_key() -> jax.Array:
    """A key from the operating system's entropy, for a run that nobody can repeat.

    JAX's default generator takes 64 bits. Anyone who knows or guesses the number behind
    a key, such as a seed in a script, can compute the noise.

    Each process of a program of several (`jax.distributed.initialize`) draws a key of
    its own. A `fit` whose arrays span them takes the key of the first process.

    Returns:
      A typed key.

    Raises:
      TypeError: if it is called inside a transformation of JAX.

    Example:
      >>> from dpadambc import training
      >>> bool((training.secret_key() != training.secret_key()).all())
      True
    """
    if isinstance(jnp.zeros(()), core.Tracer):
        raise TypeError(
            "Expected secret_key outside jax.jit and other transformations, got a call"
            " inside, where it is one constant for all calls of what is compiled. Draw"
            " the key before, and give it as an argument."
        )
    words = [secrets.randbits(32) for _ in range(2)]
    return jax.random.wrap_key_data(jnp.array(words, jnp.uint32), impl="threefry2x32")


def the_same_everywhere(key: jax.Array) -> jax.Array:
    """The key of the first process, on no device in particular.

    Processes of one run with keys of their own would each draw other batches and other
    noise, and an example be in the sum of several.
    """
    words = multihost_utils.broadcast_one_to_all(np.asarray(jax.random.key_data(key)))
    impl = jax.random.key_impl(key)
    return jax.random.wrap_key_data(jnp.asarray(np.asarray(words)), impl=impl)


def of_domain(key: jax.Array, name: str) -> jax.Array:
    """A key for one purpose: what else is drawn with the caller's repeats none of it.

    Initial parameters, say, or the noise where this is the key of the rounding.
    """
    return jax.random.fold_in(key, zlib.crc32(f"dpadambc.{name}".encode()))


def name_of(key: jax.Array) -> str:
    """What tells a key from others, *secret* as it is."""
    words = np.asarray(jax.random.key_data(key)).tobytes()
    name = f"{jax.random.key_impl(key)} ".encode()
    return hashlib.sha256(name + words).hexdigest()[:16]


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


# What keys of these kinds draw under `jax.vmap` is drawn from the first of them.
_OF_THE_FIRST = ("rbg", "unsafe_rbg")


@jax.custom_batching.custom_vmap
def _of_one_run(key: jax.Array, leaves: Sequence[jax.Array]) -> jax.Array:
    del leaves
    return key


@_of_one_run.def_vmap
def _(axis_size, are_batched, key, leaves):
    is_key_batched, are_leaves_batched = are_batched
    if (kind := str(jax.random.key_impl(key))) in _OF_THE_FIRST:
        raise ValueError(
            f"Expected keys of JAX's default kind under jax.vmap, got kind {kind!r}:"
            f" JAX draws one noise for all {axis_size} runs from the first of them."
            ' Make keys by jax.random.key(seed, impl="threefry2x32").'
        )
    if any(are_leaves_batched) and not is_key_batched:
        raise ValueError(
            f"Expected a key for each of {axis_size} runs side by side (jax.vmap), got"
            " one for all, with which equal sums of two runs have equal noise. Map over"
            " keys too: jax.vmap(train)(jax.random.split(key, n), learning_rates)."
        )
    return _of_one_run(key, leaves), is_key_batched


def of_one_run(key: jax.Array, tree: Any) -> jax.Array:
    """The key, which is refused where `jax.vmap` gives runs noise of one key.

    That is where it maps over the tree and not over the key, and for keys of a kind
    that draws from the first alone.
    """
    leaves = jax.tree.leaves(jax.lax.stop_gradient(tree))
    # `jax_debug_key_reuse` takes a key for used where it does not know the function.
    return jax.random.clone(_of_one_run(jax.random.clone(key), leaves))


def per_leaf(key: jax.Array, tree: Any) -> Any:
    """The tree with a key in place of each leaf."""
    structure = jax.tree.structure(tree)
    return structure.unflatten(of_leaves(key, tree)) if structure.num_leaves else tree

"""A key for each example of a batch, from the key of the batch and its numbers alone.

Were it from the place in the batch, one example more would give those behind it other
keys, and all of their gradients would change: to who knows the key of the batch, as one
may of dropout, the sensitivity would be no clip norm.
"""

from typing import Any

import jax

from dpadambc.core import checksums

_DEFAULT = "threefry2x32"
_OF_SEVERAL = {"rbg", "unsafe_rbg"}


def key_of(key: jax.Array, example: Any) -> jax.Array:
    """The key of an example; examples of equal bits have equal keys.

    What keys of kind "rbg" draw depends on what else `jax.vmap` maps over: an example
    is given one of JAX's default kind then.
    """
    if str(jax.random.key_impl(key)) in _OF_SEVERAL:
        of_words = checksums.of_tree(jax.random.key_data(key))
        key = jax.random.wrap_key_data(of_words, impl=_DEFAULT)
    first, second = checksums.of_tree(example)
    return jax.random.fold_in(jax.random.fold_in(key, first), second)

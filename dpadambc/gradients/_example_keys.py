"""A key for each example of a batch, from the key of the batch and its numbers alone.

Were it from the place in the batch, one example more would give those behind it other
keys, and all of their gradients would change: to who knows the key of the batch, as one
may of dropout, the sensitivity would be no clip norm.
"""

from typing import Any

import jax
import jax.numpy as jnp

_DEFAULT = "threefry2x32"
_OF_SEVERAL = {"rbg", "unsafe_rbg"}


def key_of(key: jax.Array, example: Any) -> jax.Array:
    """The key of an example; examples of equal bits have equal keys.

    What keys of kind "rbg" draw depends on what else `jax.vmap` maps over: an example
    is given one of JAX's default kind then.
    """
    if str(jax.random.key_impl(key)) in _OF_SEVERAL:
        words = jax.random.key_data(key)
        both = jnp.stack([_hashed((words, jnp.uint32(i))) for i in range(2)])
        key = jax.random.wrap_key_data(both, impl=_DEFAULT)
    return jax.random.fold_in(key, _hashed(example))


def _hashed(example: Any) -> jax.Array:
    """A number for all numbers of an example, uint32."""
    found = jnp.zeros((), jnp.uint32)
    for words in map(_words, jax.tree.leaves(example)):
        places = jax.lax.iota(jnp.uint32, words.size)
        of_words = _mixed(words ^ _mixed(places + jnp.uint32(1)))
        found = _mixed(_mixed(found) + jnp.sum(of_words, dtype=jnp.uint32))
    return found


def _words(x: Any) -> jax.Array:
    """The bits of an array, as uint32 of shape (words,)."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 8:
        x = x.astype(jnp.float32)
    if str(x.dtype) not in ("bool", "int2", "uint2", "int4", "uint4"):
        bits = 8 * x.dtype.itemsize
        x = jax.lax.bitcast_convert_type(x, f"uint{min(bits, 32)}")
    return x.astype(jnp.uint32).ravel()


def _mixed(x: jax.Array) -> jax.Array:
    """A bijection after which each bit depends on all: the finalizer of MurmurHash3."""
    x ^= x >> jnp.uint32(16)
    x *= jnp.uint32(0x85EBCA6B)
    x ^= x >> jnp.uint32(13)
    x *= jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))

"""What keeps gradients of single examples untouched until they are clipped.

A clip bounds what one example can change only if nothing has mixed the examples before
it: `optax.clip_by_global_norm` ahead of it, say, scales all of them by a norm that one
of them can set. So the arrays of per-example gradients are closed: their bits are those
of keys of a kind of their own. Keys go through `jax.jit`, `jax.lax.scan`, shardings or
an index like any array, but JAX has no arithmetic on them, and its errors print their
kind. What picks out arrays by their dtype does not find them either.

A seal goes with them, one entry for each example. It says which example that is, and
varies over the axes of a `jax.shard_map` along which the examples do: where a gradient
was summed over devices, or some parameters' rows were put in another order, it shows.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np

_WORD = np.uint32(0x5EA1ED)


def _refuse(*args: Any) -> Any:
    raise TypeError("What is sealed is no key: nothing can be drawn with it.")


def _kinds(name: str, tag: str) -> dict[int, Any]:
    """The kinds of keys of one and of two words that closed arrays are."""
    return {words: _kind(words, name, tag) for words in (1, 2)}


def _kind(words: int, name: str, tag: str) -> Any:
    return jax.extend.random.define_prng_impl(
        key_shape=(words,),
        seed=_refuse,
        split=_refuse,
        random_bits=_refuse,
        fold_in=_refuse,
        name=f"dpadambc.{name}_{32 * words}",
        tag=tag,
    )


OF_EXAMPLES = _kinds("sealed", "of a per-example gradient: put clip_per_example first")
OF_SUMS = _kinds("clipped_sum", "of a clipped sum: put add_dp_noise first")


def close(x: jax.Array, kinds: dict[int, Any] = OF_EXAMPLES) -> jax.Array:
    """The same bits, in a dtype on which there is no arithmetic; the same shape."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    if x.dtype.itemsize == 8:
        return jax.random.wrap_key_data(
            jax.lax.bitcast_convert_type(x, jnp.uint32), impl=kinds[2]
        )
    return jax.random.wrap_key_data(x.astype(jnp.uint32)[..., None], impl=kinds[1])


def opened(x: jax.Array, dtype: Any) -> jax.Array:
    """What was closed."""
    words, bits = jax.random.key_data(x), 8 * jnp.dtype(dtype).itemsize
    as_integer = f"uint{bits}" if jnp.issubdtype(dtype, jnp.floating) else dtype
    if bits == 64:
        x = jax.lax.bitcast_convert_type(words, as_integer)
    else:
        x = words[..., 0].astype(as_integer)
    return jax.lax.bitcast_convert_type(x, dtype) if x.dtype != dtype else x


def once(fun: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The same function, called once for an array: several gradients may share it."""
    known: dict[int, tuple[jax.Array, jax.Array]] = {}

    @functools.wraps(fun)
    def remembered(x: jax.Array, *args: Any) -> jax.Array:
        if id(x) not in known:
            known[id(x)] = x, fun(x, *args)
        return known[id(x)][1]

    return remembered


def of(batch_size: int) -> jax.Array:
    """A seal of shape (batch,)."""
    rows = jnp.arange(batch_size, dtype=jnp.uint32)
    words = jnp.stack([jnp.full(batch_size, _WORD), rows], axis=-1)
    return jax.random.wrap_key_data(words, impl=OF_EXAMPLES[2])


_DTYPE = jax.eval_shape(lambda: of(0)).dtype


def has_its_kind(seal: Any) -> bool:
    """Whether it is a seal, rather than what something may have made of it."""
    return getattr(seal, "dtype", None) == _DTYPE


def are_whole(seals: list[jax.Array]) -> jax.Array:
    """Whether all have the word of a seal, and the rows of the first; shape ()."""
    words = [jax.random.key_data(seal) for seal in seals]
    same = [jnp.all(w == words[0]) for w in words[1:]]
    return functools.reduce(jnp.logical_and, same, jnp.all(words[0][:, 0] == _WORD))


def num_bytes(x: Any, dtype: Any) -> int:
    """What an array takes in memory while it is open."""
    return math.prod(x.shape) * jnp.dtype(dtype).itemsize

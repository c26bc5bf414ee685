r"""Draw standard normal numbers, each of 128 random bits, in float64.

One bit is the sign. The other 127 are an integer w, and the number is the normal
quantile of :math:`t = (w + 1/2) 2^{-128}`, which lies in (0, 1/2), so it is negative
before the sign. `core.grid` bounds the effect of this finite resolution on epsilon.

Float64 is on inside of these functions (`jax.enable_x64`), whatever the program around
them has: a float32 normal number has one of 2^23 values.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpadambc.core import arrays, keys, threefry

# One draw has at most this many numbers, or as many as the largest array, or an eighth
# of all.
_TOGETHER = 2**22

# Words that do not stay in registers are drawn in parts of this size, which fit in a
# cache.
_PART = 2**14

Fun = Callable[..., jax.Array]
Numbers = tuple[jax.Array, ...]

# Wichura 1988, https://doi.org/10.2307/2347330, AS 241 (PPND16): numerators and
# denominators, constant first, for the center, the tail, and the far tail.
_CENTRAL = (
    (3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3,
     1.3731693765509461125e4, 4.5921953931549871457e4, 6.7265770927008700853e4,
     3.3430575583588128105e4, 2.5090809287301226727e3),
    (1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
     2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4,
     5.2264952788528545610e3),
)  # fmt: skip
_TAIL = (
    (1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0,
     3.64784832476320460504e0, 1.27045825245236838258e0, 2.41780725177450611770e-1,
     2.27238449892691845833e-2, 7.74545014278341407640e-4),
    (1.0, 2.05319162663775882187e0, 1.67638483018380384940e0,
     6.89767334985100004550e-1, 1.48103976427480074590e-1, 1.51986665636164571966e-2,
     5.47593808499534494600e-4, 1.05075007164441684324e-9),
)  # fmt: skip
_FAR = (
    (6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0,
     2.96560571828504891230e-1, 2.65321895265761230930e-2, 1.24266094738807843860e-3,
     2.71155556874348757815e-5, 2.01033439929228813265e-7),
    (1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1,
     1.48753612908506148525e-2, 7.86869131145613259100e-4, 1.84631831751005468180e-5,
     1.42151175831644588870e-7, 2.04426310338993978564e-15),
)  # fmt: skip


def quantile(t: jax.Array) -> jax.Array:
    """Computes the standard normal quantile of t in (0, 1/2], in float64.

    No branch depends on t, so the running time is independent of the noise.
    """

    def ratio(polynomials, x):
        above, below = (
            functools.reduce(lambda value, c: value * x + c, reversed(coefficients))
            for coefficients in polynomials
        )
        return above / below

    from_half = t - 0.5
    central = from_half * ratio(_CENTRAL, 0.180625 - from_half**2)
    depth = jnp.sqrt(-jnp.log(t))
    tail = -jnp.where(depth <= 5, ratio(_TAIL, depth - 1.6), ratio(_FAR, depth - 5))
    return jnp.where(from_half >= -0.425, central, tail)


def of_words(words: Sequence[jax.Array]) -> jax.Array:
    """Makes a normal number of four words, of which the first bit is the sign."""
    # By way of int32, and with a product for the sign: `jnp.where` would not vectorize.
    float64 = lambda word: word.astype(jnp.int32).astype(jnp.float64)
    first, *others = words
    t = 0.5
    for word in reversed(others):
        t = (t + word.astype(jnp.float64)) * 2.0**-32
    t = (t + float64(first >> 1)) * 2.0**-32
    return quantile(t) * (1 - 2 * float64(first & 1))


def _words(key: jax.Array, shape: tuple[int, ...]) -> Sequence[jax.Array]:
    """Draws four words for each coordinate."""
    if _is_written_out(key, shape):
        data, low = jax.random.key_data(key), arrays.positions(shape)
        return *threefry.block(data, 0, low), *threefry.block(data, 1, low)
    return [*jax.random.bits(key, (4, *shape), jnp.uint32)]


def _is_written_out(key: jax.Array, shape: tuple[int, ...]) -> bool:
    """Returns whether words stay in registers: a counter of one word numbers them."""
    return jax.random.key_impl(key) == "threefry2x32" and math.prod(shape) < 2**32


def _called(fun: Fun, numbers: Numbers, key: jax.Array, *args: jax.Array) -> jax.Array:
    """Calls a function with normal numbers, arrays of one shape, and numbers."""
    shape, size = args[0].shape, args[0].size
    is_split = not jax.sharding.get_abstract_mesh().empty
    if is_split or size <= _PART or _is_written_out(key, shape):
        return fun(of_words(_words(key, shape)), *args, *numbers)
    # Words of other generators are stored in memory, so draw a part at a time.
    number = -(-size // _PART)
    fill = lambda x: jnp.pad(jnp.ravel(x), (0, number * _PART - size))
    rows = [fill(x).reshape(number, _PART) for x in args]
    one = lambda xs: _called(fun, numbers, jax.random.fold_in(key, xs[0]), *xs[1:])
    found = jax.lax.map(one, (jnp.arange(number), *rows))
    return found.reshape(-1)[:size].reshape(shape)


def _once(fun: Fun, numbers: Numbers, key: jax.Array, *args: jax.Array) -> jax.Array:
    """Computes a function of normal numbers once: XLA would repeat it in each use.

    XLA does not merge a branch, and cannot know that the condition always holds.
    (`jax.lax.optimization_barrier` is for this, but does not last in JAX 0.10.)
    """
    call = lambda: _called(fun, numbers, key, *args)
    out, word = jax.eval_shape(call), jax.random.key_data(key).ravel()[0]
    # Derived from the key, so that it varies over devices as the other branch does.
    nan = lambda: jnp.broadcast_to(word.astype(out.dtype) * jnp.nan, out.shape)
    return jax.lax.cond(word | 1 != 0, call, nan)


def _alone(fun: Fun, numbers: Numbers, key: jax.Array, *args: jax.Array) -> jax.Array:
    """Calls the function for one array, by parts on devices along Explicit axes."""
    call: Any = functools.partial(_once, fun)
    sharding = jax.typeof(args[0]).sharding
    if axes := sharding.mesh.explicit_axes:
        call = jax.sharding.auto_axes(call, axes=axes, out_sharding=sharding)
    return call(numbers, key, *args)


def _together(
    fun: Fun, numbers: Numbers, key: jax.Array, *args: Sequence[jax.Array]
) -> list[jax.Array]:
    """Calls the function for the elements of several arrays at once."""
    shapes = [x.shape for x in args[0]]
    flat = [jnp.concatenate([*map(jnp.ravel, xs)]) for xs in args]
    found = _once(fun, numbers, key, *flat)
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    parts = jnp.split(found, ends[:-1])
    return [x.reshape(shape) for x, shape in zip(parts, shapes, strict=True)]


def _groups(sizes: Sequence[int]) -> list[list[int]]:
    """Groups arrays; a group needs a second copy of its arrays in memory."""
    most = max(_TOGETHER, sum(sizes) // 8, *sizes)
    groups, total = [], math.inf
    for i, size in enumerate(sizes):
        total += size
        if total > most:
            groups.append([])
            total = size
        groups[-1].append(i)
    return groups


def with_normals(
    fun: Fun, key: jax.Array, tree: Any, *rest: Any, numbers: Numbers = ()
) -> Any:
    """Calls a function, by element, with independent standard normal numbers.

    The paths of the tree are in the key, so that the parts of `optax.multi_transform`,
    which may all have been given one key, have other draws.

    Args:
      fun: a function of float64 normal numbers, of as many elements of each tree, and
        of the `numbers`. Float64 is on. It closes over no array.
      key: a typed key, of this draw alone.
      tree: a tree of arrays.
      *rest: trees of the same structure, with arrays of these shapes.
      numbers: arrays of shape ().

    Returns:
      A tree of the results of the function.
    """
    leaves, structure = jax.tree.flatten(tree)
    args = leaves, *(structure.flatten_up_to(other) for other in rest)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    # On a mesh each array is split along its own axes, so each needs its own draw.
    meshes = [jax.sharding.get_abstract_mesh()]
    meshes += [jax.typeof(x).sharding.mesh for x in leaves]
    is_split = not all(mesh.empty for mesh in meshes)
    sizes = [x.size for x in leaves]
    groups = [[i] for i in range(len(leaves))] if is_split else _groups(sizes)
    found = []
    with jax.enable_x64(True):
        for group in groups:
            own_key = keys.folded_in(key, keys.words_of(f"{group[0]} {paths}"))
            of_group = [[xs[i] for i in group] for xs in args]
            if len(group) == 1:
                only = (x for (x,) in of_group)
                found.append(_alone(fun, numbers, own_key, *only))
            else:
                found += _together(fun, numbers, own_key, *of_group)
    return structure.unflatten(found)

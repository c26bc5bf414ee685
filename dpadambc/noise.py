"""Add the Gaussian noise that makes a clipped sum private."""

import functools
import math
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpadambc import _validate, noise_level, precision

# Folded into the caller's key once, so that its draws here repeat none made with the
# same key elsewhere (initial parameters, say).
_DOMAIN = zlib.crc32(b"dpadambc.add_dp_noise")

# Threefry-2x32, 20 rounds: how far each of eight turns, and a word of the key schedule.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


class AddDPNoiseState(NamedTuple):
    """State of `add_dp_noise`. The key is secret: whoever has it knows later noise."""

    count: jax.Array  # shape=(), dtype=int32
    rng_key: jax.Array  # shape=(), a typed key


def _leaf_key(key: jax.Array, index: int, path: Any) -> jax.Array:
    """A key for one leaf, distinct by position and by path.

    The index tells the leaves of one tree apart for certain. The path does so across
    the parts of `optax.multi_transform`, where each part counts from zero and all may
    have been given the same key.
    """
    name = jax.tree_util.keystr(path).encode()
    return jax.random.fold_in(jax.random.fold_in(key, index), zlib.crc32(name))


def _threefry(
    key: jax.Array, high: jax.Array, low: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Two random words for each counter (high, low), under a key of two words.

    `Salmon et al. 2011 <https://doi.org/10.1145/2063384.2063405>`_
    """
    schedule = key[0], key[1], key[0] ^ key[1] ^ _PARITY
    x0, x1 = high + key[0], low + key[1]
    for group in range(5):
        for bits in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = x0 ^ (x1 << bits | x1 >> 32 - bits)
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + (group + 1)
    return x0, x1


def _positions(shape: tuple[int, ...]) -> jax.Array:
    """The number of each coordinate, as a sum of iotas: any sharding can split it."""
    positions = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        along = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        positions += along * np.uint32(math.prod(shape[axis + 1 :]))
    return positions


def _threefry_normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`jax.random.normal` in float32, number for number, as one pass over memory.

    JAX compiles the rounds of its generator to a loop on a CPU, where each step of
    each round takes its words from memory and puts them back. Written out, they and
    what is made of them stay in registers. (The order is that of the default,
    `jax_threefry_partitionable`.)
    """
    words = _threefry(jax.random.key_data(key), jnp.uint32(0), _positions(shape))
    # 23 random bits behind the point of a number in [1, 2), then moved to (-1, 1).
    bits = (words[0] ^ words[1]) >> 9 | np.float32(1).view(np.uint32)
    uniform = 2 * (jax.lax.bitcast_convert_type(bits, jnp.float32) - 1)
    least = np.nextafter(np.float32(-1), np.float32(0))
    return np.float32(math.sqrt(2)) * jax.lax.erf_inv(uniform + least)


def _threefry_normal_once(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`_threefry_normal`, which XLA would merge into each use, and repeat there.

    It does not merge a branch. The condition always holds, which XLA cannot tell.
    (`jax.lax.optimization_barrier` is for this, but does not last in JAX 0.10.)
    """
    return jax.lax.cond(
        jax.random.key_data(key)[0] | 1 != 0,
        lambda: _threefry_normal(key, shape),
        lambda: jnp.full(shape, jnp.nan, jnp.float32),
    )


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """`jax.random.normal`, faster on a CPU in float32 with keys of the default kind."""
    normal = lambda key: jax.random.normal(key, shape, dtype)
    is_default = dtype == jnp.float32 and jax.random.key_impl(key) == "threefry2x32"
    if not is_default or math.prod(shape) >= 2**32:  # counted in one word
        return normal(key)
    written_out = lambda key: _threefry_normal_once(key, shape)
    return jax.lax.platform_dependent(key, cpu=written_out, default=normal)


def _gaussian_like(key: jax.Array, tree: optax.Updates) -> optax.Updates:
    """Independent standard normal draws in at least float32, shaped like the tree."""
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    draws = [
        _normal(
            _leaf_key(key, index, path),
            jnp.shape(leaf),
            precision.at_least_float32(jnp.result_type(leaf)),
        )
        for index, (path, leaf) in enumerate(paths)
    ]
    return jax.tree.unflatten(structure, draws)


def _check_summed(updates: optax.Updates, params: optax.Params | None) -> None:
    """Raises where a leaf does not have the shape of its parameter."""
    if params is None:
        return
    expected, got = (
        [jnp.shape(x) for x in jax.tree.leaves(t)] for t in (params, updates)
    )
    if expected != got:
        raise ValueError(
            "Expected gradients summed over the batch, with the parameters' shapes"
            f" {expected}, got shapes {got}. Per-example gradients go through"
            " dpadambc.clip_per_example first."
        )


def add_dp_noise(
    noise_stddev: noise_level.NoiseStddev, *, key: jax.Array
) -> optax.GradientTransformation:
    r"""Adds independent Gaussian noise to every coordinate.

    .. math:: \tilde g = \bar g + \mathcal{N}(0, \sigma^2 I)

    with :math:`\sigma` = `noise_stddev`, in the unit of the gradient that comes in:
    after `clip_per_example`, that is noise multiplier times sensitivity, as
    `SubsampledGaussian.noise_stddev` has it.

    Guarantees:
      * Draws are independent over coordinates, leaves, steps and keys. Each step
        splits the key that the state carries and keeps one half, so a state tells
        nothing about the noise of earlier steps; the noise of later steps follows
        from it, so it must stay secret. (`optax.inject_hyperparams` keeps the first
        key in its state unless it is given `static_args=("key",)`.)
      * The noise is a function of the key: `init` called twice, or under `jax.vmap`
        over parameters alone, gives two runs the same noise, which their difference
        then lacks. Give each a key, as in
        `jax.vmap(lambda key, params: make(key).init(params))(keys, params)`.
      * The draws are those of `jax.random.normal`, with whatever kind of key is given.
      * Noise is drawn and added in at least float32, and the result stays there: in
        bfloat16 or float16 the noise would take a few hundred values, or vanish.

      These are pseudo-random float32 numbers, good enough against anyone who sees
      the model, not against an attack on the random generator or on the rounding of
      floating-point sums (`Mironov 2012 <https://doi.org/10.1145/2382196.2382264>`_).

    Args:
      noise_stddev: a non-negative number, a schedule (a callable of the step,
        counted from 0), or a tree prefix of the parameters whose leaves are such. With
        several levels, the sum is as private as its *lowest* level makes it.
      key: a typed JAX key, from `jax.random.key`. Never give one key to two optimizers
        or two runs. Inside `optax.masked`, what is masked out gets no noise.

    Returns:
      An Optax transformation.

    Raises:
      TypeError: if `key` is not a typed key, or a number is not a number.
      ValueError: if a level is negative or not finite, the tree is no prefix of the
        parameters, or gradients still have their batch axis.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> noise = dpadambc.add_dp_noise(0.1, key=jax.random.key(0))
      >>> params = {"w": jnp.zeros(10_000)}
      >>> state = noise.init(params)
      >>> noised, state = noise.update({"w": jnp.ones(10_000)}, state, params)
      >>> print(f"{noised['w'].mean():.2f} +- {noised['w'].std():.2f}")
      1.00 +- 0.10

    References:
      Abadi et al., `Deep Learning with Differential Privacy
      <https://arxiv.org/abs/1607.00133>`_, 2016
    """
    _validate.typed_key(key=key)
    noise_level.check(noise_stddev)

    def init_fn(params):
        noise_level.per_leaf(noise_stddev, params)
        rng_key = jax.random.fold_in(key, _DOMAIN)
        return AddDPNoiseState(count=jnp.zeros([], jnp.int32), rng_key=rng_key)

    def update_fn(updates, state, params=None):
        _check_summed(updates, params)
        rng_key, step_key = jax.random.split(state.rng_key)
        stddev = noise_level.at_step(noise_stddev, state.count)
        noised = jax.tree.map(
            lambda g, s, z: g + s.astype(z.dtype) * z,
            updates,
            noise_level.per_leaf(stddev, updates),
            _gaussian_like(step_key, updates),
        )
        count = jnp.asarray(optax.safe_increment(state.count))
        return noised, AddDPNoiseState(count=count, rng_key=rng_key)

    return optax.GradientTransformation(init_fn, update_fn)

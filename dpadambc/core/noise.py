r"""Add the Gaussian noise that makes a clipped sum private.

The normal numbers of `core.normals` are added on the grid of `core.grid`, so that
epsilon holds for the bits.

The key of the noise of step t is derived from the key in the state, which is new at
each step, and from h: a checksum of all bits of the sum :math:`s_t` that the noise
hides, and of the level. Misuse-resistant encryption calls that a synthetic nonce.

*Right use: each run has a key of its own.* Take the generator under a secret key as a
random function F, so that :math:`z_t = F(t, h(s_t))`. Steps differ in t, so no input
repeats: given the data and all outputs before it, each :math:`z_t` is standard normal
and independent of them. For every data set, the outputs are distributed as with noise
of t alone. Privacy compares these distributions, so h needs no property.

*A key used again.* Two sums that differ have independent noise, but for a collision of
h, whose probability is about :math:`2^{-64}`: such runs compose as two runs. Two equal
sums of one step have equal outputs, which tell that the sums are equal. That can itself
be the secret: releases of D and D are equal with probability 1, and those of D and of D
with one example more with probability 0, so no epsilon covers the pair. A repetition
needs a key of its own. Two levels would show the sum, so the level is in h. Where steps
share noise, so are the coefficients and the step before: runs that share a draw share
all before it.

Limits. A resumed run with other rounding, as on other devices, draws other noise for
the steps that it repeats: both count. A nonce does not repair a key that others know.
Keys of kind "rbg" and "unsafe_rbg" are refused under `jax.vmap`, where JAX draws from
the first of them alone. Devices with replicas agree on h if `jax.typeof` has their
mesh. It has none where only `in_shardings` of `jax.jit` names the mesh.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpadambc.core import arrays, grid, keys, normals, validate
from dpadambc.core.clipped_sum import open_sums

# A number, an optax.Schedule, a tree prefix with such leaves, or a mechanism.
NoiseStddev = Any


def stddev_of(noise_stddev: NoiseStddev) -> Any:
    """Returns the level, of a mechanism too; raises for an invalid number."""
    noise_stddev = getattr(noise_stddev, "noise_stddev", noise_stddev)
    for level in jax.tree.leaves(noise_stddev, is_leaf=lambda x: x is None):
        if not callable(level):
            validate.non_negative(noise_stddev=level)
    return noise_stddev


def stddev_at_step(noise_stddev: NoiseStddev, count: jax.typing.ArrayLike) -> Any:
    """Evaluates the levels at step `count`, in the same tree prefix."""

    def number(level):
        if callable(level):
            level = level(count)
            validate.full_precision(noise_stddev=level)
        return jnp.asarray(level, float)

    return jax.tree.map(number, noise_stddev)


def stddev_per_leaf(prefix: Any, tree: optax.Params) -> Any:
    """Broadcasts the prefix to one value for each leaf of the tree."""
    if not jax.tree.leaves(tree):
        return tree
    try:
        return jax.tree.broadcast(prefix, tree)
    except ValueError as error:
        raise ValueError(f"Expected noise_stddev as a tree prefix, {error}.") from error


class AddDPNoiseState(NamedTuple):
    """The state of `add_dp_noise`. The key is secret: it determines all later noise.

    No field is called `count`: `optax.tree.set(state, count=0)`, which restarts a
    schedule, sets every field of that name. It would repeat the noise of earlier steps.

    Attributes:
      noised_steps: the number of steps with noise. shape=(), int32.
      key_data: the words of the key, from `jax.random.key_data`, which any way to save
        arrays accepts. *Secret*. uint32. Zeros, as `optax.tree.zeros_like` makes them,
        are a key that everybody knows: the noise is NaN then.
    """

    noised_steps: jax.Array
    key_data: jax.Array

    def __repr__(self) -> str:
        """Hides the key: a notebook that is shared must not show it."""
        return (
            f"AddDPNoiseState(noised_steps={self.noised_steps}, key_data=...: secret)"
        )


def first_state(key: jax.Array, name: str, params: optax.Params) -> AddDPNoiseState:
    """Returns the state before the first step, with a key of the domain `name`."""
    own_key = keys.of_one_run(keys.of_domain(key, name), params)
    return AddDPNoiseState(jnp.zeros([], jnp.int32), jax.random.key_data(own_key))


def key_of_state(
    state: AddDPNoiseState, key: jax.Array, updates: optax.Updates
) -> jax.Array:
    """Returns the key in a state, of the kind of the key that the run began with.

    Raises:
      ValueError: if the devices or runs of the updates would share its noise.
    """
    check_devices(updates, state.key_data)
    kind = jax.random.key_impl(key)
    state_key = jax.random.wrap_key_data(state.key_data, impl=kind)
    return keys.of_one_run(state_key, updates)


def next_state(state: AddDPNoiseState, key: jax.Array) -> AddDPNoiseState:
    """Returns the state after a step, with the key of the next step."""
    noised_steps = jnp.asarray(optax.safe_increment(state.noised_steps))
    return AddDPNoiseState(noised_steps, jax.random.key_data(key))


def stddev_of_step(noise_stddev: NoiseStddev, state: AddDPNoiseState) -> Any:
    """Returns the level of a step, or NaN where the state has lost its key."""
    is_lost = jnp.all(state.key_data == 0)
    stddev = stddev_at_step(noise_stddev, state.noised_steps)
    return jax.tree.map(lambda s: jnp.where(is_lost, jnp.nan, s), stddev)


def key_of_step(key: jax.Array, updates: optax.Updates, *also: Any) -> jax.Array:
    """Derives a key for the noise that hides these updates, and for no other.

    Args:
      key: the key of the step.
      updates: the sums that get the noise.
      *also: the level; with shared noise, also the coefficients and the last step.
    """
    return keys.folded_in(key, keys.checksum((updates, also)))


@functools.partial(jax.jit, inline=True)
def noised(key: jax.Array, sums: optax.Updates, stddev: Any) -> optax.Updates:
    """Adds independent normal numbers to sums, on the grid of their level.

    Args:
      key: the key of this noise alone.
      sums: a tree of arrays.
      stddev: the level of the noise, a number or a tree prefix of numbers.
    """
    add = lambda z, s, level: grid.add_on_grid(level.astype(z.dtype) * z, s, level)
    levels, prefix = jax.tree.flatten(stddev)
    parts = [
        normals.with_normals(add, jax.random.fold_in(key, i), part, numbers=(level,))
        for i, (level, part) in enumerate(
            zip(levels, prefix.flatten_up_to(sums), strict=True)
        )
    ]
    return prefix.unflatten(parts)


def check_devices(updates: optax.Updates, key: jax.Array) -> None:
    """Raises unless the devices have one noise value for each coordinate.

    Equal noise on two parts of a gradient cancels in their difference, and different
    noise on two copies averages out.
    """
    if not arrays.shard_map_axes():
        return
    if not all(map(arrays.is_vma_known, [key, *jax.tree.leaves(updates)])):
        raise ValueError("Expected a jax.shard_map with check_vma=True, got False.")
    of_key = set(arrays.varying_axes(key))
    for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
        of_gradient = set(arrays.varying_axes(leaf))
        if of_gradient != of_key:
            raise ValueError(
                f"Expected a key that differs along {sorted(of_gradient)}, as"
                f" gradient{jax.tree_util.keystr(path)}, got {sorted(of_key)}. Call"
                " sum_over; for parts of params fold jax.lax.axis_index into the key."
            )


def add_dp_noise(
    noise_stddev: NoiseStddev, *, key: jax.Array
) -> optax.GradientTransformation:
    r"""Adds independent Gaussian noise to every coordinate.

    .. math:: \tilde g = \bar g + \mathcal{N}(0, \sigma^2 I)

    with :math:`\sigma` = `noise_stddev`, in the unit of the incoming gradient. After
    `clip_per_example` that is the noise multiplier times the sensitivity, such as
    `PoissonGaussian.noise_stddev`.

    Guarantees:
      * Draws are independent over coordinates, leaves, steps, keys and sums: a checksum
        of the sum is in the key of its noise. A state tells nothing about earlier
        noise; later noise follows from it. (`optax.inject_hyperparams` keeps the first
        key in its state unless it is given `static_args=("key",)`.)
      * Inside `jax.shard_map` one coordinate has one draw, whatever device has it.
        Anything else is refused, as are `check_vma=False` and a `jax.vmap` that maps
        over parameters or gradients and not over keys.
      * Epsilon holds for the bits: each number has 128 random ones, and the result lies
        on a grid, a power of two between :math:`\sigma/512` and :math:`\sigma/256`,
        which is as public as the level. With a level of 0 it is the sum.
      * Noise is drawn and added in float64, and the result has at least float32.

    Limits. A key of JAX's default kind has 64 bits, and its generator is not a cipher:
    see `training.secret_key` and the guide to precision.

    Args:
      noise_stddev: a mechanism, which gives the level, and whose numbers the sum must
        have, with a padding mask if its batches are padded; or a non-negative number, a
        schedule (a callable of the step, counted from 0), or a tree prefix of the
        parameters with such leaves. With several levels, the sum is as private as its
        *lowest* level makes it.
      key: a typed JAX key, from `jax.random.key`, secret.

    Returns:
      An Optax transformation. Its updates take `ClippedSum` in, all that were clipped
      together, and return arrays.

    Raises:
      TypeError: if `key` is not a typed key, a number is not a number, or a gradient is
        no clipped sum.
      ValueError: if a level is negative or not finite, the tree is no prefix of the
        parameters, some of the sums are missing, have other or traced numbers where a
        mechanism is given, or saw no mask where it pads batches, or the devices of a
        `jax.shard_map`, or runs under `jax.vmap`, would have the same noise for
        different coordinates.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import dpadambc
      >>> noise = dpadambc.add_dp_noise(0.1, key=jax.random.key(0))
      >>> params = {"w": jnp.zeros(10_000)}
      >>> state = noise.init(params)
      >>> summed = dpadambc.as_clipped_sum(
      ...     {"w": jnp.ones(10_000)}, l2_clip_norm=100.0, normalize_by=1)
      >>> noised, state = noise.update(summed, state, params)
      >>> print(f"{noised['w'].mean():.2f} +- {noised['w'].std():.2f}")
      1.00 +- 0.10

    References:
      Abadi et al., `Deep Learning with Differential Privacy
      <https://arxiv.org/abs/1607.00133>`_, 2016
    """
    validate.typed_key(key=key)
    if not getattr(noise_stddev, "has_independent_noise", True):
        raise TypeError(
            f"Expected noise_stddev of independent noise, got {noise_stddev!r}. Take"
            " mechanism.add_noise(key=key)."
        )
    mechanism = noise_stddev if hasattr(noise_stddev, "noise_stddev") else None
    noise_stddev = stddev_of(noise_stddev)

    def init_fn(params):
        stddev_per_leaf(noise_stddev, params)
        return first_state(key, "add_dp_noise", params)

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        updates = open_sums(updates, params, mechanism)
        run_key = key_of_state(state, key, updates)
        next_key, step_key = jax.random.split(run_key)
        stddev = stddev_of_step(noise_stddev, state)
        own_key = key_of_step(step_key, updates, stddev)
        return noised(own_key, updates, stddev), next_state(state, next_key)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)

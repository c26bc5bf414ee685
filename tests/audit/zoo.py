"""Pipelines that are broken, each by a defect of a real library or a plausible script,
and pipelines that are sound.

A broken one says which check must find it. All train one small linear model, so that
they differ in the defect alone.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import equinox
import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, PartitionSpec

import dpadambc
from dpadambc import audit, training
from dpadambc.contrib.scaling import scale_examples

NUM_EXAMPLES, NUM_FEATURES, BATCH = 2_000, 400, 100
MECHANISM = dpadambc.PoissonGaussian(
    l2_clip_norm=1.0,
    noise_multiplier=1.0,
    sampling_prob=BATCH / NUM_EXAMPLES,
    iterations=200,
    normalize_by=BATCH,
)
C, B = MECHANISM.l2_clip_norm, MECHANISM.normalize_by
NOISE: Any = MECHANISM.noise_stddev
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(NUM_EXAMPLES, NUM_FEATURES)), jnp.float32)
DATA = X, jnp.sign(X[:, 0])
ADAM = optax.adam(1e-3)
PARAMS = {"w": jnp.zeros(NUM_FEATURES), "b": jnp.zeros(())}

Loader = Callable[[int], Iterable[Any]]


@dataclasses.dataclass(frozen=True)
class Broken:
    """A pipeline, and the check that must find its defect."""

    check: str
    make: Callable[[], audit.Pipeline]


BROKEN: dict[str, Broken] = {}
SOUND: dict[str, Callable[[], audit.Pipeline]] = {}


def broken(check: str):
    """Enters a pipeline into the zoo, by the first line of its documentation."""

    def enter(make):
        BROKEN[make.__name__] = Broken(check, make)
        return make

    return enter


def sound(make):
    SOUND[make.__name__] = make
    return make


def loss_fn(params, x, y):
    return (params["w"] @ x + params["b"] - y) ** 2


def gradients(params, x, y):
    """One for each example, as plain JAX makes them."""
    return jax.vmap(jax.grad(loss_fn), (None, 0, 0))(params, x, y)


def all_devices():
    """A mesh of all devices; some defects show only where there are several."""
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def rows(weights, leaf):
    return weights.reshape(-1, *[1] * (leaf.ndim - 1)) * leaf


def norms_of(grads):
    return jnp.sqrt(
        sum(jnp.sum(g**2, axis=range(1, g.ndim)) for g in jax.tree.leaves(grads))
    )


def clipped_sum(grads, mask, bound=C, norms=None):
    norms = norms_of(grads) if norms is None else norms
    weights = jnp.where(jnp.isfinite(norms), jnp.minimum(1, bound / norms), 0) * ~mask
    finite = jax.tree.map(lambda g: jnp.where(jnp.isfinite(g), g, 0), grads)
    return jax.tree.map(lambda g: rows(weights, g).sum(0), finite)


def clipped(params, x, y, mask):
    """Right: the others differ from it."""
    total = clipped_sum(gradients(params, x, y), mask)
    return jax.tree.map(lambda g: g / B, total)


def stage(init: Any, update_fn: Any) -> optax.GradientTransformation:
    """A transformation of functions without types."""
    return optax.GradientTransformation(init, update_fn)


def noise_like(key, tree, stddev=NOISE):
    """Of two normal numbers each, in float64: few bits are a defect of its own.

    The second fills the bits that the first has not.
    """
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(key, len(leaves))
    pairs = [
        jax.random.normal(k, (2, *x.shape)) for k, x in zip(keys, leaves, strict=True)
    ]
    with jax.enable_x64(True):
        wide = [z.astype(jnp.float64) for z in pairs]
        draws = [stddev * (high + 2.0**-22 * low) for high, low in wide]
    return jax.tree.unflatten(structure, draws)


def in_float64(fun, like, *trees):
    """A function of each element, rounded to the dtype of the first."""
    with jax.enable_x64(True):
        return jax.tree.map(lambda x, *xs: fun(x, *xs).astype(x.dtype), like, *trees)


def add(one, two):
    return in_float64(jnp.add, one, two)


def of_sum(gradient=clipped, make_optimizer=None, *, loader=None, **changes):
    """A step written by hand: a clipped gradient, then a chain with the noise."""
    make = make_optimizer or with_noise

    def init(key):
        return key, PARAMS, make(key).init(PARAMS)

    def step(state, x, y, is_padding_example=None):
        key, params, opt_state = state
        mask = is_padding_example
        mask = jnp.zeros(len(x), bool) if mask is None else mask
        grads = gradient(params, x, y, mask)
        updates, opt_state = make(key).update(grads, opt_state, params)
        return key, optax.apply_updates(params, updates), opt_state

    own: dict[str, Any] = dict(
        mechanism=MECHANISM,
        init=init,
        step=step,
        batch=tuple(x[:8] for x in DATA),
        per_example=gradients,
        params=PARAMS,
        make_optimizer=make,
        loader=loader or poisson,
        num_examples=NUM_EXAMPLES,
    )
    return audit.Pipeline(**own | changes)


def of_noise(update):
    """The chain with another way to add noise: `update(gradient, key) -> gradient`."""

    def make(key):
        def update_fn(updates, state, params=None):
            state, step_key = jax.random.split(state)
            return update(updates, step_key), state

        own = optax.GradientTransformation(lambda params: key, update_fn)
        return optax.chain(own, optax.adam(1e-3))

    return of_sum(make_optimizer=make)


def vouched(l2_clip_norm=C, normalize_by=B):
    """Vouches for a clipped sum, as a careless person does."""

    def update_fn(updates, state, params=None):
        own = dict(l2_clip_norm=l2_clip_norm, normalize_by=normalize_by)
        return dpadambc.as_clipped_sum(dpadambc.materialize(updates), **own), state

    return stage(lambda params: optax.EmptyState(), update_fn)


def noise(key, stddev=NOISE):
    return optax.chain(vouched(), dpadambc.add_dp_noise(stddev, key=key))


def with_noise(key, optimizer=ADAM, stddev=NOISE):
    return optax.chain(noise(key, stddev), optimizer)


def poisson(seed):
    return MECHANISM.batches(jax.random.key(seed), num_examples=NUM_EXAMPLES)


def of_chain(*stages, mechanism: Any = MECHANISM, loss=loss_fn, **options):
    """A chain of gradients per example: each stage made of a key."""

    def loader(seed):
        return mechanism.batches(jax.random.key(seed), num_examples=NUM_EXAMPLES)

    return audit.Pipeline.of_chain(
        loss,
        PARAMS,
        DATA,
        mechanism,
        lambda key: optax.chain(*(stage(key) for stage in stages)),
        **{"loader": loader} | options,
    )


# Broken: the clip.


@broken("sensitivity")
def clip_of_the_mean():
    """Gradients are averaged, and the mean is clipped."""

    def gradient(params, x, y, mask):
        grads = gradients(params, x, y)
        mean = jax.tree.map(lambda g: rows(~mask, g).mean(0), grads)
        norm = optax.tree.norm(mean)
        return jax.tree.map(lambda g: g * jnp.minimum(1, C / norm), mean)

    return of_sum(gradient)


@broken("sensitivity")
def no_clip():
    """The mean of the gradients, as it is."""
    return of_sum(
        lambda p, x, y, mask: jax.tree.map(
            lambda g: rows(~mask, g).sum(0) / B, gradients(p, x, y)
        )
    )


@broken("sensitivity")
def clip_per_layer():
    """Each parameter is clipped to C, with noise for C in all."""

    def gradient(params, x, y, mask):
        parts = gradients(params, x, y)
        return {k: clipped_sum({k: g}, mask)[k] / B for k, g in parts.items()}

    return of_sum(gradient)


@broken("sensitivity")
def norm_of_kernels_only():
    """The bias is left out of the norm."""

    def gradient(params, x, y, mask):
        grads = gradients(params, x, y)
        norms = norms_of({"w": grads["w"]})
        return jax.tree.map(lambda g: g / B, clipped_sum(grads, mask, norms=norms))

    return of_sum(gradient)


@broken("sensitivity")
def clip_of_microbatches():
    """Gradients of four examples are summed before they are clipped."""

    def gradient(params, x, y, mask):
        grads = jax.tree.map(lambda g: rows(~mask, g), gradients(params, x, y))
        if len(x) % 4:
            raise ValueError("Expected a multiple of 4 examples.")
        four = jax.tree.map(lambda g: g.reshape(-1, 4, *g.shape[1:]).sum(1), grads)
        nobody = jnp.zeros(len(x) // 4, bool)
        return jax.tree.map(lambda g: g / B, clipped_sum(four, nobody))

    return of_sum(gradient)


@broken("sensitivity")
def sum_over_devices_before_the_clip():
    """In `shard_map`, gradients are summed over devices, then clipped."""

    def gradient(params, x, y, mask):
        axis = all_devices()
        each, all_ = PartitionSpec("data"), PartitionSpec()

        @functools.partial(
            jax.shard_map, mesh=axis, in_specs=(all_, each, each, each), out_specs=all_
        )
        def of_devices(params, x, y, mask):
            grads = jax.tree.map(
                lambda g: jax.lax.psum(rows(~mask, g), "data"),
                gradients(jax.lax.pcast(params, "data", to="varying"), x, y),
            )
            return clipped_sum(grads, jnp.zeros(len(x), bool))

        return jax.tree.map(lambda g: g / B, of_devices(params, x, y, mask))

    return of_sum(gradient)


@broken("sensitivity")
def batch_size_of_the_batch():
    """The sum is divided by the number of examples that were drawn."""

    def gradient(params, x, y, mask):
        total = clipped_sum(gradients(params, x, y), mask)
        return jax.tree.map(lambda g: g / jnp.maximum(1, jnp.sum(~mask)), total)

    return of_sum(gradient)


@broken("sensitivity")
def normalizer_255_for_256():
    """What Opacus makes of 410 batches of 256, with the noise for 256."""

    def gradient(params, x, y, mask):
        total = clipped_sum(gradients(params, x, y), mask)
        return jax.tree.map(lambda g: g / 255, total)

    return of_sum(gradient, lambda key: with_noise(key, stddev=C / 256))


@broken("sensitivity")
def padding_counts():
    """The mask is not given to the clip."""
    return of_sum(lambda p, x, y, mask: clipped(p, x, y, jnp.zeros_like(mask)))


@broken("sensitivity")
def nan_passes():
    """The clip of one broken example is NaN, and so is the sum."""

    def gradient(params, x, y, mask):
        grads = gradients(params, x, y)
        weights = jnp.minimum(1, C / norms_of(grads)) * ~mask
        return jax.tree.map(lambda g: rows(weights, g).sum(0) / B, grads)

    return of_sum(gradient)


@broken("sensitivity")
def add_or_remove_noise_for_replacement():
    """Noise for C / B, where two examples differ."""
    relation = dpadambc.NeighboringRelation.REPLACE_ONE
    claimed = dataclasses.replace(MECHANISM, neighboring_relation=relation)
    return of_sum(mechanism=claimed)


@broken("sensitivity")
def two_gradients_one_noise():
    """DiSK: two clipped gradients are combined, with the noise of one."""

    def gradient(params, x, y, mask):
        ahead = jax.tree.map(lambda p: p + 0.1, params)
        here, there = clipped(params, x, y, mask), clipped(ahead, x, y, mask)
        return jax.tree.map(lambda g, h: 1.5 * g + 0.5 * h, here, there)

    return of_sum(gradient)


@broken("sensitivity")
def batch_normalization():
    """Examples are normalized by the batch, and their gradients clipped one by one."""

    def gradient(params, x, y, mask):
        return clipped(params, normalized(x), y, mask)

    return of_sum(gradient)


@broken("sensitivity")
def division_between_clip_and_noise():
    """RMSProp divides the clipped sum, and the noise is that of the clip norm."""

    def make(key):
        own = noise(key)

        def init_fn(params):
            return jax.tree.map(jnp.zeros_like, params), own.init(params)

        def update_fn(updates, state, params=None):
            v, inner = state
            divided = jax.tree.map(lambda g, v: g / (jnp.sqrt(v) + 1e-3), updates, v)
            private, inner = own.update(divided, inner, params)
            v = jax.tree.map(lambda v, g: 0.9 * v + 0.1 * g**2, v, private)
            return private, (v, inner)

        return stage(init_fn, update_fn)

    return of_sum(make_optimizer=make)


def normalized(x):
    return (x - x.mean(0, keepdims=True)) / (1e-3 + x.std(0, keepdims=True))


@broken("isolation")
def batch_normalization_of_losses():
    """The same, found in the losses."""
    per_example = lambda p, x, y: gradients(p, normalized(x), y)
    return of_sum(per_example=per_example)


@broken("isolation")
def loss_over_pairs():
    """A contrast with all other examples of the batch."""

    def losses(params, x, y):
        scores = x @ params["w"] + params["b"] + x.sum(1)
        return jax.nn.logsumexp(scores) - scores

    return of_sum(per_example=losses)


@broken("isolation")
def synchronized_statistics():
    """A mean over devices inside the loss."""

    def losses(params, x, y):
        loss = lambda x, y: loss_fn(params, x - jax.lax.pmean(x, "batch"), y)
        return jax.vmap(loss, axis_name="batch")(x, y)

    return of_sum(per_example=losses)


@broken("sensitivity")
def no_clip_of_tokens():
    """No example is large with these parameters, and none can be made large."""
    tokens = jnp.asarray(RNG.integers(0, 50, (NUM_EXAMPLES, 12)), jnp.int32)
    params = {"table": 0.02 * jnp.ones((50, 40)), "head": 0.02 * jnp.ones(40)}

    def loss(params, ids):
        return jnp.square(jnp.mean(params["table"][ids], 0) @ params["head"] - 1.0)

    def init(key):
        return key, params

    def step(state, ids, is_padding_example=None):
        key, params = state
        mask = is_padding_example
        present = jnp.ones(len(ids), bool) if mask is None else ~mask
        key, step_key = jax.random.split(key)
        grads = jax.vmap(jax.grad(loss), (None, 0))(params, ids)
        total = jax.tree.map(lambda g: rows(present, g).sum(0) / B, grads)
        private = add(total, noise_like(step_key, total))
        return key, jax.tree.map(lambda p, g: p - 0.1 * g, params, private)

    return of_sum(
        init=init,
        step=step,
        batch=(tokens[:8],),
        per_example=jax.vmap(loss, (None, 0)),
        params=params,
        make_optimizer=None,
    )


@broken("sensitivity")
def rows_of_the_data_in_the_loss():
    """Each example is drawn to those that are like it, which the loss closes over."""

    def loss(params, x, y):
        near = jax.nn.softmax(X @ x / NUM_FEATURES)
        return loss_fn(params, x + near @ X, y)

    return of_fit(loss=loss)


# Broken: the noise.


@broken("noise")
def noise_before_the_clip():
    """Each example's gradient gets noise, and is clipped after that."""

    def step(state, x, y, is_padding_example=None):
        key, params = state
        mask = is_padding_example
        mask = jnp.zeros(len(x), bool) if mask is None else mask
        key, step_key = jax.random.split(key)
        grads = gradients(params, x, y)
        total = clipped_sum(add(grads, noise_like(step_key, grads)), mask)
        return key, jax.tree.map(lambda p, g: p - g / B, params, total)

    return of_sum(init=lambda key: (key, PARAMS), step=step, make_optimizer=None)


@broken("noise")
def noise_of_a_mean_on_a_sum():
    """The sum is not divided, but the noise is."""
    scaled = lambda key: optax.chain(optax.scale(B), with_noise(key))
    return of_sum(make_optimizer=scaled)


@broken("noise")
def half_the_noise():
    """The level is a variance to the one, a standard deviation to the other."""
    return of_sum(make_optimizer=lambda key: with_noise(key, stddev=NOISE / 2))


@broken("noise")
def same_key_in_every_step():
    """The key is not split."""
    return of_noise_state(lambda g, key: add(g, noise_like(key, g)))


@broken("noise")
def init_in_every_step():
    """The state is made anew, so that the noise of each step is the same."""

    def make(key):
        def update_fn(g, state, params=None):
            return add(g, noise_like(jax.random.split(key)[0], g)), state

        return optax.chain(stage(lambda params: optax.EmptyState(), update_fn), ADAM)

    def step(state, x, y, is_padding_example=None):
        key, params = state
        mask = is_padding_example
        mask = jnp.zeros(len(x), bool) if mask is None else mask
        optimizer = make(key)
        grads = clipped(params, x, y, mask)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return key, optax.apply_updates(params, updates)

    return of_sum(init=lambda key: (key, PARAMS), step=step, make_optimizer=None)


@broken("noise")
def correction_for_the_noise():
    """`adam_bc` is taken for the stage that adds the noise."""
    return of_sum(make_optimizer=lambda key: dpadambc.adam_bc(1e-3, NOISE))


def of_noise_state(update):
    def make(key):
        update_fn: Any = lambda g, state, params=None: (update(g, state), state)
        own = optax.GradientTransformation(lambda params: key, update_fn)
        return optax.chain(own, ADAM)

    return of_sum(make_optimizer=make)


@broken("noise")
def same_key_for_all_parameters():
    """All leaves draw from one key."""
    return of_noise(
        lambda g, key: jax.tree.map(lambda x: add(x, noise_like(key, x)), g)
    )


@broken("noise")
def one_draw_for_all_coordinates():
    """The shape of the noise is forgotten."""
    return of_noise(
        lambda g, key: jax.tree.map(
            lambda x: add(x, noise_like(jax.random.fold_in(key, x.size), np.zeros(()))),
            g,
        )
    )


@broken("noise")
def constant_key():
    """The key is made from a number in the script: the same noise in every run."""
    return of_sum(make_optimizer=lambda key: with_noise(jax.random.key(0)))


@broken("noise")
def normal_numbers_of_jax():
    """In float32, with 23 random bits."""
    return of_noise(
        lambda g, key: {
            name: x + NOISE * jax.random.normal(jax.random.fold_in(key, i), x.shape)
            for i, (name, x) in enumerate(g.items())
        }
    )


@broken("noise")
def aggregate_of_optax():
    """Its clip and its noise, which has as few bits."""

    def gradient(params, x, y, mask):
        return jax.tree.map(lambda g: rows(~mask, g), gradients(params, x, y))

    def make(key):
        own = optax.contrib.differentially_private_aggregate(C, 1.0, key)
        return optax.chain(own, ADAM)

    return of_sum(gradient, make)


@broken("noise")
def noise_in_bfloat16():
    """Noise is drawn in the dtype of the parameters."""

    def update(g, key):
        low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), noise_like(key, g))
        return jax.tree.map(lambda x, z: x + z.astype(x.dtype), g, low)

    return of_noise(update)


@broken("noise")
def sum_in_bfloat16():
    """Noise is added in the dtype of the parameters."""

    def update(g, key):
        low = lambda x: x.astype(jnp.bfloat16)
        total = add(jax.tree.map(low, g), jax.tree.map(low, noise_like(key, g)))
        return jax.tree.map(lambda x: x.astype(jnp.float32), total)

    return of_noise(update)


@broken("noise")
def uniform_noise():
    """Of the right variance, but not Gaussian."""

    def update(g, key):
        keys = dict(zip(g, jax.random.split(key, len(g)), strict=True))
        half = NOISE * np.sqrt(3)
        return {
            k: x + jax.random.uniform(keys[k], x.shape, minval=-half, maxval=half)
            for k, x in g.items()
        }

    return of_noise(update)


@broken("noise")
def truncated_noise():
    """Cut at two standard deviations."""

    def update(g, key):
        cut = lambda z: jnp.clip(z, -2 * NOISE, 2 * NOISE)
        return in_float64(lambda g, z: g + cut(z), g, noise_like(key, g))

    return of_noise(update)


@broken("noise")
def mean_over_devices_of_noised_gradients():
    """Each device adds noise of its own to the sum of all, and they are averaged."""

    def update(g, key):
        mesh = all_devices()
        spec = PartitionSpec()

        @functools.partial(
            jax.shard_map, mesh=mesh, in_specs=(spec, spec), out_specs=spec
        )
        def of_device(g, key):
            own = jax.random.fold_in(key, jax.lax.axis_index("data"))
            return jax.lax.pmean(add(g, noise_like(own, g)), "data")

        return of_device(g, key)

    return of_noise(update)


@broken("noise")
def noise_of_an_epoch_again():
    """The key follows the step within an epoch."""

    def make(key):
        def update_fn(g, step, params=None):
            own = jax.random.fold_in(key, step % 20)
            return add(g, noise_like(own, g)), step + 1

        start = lambda params: jnp.zeros((), jnp.int32)
        return optax.chain(stage(start, update_fn), ADAM)

    return of_sum(make_optimizer=make)


@broken("noise")
def noise_that_fades():
    """A schedule of the noise that the mechanism knows nothing of."""
    schedule: Any = optax.piecewise_constant_schedule(NOISE, {30: 0.1})
    return of_sum(make_optimizer=lambda key: with_noise(key, stddev=schedule))


@broken("noise")
def noise_that_telescopes():
    """Each step takes the noise of the last one out again."""

    def make(key):
        def update_fn(g, state, params=None):
            key, before = state
            key, step_key = jax.random.split(key)
            now = noise_like(step_key, g)
            return in_float64(lambda x, z, y: x + z - y, g, now, before), (key, now)

        start = lambda params: (key, noise_like(key, params, 0.0))
        return optax.chain(stage(start, update_fn), ADAM)

    return of_sum(make_optimizer=make)


@broken("noise")
def one_coordinate_with_hardly_any_noise():
    """A scale for each coordinate, one of them wrong."""
    scale = jnp.ones(NUM_FEATURES).at[7].set(1e-3)

    def update(g, key):
        z = noise_like(key, g)
        scales = {"w": scale, "b": 1.0}
        return in_float64(lambda x, z, scale: x + scale * z, g, z, scales)

    return of_noise(update)


@broken("noise")
def start_and_noise_of_one_key():
    """The first parameters, which are published, are the noise of the first step."""

    def init(key):
        start = add(jax.tree.map(jnp.zeros_like, PARAMS), noise_like(key, PARAMS, 0.05))
        return key, jnp.zeros((), jnp.int32), start

    def step(state, x, y, is_padding_example=None):
        key, count, params = state
        mask = is_padding_example
        mask = jnp.zeros(len(x), bool) if mask is None else mask
        own = jax.lax.cond(
            count == 0, lambda: key, lambda: jax.random.fold_in(key, count)
        )
        private = add(clipped(params, x, y, mask), noise_like(own, params))
        return key, count + 1, jax.tree.map(lambda p, g: p - g, params, private)

    return of_sum(init=init, step=step, make_optimizer=None)


# Broken: the state.


@broken("state")
def noise_taken_out_again():
    """What is added is subtracted, for a cleaner gradient."""

    def update(g, key):
        z = noise_like(key, g)
        return in_float64(jnp.subtract, add(g, z), z)

    return of_noise(update)


@broken("state")
def loss_of_the_training_set():
    """The step closes over the data, and keeps the best loss."""

    def init(key):
        return key, PARAMS, jnp.asarray(1e9)

    def step(state, x, y, is_padding_example=None):
        key, params, best = state
        mask = is_padding_example
        mask = jnp.zeros(len(x), bool) if mask is None else mask
        key, step_key = jax.random.split(key)
        private = add(clipped(params, x, y, mask), noise_like(step_key, params))
        loss = jnp.mean(jax.vmap(loss_fn, (None, 0, 0))(params, *DATA))
        params = jax.tree.map(lambda p, g: p - g, params, private)
        return key, params, jnp.minimum(best, loss)

    return of_sum(init=init, step=step, make_optimizer=None)


@broken("state")
def no_noise():
    """The noise was forgotten; dropout is all that is random."""

    def step(state, x, y, is_padding_example=None):
        key, params = state
        mask = is_padding_example
        mask = jnp.zeros(len(x), bool) if mask is None else mask
        key, drop = jax.random.split(key)
        grads = clipped(params, x * jax.random.bernoulli(drop, 0.5, x.shape), y, mask)
        return key, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return of_sum(init=lambda key: (key, PARAMS), step=step, make_optimizer=None)


@broken("state")
def momentum_before_the_noise():
    """The moving average in the state has no noise."""
    return of_sum(make_optimizer=lambda key: optax.chain(optax.ema(0.9), noise(key)))


@broken("state")
def delayed_second_moment_without_noise():
    """DP² whose second moment is that of the clipped gradient, before the noise."""

    def make(key):
        private_gradient = dpadambc.privatize(MECHANISM, key=key)
        clip = dpadambc.clip_per_example(C, normalize_by=B)

        def init_fn(params):
            return jax.tree.map(jnp.zeros_like, params), private_gradient.init(params)

        def update_fn(updates, state, params=None, **options):
            v, inner = state
            factors = jax.tree.map(lambda v: 1 / (jnp.sqrt(v) + 1.0), v)
            divided = scale_examples(updates, factors)
            private, inner = private_gradient.update(divided, inner, params, **options)
            bare, _ = clip.update(updates, optax.EmptyState(), params, **options)
            bare = dpadambc.materialize(bare)
            v = jax.tree.map(lambda v, g: 0.9 * v + 0.1 * g**2, v, bare)
            return private, (v, inner)

        return optax.GradientTransformationExtraArgs(init_fn, update_fn)

    return of_chain(make, lambda key: optax.sgd(1e-3))


@broken("state")
def multi_steps_around_the_noise():
    """`optax.MultiSteps` keeps the sum of gradients without noise."""
    return of_sum(
        make_optimizer=lambda key: optax.MultiSteps(
            with_noise(key), 4
        ).gradient_transformation()
    )


@broken("state")
def a_parameter_without_noise():
    """A mask leaves the bias out of the noise."""
    return of_sum(
        make_optimizer=lambda key: optax.chain(
            optax.masked(noise(key), {"w": True, "b": False}), ADAM
        )
    )


@broken("state")
def norm_in_the_state():
    """The norm of the gradient is kept for a log."""

    def make(key):
        def update_fn(updates, state, params=None):
            return updates, optax.tree.norm(updates)

        log = optax.GradientTransformation(lambda params: jnp.zeros(()), update_fn)
        return optax.chain(log, with_noise(key))

    return of_sum(make_optimizer=make)


@broken("state")
def adaptive_clip_without_noise():
    """The clip norm follows the share of clipped examples."""

    def init(key):
        return PARAMS, (key, noise(key).init(PARAMS)), jnp.ones(())

    def step(state, x, y, is_padding_example=None):
        params, (key, noise_state), bound = state
        mask = is_padding_example
        mask = jnp.zeros(len(x), bool) if mask is None else mask
        grads = gradients(params, x, y)
        total = jax.tree.map(lambda g: g / B, clipped_sum(grads, mask, C))
        private, noise_state = noise(key).update(total, noise_state, params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, private)
        share = jnp.sum((norms_of(grads) < bound) & ~mask) / B
        return params, (key, noise_state), bound * jnp.exp(-0.2 * (share - 0.5))

    return of_sum(init=init, step=step, make_optimizer=None)


@broken("state")
def level_of_the_batch():
    """The noise is scaled by the size of the batch, which is private."""

    def init(key):
        return key, PARAMS

    def step(state, x, y, is_padding_example=None):
        key, params = state
        mask = is_padding_example
        mask = jnp.zeros(len(x), bool) if mask is None else mask
        key, step_key = jax.random.split(key)
        count = jnp.maximum(1, jnp.sum(~mask))
        total = clipped_sum(gradients(params, x, y), mask)
        mean = jax.tree.map(lambda g: g / count, total)
        z = noise_like(step_key, mean, 1.0)
        private = in_float64(lambda g, z: g + z * C / count, mean, z)
        return key, jax.tree.map(lambda p, g: p - g, params, private)

    return of_sum(init=init, step=step, make_optimizer=None)


@broken("state")
def plateau_on_the_training_loss():
    """The learning rate falls where the loss of the batch does not."""
    plateau = optax.contrib.reduce_on_plateau(patience=1)

    def init(key):
        start = with_noise(key).init(PARAMS), plateau.init(PARAMS)
        return key, PARAMS, start

    def step(state, x, y, is_padding_example=None):
        key, params, (inner, rate) = state
        mask = is_padding_example
        mask = jnp.zeros(len(x), bool) if mask is None else mask
        value = jnp.mean(jax.vmap(loss_fn, (None, 0, 0))(params, x, y), where=~mask)
        grads = clipped(params, x, y, mask)
        updates, inner = with_noise(key).update(grads, inner, params)
        updates, rate = plateau.update(updates, rate, params, value=value)
        return key, optax.apply_updates(params, updates), (inner, rate)

    return of_sum(init=init, step=step, make_optimizer=None)


# Broken: the correction.


@broken("correction")
def correction_of_another_level():
    """Φ without the average of four gradients before it."""
    adam_bc = dpadambc.adam_bc(1e-3, NOISE)
    return of_chain(
        lambda key: dpadambc.privatize(MECHANISM, key=key),
        lambda key: optax.MultiSteps(adam_bc, 4).gradient_transformation(),
    )


@broken("correction")
def correction_of_256_for_255():
    """Φ = (σC/256)², where the noise is σC/255."""
    adam_bc = dpadambc.adam_bc(1e-3, C / 256)
    return of_sum(make_optimizer=lambda key: with_noise(key, adam_bc, C / 255))


# Broken: the engine.


@broken("factored")
def engine_with_a_wrong_factor():
    """A rule of the engine makes the gradient of the weights a hundredth too small."""
    pipeline = of_fit()
    right: Any = pipeline.gradients_by

    def gradients_by(method, params, *batch):
        grads = right(method, params, *batch)
        wrong = {"w": 0.99 * jnp.ones(NUM_FEATURES), "b": jnp.ones(())}
        return scale_examples(grads, wrong) if method == "factored" else grads

    return dataclasses.replace(pipeline, gradients_by=gradients_by)


# Broken: the batches.


def epochs(order: Callable[[np.random.Generator], np.ndarray]) -> Loader:
    def loader(seed):
        rng = np.random.default_rng(seed)
        for _ in range(10):
            yield from order(rng).reshape(-1, BATCH)

    return loader


def each_step(draw: Callable[[np.random.Generator], np.ndarray]) -> Loader:
    def loader(seed):
        rng = np.random.default_rng(seed)
        return (draw(rng) for _ in range(MECHANISM.iterations))

    return loader


def taken(rng, prob=MECHANISM.sampling_prob):
    return np.flatnonzero(rng.random(NUM_EXAMPLES) < prob)


@broken("sampling")
def shuffled_epochs_as_poisson():
    """A shuffled data loader, accounted for as Poisson sampling."""
    return of_sum(loader=epochs(lambda rng: rng.permutation(NUM_EXAMPLES)))


@broken("sampling")
def fixed_order():
    """No shuffling: the same batches in each epoch."""
    return of_sum(loader=epochs(lambda rng: np.arange(NUM_EXAMPLES)))


@broken("sampling")
def fixed_size_as_poisson():
    """A random subset of fixed size, under add-or-remove."""
    return of_sum(
        loader=each_step(lambda rng: rng.choice(NUM_EXAMPLES, BATCH, replace=False))
    )


@broken("sampling")
def one_key_for_all_batches():
    """The key of the batches is not folded with the step."""

    def loader(seed):
        key = jax.random.key(seed)
        batch = MECHANISM.sample_step(key, 0, num_examples=NUM_EXAMPLES)
        return (batch for _ in range(MECHANISM.iterations))

    return of_sum(loader=loader)


@broken("sampling")
def with_replacement():
    """An example can be in a batch twice."""
    return of_sum(
        loader=each_step(lambda rng: rng.choice(NUM_EXAMPLES, rng.poisson(BATCH)))
    )


@broken("sampling")
def cut_batches():
    """Poisson batches, cut to a size that is often exceeded."""
    return of_sum(loader=each_step(lambda rng: rng.permutation(taken(rng))[:105]))


@broken("sampling")
def rate_of_another_batch_size():
    """The probability is 2 % too large."""
    return of_sum(loader=each_step(lambda rng: taken(rng, 1.02 * BATCH / NUM_EXAMPLES)))


@broken("sampling")
def same_seed_in_every_run():
    """The loader ignores its seed."""
    return of_sum(loader=lambda seed: poisson(0))


@broken("sampling")
def same_seed_in_every_epoch():
    """The batches of an epoch are drawn anew from one seed."""

    def loader(seed):
        for _ in range(10):
            rng = np.random.default_rng(seed)
            yield from (taken(rng) for _ in range(20))

    return of_sum(loader=loader)


@broken("sampling")
def one_example_more_often():
    """A person has three rows."""
    often = lambda rng: np.union1d(taken(rng), np.flatnonzero(rng.random(1) < 0.1))
    return of_sum(loader=each_step(often))


@broken("sampling")
def balls_in_bins():
    """Each example is in exactly one batch of an epoch, at random."""

    def loader(seed):
        rng = np.random.default_rng(seed)
        for _ in range(10):
            bins = rng.integers(0, 20, NUM_EXAMPLES)
            yield from (np.flatnonzero(bins == i) for i in range(20))

    return of_sum(loader=loader)


@broken("sampling")
def blocks_of_the_data():
    """Neighbors in a file come together."""

    def draw(rng):
        starts = np.flatnonzero(rng.random(NUM_EXAMPLES // 10) < BATCH / NUM_EXAMPLES)
        return (10 * starts[:, None] + np.arange(10)).ravel()

    return of_sum(loader=each_step(draw))


@broken("sampling")
def empty_batches_are_skipped():
    """A batch without examples, or with few, is drawn again."""

    def draw(rng):
        while len(batch := taken(rng)) < 95:
            pass
        return batch

    return of_sum(loader=each_step(draw))


# Sound.


def of_fit(optimizer: Any = ADAM, loss=loss_fn, params=PARAMS, **options):
    mechanism = options.pop("mechanism", MECHANISM)
    data = options.pop("data", DATA)
    return audit.Pipeline.of_fit(loss, params, data, mechanism, optimizer, **options)


@sound
def fit_with_sgd():
    return of_fit(optax.sgd(0.1, momentum=0.9))


@sound
def fit_with_adam_bc():
    return of_fit(dpadambc.adam_bc(1e-3, NOISE))


@sound
def fit_with_adamw_bc():
    return of_fit(dpadambc.adamw_bc(1e-3, NOISE))


@sound
def fit_in_microbatches():
    return of_fit(microbatch_size=3)


@sound
def fit_with_multi_steps():
    adam_bc = dpadambc.adam_bc(1e-3, NOISE / 2)
    return of_fit(optax.MultiSteps(adam_bc, 4))


@sound
def fit_with_a_frozen_part():
    labels = {"w": "trained", "b": "frozen"}
    parts: Any = {"trained": optax.adam(1e-3), "frozen": optax.set_to_zero()}
    return of_fit(optax.multi_transform(parts, labels))


@sound
def fit_with_dropout_and_augmentation():
    """Noise on the inputs is not the noise that makes it private."""

    def loss(params, x, y, *, key):
        shift, drop = jax.random.split(key)
        x = x + 0.1 * jax.random.normal(shift, x.shape)
        return loss_fn(params, x * jax.random.bernoulli(drop, 0.5, x.shape), y)

    return of_fit(loss=loss)


@sound
def fit_of_a_diffusion_model():
    """The loss adds noise of its own, and takes it away."""

    def loss(params, x, y, *, key):
        noise = jax.random.normal(key, x.shape)
        mixed = 0.6 * x + 0.8 * noise
        return jnp.mean((jnp.tanh(params["w"] * mixed + params["b"]) - noise) ** 2)

    return of_fit(loss=loss)


@sound
def fit_in_bfloat16():
    return of_fit(loss=training.with_compute_dtype(loss_fn, jnp.bfloat16))


@sound
def fit_with_a_linen_model():
    model = flax.linen.Dense(1)
    params = model.init(jax.random.key(0), X[0])
    return of_fit(
        loss=lambda params, x, y: (model.apply(params, x)[0] - y) ** 2, params=params
    )


@sound
def fit_with_an_nnx_model():
    model = flax.nnx.Linear(NUM_FEATURES, 1, rngs=flax.nnx.Rngs(0))
    graph, params = flax.nnx.split(model)

    def loss(params, x, y):
        return (flax.nnx.merge(graph, params)(x)[0] - y) ** 2

    return of_fit(loss=loss, params=params)


@sound
def fit_with_an_equinox_model():
    model = equinox.nn.Linear(NUM_FEATURES, 1, key=jax.random.key(0))
    params, static = equinox.partition(model, equinox.is_array)
    loss = lambda params, x, y: (equinox.combine(params, static)(x)[0] - y) ** 2
    return of_fit(loss=loss, params=params)


@sound
def fit_with_a_schedule_of_noise():
    schedule = optax.linear_schedule(1.0, 0.5, 200)
    mechanism = dataclasses.replace(MECHANISM, noise_multiplier=schedule)
    return of_fit(dpadambc.adam_bc(1e-3, mechanism.noise_stddev), mechanism=mechanism)


@sound
def fit_with_fixed_size():
    mechanism = dpadambc.FixedSizeGaussian(
        l2_clip_norm=C,
        noise_multiplier=1.0,
        batch_size=BATCH,
        num_examples=NUM_EXAMPLES,
        iterations=200,
        normalize_by=BATCH,
    )
    return of_fit(mechanism=mechanism)


@sound
def fit_with_truncated_batches():
    mechanism = dpadambc.TruncatedPoissonGaussian(
        l2_clip_norm=C,
        noise_multiplier=1.0,
        sampling_prob=BATCH / NUM_EXAMPLES,
        truncated_batch_size=105,
        num_examples=NUM_EXAMPLES,
        iterations=200,
        normalize_by=BATCH,
    )
    return of_fit(mechanism=mechanism)


@sound
def chain_with_shuffled_epochs():
    mechanism = dpadambc.ShuffledGaussian(
        l2_clip_norm=C,
        noise_multiplier=1.0,
        batch_size=BATCH,
        num_examples=NUM_EXAMPLES,
        iterations=200,
        normalize_by=BATCH,
    )
    return of_chain(
        lambda key: dpadambc.dp_adam_bc(1e-3, mechanism, key=key), mechanism=mechanism
    )


@sound
def chain_for_replacement():
    relation = dpadambc.NeighboringRelation.REPLACE_ONE
    mechanism = dataclasses.replace(MECHANISM, neighboring_relation=relation)
    return of_chain(
        lambda key: dpadambc.dp_adamw_bc(1e-3, mechanism, key=key), mechanism=mechanism
    )


@sound
def chain_with_rounding():
    return of_chain(
        lambda key: dpadambc.dp_adamw(1e-3, MECHANISM, key=key),
        lambda key: dpadambc.round_stochastically(key=jax.random.fold_in(key, 1)),
    )


@sound
def chain_with_zero_nans_before_the_correction():
    """And a bound that nothing reaches."""
    return of_chain(
        lambda key: dpadambc.privatize(MECHANISM, key=key),
        lambda key: optax.zero_nans(),
        lambda key: optax.clip(1e6),
        lambda key: dpadambc.adam_bc(1e-3, NOISE),
    )


@sound
def chain_with_dp_sgd():
    return of_chain(lambda key: dpadambc.dp_sgd(0.1, MECHANISM, key=key))


@sound
def chain_with_dp_adam():
    return of_chain(lambda key: dpadambc.dp_adam(1e-3, MECHANISM, key=key))


@sound
def chain_with_dp2_rmsprop():
    """Gradients are divided by a moment of earlier private gradients."""
    return of_chain(
        lambda key: dpadambc.contrib.dp2_rmsprop(
            1e-3, MECHANISM, key=key, interval=1, preconditioned_clip_norm=10.0
        )
    )


@sound
def by_hand():
    """Plain JAX and Optax, as a careful person writes it."""
    return of_noise(lambda g, key: add(g, noise_like(key, g)))


@sound
def by_hand_with_the_noise_of_the_sum():
    """One key for all steps, with which a checksum of the sum is drawn from."""

    def update(g, key):
        bits = lambda x: jax.lax.bitcast_convert_type(x, jnp.uint32)
        place = lambda x: 2 * jnp.arange(x.size, dtype=jnp.uint32).reshape(x.shape) + 1
        words = [jnp.sum(bits(x) * place(x)) for x in jax.tree.leaves(g)]
        for word in words:
            key = jax.random.fold_in(key, word)
        return add(g, noise_like(key, g))

    return of_noise_state(update)


@sound
def by_hand_in_four_parts():
    """Four noises of half the level."""

    def update(g, key):
        parts = [noise_like(part, g, NOISE / 2) for part in jax.random.split(key, 4)]
        return in_float64(lambda g, *z: g + z[0] + z[1] + z[2] + z[3], g, *parts)

    return of_noise(update)


@sound
def by_hand_with_more_noise_afterwards():
    """A second noise, on the update, is post-processing."""
    return of_sum(
        make_optimizer=lambda key: optax.chain(
            with_noise(key),
            optax.add_noise(1e-6, 0.55, key=jax.random.fold_in(key, 1)),
        )
    )


@sound
def by_hand_on_the_sum():
    """Noise on the sum, then the division: the same."""
    return of_sum(
        make_optimizer=lambda key: optax.chain(
            optax.scale(B), with_noise(key, stddev=C), optax.scale(1 / B)
        )
    )


@sound
def by_hand_on_all_devices():
    """Each device has the same gradient, and draws the same noise."""

    def update(g, key):
        mesh = all_devices()
        spec = PartitionSpec()
        draw = lambda g, key: add(g, noise_like(key, g))
        return jax.shard_map(draw, mesh=mesh, in_specs=(spec, spec), out_specs=spec)(
            g, key
        )

    return of_noise(update)

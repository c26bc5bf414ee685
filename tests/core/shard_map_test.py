"""Inside `jax.shard_map` each example is clipped for itself, as on one device."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dpadambc
from dpadambc.core import arrays, clip, gradient, per_example
from dpadambc.core.arrays import varying_axes
from dpadambc.engine import collectives
from tests import common

pytestmark = pytest.mark.guarantee

RNG = np.random.default_rng(0)
PARAMS = {
    "tokens": RNG.normal(0, 0.5, (30, 6)).astype(np.float32),
    "w": RNG.normal(0, 0.5, (6, 4)).astype(np.float32),
    "b": np.zeros(4, np.float32),
}
TOKENS = RNG.integers(0, 30, (32, 5))
TARGETS = RNG.normal(size=(32, 4)).astype(np.float32)
C = 0.5


def loss_fn(params, tokens, target):
    hidden = jnp.tanh(params["tokens"][tokens] @ params["w"])
    return jnp.sum((hidden.mean(0) + params["b"] - target) ** 2)


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((8,), ("data",), axis_types=(kind,))


def on_devices(fun, mesh=None, targets=TARGETS, **options):
    """A function of (params, *batch), each device having its part of the batch."""
    mesh = mesh or mesh_of()
    specs = P(), P("data"), P("data")
    mapped = jax.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=P(), **options)
    put = lambda x: jax.device_put(x, NamedSharding(mesh, P("data")))
    return jax.jit(mapped)(PARAMS, put(TOKENS), put(targets))


def assert_close(got, expected):
    got, expected = dpadambc.materialize((got, expected))
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["factored", "vmap"])
def test_each_device_of_a_pmap_clips_its_own(method):
    clipped = dpadambc.clipped_grad(
        loss_fn, l2_clip_norm=C, normalize_by=4, method=method
    )
    parts = TOKENS.reshape(8, 4, 5), TARGETS.reshape(8, 4, 4)
    together = jax.pmap(clipped, in_axes=(None, 0, 0))(PARAMS, *parts)
    alone = [jax.jit(clipped)(PARAMS, *part) for part in zip(*parts, strict=True)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *dpadambc.materialize(alone))
    assert_close(together, stacked)


# Every pair of values of two columns.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "microbatch_size", "check_vma", "kind"),
    [
        ("factored", None, True, AxisType.Auto),
        ("factored", 3, False, AxisType.Explicit),
        common.slow("vmap", 3, True, AxisType.Auto),
        common.slow("vmap", None, False, AxisType.Auto),
        common.slow("vmap", 3, True, AxisType.Explicit),
        common.slow("factored", None, True, AxisType.Explicit),
        common.slow("factored", 3, False, AxisType.Auto),
    ],
)
def test_the_sum_over_devices_is_that_of_one(method, microbatch_size, check_vma, kind):
    clipped = dpadambc.clipped_grad(
        loss_fn,
        l2_clip_norm=C,
        normalize_by=1.0,
        microbatch_size=microbatch_size,
        method=method,
    )
    summed = lambda *args: common.sum_over(clipped(*args), "data")
    got = on_devices(summed, mesh_of(kind), check_vma=check_vma)
    assert_close(got, clipped(PARAMS, TOKENS, TARGETS))


def private_sum(method, *args):
    gradients = dpadambc.per_example_grad(loss_fn, method=method)(*args)
    clip = dpadambc.clip_per_example(C, normalize_by=1.0)
    return clip.update(gradients, clip.init(PARAMS), PARAMS)[0]


@pytest.mark.parametrize("method", ["factored", "vmap"])
def test_gradients_per_example_are_clipped_on_their_device(method):
    fun = functools.partial(private_sum, method)
    got = on_devices(lambda *args: common.sum_over(fun(*args), "data"))
    assert_close(got, jax.jit(fun)(PARAMS, TOKENS, TARGETS))


def test_without_it_one_person_would_be_in_the_gradients_of_all_devices(monkeypatch):
    """Negative control: the sum passes what its sensitivity says it cannot."""
    clipped = dpadambc.clipped_grad(
        loss_fn, l2_clip_norm=C, normalize_by=1.0, method="vmap"
    )
    others = TARGETS.copy()
    others[0] += 100

    def influence():
        """Of the first example, which is replaced by another."""
        total = lambda *args: common.sum_over(clipped(*args), "data")
        both = on_devices(total), on_devices(total, targets=others)
        gap = jax.tree.map(jnp.subtract, *dpadambc.materialize(both))
        return float(optax.tree.norm(gap))

    assert influence() <= 2 * C * 1.001
    for module in (arrays, gradient, per_example):
        monkeypatch.setattr(module, "make_varying", lambda tree, axes: tree)
    seal_of = gradient._seal_of
    monkeypatch.setattr(gradient, "_seal_of", lambda size, axes: seal_of(size, ()))
    # What JAX would do by itself is seen, too.
    with pytest.raises(ValueError, match="loss_fn"):
        influence()
    monkeypatch.setattr(collectives, "refuse", lambda jaxpr, allowed: None)
    with pytest.raises(ValueError, match="combined"):
        influence()
    monkeypatch.setattr(clip, "_check_seal", lambda leaf: None)
    assert influence() > 2 * 2 * C


@pytest.mark.usefixtures("without_nonces")
def test_noise_is_added_once_after_the_sum():
    clipped = dpadambc.clipped_grad(loss_fn, l2_clip_norm=C, normalize_by=1.0)
    noise = dpadambc.add_dp_noise(0.1, key=jax.random.key(0))

    def noised(*args):
        total = common.sum_over(clipped(*args), "data")
        return noise.update(total, noise.init(PARAMS), PARAMS)[0]

    one = jax.make_mesh(
        (1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1]
    )
    # Sums that round otherwise may fall into neighboring cells of the grid.
    found, expected = on_devices(noised), on_devices(noised, one)
    chex.assert_trees_all_close(found, expected, atol=1.1 * 2.0**-12)


def test_outside_of_shard_map_nothing_varies():
    assert varying_axes((PARAMS, jnp.ones(3))) == ()
    seen = []
    jax.jit(lambda x: seen.append(varying_axes(x)) or x)(jnp.ones(3))
    jax.vmap(lambda x: seen.append(varying_axes(x)) or x, axis_name="data")(jnp.ones(3))
    assert seen == [(), ()]


def test_what_is_shared_over_an_axis_stays_shared():
    """Only the axes over which the examples vary are those of their gradients."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    seen = []

    def look(params, tokens, targets):
        seen.append(varying_axes((tokens, targets)))
        clipped = dpadambc.clipped_grad(loss_fn, l2_clip_norm=C, normalize_by=1.0)(
            params, tokens, targets
        )
        return common.sum_over(clipped, "data")

    got = on_devices(look, mesh)
    assert set(seen) == {("data",)}
    expected = dpadambc.clipped_grad(loss_fn, l2_clip_norm=C, normalize_by=1.0)(
        PARAMS, TOKENS, TARGETS
    )
    assert_close(got, expected)


# What a loop of one's own on many devices can do wrong.


WHOLE = P()


def on_four(fun, params_spec, x_spec, out_spec=WHOLE, **options):
    mesh = jax.make_mesh(
        (4,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4]
    )
    specs = params_spec, x_spec
    mapped = jax.shard_map(
        fun, mesh=mesh, in_specs=specs, out_specs=out_spec, **options
    )
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    w, x = jnp.zeros(8), jnp.asarray(RNG.normal(size=(8, 8)), jnp.float32)
    return jax.jit(mapped)(put(w, params_spec), put(x, x_spec))


def inner_product(w, x):
    return w @ x


def noised(summed, key=None):
    noise = dpadambc.add_dp_noise(1.0, key=jax.random.key(0))
    state = noise.init(dpadambc.materialize(summed))
    if key is not None:
        own = key(jax.random.wrap_key_data(state.key_data))
        state = state._replace(key_data=jax.random.key_data(own))
    return noise.update(summed, state)[0]


@pytest.mark.parametrize("check_vma", [True, False])
def test_parts_of_the_parameters_do_not_get_the_same_noise(check_vma):
    """Its difference would be the gradient's."""
    with pytest.raises(ValueError, match="key|check_vma"):
        on_four(
            lambda w, x: noised(common.summed(w)),
            P("d"),
            P(),
            P("d"),
            check_vma=check_vma,
        )
    own = lambda key: jax.random.fold_in(key, jax.lax.axis_index("d"))
    drawn = on_four(lambda w, x: noised(common.summed(w), own), P("d"), P(), P("d"))
    assert len(np.unique(np.asarray(drawn))) == 8


def test_copies_of_a_gradient_do_not_get_noise_of_their_own():
    """Their mean would have half as much."""
    own = lambda key: jax.random.fold_in(key, jax.lax.axis_index("d"))
    mean = lambda w, x: jax.lax.pmean(noised(common.summed(w), own), "d")
    with pytest.raises(ValueError, match="key"):
        on_four(mean, P(), P())


def test_a_sum_over_devices_that_is_forgotten_is_an_error():
    clipped = dpadambc.clipped_grad(inner_product, l2_clip_norm=C, normalize_by=1.0)
    with pytest.raises(ValueError, match="key"):
        on_four(lambda w, x: noised(clipped(w, x)), P(), P("d"), P("d"))


def clipped_later(method, early):
    def fun(w, x):
        gradients = dpadambc.per_example_grad(inner_product, method=method)(w, x)
        gradients = early(gradients)
        clip = dpadambc.clip_per_example(C, normalize_by=1.0)
        return clip.update(gradients, clip.init(w), w)[0]

    return fun


@pytest.mark.parametrize("method", ["factored", "vmap"])
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("over", [jax.lax.psum, jax.lax.pmax])
def test_examples_are_not_summed_over_devices_before_they_are_clipped(
    over, check_vma, method
):
    fun = clipped_later(method, lambda grads: over(grads, "d"))
    with pytest.raises((ValueError, TypeError)):
        on_four(fun, P(), P("d"), check_vma=check_vma)


def test_a_norm_is_not_that_of_a_part_of_the_parameters():
    def split_loss(w, x):
        part = jax.lax.dynamic_slice(x, (2 * jax.lax.axis_index("d"),), (2,))
        return jax.lax.psum(w @ part, "d")

    clipped = dpadambc.clipped_grad(split_loss, l2_clip_norm=C, normalize_by=1.0)
    with pytest.raises(ValueError, match="gradients"):
        on_four(clipped, P("d"), P(), P("d"))

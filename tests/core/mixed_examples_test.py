"""A loss in which examples meet: by a collective, a rule for batches, or the data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dpadambc
from dpadambc.engine import collectives
from tests import common
from tests.attacks import (
    BATCH,
    PARAMS,
    RNG,
    C,
    X,
    both_methods,
    clipped_grad,
    distance,
    linear,
    mesh_of,
    one_replaced,
)

pytestmark = pytest.mark.guarantee


def through_a_scan(h, axis):
    step = lambda carry, _: (carry - jax.lax.pmean(carry, axis), None)
    return jax.lax.scan(step, h, length=2)[0]


COLLECTIVES = {
    "pmean": lambda h, axis: h - jax.lax.pmean(h, axis),
    "all_gather": lambda h, axis: jax.lax.all_gather(h, axis).sum(0),
    "ppermute": lambda h, axis: h + jax.lax.ppermute(h, axis, [(0, 1), (1, 0)]),
    "psum_scatter": lambda h, axis: jax.lax.psum_scatter(jnp.stack([h, h]), axis),
    "all_to_all": lambda h, axis: jax.lax.all_to_all(jnp.stack([h, h]), axis, 0, 0),
    "inside jit": lambda h, axis: h - jax.jit(lambda h: jax.lax.psum(h, axis))(h),
    "inside scan": through_a_scan,
}


def mixed_by(name, axis):
    return lambda w, x: jnp.sum(COLLECTIVES[name](jnp.tanh(w * x), axis))


def on_two_devices(fun, mesh, x=X, **options):
    mapped = jax.shard_map(
        lambda w, x: fun(w, x).sum_over("data"),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
        **options,
    )
    return jax.jit(mapped)(
        PARAMS + 1, jax.device_put(x, NamedSharding(mesh, P("data")))
    )


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("check_vma", [True, False])
@both_methods
def test_a4_a_collective_over_the_axis_of_the_examples_is_refused(
    method, check_vma, name
):
    clipped = clipped_grad(mixed_by(name, "data"), method=method)
    mesh = mesh_of(("data",), (2,))
    with pytest.raises(ValueError, match="loss_fn"):
        on_two_devices(clipped, mesh, check_vma=check_vma)


def test_a4_a_collective_under_vmap_is_refused():
    clipped = clipped_grad(mixed_by("pmean", "parts"))
    rows = X.reshape(2, BATCH // 2, 8)
    with pytest.raises(ValueError, match="loss_fn"):
        jax.vmap(lambda x: clipped(PARAMS + 1, x), axis_name="parts")(rows)


def test_a4_operations_that_are_given_the_whole_batch_are_refused():
    @jax.custom_batching.custom_vmap
    def centered(h):
        return h

    @centered.def_vmap
    def _(size, batched, h):
        return h - h.mean(0, keepdims=True), True

    def on_host(h):
        shape = jax.ShapeDtypeStruct(h.shape, h.dtype)
        return jax.pure_callback(lambda h: h, shape, h, vmap_method="expand_dims")

    for mixes in (centered, on_host):
        loss = lambda w, x, mixes=mixes: w @ jax.lax.stop_gradient(mixes(x))
        with pytest.raises(ValueError, match="loss_fn"):
            clipped_grad(loss)(PARAMS, X)


@pytest.mark.slow
def test_a4_collectives_that_mix_no_examples_are_not():
    """Over an axis of the model, and over one that the loss makes for itself."""
    mesh = mesh_of(("data", "model"), (2, 2))

    def tensor_parallel(w, x):
        part = jax.lax.axis_index("model")
        own = jax.lax.dynamic_slice(w * x, (4 * part,), (4,))
        return jax.lax.psum(jnp.tanh(own).sum(), "model")

    clipped = clipped_grad(tensor_parallel)
    mapped = jax.shard_map(
        lambda w, x: clipped(w, x).sum_over("data"),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=True,
    )
    split = jax.device_put(X, NamedSharding(mesh, P("data")))
    # As on one device: each example is clipped as a whole (up to how JAX splits its
    # gradient over the axis of the model).
    assert np.isfinite(jax.jit(mapped)(PARAMS + 1, split).value).all()

    def views(w, x):
        one = lambda x: jnp.tanh(w * x - jax.lax.pmean(w * x, "views")).sum()
        return jax.vmap(one, axis_name="views")(jnp.stack([x, 2 * x])).sum()

    assert np.isfinite(clipped_grad(views)(PARAMS + 1, X).value).all()


def test_a4_what_synchronized_statistics_did(monkeypatch):
    """Negative control: one example replaced moves the sum by more than 2 C."""
    monkeypatch.setattr(collectives, "refuse", lambda jaxpr, allowed: None)
    loss = lambda w, x: jnp.sum(jax.lax.pmean(jnp.tanh(w * x), "data") ** 2)
    clipped = clipped_grad(loss)
    mesh = mesh_of(("data",), (2,))
    rows = 1 + jnp.abs(X)  # so that all gradients point the same way
    broken = rows.at[0].set(jnp.nan)
    sums = [on_two_devices(clipped, mesh, x) for x in (rows, broken)]
    assert distance(*sums) > 1.2 * C  # where leaving one out moves it by C


def kernel_gradient(x, g):
    convolved = lambda k: jax.lax.conv_general_dilated(
        x, k, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return jax.vjp(convolved, jnp.zeros((3, 2, 4)))[1](g)[0]


def with_own_jvp():
    fun = jax.custom_jvp(kernel_gradient)
    fun.defjvp(lambda primals, tangents: (fun(*primals), fun(*primals)))
    return fun


def with_own_vjp():
    fun = jax.custom_vjp(kernel_gradient)
    fun.defvjp(lambda x, g: (fun(x, g), None), lambda residual, g: (g, g))
    return fun


def in_a_while(x, g):
    step = lambda carry: (carry[0] + 1, carry[1] + kernel_gradient(x, g))
    return jax.lax.while_loop(
        lambda carry: carry[0] < 2, step, (0, jnp.zeros((3, 2, 4)))
    )[1]


@pytest.mark.parametrize(
    "call",
    [with_own_jvp(), *map(common.slow, [with_own_vjp(), in_a_while])],
    ids=["jvp", "vjp", "while"],
)
@both_methods
def test_a8_nan_stays_in_its_example_through_calls_of_ones_own(method, call):
    def loss(w, x, g):
        return jnp.sum(w * jax.lax.stop_gradient(call(x, g)))

    x = jnp.asarray(RNG.normal(size=(4, 1, 8, 2)), jnp.float32)
    g = jnp.asarray(RNG.normal(size=(4, 1, 6, 4)), jnp.float32)
    clipped = clipped_grad(loss, method=method)
    params = jnp.ones((3, 2, 4))
    broken = clipped(params, x.at[0].set(jnp.nan), g).value
    np.testing.assert_allclose(broken, clipped(params, x[1:], g[1:]).value, atol=1e-6)
    assert jnp.linalg.norm(broken) > 0.1


@pytest.mark.slow
def test_a14_what_they_did():
    """Negative control: a row that is not in the batch moves all gradients in it."""
    centered = lambda w, rows, x: linear(w, x - rows.mean(0))
    clipped = clipped_grad(centered, batch_argnums=2)
    moved = distance(*(clipped(PARAMS, one_replaced(by), X[1:]) for by in (1e3, -1e3)))
    assert moved > 10 * C


def contrastive(w, x, all_x):
    return jax.nn.logsumexp(all_x @ (w * x)) - x @ (w * x)


BOTH_MAKE = {
    "per_example_grad": lambda: dpadambc.per_example_grad(contrastive, batch_argnums=1),
    "clipped_grad": lambda: clipped_grad(contrastive, batch_argnums=1),
}


@pytest.mark.parametrize("name", BOTH_MAKE)
def test_a27_what_is_public_is_not(name):
    BOTH_MAKE[name]()(PARAMS, X, jnp.ones((3, 8)))


def test_a27_what_it_did():
    """Negative control: one example in place of another moves the sum by more than 2 C.

    The row is long, so that it is the nearest of all in every other example's loss.
    """
    clipped = BOTH_MAKE["clipped_grad"]()
    sums = [clipped(PARAMS + 1, x, x) for x in (X, X.at[0].set(30 * X[0]))]
    assert distance(*sums) > 4 * C

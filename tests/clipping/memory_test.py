"""The largest microbatch within a memory: never beyond it, and said where none is."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dpadambc
from dpadambc.clipping import flops, memory
from tests import common

WIDTH = 64


def loss_fn(params, x):
    """Layers of a scan, each computed again in the backward pass."""

    @jax.checkpoint
    def layer(x, w):
        return x + jnp.tanh(x @ w), None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    return jnp.sum(jnp.square(x @ params["head"]))


PARAMS = {
    "layers": jax.ShapeDtypeStruct((4, WIDTH, WIDTH), jnp.float32),
    "head": jax.ShapeDtypeStruct((WIDTH, 5), jnp.float32),
}
EXAMPLE = jax.ShapeDtypeStruct((32, WIDTH), jnp.float32)


def unrolled_loss_fn(params, x):
    for w in params["layers"]:
        x = x + jnp.tanh(x @ w)
    return jnp.sum(jnp.square(x @ params["head"]))


def tied_loss_fn(params, x):
    """All layers are the first, which a carry sums over."""
    shared = jnp.broadcast_to(params["layers"][0], params["layers"].shape)
    return loss_fn(params | {"layers": shared}, x)


def explained(batch_size, memory_limit, loss_fn=loss_fn, **options):
    return dpadambc.explain(
        loss_fn,
        PARAMS,
        EXAMPLE,
        batch_size=batch_size,
        memory_limit=memory_limit,
        **options,
    )


def compiled_bytes(batch_size, microbatch_size, loss_fn=loss_fn):
    """Without a word of the planner's."""
    grad_fn = dpadambc.clipped_grad(
        loss_fn,
        l2_clip_norm=1.0,
        normalize_by=batch_size,
        microbatch_size=microbatch_size,
    )
    masked = lambda params, x, mask: grad_fn(params, x, is_padding_example=mask)
    batch = jax.ShapeDtypeStruct((batch_size, *EXAMPLE.shape), EXAMPLE.dtype)
    mask = jax.ShapeDtypeStruct((batch_size,), bool)
    memory = jax.jit(masked).lower(PARAMS, batch, mask).compile().memory_analysis()
    assert memory is not None
    return sum(
        getattr(memory, f"{part}_size_in_bytes")
        for part in ("argument", "output", "temp")
    )


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(
    st.sampled_from([loss_fn, unrolled_loss_fn, tied_loss_fn]),
    st.integers(1, 40),
    st.floats(1e5, 2e6),
)
def test_the_plan_never_exceeds_its_limit(loss_fn, batch_size, limit):
    found = explained(batch_size, limit, loss_fn)
    compiled = functools.partial(compiled_bytes, batch_size, loss_fn=loss_fn)
    least = compiled(1)
    if found.plan.chosen is None:
        assert least > limit
        with pytest.raises(ValueError, match="microbatch"):
            found.microbatch_size  # noqa: B018
        return
    size = found.microbatch_size
    assert compiled(size) <= limit
    larger = [n for n in memory.sizes(batch_size) if n > size]
    if larger:
        assert compiled(larger[0]) > limit


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1e6, 1.5e6, 1e9])
def test_a_plan_is_of_the_program_that_will_run(limit):
    found = explained(16, limit)
    assert found.plan.chosen.peak_bytes == compiled_bytes(16, found.microbatch_size)
    assert found.plan.chosen.peak_bytes <= limit


@pytest.mark.slow
def test_a_plan_tells_its_neighbors_and_the_other_ways():
    found = explained(16, 6e5)
    plan, sizes = found.plan, [choice.microbatch_size for choice in found.plan.factored]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 16
    above = sizes[sizes.index(found.microbatch_size) - 1]
    possible = memory.sizes(16)
    assert possible.index(above) == possible.index(found.microbatch_size) + 1
    assert plan.vmap.peak_bytes > plan.ordinary.peak_bytes
    assert 1 <= plan.chosen.product_flops / plan.ordinary.product_flops < 1.5
    text = str(found)
    for word in ("ordinary", "factored", "vmap", "GFLOP", "the largest that fits"):
        assert word in text
    assert f"microbatch_size={found.microbatch_size}" in text


@pytest.mark.slow
def test_microbatches_give_back_what_rematerialization_saves():
    """The factors of all layers are held; those of few examples are few."""
    ordinary = explained(64, 1e9).plan.ordinary.peak_bytes
    found = explained(64, ordinary)
    whole, chosen = found.plan.factored[0], found.plan.chosen
    assert whole.peak_bytes > 1.5 * ordinary
    assert chosen.peak_bytes <= ordinary
    assert chosen.product_flops < 1.4 * found.plan.ordinary.product_flops


@pytest.mark.slow
def test_a_whole_step_takes_more_than_its_gradient():
    optimizer = optax.chain(
        dpadambc.add_dp_noise(0.1, key=jax.random.key(0)), dpadambc.adam_bc(1e-3, 0.1)
    )
    step = explained(16, 1e9, optimizer=optimizer).plan.chosen.peak_bytes
    gradient = explained(16, 1e9).plan.chosen.peak_bytes
    moments = 2 * 4 * (4 * WIDTH * WIDTH + 5 * WIDTH)
    assert gradient < step < gradient + 2.5 * moments


def test_arguments_of_all_kinds_are_planned_for():
    def loss_fn(frozen, params, bias, x, key):
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.sum((x * keep) @ params + bias + frozen), {"aux": x}

    found = dpadambc.explain(
        loss_fn,
        jnp.ones(3),
        jnp.ones((4, 3)),
        jnp.ones(3),
        jnp.ones(4),
        jax.random.key(0),
        batch_size=8,
        argnums=(1, 2),
        has_aux=True,
        batch_argnums=3,
        prng_argnum=4,
        memory_limit=1e9,
        optimizer=optax.chain(
            dpadambc.add_dp_noise(common.poisson_gaussian(), key=jax.random.key(0)),
            optax.adam(1e-3),
        ),
    )
    assert found.microbatch_size == 8


def test_what_cannot_be_planned_says_why():
    with pytest.raises(ValueError, match="memory_limit"):
        explained(16, None).microbatch_size  # noqa: B018
    with pytest.raises(ValueError, match="memory_limit"):
        explained(16, None, optimizer=optax.sgd(1.0))
    with pytest.raises(ValueError, match="memory_limit"):
        explained(16, -1.0)

    class Silent:
        memory_analysis = staticmethod(lambda: None)

    with pytest.raises(RuntimeError, match="compiler"):
        memory.peak_bytes(Silent())


@given(st.integers(1, 3000), st.sampled_from([1, 2, 8]))
def test_sizes_are_the_least_for_their_number_with_little_padding(batch_size, unit):
    sizes = memory.sizes(batch_size, unit)
    shards = -(-batch_size // unit)
    assert sizes == sorted(set(sizes)) and sizes[0] == unit
    assert sizes[-1] == unit * shards
    for size in sizes:
        assert size % unit == 0
        count = -(-batch_size // size)
        assert count * size - unit * shards <= batch_size / 16 + unit
        assert -(-batch_size // (size - unit)) > count if size > unit else True


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=60),
    st.integers(0, 100),
    st.floats(-0.1, 1.1),
)
def test_the_search_finds_the_largest_and_its_neighbor(steps, first, share):
    """Whatever increasing function of the size the bytes are."""
    sizes = list(range(1, len(steps) + 1))
    total = first
    num_bytes = {}
    for size, step in zip(sizes, steps, strict=True):
        total += step
        num_bytes[size] = total
    limit = share * total
    calls = []

    def measure(size):
        calls.append(size)
        return num_bytes[size]

    known = memory.measured_around(limit, sizes, measure)
    fitting = [size for size in sizes if num_bytes[size] <= limit]
    assert memory.largest_within(limit, known) == (fitting[-1] if fitting else None)
    if fitting and fitting[-1] != sizes[-1]:
        assert fitting[-1] + 1 in known
    assert len(calls) == len(set(calls)) <= 2 + 2 * len(sizes).bit_length()


def test_products_are_counted_with_the_steps_of_loops():
    w, x = jnp.ones((3, 5)), jnp.ones((2, 3))
    assert flops.of_products(jnp.dot, x, w) == 2 * 2 * 3 * 5
    squares = jnp.ones((7, 4, 4))
    chain = lambda x: jax.lax.scan(lambda x, w: (x @ w, None), x, squares)[0]
    assert flops.of_products(chain, jnp.ones((2, 4))) == 7 * 2 * 2 * 4 * 4
    either = lambda x: jax.lax.cond(
        x[0, 0] > 0, lambda x: x @ w, lambda x: x @ w @ w.T @ w, x
    )
    assert flops.of_products(either, x) == 3 * 2 * 2 * 3 * 5
    conv = lambda x, k: jax.lax.conv_general_dilated(
        x, k, (1, 1), "VALID", feature_group_count=2
    )
    images, kernels = jnp.ones((2, 4, 5, 5)), jnp.ones((6, 2, 3, 3))
    assert flops.of_products(conv, images, kernels) == 2 * (2 * 6 * 3 * 3) * 2 * 9


def test_terms_of_a_scan_that_are_cheaper_formed_are_formed_inside_of_it():
    """Else activations of all layers would be held for kernels that are smaller."""

    def loss_fn(layers, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)
        return jnp.sum(x)

    layers = jax.ShapeDtypeStruct((8, 8, 8), jnp.float32)
    long = jax.ShapeDtypeStruct((512, 8), jnp.float32)
    plan = dpadambc.explain(
        jax.checkpoint(loss_fn), layers, long, batch_size=16, memory_limit=1e9
    ).plan
    activations = 4 * 16 * 8 * 512 * 8  # of one factor of all layers
    assert plan.chosen.peak_bytes < plan.vmap.peak_bytes + 0.2 * activations

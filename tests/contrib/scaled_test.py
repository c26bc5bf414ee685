"""Scale-then-privatize is the algorithm, and as private whatever it divides by."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpadambc
from dpadambc import contrib, training
from dpadambc.contrib.scaling import OuterProduct, scale_examples
from dpadambc.core.gradient import is_per_example
from tests import common

C, B, EPS = 0.8, 4.0, 1e-2
MECHANISM = common.poisson_gaussian(l2_clip_norm=C, normalize_by=B)
SILENT = dataclasses.replace(MECHANISM, noise_multiplier=0.0)
KEY = jax.random.key(0)
PARAMS = {
    "b": np.zeros(3),
    "s": np.zeros(()),
    "w": np.array([[0.5, -1.0, 2.0], [1.0, 0.1, -0.3]]),
}
BATCH = 5
every_form = pytest.mark.parametrize("factored", [False, True])


def of_float32(tree):
    return jax.tree.map(jnp.float32, tree)


def transformation(mechanism=SILENT, **options):
    return contrib.scale_then_privatize(
        dpadambc.privatize(mechanism, key=KEY), **dict(eps=EPS) | options
    )


def random_gradients(seed, size=BATCH, scale=1.0):
    """Norms over two orders of magnitude, coordinates over three."""
    rng, of_coordinates = np.random.default_rng(seed), np.random.default_rng(99)
    sizes = scale * np.exp(rng.normal(0, 1, size))

    def draw(p):
        wide = 10.0 ** of_coordinates.uniform(-2, 1, p.shape)
        own = sizes.reshape(-1, *[1] * p.ndim)
        return rng.normal(size=(size, *p.shape)) * wide * own

    return jax.tree.map(draw, PARAMS)


def sealed(gradients):
    size = len(jax.tree.leaves(gradients)[0])
    arrays = jax.tree.map(jnp.asarray, gradients)
    return dpadambc.as_per_example(arrays, is_padding_example=np.zeros(size, bool))


def guess(square, factored):
    """The outer product of means along each axis, over the power of the mean."""
    if not factored or square.ndim < 2:
        return square
    return np.outer(square.mean(1), square.mean(0)) / square.mean()


def looped(batches, draws, decay, z, factored):
    """The algorithm in plain NumPy, an example at a time; both of what comes out."""
    v = jax.tree.map(np.zeros_like, PARAMS)
    found = []
    for t, (batch, draw) in enumerate(zip(batches, draws, strict=True)):
        d = {
            k: np.sqrt(guess(v[k] / (1 - decay ** max(t, 1)) + EPS**2, factored))
            for k in v
        }
        divided = {k: z * C * draw[k] for k in v}
        for i in range(BATCH):
            g = {k: batch[k][i] / d[k] for k in v}
            norm = np.sqrt(sum(np.sum(x**2) for x in g.values()))
            divided = {k: divided[k] + g[k] / max(1, norm / C) for k in v}
        divided = {k: divided[k] / B for k in v}
        private = {k: d[k] * divided[k] for k in v}
        v = {k: decay * v[k] + (1 - decay) * private[k] ** 2 for k in v}
        found.append((private, divided))
    return found


@pytest.mark.slow
@every_form
def test_it_is_the_algorithm_over_several_steps(factored, x64, monkeypatch):
    drawn, steps, decay = common.drawn_later(monkeypatch), 6, 0.7
    params = jax.tree.map(jnp.asarray, PARAMS)
    batches = [random_gradients(seed) for seed in range(steps)]
    for at, scales_back in enumerate((True, False)):
        tx = transformation(
            MECHANISM, decay=decay, factored=factored, scales_back=scales_back
        )
        state, found = tx.init(params), []
        chex.clear_trace_counter()
        update = jax.jit(chex.assert_max_traces(tx.update, n=1))
        for batch in batches:
            private, state = update(sealed(batch), state, params)
            found.append(private)
        jax.effects_barrier()
        draws = [jax.tree.unflatten(jax.tree.structure(params), x) for x in drawn]
        drawn.clear()
        expected = looped(batches, draws, decay, 1.0, factored)
        for private, both in zip(found, expected, strict=True):
            chex.assert_trees_all_close(private, both[at], rtol=1e-10, atol=1e-15)


def in_state(tx, params, draw):
    """With a second moment that was drawn."""
    state = tx.init(params)
    nu = jax.tree.map(lambda v: jnp.asarray(draw(v.shape), v.dtype), state.nu)
    return state._replace(count=jnp.int32(3), nu=nu)


@pytest.mark.guarantee
@every_form
def test_the_noise_has_the_level_that_is_stated_in_each_coordinate(factored):
    """Of nothing, all is noise: of the mechanism's level times the divisor."""
    repeats = 4000
    params = of_float32(PARAMS)
    rng = np.random.default_rng(0)
    draw = lambda shape: 10.0 ** rng.uniform(-4, 2, shape)
    nothing = jax.tree.map(lambda p: np.zeros((1, *p.shape), np.float32), PARAMS)
    keys = jax.random.split(jax.random.key(1), repeats)

    def both(key, state):
        found = []
        for scales_back in (True, False):
            tx = contrib.scale_then_privatize(
                dpadambc.privatize(MECHANISM, key=key),
                eps=EPS,
                factored=factored,
                scales_back=scales_back,
            )
            own = state._replace(inner_state=tx.init(params).inner_state)
            found.append(tx.update(sealed(nothing), own, params)[0])
        return found

    state = in_state(transformation(factored=factored), params, draw)
    back, divided = jax.jit(jax.vmap(both, (0, None)))(keys, state)
    error = 5 / np.sqrt(2 * repeats)
    level = MECHANISM.noise_stddev
    for name in PARAMS:
        nu = state.nu[name]
        if isinstance(nu, OuterProduct):
            nu = [np.float64(v) / (1 - 0.999**3) + EPS**2 for v in nu.vectors]
            d = np.sqrt(
                nu[0] if len(nu) == 1 else np.outer(nu[0], nu[1] / nu[1].mean())
            )
        else:
            d = np.sqrt(np.float64(nu) / (1 - 0.999**3) + EPS**2)
        np.testing.assert_allclose(np.std(divided[name], 0), level, rtol=error)
        np.testing.assert_allclose(np.std(back[name], 0), level * d, rtol=error)


def of_this_step(gradients, nu):
    """Broken: divides by what the gradients of this step are."""
    materialized = dpadambc.materialize(gradients)
    factors = jax.tree.map(
        lambda g, v: 1 / (jnp.sqrt(jnp.square(g).mean(0)) + EPS), materialized, nu
    )
    return scale_examples(gradients, factors)


def moved(seed, hostile, level, factored, is_broken=False):
    """How far one more example moves what comes out before it is scaled back."""
    tx = transformation(factored=factored, scales_back=False)
    params = of_float32(PARAMS)
    rng = np.random.default_rng(seed)
    state = in_state(tx, params, lambda shape: level * rng.lognormal(0, 3, shape))
    gradients = random_gradients(seed)
    gradients = jax.tree.map(
        lambda g: np.float32(np.concatenate([g[:1] * hostile, g[1:]])), gradients
    )

    @jax.jit
    def release(gradients, is_padding):
        grads = dpadambc.as_per_example(gradients, is_padding_example=is_padding)
        if is_broken:
            grads = of_this_step(grads, params)
            inner = dpadambc.privatize(SILENT, key=KEY)
            return inner.update(grads, state.inner_state, params)[0]
        return tx.update(grads, state, params)[0]

    ends = [release(gradients, np.arange(BATCH) < n) for n in (0, 1)]
    return float(optax.tree.norm(optax.tree.sub(*ends))), ends


@pytest.mark.slow
@pytest.mark.guarantee
@every_form
@pytest.mark.parametrize("level", [0.0, 1e6])
@pytest.mark.parametrize("hostile", [1.0, 1e12, np.nan])
def test_one_example_moves_a_release_by_the_sensitivity(hostile, level, factored):
    with np.errstate(over="ignore", invalid="ignore"):
        distance, ends = moved(0, hostile, level, factored)
    assert distance <= C / B * (1 + 1e-4)
    if not np.isfinite(hostile):
        chex.assert_trees_all_equal(*ends)


@pytest.mark.guarantee
def test_what_dividing_by_the_gradients_of_the_step_does():
    """Negative control: one example divides all the others, who vanish with it."""
    distance, _ = moved(0, 1e12, 1.0, False, is_broken=True)
    assert distance > 1.5 * C / B


@pytest.mark.guarantee
@pytest.mark.usefixtures("without_nonces")
def test_what_is_kept_is_a_function_of_private_gradients_alone():
    """Two data sets with the same clipped sums leave the same state."""
    tx, params = transformation(MECHANISM, factored=True), of_float32(PARAMS)
    update = jax.jit(tx.update)
    ends = []
    for scale in (1e4, 1e6):
        state = tx.init(params)
        for seed in range(3):
            grads = sealed(of_float32(random_gradients(seed, scale=scale)))
            private, state = update(grads, state, params)
        ends.append(optax.tree.unwrap_random_key_data((private, state)))
    chex.assert_trees_all_close(*ends, rtol=1e-3)
    assert all(map(np.any, jax.tree.leaves(state.nu)))


@pytest.mark.slow
def test_factored_gradients_stay_so_and_are_divided_as_arrays_are():
    def loss_fn(params, ids, x):
        rows = params["table"][ids]
        return jnp.sum(jnp.tanh(jnp.sin(x + rows) @ params["w"]) ** 2)

    params = {"table": jnp.ones((20, 8)), "w": jnp.ones((8, 12)) / 8}
    x = jax.random.normal(KEY, (BATCH, 3, 8))
    ids = jax.random.randint(KEY, (BATCH, 3), 0, 20)
    seen, private = {}, dpadambc.privatize(SILENT, key=KEY)

    def spy(updates, state, params=None, **extra_args):
        leaves = jax.tree.leaves(updates, is_leaf=is_per_example)
        seen[tuple(leaf.rule for leaf in leaves)] = True
        return private.update(updates, state, params, **extra_args)

    inner = optax.GradientTransformationExtraArgs(private.init, spy)
    found = []
    for method in ("factored", "vmap"):
        tx = contrib.scale_then_privatize(inner, eps=EPS, factored=True)
        draw = lambda shape: np.random.default_rng(0).lognormal(0, 2, shape)
        grads = dpadambc.per_example_grad(loss_fn, method=method)(
            params, ids, x, is_padding_example=np.arange(BATCH) == 1
        )
        found.append(jax.jit(tx.update)(grads, in_state(tx, params, draw), params)[0])
    chex.assert_trees_all_close(*found, rtol=1e-4, atol=1e-7)
    assert ("lookup", "gram") in seen


@pytest.mark.guarantee
def test_wrong_use_is_refused():
    params = of_float32(PARAMS)
    clip = dpadambc.clip_per_example(C, normalize_by=B)
    for inner in (clip, optax.identity(), optax.chain(clip, optax.trace(0.9))):
        with pytest.raises(ValueError, match="private_gradient"):
            contrib.scale_then_privatize(inner, eps=EPS).init(params)
    with pytest.raises(ValueError, match="eps"):
        transformation(eps=0.0)
    with pytest.raises(ValueError, match="decay"):
        transformation(decay=1.0)
    tx = transformation()
    state, grads = tx.init(params), sealed(of_float32(random_gradients(0)))
    with pytest.raises(TypeError):  # of this step's gradients nothing can be made
        jax.tree.map(lambda g: g / jnp.sqrt(jnp.square(g).mean(0)), grads)
    with pytest.raises(TypeError, match="gradient"):
        tx.update(of_float32(random_gradients(0)), state, params)
    unmasked = dpadambc.as_per_example(of_float32(random_gradients(0)))
    with pytest.raises(ValueError, match="is_padding_example"):
        tx.update(unmasked, state, params)
    with pytest.raises(ValueError, match="params"):
        optax.masked(tx, {"b": False, "s": True, "w": True}).init(params)
    with pytest.raises(ValueError, match="optimizer"):
        training.fit(
            lambda w, x: w @ x,
            jnp.zeros(3),
            (jnp.ones((40, 3)),),
            MECHANISM,
            optax.chain(tx, optax.sgd(0.1)),
            key=KEY,
            target_delta=1e-5,
        )

"""The memory of gradients that are factored, and of those that are formed."""

import jax
import jax.numpy as jnp
import numpy as np

import dpadambc

MATERIALIZED = "materialized: a sum of different forms"


def temporaries(fun, *args):
    return jax.jit(fun).lower(*args).compile().memory_analysis().temp_size_in_bytes


def private(loss_fn, **options):
    return dpadambc.clipped_grad(loss_fn, l2_clip_norm=1.0, normalize_by=1.0, **options)


def ordinary(loss_fn):
    of_batch = lambda p, x: jax.vmap(loss_fn, (None, 0))(p, x).mean()
    return jax.grad(of_batch)


def rules(loss_fn, params, x):
    grads = jax.eval_shape(dpadambc.per_example_grad(loss_fn), params, x)
    return {name: grad.rule for name, grad in grads.items()}


TOKENS, CHANNELS = 64, 16
MIXER = {
    "tokens": jnp.ones((TOKENS, 1024)),
    "tokens out": jnp.ones((1024, TOKENS)),
    "channels": jnp.ones((CHANNELS, 64)),
    "channels out": jnp.ones((64, CHANNELS)),
    "bias": jnp.ones(1024),
    "scale": jnp.ones(CHANNELS),
}


def mixer(p, x):
    """One layer of an MLP-Mixer: two kernels multiply transposed activations."""
    norm = lambda x: jax.nn.standardize(x, axis=-1, epsilon=1e-5) * p["scale"][None]
    hidden = jax.nn.gelu(norm(x).T @ p["tokens"] + p["bias"][None])
    x = x + (hidden @ p["tokens out"]).T
    x = x + jax.nn.gelu(norm(x) @ p["channels"]) @ p["channels out"]
    return jnp.sum(jnp.sin(x))


def test_a_mixer_takes_the_memory_of_the_ordinary_gradient():
    x = jnp.ones((16, TOKENS, CHANNELS))
    found = rules(mixer, MIXER, x)
    of_kernels = {found[name] for name, p in MIXER.items() if p.ndim > 1}
    assert of_kernels == {"gram", "direct"}
    limit = 1.3 * temporaries(ordinary(mixer), MIXER, x)
    assert temporaries(private(mixer), MIXER, x) <= limit
    assert temporaries(private(mixer, method="vmap"), MIXER, x) > limit  # control


def test_a_penalty_takes_no_more_memory_than_gradients_of_each_example():
    def loss_fn(p, x):
        return jnp.sum(jnp.sin(jnp.tanh(x @ p["a"]) @ p["b"])) + jnp.sum(p["a"] ** 2)

    params = {"a": jnp.ones((64, 128)), "b": jnp.ones((128, 64))}
    x = jnp.ones((32, 64))
    assert rules(loss_fn, params, x) == {"a": MATERIALIZED, "b": "outer product"}
    of_all = temporaries(private(loss_fn, method="vmap"), params, x)
    assert temporaries(private(loss_fn), params, x) <= of_all
    few = temporaries(private(loss_fn, microbatch_size=8), params, x)
    assert few <= of_all / 2


def test_no_example_adds_more_than_the_clip_norm_where_data_cancel_a_penalty():
    spread = np.random.default_rng(1).uniform(-1e-3, 1e-3, (64, 1, 1))
    for scale in (1e2, 1e4, 1e6, 1e8):
        a, g = jnp.full((8, 48), 1.37 * scale), jnp.full((8, 56), 1.61)
        w = -jnp.einsum("ti,tj->ij", a, g)

        def loss_fn(p, a, g, w=w):
            return jnp.einsum("ti,ij,tj->", a, p, g) + jnp.sum(p * w)

        def contribution(a, g, loss_fn=loss_fn):
            args = jnp.zeros((48, 56)), a[None], g[None]
            return dpadambc.materialize(private(loss_fn)(*args))

        several = a[None] * jnp.asarray(1 + spread, a.dtype)
        sums = jax.jit(jax.vmap(contribution, (0, None)))(several, g)
        norms = np.linalg.norm(np.asarray(sums, float).reshape(len(sums), -1), axis=1)
        assert 0.9 < norms.max() <= 1 + 1e-6

"""The layers that the models share; each takes any batch axes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> jax.Array:
    """Parameters or inputs at random."""
    return jnp.asarray(rng.normal(scale=scale, size=shape), jnp.float32)


def integers(rng: np.random.Generator, limit: int, *shape: int) -> jax.Array:
    """Labels or tokens at random, below the limit."""
    return jnp.asarray(rng.integers(limit, size=shape), jnp.int32)


def init_dense(
    rng: np.random.Generator, inputs: int, outputs: int, bias: bool = True
) -> Any:
    kernel = normal(rng, inputs, outputs, scale=inputs**-0.5)
    return {"kernel": kernel} | ({"bias": jnp.zeros(outputs)} if bias else {})


def dense(layer: Any, x: jax.Array) -> jax.Array:
    """With a low-rank update of the kernel, where there is one."""
    outputs = x @ layer["kernel"]
    if "a" in layer:
        outputs = outputs + (x @ layer["a"]) @ layer["b"]
    return outputs + layer["bias"] if "bias" in layer else outputs


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def init_layer_norm(width: int) -> Any:
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}


def layer_norm(layer: Any, x: jax.Array) -> jax.Array:
    x = jax.nn.standardize(x, axis=-1, epsilon=1e-5)
    return x * layer["scale"] + layer["bias"]


def attention(layer: Any, x: jax.Array, heads: int, is_seen: jax.Array) -> jax.Array:
    """Attention of every position to those that it sees, shape=(..., queries, keys)."""
    split = lambda x: x.reshape(*x.shape[:-1], heads, -1)
    query, key, value = (split(dense(layer[name], x)) for name in "qkv")
    scores = jnp.einsum("...qhd,...khd->...hqk", query, key) / query.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(is_seen, scores, -jnp.inf))
    mixed = jnp.einsum("...hqk,...khd->...qhd", weights, value)
    return dense(layer["o"], mixed.reshape(x.shape))


def causal(length: int) -> jax.Array:
    """Every position sees itself and those before it."""
    return jnp.tril(jnp.ones((length, length), bool))


def init_attention(rng: np.random.Generator, width: int, bias: bool = True) -> Any:
    return {name: init_dense(rng, width, width, bias) for name in "qkvo"}

"""Kernels used more than once, in parts, as LoRA, or in another precision."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.engine.factored_models.common import (
    FALLBACK,
    PLAIN,
    Model,
    normal,
    of_x,
    score,
    w_only,
    weights,
)


def twice(w, x):
    return score(jnp.tanh(x @ w) @ w)


def tied_views(w, x):
    return score(x[:3] @ w) + score(x[3:] @ w)


def there_and_back(w, x):
    return score(jnp.tanh(x @ w) @ w.T)


def split_kernel(w, x):
    value, gate = jnp.split(w, 2, axis=1)
    return score((x @ value) * jax.nn.sigmoid(x @ gate))


def indexed_layers(w, x):
    for i in range(w.shape[0]):
        x = jnp.tanh(x @ w[i])
    return score(x)


def joined_kernels(p, x):
    """As in flax.linen.OptimizedLSTMCell, which makes one product of four."""
    y = x @ jnp.concatenate([p["i"], p["f"], p["g"]], axis=1)
    i, f, g = jnp.split(y, 3, axis=1)
    return score(i * jnp.tanh(f) + jax.nn.sigmoid(g))


def stacked_kernels(p, x):
    return score(jnp.einsum("td,sde->ste", x, jnp.stack([p["v"], p["w"]])))


def lora(p, x, w):
    return score(x @ w + x @ p["a"] @ p["b"])


def merged_lora(p, x, w):
    return score(x @ (w + 0.5 * p["a"] @ p["b"]))


def merged_int8_lora(p, x, w):
    """As QLoRA: the kernel is frozen and quantized, with a scale for each column."""
    scale = jnp.abs(w).max(0, keepdims=True) / 127
    quantized = jax.lax.stop_gradient(jnp.round(w / scale).astype(jnp.int8))
    return merged_lora(p, x, quantized.astype(x.dtype) * scale)


def merged_stacked_lora(p, x, w):
    return score(jnp.einsum("td,lde->lte", x, w[None] + p["a"] @ p["b"]))


def merged_lora_by_scan(p, x, w):
    layer = lambda x, p: (jnp.tanh(x @ (w + p["a"] @ p["b"])), None)
    return score(jax.lax.scan(layer, x, p)[0])


def merged_transposed_lora(p, x, w):
    return score((w + p["b"].T @ p["a"].T).T @ x.T)


def lora_model(loss_fn, t, d, r, rule, lead=()):
    frozen = np.random.default_rng(1).normal(size=(d, d))
    rules = {"a": rule, "b": rule}
    closed_over = lambda p, x: loss_fn(p, x, frozen.astype(x.dtype))
    return of_x(closed_over, (t, d), rules, a=(*lead, d, r), b=(*lead, r, d))


def lora_with_frozen_argument(p, frozen, x):
    return lora(p, x, frozen)


def in_bfloat16(p, x):
    p, x = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (p, x))
    y = jnp.tanh(x @ p["w"]) + p["b"][None]
    return score(y.astype(jnp.float32) @ p["v"].astype(jnp.float32))


def in_float64(p, x):
    return score((jnp.tanh(x @ p["w"]) + p["b"][None]) @ p["v"])


def float32_weights(**shapes):
    draw = weights(**shapes)
    return lambda rng: jax.tree.map(lambda x: x.astype(jnp.float32), draw(rng))


SHARED = {
    "kernel used twice": w_only(twice, (20, 20), (3, 20), "gram"),
    "kernel used twice, many": w_only(twice, (4, 4), (9, 4), "direct"),
    "kernel of two views": w_only(tied_views, (20, 16), (6, 20), "gram"),
    "kernel there and back": w_only(there_and_back, (20, 16), (3, 20), "gram"),
    "kernel there and back, many": w_only(there_and_back, (4, 5), (9, 4), "direct"),
    "kernel of vectors and of one vector": w_only(
        lambda w, x: score(x @ w) + score(x[0] @ w), (20, 16), (3, 20), "gram"
    ),
    "split kernel": w_only(split_kernel, (20, 40), (3, 20), "gram"),
    "split kernel, many": w_only(split_kernel, (4, 6), (9, 4), "direct"),
    "part of a kernel": w_only(
        lambda w, x: score(x @ w[:, 2:18]), (20, 20), (3, 20), "gram"
    ),
    "strided part of a kernel": w_only(
        lambda w, x: score(x @ w[:, ::2]), (20, 40), (3, 20), FALLBACK
    ),
    "overlapping parts of a kernel": w_only(
        lambda w, x: score(x @ w[:, :16]) + score(x @ w[:, 4:]),
        (20, 20),
        (3, 20),
        FALLBACK,
    ),
    "layers by index": w_only(indexed_layers, (2, 20, 20), (3, 20), "gram"),
    "joined kernels": of_x(
        joined_kernels,
        (3, 20),
        dict.fromkeys("ifg", "gram"),
        **dict.fromkeys("ifg", (20, 20)),
    ),
    "stacked kernels": of_x(
        stacked_kernels, (3, 20), {"v": "gram", "w": "gram"}, v=(20, 20), w=(20, 20)
    ),
    "lora": lora_model(lora, 3, 40, 8, "gram"),
    "lora of many": lora_model(lora, 9, 8, 3, "direct"),
    "lora merged into the kernel": lora_model(merged_lora, 2, 20, 10, "gram"),
    "lora merged into the kernel, many": lora_model(merged_lora, 9, 8, 3, "direct"),
    "lora merged into an int8 kernel": lora_model(merged_int8_lora, 2, 20, 10, "gram"),
    "lora merged into the kernels of a scan": lora_model(
        merged_lora_by_scan, 2, 20, 10, "gram", lead=(2,)
    ),
    "lora merged into stacked kernels": lora_model(
        merged_stacked_lora, 2, 20, 10, "gram", lead=(2,)
    ),
    "lora merged on the other side": lora_model(
        merged_transposed_lora, 2, 20, 10, "gram"
    ),
    "lora with a frozen argument": Model(
        lora_with_frozen_argument,
        weights(a=(40, 8), b=(8, 40)),
        (normal(3, 40),),
        {"a": "gram", "b": "gram"},
        frozen=lambda rng: (jnp.asarray(rng.normal(size=(40, 40))),),
    ),
    "complex compute": w_only(
        lambda w, x: score(((x + 1j * jnp.cos(x)) @ (w + 0j)).real),
        (20, 20),
        (3, 20),
        PLAIN,
    ),
    "bfloat16 compute": Model(
        in_bfloat16,
        float32_weights(w=(20, 20), b=(20,), v=(20, 20)),
        (normal(3, 20),),
        {"w": "gram", "b": PLAIN, "v": "gram"},
        reference=in_float64,
        tolerance=0.05,
    ),
}

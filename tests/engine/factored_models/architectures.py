"""The layers of today's models, as they are written in plain JAX."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.engine.factored_models.common import (
    FALLBACK,
    PLAIN,
    Model,
    ids,
    of_x,
    score,
    w_only,
    weights,
)
from tests.engine.factored_models.convolutions import Conv
from tests.engine.factored_models.networks import NETWORKS


def heads(p, x, names="qkv"):
    return (jnp.einsum("td,dhk->thk", x, p[name]) for name in names)


def dot_product_attention(p, x):
    """Fewer heads of keys and values than of queries."""
    y = jax.nn.dot_product_attention(*heads(p, x), is_causal=True)
    return score(jnp.einsum("thk,hkd->td", y, p["o"]))


def softmax_attention(q, k, v):
    mixed = jax.nn.softmax(jnp.einsum("thk,shk->hts", q, k))
    return jnp.einsum("hts,shk->thk", mixed, v)


def repeated_heads(p, x):
    q, k, v = heads(p, x)
    y = softmax_attention(q, jnp.repeat(k, 2, axis=1), jnp.repeat(v, 2, axis=1))
    return score(jnp.einsum("thk,hkd->td", y, p["o"]))


def repeated_kernels(p, x):
    repeated = {name: jnp.repeat(p[name], 2, axis=1) for name in "kv"}
    y = softmax_attention(*heads({**p, **repeated}, x))
    return score(jnp.einsum("thk,hkd->td", y, p["o"]))


def fused_heads(p, x):
    q, k, v = jnp.moveaxis((x @ p["qkv"]).reshape(len(x), 3, 4, 5), 1, 0)
    return score(softmax_attention(q, k, v).reshape(len(x), 20) @ p["o"])


def flat_heads(p, x):
    """Kernels that are matrices, and are given their heads where they are used."""
    shaped = {name: p[name].reshape(20, 4, 5) for name in "qkv"}
    y = softmax_attention(*heads(shaped, x))
    return score(jnp.einsum("thk,hkd->td", y, p["o"].reshape(4, 5, 20)))


def rms_norm(p, x):
    x = x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    return score((x * (1 + p["scale"])[None]) @ p["w"])


def rotated(x):
    """Rotary embeddings, of pairs next to each other."""
    angles = jnp.arange(len(x))[:, None] * jnp.exp(-jnp.arange(x.shape[-1] // 2))[None]
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    even, odd = x[..., ::2], x[..., 1::2]
    pairs = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
    return pairs.reshape(x.shape)


def rotary_attention(p, x):
    q, k, v = heads(p, x)
    return score(softmax_attention(rotated(q), rotated(k), v))


def gated_mlp(p, x):
    return score((jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"])


def fused_gated_mlp(p, x):
    gate, up = jnp.moveaxis(jnp.einsum("td,dch->tch", x, p["up"]), 1, 0)
    return score((jax.nn.silu(gate) * up) @ p["down"])


def routes(p, x):
    """The weights of the two experts with the largest logits, and their numbers."""
    logits, experts = lax.top_k(x @ p["router"], 2)
    return jax.nn.softmax(logits), experts


def gates(p, x):
    weights, experts = routes(p, x)
    return (jax.nn.one_hot(experts, 4, dtype=x.dtype) * weights[..., None]).sum(1)


def all_experts(p, x):
    hidden = jax.nn.silu(jnp.einsum("td,edh->teh", x, p["up"]))
    return score(jnp.einsum("teh,ehd,te->td", hidden, p["down"], gates(p, x)))


def experts_by_scan(p, x):
    def expert(y, of_expert):
        up, down, gate = of_expert
        return y + jax.nn.silu(x @ up) @ down * gate[:, None], None

    of_experts = p["up"], p["down"], gates(p, x).T
    return score(lax.scan(expert, jnp.zeros_like(x), of_experts)[0])


def experts_with_capacity(p, x):
    """Two places for each expert; what does not fit is left out."""
    weights, experts = routes(p, x)
    chosen = jax.nn.one_hot(experts, 4, dtype=int)
    place = jnp.cumsum(chosen.reshape(-1, 4), 0).reshape(chosen.shape) * chosen - 1
    places = jax.nn.one_hot(place, 2, dtype=x.dtype)
    sent = jnp.einsum("td,tkec->ecd", x, places)
    hidden = jax.nn.silu(jnp.einsum("ecd,edh->ech", sent, p["up"]))
    combine = jnp.einsum("tkec,tk->tec", places, weights)
    return score(jnp.einsum("ech,ehd,tec->td", hidden, p["down"], combine))


def gathered_experts(p, x):
    """The kernels of each token's experts: the forward pass has a copy for each."""
    weights, experts = routes(p, x)
    hidden = jax.nn.silu(jnp.einsum("td,tkdh->tkh", x, p["up"][experts]))
    return score(jnp.einsum("tkh,tkhd,tk->td", hidden, p["down"][experts], weights))


def ragged_experts(p, x):
    """Tokens of one expert next to each other: JAX maps no such product."""
    expert = jnp.argmax(x @ lax.stop_gradient(p["router"]), -1)
    order, sizes = jnp.argsort(expert), jnp.bincount(expert, length=4)
    hidden = jax.nn.silu(lax.ragged_dot(x[order], p["up"], sizes.astype(jnp.int32)))
    y = lax.ragged_dot(hidden, p["down"], sizes.astype(jnp.int32))
    return score(
        y[jnp.argsort(order)] * jax.nn.softmax(x @ p["router"]).max(-1)[:, None]
    )


def ragged_experts_in_a_loop(p, x):
    """One of a traced length, whose derivative is not asked for."""
    sizes, frozen = jnp.array([1, 0, 2, 0]), lax.stop_gradient(p["up"])
    step = lambda up, y: jnp.tanh(lax.ragged_dot(y, up, sizes))
    is_small = lambda y: jnp.sum(y * y) < 1e3
    y = lax.while_loop(is_small, lambda y: 2 + y + step(frozen, y), x)
    layer = jax.checkpoint(lambda y, _: (step(p["up"], y), None))
    return score(lax.scan(layer, x + y, None, length=2)[0])


def albert(p, i):
    """A factorized table with a row of padding, tied to the output head."""
    table = p["table"].at[0].set(0.0) @ p["proj"]
    x = table[i]
    q, k, v = heads(p, x)
    x = x + jnp.einsum("thk,hkd->td", softmax_attention(q, k, v), p["o"])
    return -jnp.diagonal(jax.nn.log_softmax(x @ table.T)[:, i]).sum()


def lora_of_all(p, table, i):
    """Merged into a frozen table and head, and into a kernel."""
    table = table + p["table"]["a"] @ p["table"]["b"]
    h = jnp.tanh(table[i] @ (jnp.eye(20) + p["w"]["a"] @ p["w"]["b"]))
    return -jnp.diagonal(jax.nn.log_softmax(h @ table.T)[:, i]).sum()


def selective_state_space(p, x):
    """As Mamba has it, without the convolution."""
    u = x @ p["in"]
    step = jax.nn.softplus(u @ p["step"] + p["bias"][None])
    b, c = u @ p["b"], u @ p["c"]
    decay = jnp.exp(-step[..., None] * jnp.exp(p["a"])[None])
    drive = (step * u)[..., None] * b[:, None]
    combine = lambda x, y: (x[0] * y[0], x[1] * y[0] + y[1])
    state = lax.associative_scan(combine, (decay, drive))[1]
    y = jnp.einsum("tdn,tn->td", state, c) + u * p["skip"][None]
    return score((y * jax.nn.silu(x @ p["z"])) @ p["out"])


def standardized_conv(w, x):
    w = w - w.mean((0, 1, 2), keepdims=True)
    w = w / jnp.sqrt(w.var((0, 1, 2), keepdims=True) + 1e-5)
    return score(Conv()(w, x))


def chained_einsum(w, x):
    return score(jnp.einsum("ti,ij,jk->tk", x, w, w) + jnp.einsum("ti,ij->tj", x, w))


def bilinear(w, x):
    return score(
        jnp.einsum("ti,ij,tj->t", x, w, x) + jnp.einsum("ij,tj,ti->t", w, x, x)
    )


def low_rank(p, x):
    return score(jnp.tanh(x @ (p["u"] @ p["v"])) @ (p["v"].T @ p["u"].T))


def layers_by_index(w, x):
    """A kernel at an index that is traced."""
    return score(lax.fori_loop(0, 2, lambda i, x: jnp.tanh(x @ w[i]), x))


def decoder(p, i):
    """A small language model: all of the above in a scan over layers."""

    def layer(x, p):
        q, k, v = heads(p, x)
        y = softmax_attention(rotated(q), rotated(k), v)
        x = x + jnp.einsum("thk,hkd->td", y, p["o"])
        gate, up = x @ p["gate"], x @ p["up"]
        return x + (jax.nn.silu(gate) * up) @ p["down"], None

    x = lax.scan(jax.checkpoint(layer), p["table"][i], p["layers"])[0]
    return -jnp.diagonal(jax.nn.log_softmax(x @ p["table"].T)[:, i]).sum()


def gram(*names, **others):
    return dict.fromkeys(names, "gram") | others


ATTENTION = dict(q=(20, 4, 5), k=(20, 4, 5), v=(20, 4, 5), o=(4, 5, 20))
GROUPED = {**ATTENTION, "k": (20, 2, 5), "v": (20, 2, 5)}
ROTARY = dict.fromkeys("qkv", (20, 2, 10))
GATED = dict(gate=(20, 24), up=(20, 24), down=(24, 20))
EXPERTS = dict(router=(20, 4), up=(4, 20, 24), down=(4, 24, 20))
EXPERT_RULES = gram("router", "up", "down")


def decoder_model():
    layers = {**ATTENTION, **ROTARY, "o": (2, 10, 20), **GATED}
    rules = {f"layers/{name}": "gram" for name in layers}
    shapes = {name: (2, *shape) for name, shape in layers.items()}
    params = weights(table=(60, 20), layers=shapes)
    return Model(decoder, params, (ids(0, 4, 3),), rules | {"table": "gram + lookup"})


ARCHITECTURES = {
    "jax.nn.dot_product_attention": of_x(
        dot_product_attention, (3, 20), gram(*"qkvo"), **GROUPED
    ),
    "repeated heads": of_x(repeated_heads, (3, 20), gram(*"qkvo"), **GROUPED),
    "repeated heads of kernels": of_x(
        repeated_kernels, (3, 20), gram(*"qkvo"), **GROUPED
    ),
    "heads of one kernel": of_x(
        fused_heads, (3, 20), gram("qkv", "o"), qkv=(20, 60), o=(20, 20)
    ),
    "heads of reshaped kernels": of_x(
        flat_heads, (3, 20), gram(*"qkvo"), **dict.fromkeys("qkvo", (20, 20))
    ),
    "rms norm": of_x(
        rms_norm, (3, 20), {"scale": PLAIN, "w": "gram"}, scale=(20,), w=(20, 20)
    ),
    "rotary embeddings": of_x(rotary_attention, (3, 20), gram(*"qkv"), **ROTARY),
    "gated mlp": of_x(gated_mlp, (3, 20), gram("gate", "up", "down"), **GATED),
    "gated mlp of one kernel": of_x(
        fused_gated_mlp, (3, 20), gram("up", "down"), up=(20, 2, 24), down=(24, 20)
    ),
    "top experts of all": of_x(all_experts, (3, 20), EXPERT_RULES, **EXPERTS),
    "top experts by scan": of_x(experts_by_scan, (3, 20), EXPERT_RULES, **EXPERTS),
    "top experts with capacity": of_x(
        experts_with_capacity, (3, 20), EXPERT_RULES, **EXPERTS
    ),
    "top experts, gathered": of_x(
        gathered_experts,
        (3, 20),
        {"router": "gram", "up": "direct", "down": "direct"},
        **EXPERTS,
    ),
    "top expert, ragged": of_x(
        ragged_experts,
        (3, 20),
        {"router": "gram", "up": PLAIN, "down": PLAIN},
        **EXPERTS,
    ),
    "top expert, ragged, in loops": of_x(
        ragged_experts_in_a_loop, (3, 20), {"up": PLAIN}, up=(4, 20, 20)
    ),
    "albert": Model(
        albert,
        weights(table=(90, 8), proj=(8, 20), **ATTENTION),
        (ids(0, 5, 3),),
        gram(*"qkvo", table="gram + lookup", proj=PLAIN),
    ),
    "lora of table, head and kernel": Model(
        lora_of_all,
        weights(table=dict(a=(90, 8), b=(8, 20)), w=dict(a=(20, 9), b=(9, 20))),
        (ids(0, 5, 3),),
        {"table/a": "gram + lookup", "table/b": PLAIN} | gram("w/a", "w/b"),
        frozen=lambda rng: (jnp.asarray(rng.normal(size=(90, 20))),),
    ),
    "selective state space": of_x(
        selective_state_space,
        (3, 20),
        gram("in", "step", *"bcz", "out", bias=PLAIN, a=PLAIN, skip=PLAIN),
        **{"in": (20, 24), "step": (24, 24), "bias": (24,), "skip": (24,)},
        **{"a": (24, 4), "b": (24, 4), "c": (24, 4), "z": (20, 24), "out": (24, 20)},
    ),
    # Its gradient is that of the standardized kernel times a Jacobian of its entries.
    "weight standardization": w_only(
        standardized_conv, (3, 3, 8, 12), (2, 2, 8), PLAIN
    ),
    "einsum with a kernel twice": w_only(chained_einsum, (20, 20), (2, 20), "gram"),
    "bilinear einsum": w_only(bilinear, (20, 20), (3, 20), "gram"),
    "low rank": of_x(low_rank, (2, 40), gram("u", "v"), u=(40, 12), v=(12, 40)),
    # Steps may come back to a kernel, so their gradients are formed and added.
    "layers by a traced index": w_only(layers_by_index, (2, 20, 20), (3, 20), FALLBACK),
    "decoder": decoder_model(),
    **NETWORKS,
}

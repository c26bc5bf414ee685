"""Losses whose gradients are products of two factors."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.engine.factored_models.common import PLAIN, of_x, score, w_only


def mlp(p, x):
    return score(jnp.tanh(x @ p["w"] + p["b"]) @ p["v"])


def attention(p, x):
    q, k, v = (jnp.einsum("td,dhk->htk", x, p[name]) for name in "qkv")
    mixed = jax.nn.softmax(q @ k.mT / 2) @ v
    return score(jnp.einsum("htk,hkd->td", mixed, p["o"]))


def attention_model(t, d, rule):
    kernel = (d, 2, d // 2)
    shapes = dict(q=kernel, k=kernel, v=kernel, o=(2, d // 2, d))
    return of_x(attention, (t, d), dict.fromkeys("qkvo", rule), **shapes)


def experts(w, x):
    return score(jnp.einsum("etd,edp->etp", x, w))


def layer_norm(p, x):
    x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return score(x * p["scale"][None] + p["bias"][None])


PRODUCTS = {
    "mlp of one vector": of_x(
        mlp,
        (20,),
        {"w": "outer product", "b": PLAIN, "v": "outer product"},
        w=(20, 20),
        b=(20,),
        v=(20, 20),
    ),
    "mlp of few vectors": of_x(
        lambda p, x: score(jnp.tanh(x @ p["w"] + p["b"][None]) @ p["v"]),
        (3, 20),
        {"w": "gram", "b": PLAIN, "v": "gram"},
        w=(20, 16),
        b=(16,),
        v=(16, 20),
    ),
    "mlp of many vectors": of_x(
        lambda p, x: score(jnp.tanh(x @ p["w"] + p["b"][None]) @ p["v"]),
        (9, 4),
        {"w": "direct", "b": PLAIN, "v": "direct"},
        w=(4, 5),
        b=(5,),
        v=(5, 3),
    ),
    "kernel on the left": w_only(lambda w, x: score(w @ x), (20, 20), (20, 3), "gram"),
    "transposed kernel": w_only(lambda w, x: score(x @ w.T), (20, 16), (3, 16), "gram"),
    "batch dimensions": w_only(lambda w, x: score(x @ w), (20, 20), (2, 3, 20), "gram"),
    "batch dimensions behind": w_only(
        lambda w, x: score(jnp.einsum("dab,dp->apb", x, w)),
        (20, 20),
        (20, 2, 3),
        "gram",
    ),
    "reshaped kernel": w_only(
        lambda w, x: score(x @ w.reshape(20, 20)), (4, 5, 20), (3, 20), "gram"
    ),
    "reshaped kernel across factors": w_only(
        lambda w, x: score(x @ w.reshape(20, 20)), (400,), (3, 20), "gram"
    ),
    "reshaped kernel, there and back": w_only(
        lambda w, x: score(x @ w.T.reshape(8, 50).T.reshape(20, 20)),
        (20, 20),
        (3, 20),
        "gram",
    ),
    "reshaped kernel across factors, many": w_only(
        lambda w, x: score(x @ w.reshape(4, 5)), (20,), (9, 4), "direct"
    ),
    "reshaped kernel used in two shapes": w_only(
        lambda w, x: score(x @ w.reshape(20, 20)) + score(x @ w.reshape(20, 20).T),
        (400,),
        (2, 20),
        "gram",
    ),
    "layers reshaped in a scan": w_only(
        lambda w, x: score(
            lax.scan(lambda x, w: (jnp.tanh(x @ w.reshape(20, 20)), None), x, w)[0]
        ),
        (2, 400),
        (3, 20),
        "gram",
    ),
    "reshaped kernel shared by the steps of a scan": w_only(
        lambda w, x: score(
            lax.scan(
                lambda x, _: (jnp.tanh(x @ w.reshape(20, 20)), None), x, None, length=2
            )[0]
        ),
        (400,),
        (3, 20),
        "gram",
    ),
    "kernel on zeros": of_x(
        lambda p, x: score(jnp.zeros_like(x) @ p["w"] + x @ p["v"]),
        (3, 20),
        {"w": "gram", "v": "gram"},
        w=(20, 16),
        v=(20, 16),
    ),
    "attention of few": attention_model(3, 20, "gram"),
    "attention of many": attention_model(9, 4, "direct"),
    "experts of few": w_only(experts, (4, 20, 16), (4, 3, 20), "gram"),
    "experts of one": w_only(experts, (4, 20, 16), (4, 1, 20), "gram"),
    "experts of many": w_only(experts, (4, 5, 3), (4, 9, 5), "direct"),
    "gated experts": of_x(
        lambda p, x: score(
            jnp.einsum(
                "te,etp->tp",
                jax.nn.softmax(x @ p["gate"]),
                jnp.einsum("td,edp->etp", x, p["w"]),
            )
        ),
        (3, 20),
        {"gate": "gram", "w": "gram"},
        gate=(20, 4),
        w=(4, 20, 16),
    ),
    "layer norm": of_x(
        layer_norm, (3, 8), {"scale": PLAIN, "bias": PLAIN}, scale=(8,), bias=(8,)
    ),
    "scalar parameters": of_x(
        lambda p, x: score(p["a"] * x + p["b"] ** 2),
        (5,),
        {"a": PLAIN, "b": PLAIN},
        a=(),
        b=(),
    ),
    "parameters without gradient": of_x(
        lambda p, x: score(x @ p["w"] + lax.stop_gradient(p["b"][None])),
        (3, 20),
        {"w": "gram", "b": "no gradient", "unused": "no gradient"},
        w=(20, 20),
        b=(20,),
        unused=(2, 3),
    ),
}

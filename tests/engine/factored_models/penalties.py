"""Kernels that are functions of parameters, and penalties: with arrays all share."""

import jax
import jax.numpy as jnp
import numpy as np
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

FROZEN = jnp.asarray(np.random.default_rng(2).normal(size=(30, 20)))


def squares(p):
    return 0.1 * sum(jnp.sum(w**2) for w in jax.tree.leaves(p))


def unit(w, axes):
    """Of norm one along some axes."""
    return w / jnp.sqrt(jnp.sum(w**2, axes, keepdims=True) + 1e-6)


def standardized(w, axes):
    w = w - w.mean(axes, keepdims=True)
    return w / jnp.sqrt(w.var(axes, keepdims=True) + 1e-5)


def dense(kernel):
    return lambda p, x: score(x @ kernel(p))


def elastic_net(w, x):
    return score(x @ w) + 0.1 * jnp.sum(w**2) + 0.2 * jnp.sum(jnp.abs(w))


def group_lasso(w, x):
    return score(x @ w) + 0.3 * jnp.sum(jnp.linalg.norm(w, axis=1))


def weighted_penalty(w, x):
    """A loss that each example has a weight of its own for, penalty included."""
    return jnp.square(x[0, 0]) * (score(x @ w) + 0.1 * jnp.sum(w**2))


def tied(w, x):
    return score(jnp.tanh(x @ w) @ w.T) + 0.1 * jnp.sum(w**4)


def decayed_head(p, i):
    """A table, its tied head, and their penalty."""
    logits = p["table"][i] @ p["table"].T
    return -jnp.diagonal(jax.nn.log_softmax(logits)[:, i]).sum() + squares(p)


def layers(p, x):
    step = lambda x, w: (jnp.tanh(x @ w), None)
    return score(lax.scan(step, x, p["w"])[0]) + squares(p)


def penalty_of_each_layer(p, x):
    step = lambda x, w: (jnp.tanh(x @ w), jnp.sum(w**2))
    x, sizes = lax.scan(step, x, p["w"])
    return score(x) + 0.1 * jnp.sum(sizes)


def normalized_layers(p, x):
    step = lambda x, p: (jnp.tanh(x @ (unit(p["w"], 0) * p["g"][None])), None)
    return score(lax.scan(step, x, p)[0])


def penalty_of_each_step(w, x):
    step = lambda carry, x: ((jnp.tanh(carry[0] @ w + x), carry[1] + squares(w)), None)
    state, penalty = lax.scan(step, (x[0], 0.0), x)[0]
    return score(state) + penalty


def recurrent(w, x):
    kernel = unit(w, 0)
    step = lambda state, x: (jnp.tanh(state @ kernel + x), None)
    return score(lax.scan(step, x[0], x)[0])


def recurrent_unit(w, x):
    """Each step has an array of its own, which it adds."""
    step = lambda state, x: (jnp.tanh(state @ unit(w, 0) + x), None)
    return score(lax.scan(step, x[0], x)[0])


def heads(p, x):
    kernel = unit(p["w"], 0) * p["g"][None]
    return score(jnp.einsum("ti,ihk->thk", x, kernel))


def reshaped(w, x):
    kernel = unit(w, 0).reshape(20, 4, 6)
    return score(jnp.einsum("ti,ihk->thk", x, kernel)) + squares(w)


def spectral_norm(w, x):
    """By a power iteration that is not differentiated."""
    v = w.T @ jnp.ones(20)
    u = w @ v / jnp.linalg.norm(w @ v)
    v = w.T @ u / jnp.linalg.norm(w.T @ u)
    u, v = map(lax.stop_gradient, (u, v))
    return score(x @ (w / (u @ w @ v)))


def dora(p, x):
    kernel = FROZEN + p["a"] @ p["b"]
    return score(x @ (p["m"][None] * kernel / jnp.linalg.norm(kernel, axis=0)[None]))


def rematerialized(p, x):
    layer = jax.checkpoint(lambda w, x: jnp.tanh(x @ unit(w, 0)))
    return score(layer(p["w"], x) @ p["v"]) + squares(p)


def in_a_branch(w, x):
    """In a branch nothing is shared: another branch has zeros in its place."""
    both = (lambda x: score(x @ w) + squares(w)), (lambda x: score(jnp.cos(x) @ w))
    return lax.cond(x[0, 0] > 0, *both, x)


def convolved(kernel, penalty=False, **options):
    def loss_fn(p, x):
        loss = score(Conv(**options)(kernel(p), x))
        return loss + squares(p) if penalty else loss

    return loss_fn


def of_ids(loss_fn, rule, **shapes):
    return Model(loss_fn, weights(**shapes), (ids(0, 6, 3),), rule)


SQUARE, MANY, FEW = (20, 20), (30, 20), (2, 20)
SHARED = "gram + shared"
TAPS = (3, 3, 8, 12)
CONV = "convolution: gram"

PENALTIES = {
    "elastic net": w_only(elastic_net, SQUARE, FEW, SHARED),
    "group lasso": w_only(group_lasso, SQUARE, FEW, SHARED),
    "penalty weighted by the example": w_only(weighted_penalty, SQUARE, FEW, SHARED),
    "penalty of a sum": w_only(
        lambda w, x: score(x @ w) + 0.1 * jnp.sum(w), SQUARE, FEW, SHARED
    ),
    "penalty of orthogonality": w_only(
        lambda w, x: score(x @ w) + jnp.sum((w.T @ w - jnp.eye(20)) ** 2),
        SQUARE,
        FEW,
        SHARED,
    ),
    "penalty of a part": w_only(
        lambda w, x: score(x @ w) + jnp.sum(w[:, :7] ** 2), SQUARE, FEW, SHARED
    ),
    "penalty of all, of which a part is used": w_only(
        lambda w, x: score(x @ w[:, :18]) + squares(w), SQUARE, FEW, SHARED
    ),
    "penalty alone": of_x(
        lambda p, x: score(x @ p["w"]) + jnp.sum(p["v"] ** 2),
        FEW,
        {"w": "gram", "v": "shared"},
        w=SQUARE,
        v=SQUARE,
    ),
    "penalty of a kernel and a bias": of_x(
        lambda p, x: score(x @ p["w"] + p["b"][None]) + squares(p),
        FEW,
        {"w": SHARED, "b": PLAIN},
        w=SQUARE,
        b=(20,),
    ),
    "penalty of many": w_only(
        lambda w, x: score(x @ w) + squares(w), (4, 5), (9, 4), "direct"
    ),
    "penalty of a kernel there and back": w_only(tied, SQUARE, FEW, SHARED),
    "penalty of a table": of_ids(
        lambda p, i: score(p["t"][i]) + squares(p), {"t": "lookup + shared"}, t=(30, 8)
    ),
    "penalty of a tied head": of_ids(
        decayed_head, {"table": "gram + lookup + shared"}, table=(40, 20)
    ),
    "penalty of layers": w_only(
        lambda w, x: layers({"w": w}, x), (2, *SQUARE), FEW, SHARED
    ),
    "penalty of each layer": of_x(
        penalty_of_each_layer, FEW, {"w": SHARED}, w=(2, *SQUARE)
    ),
    "penalty of each step": w_only(penalty_of_each_step, SQUARE, FEW, FALLBACK),
    "penalty in a branch": w_only(in_a_branch, SQUARE, FEW, FALLBACK),
    "penalty of taps": of_x(
        convolved(lambda p: p["w"], penalty=True),
        (2, 2, 8),
        {"w": CONV + " + shared"},
        w=TAPS,
    ),
    "columns scaled": of_x(
        dense(lambda p: p["w"] * p["s"][None]),
        FEW,
        {"w": "gram", "s": PLAIN},
        w=SQUARE,
        s=(20,),
    ),
    "rows scaled": of_x(
        dense(lambda p: p["w"] * p["s"][:, None]),
        FEW,
        {"w": "gram", "s": PLAIN},
        w=SQUARE,
        s=(20,),
    ),
    "columns of a frozen kernel scaled": of_x(
        dense(lambda p: FROZEN[:20] * p["s"][None]), FEW, {"s": PLAIN}, s=(20,)
    ),
    "rows of a table scaled": of_ids(
        lambda p, i: score((p["t"] * p["s"][:, None])[i]),
        {"t": "lookup", "s": "lookup"},
        t=(30, 8),
        s=(30,),
    ),
    "unit rows of a table": of_ids(
        lambda p, i: score(unit(p["t"], 1)[i]), {"t": "lookup"}, t=(30, 8)
    ),
    "unit norm of a kernel": w_only(
        lambda w, x: score(x @ (w / jnp.linalg.norm(w))), SQUARE, FEW, SHARED
    ),
    "unit rows": w_only(lambda w, x: score(x @ unit(w, 1)), SQUARE, FEW, SHARED),
    "unit columns of heads": of_x(
        heads, FEW, {"w": SHARED, "g": PLAIN}, w=(20, 4, 5), g=(4, 5)
    ),
    "unit heads": w_only(
        lambda w, x: score(jnp.einsum("ti,ihk->thk", x, unit(w, (0, 2)))),
        (20, 4, 5),
        FEW,
        SHARED,
    ),
    "unit columns, reshaped": w_only(reshaped, (20, 24), FEW, SHARED),
    "unit columns of layers": of_x(
        normalized_layers, FEW, {"w": SHARED, "g": PLAIN}, w=(2, *SQUARE), g=(2, 20)
    ),
    "unit columns of a recurrent kernel": w_only(recurrent, SQUARE, FEW, SHARED),
    "unit columns in each step": w_only(recurrent_unit, SQUARE, FEW, FALLBACK),
    "unit columns, rematerialized": of_x(
        rematerialized, FEW, {"w": SHARED, "v": SHARED}, w=SQUARE, v=SQUARE
    ),
    "spectral norm": w_only(spectral_norm, SQUARE, FEW, "gram"),
    "standardized columns": w_only(
        lambda w, x: score(x @ standardized(w, 0)), SQUARE, FEW, SHARED
    ),
    "columns standardized twice": w_only(
        lambda w, x: score(x @ standardized(standardized(w, 0), (0, 1))),
        SQUARE,
        FEW,
        SHARED,
    ),
    "dora": of_x(
        dora,
        (1, 30),
        {"a": "direct", "b": SHARED, "m": PLAIN},
        a=(30, 2),
        b=(2, 20),
        m=(20,),
    ),
    "unit taps": of_x(
        convolved(lambda p: unit(p["w"], (0, 1, 2)) * p["g"][None, None, None]),
        (2, 2, 8),
        {"w": CONV + " + shared", "g": PLAIN},
        w=TAPS,
        g=(12,),
    ),
    "unit taps of groups": of_x(
        convolved(
            lambda p: unit(p["w"], (0, 1, 2)) * p["g"][None, None, None], groups=2
        ),
        (2, 2, 64),
        {"w": CONV + " + shared", "g": PLAIN},
        w=(3, 3, 32, 48),
        g=(48,),
    ),
    "taps scaled by input": of_x(
        convolved(lambda p: p["w"] * p["s"][None, None, :, None]),
        (2, 2, 8),
        {"w": CONV, "s": PLAIN},
        w=TAPS,
        s=(8,),
    ),
    "taps scaled each": of_x(
        convolved(lambda p: p["w"] * p["s"][..., None, None]),
        (2, 2, 8),
        {"w": PLAIN, "s": FALLBACK},
        w=TAPS,
        s=(3, 3),
    ),
}

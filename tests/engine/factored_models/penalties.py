"""Penalties in the loss, and kernels that are functions of parameters: all formed."""

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


def learned_weights(p, x):
    """Two tasks, each with a learned log variance (Kendall et al., 2018)."""
    y = jnp.tanh(x @ p["w"])
    losses = score(y), jnp.sum(y**2)
    return (
        sum(x * jnp.exp(-s) for x, s in zip(losses, p["s"], strict=True)) + p["s"].sum()
    )


def elastic_net(w, x):
    return score(x @ w) + 0.1 * jnp.sum(w**2) + 0.2 * jnp.sum(jnp.abs(w))


def weighted_penalty(w, x):
    """A loss that each example has a weight of its own for, penalty included."""
    return jnp.square(x[0, 0]) * (score(x @ w) + 0.1 * jnp.sum(w**2))


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


def dora(p, x):
    kernel = FROZEN + p["a"] @ p["b"]
    return score(x @ (p["m"][None] * kernel / jnp.linalg.norm(kernel, axis=0)[None]))


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


SQUARE, FEW = (20, 20), (2, 20)
TAPS = (3, 3, 8, 12)

PENALTIES = {
    "learned weights of losses": of_x(
        learned_weights,
        (20,),
        {"w": "outer product", "s": FALLBACK},
        w=(20, 30),
        s=(2,),
    ),
    "elastic net": w_only(elastic_net, SQUARE, FEW, FALLBACK),
    "penalty weighted by the example": w_only(weighted_penalty, SQUARE, FEW, FALLBACK),
    "penalty of a sum": w_only(
        lambda w, x: score(x @ w) + jnp.sum(w), SQUARE, FEW, FALLBACK
    ),
    "penalty of a part": w_only(
        lambda w, x: score(x @ w) + jnp.sum(w[:, :7] ** 2), SQUARE, FEW, FALLBACK
    ),
    "penalty alone": of_x(
        lambda p, x: score(x @ p["w"]) + jnp.sum(p["v"] ** 2),
        FEW,
        {"w": "gram", "v": PLAIN},
        w=SQUARE,
        v=SQUARE,
    ),
    "penalty of a table": of_ids(
        lambda p, i: score(p["t"][i]) + squares(p), {"t": FALLBACK}, t=(30, 8)
    ),
    "sum of a table": of_ids(
        lambda p, i: score(p["t"][i]) + jnp.sum(p["t"]), {"t": FALLBACK}, t=(30, 8)
    ),
    "penalty of a tied head": of_ids(decayed_head, {"table": FALLBACK}, table=(40, 20)),
    "penalty of layers": w_only(
        lambda w, x: layers({"w": w}, x), (2, *SQUARE), FEW, FALLBACK
    ),
    "penalty of each layer": of_x(
        penalty_of_each_layer, FEW, {"w": FALLBACK}, w=(2, *SQUARE)
    ),
    "penalty of each step": w_only(penalty_of_each_step, SQUARE, FEW, FALLBACK),
    "penalty in a branch": w_only(in_a_branch, SQUARE, FEW, FALLBACK),
    "penalty of taps": of_x(
        convolved(lambda p: p["w"], penalty=True), (2, 2, 8), {"w": FALLBACK}, w=TAPS
    ),
    "columns scaled": of_x(
        dense(lambda p: p["w"] * p["s"][None]),
        FEW,
        {"w": PLAIN, "s": PLAIN},
        w=SQUARE,
        s=(20,),
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
    "unit columns of layers": of_x(
        normalized_layers, FEW, {"w": PLAIN, "g": PLAIN}, w=(2, *SQUARE), g=(2, 20)
    ),
    "standardized columns": w_only(
        lambda w, x: score(x @ standardized(w, 0)), SQUARE, FEW, PLAIN
    ),
    "dora": of_x(
        dora,
        (1, 30),
        {"a": PLAIN, "b": PLAIN, "m": PLAIN},
        a=(30, 2),
        b=(2, 20),
        m=(20,),
    ),
    "unit taps of groups": of_x(
        convolved(
            lambda p: unit(p["w"], (0, 1, 2)) * p["g"][None, None, None], groups=2
        ),
        (2, 2, 16),
        {"w": PLAIN, "g": PLAIN},
        w=TAPS,
        g=(12,),
    ),
}

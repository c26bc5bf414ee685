"""Losses whose gradients have no rule, and are formed."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from tests.engine.factored_models.common import (
    FALLBACK,
    PLAIN,
    Model,
    ids,
    normal,
    of_x,
    score,
    w_only,
    weights,
)


def scaled_loss(p, x, s):
    return s * score(x @ p["w"])


def weight_norm(p, x):
    w = p["w"] / jnp.linalg.norm(p["w"], axis=0, keepdims=True)
    return score(x @ (w * p["scale"][None]))


MASK = np.random.default_rng(0).random((20, 20)) < 0.5


def raveled(p, x):
    flat, unravel = ravel_pytree({"w": jnp.zeros((20, 20)), "b": jnp.zeros(20)})
    p = unravel(p["flat"].astype(flat.dtype))
    return score(x @ p["w"] + p["b"][None])


def chosen_expert(p, x, which):
    w = lax.dynamic_index_in_dim(p["w"], which, keepdims=False)
    return score(x @ w)


FALLBACKS = {
    "loss scaled by a number of the example": Model(
        scaled_loss,
        weights(w=(20, 20)),
        (normal(3, 20), normal()),
        {"w": "gram"},
    ),
    "kernel scaled by a number of the example": Model(
        lambda p, x, s: score(x @ (p["w"] * s)),
        weights(w=(20, 20)),
        (normal(3, 20), normal()),
        {"w": "gram"},
    ),
    "kernel scaled by a parameter": of_x(
        lambda p, x: score(x @ (p["w"] * p["scale"])),
        (3, 20),
        {"w": PLAIN, "scale": PLAIN},
        w=(20, 20),
        scale=(),
    ),
    "weight normalization": of_x(
        weight_norm,
        (3, 20),
        {"w": PLAIN, "scale": PLAIN},
        w=(20, 20),
        scale=(20,),
    ),
    "reversed kernel": w_only(
        lambda w, x: score(x @ w[::-1]), (20, 20), (3, 20), "gram"
    ),
    "symmetric kernel": w_only(
        lambda w, x: score(x @ (w + w.T)), (20, 20), (2, 20), "gram"
    ),
    "sums of a kernel": w_only(
        lambda w, x: score(x @ w.sum(1)), (20, 20), (3, 20), FALLBACK
    ),
    "masked kernel": w_only(
        lambda w, x: score(x @ (w * MASK)), (20, 20), (3, 20), PLAIN
    ),
    "function of a kernel": w_only(
        lambda w, x: score(x @ jnp.tanh(w)), (20, 20), (3, 20), PLAIN
    ),
    "penalty of a kernel": w_only(
        lambda w, x: score(x @ w) + 0.1 * jnp.sum(w**2),
        (20, 20),
        (3, 20),
        FALLBACK,
    ),
    "raveled parameters": w_only(lambda w, x: 0.0, (), (), PLAIN)._replace(
        loss_fn=raveled,
        params=weights(flat=(420,)),
        batch=(normal(3, 20),),
        rules={"flat": "reduce_sum + gram"},
    ),
    "kernel chosen by the example": Model(
        chosen_expert,
        weights(w=(4, 20, 20)),
        (normal(3, 20), ids(0, 4)),
        {"w": FALLBACK},
    ),
    "inverse of a kernel": w_only(
        lambda w, x: score(x @ jnp.linalg.inv(w)), (20, 20), (3, 20), PLAIN
    ),
}

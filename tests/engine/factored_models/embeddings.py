"""Embeddings, tied to an output head or not."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from tests.engine.factored_models.common import (
    FALLBACK,
    PLAIN,
    Model,
    ids,
    normal,
    score,
    weights,
)


def embedding(table, i):
    return score(jnp.tanh(table[i]).sum(0) * jnp.arange(1.0, table.shape[1] + 1))


def rows(take, table, i, low=0, high=None, rule="lookup"):
    """A model of rows of a table, taken at indices of shape i."""
    high = table[0] if high is None else high
    loss_fn = lambda p, i: score(jnp.sin(take(p["table"], i)) * 2)
    return Model(loss_fn, weights(table=table), (ids(low, high, *i),), {"table": rule})


def taken(**kwargs):
    return functools.partial(jnp.take, axis=0, **kwargs)


def language_model(p, i):
    """Tied to the output head."""
    h = jnp.tanh(p["table"][i] @ p["w"])
    return -jnp.diagonal(jax.nn.log_softmax(h @ p["table"].T)[:, i]).sum()


def head_first(p, i, x):
    """The table as a head of other data, and then as an embedding."""
    return score(p["table"] @ x.T) + score(p["table"][i])


def summed_logits(p, i):
    h = jnp.tanh(p["table"][i].mean(0))
    return score(p["table"] @ h)


def positions(p, i):
    h = p["token"][i] + p["position"][: len(i)]
    return score(jnp.tanh(h) @ p["w"])


def tokens_in_a_scan(take, p, i):
    step = lambda h, i: (jnp.tanh(take(p["table"], i) + h @ p["w"]), None)
    return score(lax.scan(step, jnp.zeros(p["w"].shape[0]), i)[0])


def token_model(loss_fn, rule):
    rules = {"table": rule, "w": "gram"}
    return Model(loss_fn, weights(table=(40, 20), w=(20, 20)), (ids(0, 3, 4),), rules)


EMBEDDINGS = {
    "embedding": rows(lambda t, i: t[i], (40, 6), (4,)),
    "embedding of repeated ids": rows(lambda t, i: t[i], (40, 6), (4,), high=2),
    "embedding of one id, repeated": rows(lambda t, i: t[i], (40, 6), (4,), 3, 4),
    "embedding longer than wide": rows(lambda t, i: t[i], (60, 3), (8,), high=4),
    "embedding of many": rows(lambda t, i: t[i], (7, 3), (9,), rule="direct"),
    "embedding of a grid": rows(lambda t, i: t[i], (60, 6), (2, 3), high=4),
    "negative ids": rows(lambda t, i: t[i], (40, 6), (5,), -40),
    "ids out of range": rows(lambda t, i: t[i], (8, 20), (5,), -12, 12),
    "ids out of range, fill": rows(
        taken(mode="fill", fill_value=0.5), (8, 20), (5,), -12, 12
    ),
    "ids out of range, clip": rows(taken(mode="clip"), (8, 20), (5,), -12, 12),
    "ids out of range, wrap": rows(taken(mode="wrap"), (8, 20), (5,), -12, 12),
    "embedding along the last axis": rows(lambda t, i: t[:, i], (6, 40), (4,), high=40),
    "embedding of matrices": rows(lambda t, i: t[i], (30, 2, 3), (4,)),
    "embedding by one-hot": rows(
        lambda t, i: jax.nn.one_hot(i, 40, dtype=t.dtype) @ t,
        (40, 6),
        (1,),
        rule="gram",
    ),
    "pairs of ids": rows(lambda t, i: t[i[:, 0], i[:, 1]], (6, 6, 8), (4, 2), high=3),
    "pairs of ids around an axis": rows(
        lambda t, i: t[i[:, 0], :, i[:, 1]], (6, 8, 7), (4, 2), -7, 9
    ),
    "pairs of ids out of range, fill": rows(
        lambda t, i: t.at[i[:, 0], i[:, 1]].get(mode="fill", fill_value=0.5),
        (6, 7, 8),
        (4, 2),
        -7,
        9,
    ),
    "ids of single numbers": rows(
        lambda t, i: t[i[:, 0], i[:, 1]], (6, 7), (5, 2), high=3
    ),
    "pairs of small integers": rows(
        lambda t, i: t[tuple(i.astype(jnp.uint8).T)], (20, 20, 3), (4, 2)
    ),
    "token and position": Model(
        positions,
        weights(token=(40, 20), position=(8, 20), w=(20, 20)),
        (ids(0, 40, 3),),
        {"token": "lookup", "position": PLAIN, "w": "gram"},
    ),
    "tied head": Model(
        language_model,
        weights(table=(40, 20), w=(20, 20)),
        (ids(0, 4, 5),),
        {"table": "gram + lookup", "w": "gram"},
    ),
    "tied head, many": Model(
        language_model,
        weights(table=(6, 3), w=(3, 3)),
        (ids(0, 4, 9),),
        {"table": "direct", "w": "direct"},
    ),
    "tied head, many for the head alone": Model(
        language_model,
        weights(table=(9, 6), w=(6, 6)),
        (ids(0, 4, 4),),
        {"table": "direct", "w": "direct"},
    ),
    "tied head first": Model(
        head_first,
        weights(table=(40, 20)),
        (ids(0, 4, 5), normal(3, 20)),
        {"table": "lookup + gram"},
    ),
    "tied head of one vector": Model(
        summed_logits,
        weights(table=(40, 20)),
        (ids(0, 4, 5),),
        {"table": "outer product + lookup"},
    ),
    "embedding in a scan": token_model(
        functools.partial(tokens_in_a_scan, taken()), "lookup"
    ),
    "embedding in a scan by one index": token_model(
        functools.partial(tokens_in_a_scan, lambda table, i: table[i]), "lookup"
    ),
    "embedding of one index": rows(lambda t, i: t[i], (40, 6), ()),
    "embedding of one index, out of range": rows(
        lambda t, i: t[i], (8, 6), (), -12, 12
    ),
    "column of one index": rows(lambda t, i: t[:, i], (6, 40), (), high=40),
    "number of one index": rows(lambda t, i: t[i], (40,), (), high=40),
    "successive rows from one index": rows(
        lambda t, i: lax.dynamic_slice_in_dim(t, i, 5), (40, 6), (), -3, 43
    ),
    "box from two indices": rows(
        lambda t, i: lax.dynamic_slice(t, i, (5, 3)), (40, 6), (2,), rule=FALLBACK
    ),
    "embedding under vmap": rows(
        lambda t, i: jax.vmap(lambda i: t[i])(i), (40, 6), (4,), high=3
    ),
    "embedding under vmap, out of range": rows(
        lambda t, i: jax.vmap(lambda i: t[i])(i), (8, 20), (5,), -12, 12
    ),
    "embedding of reshaped numbers": rows(
        lambda t, i: t.reshape(40, 6)[i], (240,), (4,), high=3
    ),
    "one-hot under vmap": rows(
        lambda t, i: jax.vmap(lambda i: jax.nn.one_hot(i, 40, dtype=t.dtype) @ t)(i),
        (40, 6),
        (1,),
        high=40,
        rule="gram",
    ),
}

"""Embeddings, tied to an output head or not."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import sparse

from tests.engine.factored_models.common import (
    FALLBACK,
    PLAIN,
    Model,
    both,
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


def of_table(made, rules, count=4, /, **shapes):
    """A model of rows of a table that is a function of parameters."""
    loss_fn = lambda p, i: score(jnp.sin(made(p)[i]) * 2)
    return Model(loss_fn, weights(**shapes), (ids(0, 3, count),), rules)


def changed(change, shape=(40, 6), rule="lookup", **kwargs):
    """Rows of a table after a change that depends on no parameter."""
    return rows(lambda t, i: change(t)[i], shape, (4,), high=5, rule=rule, **kwargs)


def merged(p):
    """A low-rank update of a table that is frozen."""
    rank, frozen = p["b"].shape[0], jnp.outer(jnp.arange(40.0), jnp.arange(20.0))
    return jnp.sin(frozen) + p["a"] @ p["b"] / rank


def merged_in_a_scan(p, i):
    table = merged(p)
    step = lambda h, i: (jnp.tanh(h + table[i]), None)
    return score(lax.scan(step, jnp.zeros(20), i)[0])


def tied_to(table, p, i):
    """A table that is used twice, or computed twice where it is a function."""
    h = jnp.tanh(table(p)[i] @ p["w"])
    return -jnp.diagonal(jax.nn.log_softmax(h @ table(p).T)[:, i]).sum()


def tied_once(table, p, i):
    made = table(p)
    return tied_to(lambda _: made, p, i)


def factorized(p):
    return p["table"] @ p["m"]


def held(t, rows: Any = 0):
    return t.at[rows].set(0.0)


def by_norm(t):
    return t / jnp.linalg.norm(t, axis=1, keepdims=True)


def below_zeros(p):
    return jnp.concatenate([jnp.zeros((1, 6)), p["table"]])


def stacked_tables(change_all, change_each, t, i):
    step = lambda y, t: (y + jnp.tanh(change_each(t)[i]), None)
    return lax.scan(step, jnp.zeros((4, 6)), change_all(t))[0]


def rows_to_keep(t):
    return (jnp.arange(len(t)) % 3 != 0)[:, None]


def sparse_rows(x, n_batch=0):
    """Sparse arrays of five numbers, three of them padding outside of the array."""

    def numbers(rng, n):
        return rng.normal(size=(n, *x[:n_batch], 5))

    def places(rng, n):
        at = [rng.integers(0, m, size=(n, *x[:n_batch], 5)) for m in x[n_batch:]]
        at = np.stack(at, -1)
        at[..., 3:, :] = x[n_batch:]
        return at

    return numbers, places


def of_sparse(loss_of, x, shapes, rules, n_batch=0):
    loss_fn = lambda p, x, at: loss_of(p, sparse.BCOO((x, at), shape=x_shape))
    x_shape = x
    return Model(loss_fn, weights(**shapes), sparse_rows(x, n_batch), rules)


def sparse_times(p, x):
    return score(jnp.tanh(x @ p["table"]))


FACTORIZED = dict(table=(40, 6), m=(6, 20))
LORA = dict(a=(40, 4), b=(4, 20))

# Tables that are functions of parameters.
MADE = {
    "lora merged into the table": of_table(merged, {"a": "lookup", "b": PLAIN}, **LORA),
    "lora of a table that is trained": of_table(
        lambda p: p["table"] + p["a"] @ p["b"],
        {"table": "lookup", "a": "lookup", "b": PLAIN},
        table=(40, 20),
        **LORA,
    ),
    "lora merged into a transposed table": of_table(
        lambda p: (p["b"].T @ p["a"].T).T, {"a": "lookup", "b": PLAIN}, **LORA
    ),
    "lora merged, read in a scan": Model(
        merged_in_a_scan,
        weights(**LORA),
        (ids(0, 5, 4),),
        {"a": "lookup", "b": PLAIN},
    ),
    "factorized table": of_table(
        factorized, {"table": "lookup", "m": "gram"}, **FACTORIZED
    ),
    "factorized table, to fewer": of_table(
        factorized, {"table": "lookup", "m": "gram"}, table=(40, 20), m=(20, 6)
    ),
    "factorized table, of a square": of_table(
        factorized, {"table": "lookup", "m": "gram"}, table=(40, 20), m=(20, 20)
    ),
    "factorized table of few rows": of_table(
        factorized, {"table": PLAIN, "m": "gram"}, 9, table=(3, 6), m=(6, 8)
    ),
    "factorized table along the last axis": Model(
        lambda p, i: score(jnp.sin((p["m"] @ p["table"])[:, i])),
        weights(table=(6, 40), m=(20, 6)),
        (ids(0, 5, 4),),
        {"table": "lookup", "m": "gram"},
    ),
    "factorized table of three": of_table(
        lambda p: factorized(p) @ p["n"],
        {"table": "lookup", "m": "gram", "n": "gram"},
        **FACTORIZED,
        n=(20, 20),
    ),
    "factorized table by heads": of_table(
        lambda p: jnp.einsum("ve,ehk->vhk", p["table"], p["m"]),
        {"table": "lookup", "m": "gram"},
        table=(40, 6),
        m=(6, 4, 5),
    ),
    **both(
        lambda loss: Model(
            functools.partial(loss, factorized),
            weights(**FACTORIZED, w=(20, 20)),
            (ids(0, 5, 3),),
            {"table": "gram + lookup", "m": PLAIN, "w": "gram"},
        ),
        **{
            "factorized table, tied": dict(loss=tied_once),
            "factorized table, made twice": dict(loss=tied_to),
        },
    ),
    "scaled table": of_table(
        lambda p: p["scale"] * p["table"],
        {"table": "lookup", "scale": PLAIN},
        table=(40, 6),
        scale=(),
    ),
    "table scaled by columns": of_table(
        lambda p: p["table"] / (2 + jnp.tanh(p["scale"]))[None],
        {"table": "lookup", "scale": PLAIN},
        table=(40, 6),
        scale=(6,),
    ),
    "table scaled by rows": of_table(
        lambda p: p["scale"][:, None] * p["table"],
        {"table": "lookup", "scale": "lookup"},
        table=(40, 6),
        scale=(40,),
    ),
    "table of normalized rows": changed(by_norm),
    "table of rows of a largest norm": changed(
        lambda t: t * jnp.minimum(1, jnp.linalg.norm(t, axis=1, keepdims=True))
    ),
    "table, entry by entry": changed(lambda t: jnp.tanh(t) + t**2),
    "table of two": of_table(
        lambda p: jnp.concatenate([p["head"], p["table"]]),
        {"head": PLAIN, "table": "lookup"},
        head=(2, 6),
        table=(40, 6),
    ),
    "table of two side by side": of_table(
        lambda p: jnp.concatenate([p["u"], p["table"].T], axis=1),
        dict.fromkeys(["u", "table"], "lookup"),
        u=(40, 6),
        table=(3, 40),
    ),
    "table below a row of zeros": of_table(
        below_zeros, {"table": "lookup"}, table=(40, 6)
    ),
    "table below padding": changed(lambda t: jnp.pad(t, ((1, 0), (0, 0)))),
    "table in the rows of another": changed(lambda t: jnp.zeros((41, 6)).at[1:].set(t)),
    "table with a row that is replaced": of_table(
        lambda p: p["table"].at[2].set(p["row"]),
        {"table": "lookup", "row": PLAIN},
        table=(40, 6),
        row=(6,),
    ),
    "table with rows that are replaced": of_table(
        lambda p: p["table"].at[jnp.array([0, -37, 3, 50])].set(p["rows"]),
        {"table": "lookup", "rows": PLAIN},
        table=(40, 6),
        rows=(4, 6),
    ),
    "rows replaced in a frozen table": of_table(
        lambda p: jnp.ones((40, 6)).at[jnp.array([0, 3])].set(p["rows"]),
        {"rows": PLAIN},
        rows=(2, 6),
    ),
}

# Rows of a table that are held at zero, or at something else.
HELD = {
    "padding row": changed(held),
    "padding row, held at one": changed(lambda t: t.at[1].set(1.0)),
    "padding row from the end": changed(lambda t: held(t, -38)),
    "padding rows": changed(lambda t: held(t, jnp.array([0, -38, 50]))),
    "padding rows in succession": changed(lambda t: held(t, slice(1, 3))),
    "padding row of each example": rows(
        lambda t, i: held(t, i[0])[i], (40, 6), (4,), high=5
    ),
    "padding column": changed(lambda t: held(t, (slice(None), 2))),
    "padding row along the last axis": rows(
        lambda t, i: held(t, (slice(None), 1))[:, i], (6, 40), (4,), high=5
    ),
    "padding entry": changed(lambda t: held(t, (1, 2))),
    "padding box": changed(lambda t: held(t, (slice(1, 3), slice(2, None)))),
    "padding row, multiplied": changed(lambda t: t.at[0].multiply(0.0)),
    "rows that are multiplied": changed(
        lambda t: t.at[jnp.array([0, 0, 2])].multiply(jnp.arange(2.0, 5.0)[:, None])
    ),
    "padding row in a slice": changed(
        lambda t: lax.dynamic_update_slice(t, jnp.zeros((1, 6)), (1, 0)), rule=FALLBACK
    ),
    "padding rows by where": changed(lambda t: jnp.where(rows_to_keep(t), t, 0)),
    "padding rows by where, the other way": changed(
        lambda t: jnp.where(~rows_to_keep(t), 1.0, t)
    ),
    "padding rows by a mask": changed(lambda t: t * rows_to_keep(t)),
    "padding row of pairs": rows(
        lambda t, i: held(t, (slice(None), 0))[i, i[::-1]], (8, 8, 9), (4,), high=5
    ),
    "padding row of few": changed(held, shape=(3, 6), rule=PLAIN),
    "padding row of stacked tables": rows(
        functools.partial(
            stacked_tables, lambda t: held(t, (slice(None), 0)), lambda t: t
        ),
        (3, 40, 6),
        (4,),
        high=5,
    ),
    "padding row in a scan over tables": rows(
        functools.partial(stacked_tables, lambda t: t, held), (3, 40, 6), (4,), high=5
    ),
    "padding row in a branch": rows(
        lambda t, i: lax.cond(i[0] > 1, lambda t: held(t)[i], lambda t: t[i], t),
        (40, 6),
        (4,),
        high=5,
    ),
    "padding row, tied": Model(
        functools.partial(tied_once, lambda p: held(p["table"])),
        weights(table=(40, 20), w=(20, 20)),
        (ids(0, 5, 3),),
        {"table": "gram + lookup", "w": "gram"},
    ),
}

# Sparse arrays times a table.
SPARSE = {
    "sparse matrix": of_sparse(
        sparse_times, (3, 40), dict(table=(40, 6)), {"table": "lookup"}
    ),
    "sparse vector": of_sparse(
        sparse_times, (40,), dict(table=(40, 6)), {"table": "lookup"}
    ),
    "sparse rows": of_sparse(
        sparse_times, (3, 90), dict(table=(90, 6)), {"table": "lookup"}, n_batch=1
    ),
    "sparse matrix of few": of_sparse(
        sparse_times, (3, 4), dict(table=(4, 6)), {"table": PLAIN}
    ),
    "sparse matrix behind the table": of_sparse(
        lambda p, x: score(p["table"] @ x.T),
        (3, 40),
        dict(table=(6, 40)),
        {"table": "lookup"},
    ),
    "sparse matrix and a factorized table": of_sparse(
        lambda p, x: score(x @ factorized(p)),
        (3, 40),
        FACTORIZED,
        {"table": "lookup", "m": PLAIN},
    ),
    "sparse tensor": of_sparse(
        lambda p, x: score(
            sparse.bcoo_dot_general(
                x, p["table"], dimension_numbers=(((1, 2), (0, 1)), ((), ()))
            )
        ),
        (3, 8, 9),
        dict(table=(8, 9, 4)),
        {"table": "lookup"},
    ),
    "sparse matrix that all share": Model(
        lambda p, x: score(
            jnp.tanh(sparse.BCOO.fromdense(jnp.eye(4, k=1), nse=3) @ (x @ p["w"]))
        ),
        weights(w=(20, 20)),
        (normal(4, 20),),
        {"w": "gram"},
    ),
}


def token_model(loss_fn, rule):
    rules = {"table": rule, "w": "gram"}
    return Model(loss_fn, weights(table=(40, 20), w=(20, 20)), (ids(0, 3, 4),), rules)


EMBEDDINGS = {
    **MADE,
    **HELD,
    **SPARSE,
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

"""Losses with loops, branches, checkpoints and rules of their own."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from tests.engine.factored_models.common import (
    PLAIN,
    Model,
    normal,
    of_x,
    score,
    w_only,
    weights,
)
from tests.engine.factored_models.shared import twice


def lstm(p, x, reverse=False):
    def step(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(x @ p["w"] + h @ p["u"] + p["b"], 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    start = jnp.zeros(p["u"].shape[0], x.dtype)
    return lax.scan(step, (start, start), x, reverse=reverse)[1]


def gru(p, x):
    def step(h, x):
        r, z = jnp.split(jax.nn.sigmoid(x @ p["w"] + h @ p["u"]), 2)
        h = (1 - z) * jnp.tanh(x @ p["wn"] + (r * h) @ p["un"]) + z * h
        return h, h

    return lax.scan(step, jnp.zeros(p["un"].shape[0], x.dtype), x)[1]


def cell(d, h):
    return dict(w=(d, 4 * h), u=(h, 4 * h), b=(4 * h,))


CELL_RULES = {"w": "gram", "u": "gram", "b": PLAIN}


def in_both_directions(p, x):
    forth, back = lstm(p["forth"], x), lstm(p["back"], x, reverse=True)
    return score(jnp.concatenate([forth, back], axis=1) @ p["out"])


def scanned_layers(p, x):
    layer = lambda x, p: (jnp.tanh(x @ p["w"] + p["b"][None]), None)
    return score(lax.scan(layer, x, p)[0])


def nested_scan(p, x):
    """Time inside layers: each layer shares its kernel over time."""

    def layer(x, w):
        step = lambda h, x: (jnp.tanh(h @ w + x),) * 2
        return lax.scan(step, jnp.zeros(x.shape[1], x.dtype), x)

    def transposed(x, w):
        return layer(x, w)[1], None

    return score(lax.scan(transposed, x, p["w"])[0])


def shared_nested_scan(w, x):
    """One kernel shared by all layers and all times."""
    step = lambda h, x: (jnp.tanh(h @ w + x),) * 2
    layer = lambda x, _: (lax.scan(step, x[0], x)[1], None)
    return score(lax.scan(layer, x, None, length=2)[0])


def scan_over_time(w, x, transform=lambda step: step, **kwargs):
    step = transform(lambda h, x: (jnp.tanh(x @ w + h @ w),) * 2)
    return score(lax.scan(step, jnp.zeros(w.shape[0], x.dtype), x, **kwargs)[1])


def in_a_scan_and_outside(w, x):
    return scan_over_time(w, jnp.tanh(x @ w))


def last_state(w, x):
    step = lambda h, x: (jnp.tanh(x + h @ w), None)
    return score(lax.scan(step, x[0], x)[0])


def fori_loop(w, x):
    return score(lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ w), x))


def fast_weights(w, x):
    """The kernel itself changes from step to step."""

    def step(w, x):
        y = jnp.tanh(x @ w)
        return w + 0.1 * jnp.outer(x, y), y

    return score(lax.scan(step, w, x)[1])


def layer(w, x):
    return jnp.tanh(x @ w)


def in_one_branch(w, x):
    return score(lax.cond(x.sum() > -4, lambda: x @ w, lambda: x))


def in_both_branches(w, x):
    return score(lax.cond(x.sum() > 0, lambda: x @ w, lambda: jnp.tanh(x @ w.T)))


def in_other_forms(w, x):
    return lax.cond(x.sum() > 0, lambda: score(x @ w), lambda: score(x[0] @ w))


def branch_by_frozen(p, flag, x):
    y = lax.cond(flag > 0, lambda: x @ p["w"], lambda: x)
    return score(y)


def cond_in_a_scan(w, x):
    def step(h, x):
        h = lax.cond(x.sum() > 0, lambda: jnp.tanh(h @ w), lambda: h) + x
        return h, h

    return score(lax.scan(step, x[0], x)[1])


@jax.custom_vjp
def squared_relu(x):
    return jax.nn.relu(x) ** 2


squared_relu.defvjp(
    lambda x: (squared_relu(x), x), lambda x, g: (2 * g * jax.nn.relu(x),)
)


@jax.custom_jvp
def soft_sign(x):
    return x / (1 + jnp.abs(x))


soft_sign.defjvps(lambda t, _, x: t / (1 + jnp.abs(x)) ** 2)


@jax.custom_vjp
def linear(x, w):
    return x @ w


linear.defvjp(lambda x, w: (x @ w, (x, w)), lambda xw, g: (g @ xw[1].T, xw[0].T @ g))


def newton_steps(w, x):
    """A while loop, which has no gradient, before the part that is trained."""
    halve = lambda x: x / 2
    x = lax.while_loop(lambda x: jnp.abs(x).max() > 1, halve, x)
    return score(x @ w)


def over_heads(w, x):
    """One vmap over heads, with a kernel each."""
    return score(jax.vmap(lambda w: jnp.tanh(x @ w))(w))


def over_views(w, x):
    """One vmap over views of an example, which share the kernel."""
    return jax.vmap(lambda x: score(jnp.tanh(x @ w)))(x).sum()


def linear_recurrence(p, x):
    gate, value = jax.nn.sigmoid(x @ p["gate"]), x @ p["value"]
    combine = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])
    return score(lax.associative_scan(combine, (gate, value))[1])


def dropout(p, x, key):
    keep = jax.random.bernoulli(key, 0.5, (x.shape[0], p["w"].shape[1]))
    return score(jnp.where(keep, x @ p["w"], 0) @ p["v"])


def with_aux(p, x):
    y = x @ p["w"]
    return score(y), {"mean": y.mean(), "shape": jnp.ones(3)}


def both_directions_model():
    d, h = 12, 16
    paths = {
        f"{side}/{k}": v for side in ("forth", "back") for k, v in CELL_RULES.items()
    }
    shapes = dict(forth=cell(d, h), back=cell(d, h), out=(2 * h, 20))
    return of_x(in_both_directions, (3, d), {**paths, "out": "gram"}, **shapes)


CONTROL_FLOW = {
    "lstm": of_x(lambda p, x: score(lstm(p, x)), (3, 12), CELL_RULES, **cell(12, 16)),
    "lstm of many steps": of_x(
        lambda p, x: score(lstm(p, x)),
        (9, 3),
        {"w": "direct", "u": "direct", "b": PLAIN},
        **cell(3, 2),
    ),
    "gru": of_x(
        lambda p, x: score(gru(p, x)),
        (3, 12),
        dict.fromkeys(["w", "u", "wn", "un"], "gram"),
        w=(12, 32),
        u=(16, 32),
        wn=(12, 16),
        un=(16, 16),
    ),
    "two directions": both_directions_model(),
    "two directions, one cell": of_x(
        lambda p, x: score(lstm(p, x) * lstm(p, x, reverse=True)),
        (3, 12),
        CELL_RULES,
        **cell(12, 16),
    ),
    "layers by scan": of_x(
        scanned_layers, (3, 20), {"w": "gram", "b": PLAIN}, w=(2, 20, 20), b=(2, 20)
    ),
    "layers by scan, many": of_x(
        scanned_layers, (9, 4), {"w": "direct", "b": PLAIN}, w=(2, 4, 4), b=(2, 4)
    ),
    "layers of one vector by scan": w_only(
        lambda w, x: score(lax.scan(lambda x, w: (layer(w, x), None), x, w)[0]),
        (2, 20, 20),
        (20,),
        "outer product",
    ),
    "time in layers by scan": of_x(nested_scan, (3, 20), {"w": "gram"}, w=(2, 20, 20)),
    "one kernel in nested scans": w_only(shared_nested_scan, (20, 20), (3, 20), "gram"),
    "reverse scan": w_only(
        functools.partial(scan_over_time, reverse=True), (20, 20), (3, 20), "gram"
    ),
    "unrolled scan": w_only(
        functools.partial(scan_over_time, unroll=2), (20, 20), (3, 20), "gram"
    ),
    "scan that keeps its last state": w_only(last_state, (20, 20), (3, 20), "gram"),
    "fori loop": w_only(fori_loop, (40, 40), (3, 40), "gram"),
    "kernel in a scan and outside": w_only(
        in_a_scan_and_outside, (20, 20), (2, 20), "gram"
    ),
    "kernel that a scan changes": w_only(fast_weights, (20, 20), (3, 20), PLAIN),
    "checkpoint": w_only(
        lambda w, x: score(jax.checkpoint(twice)(w, x)), (20, 20), (3, 20), "gram"
    ),
    "checkpoint in a scan": w_only(
        functools.partial(scan_over_time, transform=jax.checkpoint),
        (20, 20),
        (3, 20),
        "gram",
    ),
    "checkpointed layers by scan": w_only(
        lambda w, x: score(
            lax.scan(jax.checkpoint(lambda x, w: (layer(w, x), None)), x, w)[0]
        ),
        (2, 20, 20),
        (3, 20),
        "gram",
    ),
    "jit": w_only(
        lambda w, x: score(jax.jit(layer)(w, jax.jit(layer)(w, x))),
        (20, 20),
        (3, 20),
        "gram",
    ),
    "kernel in one branch": w_only(in_one_branch, (20, 20), (3, 20), "gram"),
    "kernel in both branches": w_only(in_both_branches, (20, 20), (2, 20), "gram"),
    "kernel in branches of other forms": w_only(
        in_other_forms, (20, 20), (3, 20), "gram"
    ),
    "kernel in both branches, many": w_only(in_both_branches, (4, 4), (9, 4), "direct"),
    "branch by a frozen argument": Model(
        branch_by_frozen,
        weights(w=(20, 20)),
        (normal(3, 20),),
        {"w": "gram"},
        frozen=lambda rng: (jnp.ones(()),),
    ),
    "cond in a scan": w_only(cond_in_a_scan, (20, 20), (3, 20), "gram"),
    "custom_vjp activation": w_only(
        lambda w, x: score(squared_relu(x @ w)), (20, 20), (3, 20), "gram"
    ),
    "custom_jvp activation": w_only(
        lambda w, x: score(soft_sign(x @ w)), (20, 20), (3, 20), "gram"
    ),
    "custom_vjp of the kernel": w_only(
        lambda w, x: score(linear(jnp.tanh(linear(x, w)), w)), (20, 20), (3, 20), "gram"
    ),
    "while loop": w_only(newton_steps, (20, 20), (3, 20), "gram"),
    "vmap over heads": w_only(over_heads, (2, 20, 16), (3, 20), "gram"),
    "vmap over views": w_only(over_views, (20, 20), (2, 3, 20), "gram"),
    "vmap over views of one vector": w_only(over_views, (20, 20), (2, 20), "gram"),
    "associative scan": of_x(
        linear_recurrence,
        (3, 20),
        {"gate": "gram", "value": "gram"},
        gate=(20, 20),
        value=(20, 20),
    ),
    "dropout": Model(
        dropout,
        weights(w=(20, 20), v=(20, 20)),
        (normal(3, 20),),
        {"w": "gram", "v": "gram"},
        with_key=True,
    ),
    "auxiliary output": of_x(with_aux, (3, 20), {"w": "gram"}, w=(20, 20))._replace(
        has_aux=True
    ),
}

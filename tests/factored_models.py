"""A table of losses whose gradients take every form, and the form each should take."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

# The rule of a gradient that is no larger than its factors, or has none: its own array,
# named after the primitive that gives it, which releases of JAX may change.
PLAIN = "plain"
FALLBACK = "materialised"

Draw = Callable[[np.random.Generator, int], Any]


class Model(NamedTuple):
    """A loss of `(params, *frozen, *example)`, with a key last where `with_key`."""

    loss_fn: Callable[..., Any]
    params: Callable[[np.random.Generator], Any]
    batch: tuple[Draw, ...]
    rules: dict[str, str]  # by path of the parameter
    frozen: Callable[[np.random.Generator], tuple] = lambda rng: ()
    has_aux: bool = False
    with_key: bool = False
    reference: Callable[..., Any] | None = None  # the loss in double precision
    tolerance: float = 1e-10


def normal(*shape, scale=1.0) -> Draw:
    return lambda rng, n: scale * rng.normal(size=(n, *shape))


def ids(low, high, *shape) -> Draw:
    return lambda rng, n: rng.integers(low, high, size=(n, *shape))


def weights(**shapes):
    """Shapes, or trees of them, to a function that draws normal numbers."""
    is_shape = lambda x: isinstance(x, tuple)
    draw = lambda rng: lambda shape: jnp.asarray(0.5 * rng.normal(size=shape))
    return lambda rng: jax.tree.map(draw(rng), shapes, is_leaf=is_shape)


def score(y):
    """A loss of an output, with a gradient unlike the output."""
    return jnp.sum(jnp.sin(y))


def of_x(loss_fn, x, rules, **shapes):
    """A model of one array x of this shape."""
    return Model(loss_fn, weights(**shapes), (normal(*x),), rules)


def both(model, **sizes):
    """A family at sizes where products stay factored, and where they are formed."""
    return {name: model(**size) for name, size in sizes.items()}


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


def w_only(loss_of_w, w, x, rule):
    """A model of one kernel, w."""
    return of_x(lambda p, x: loss_of_w(p["w"], x), x, {"w": rule}, w=w)


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
        lambda w, x: score(x @ w.reshape(20, 20)), (400,), (3, 20), FALLBACK
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


def lora_model(loss_fn, t, d, r, rule):
    frozen = np.random.default_rng(1).normal(size=(d, d))
    rules = {"a": rule, "b": rule}
    closed_over = lambda p, x: loss_fn(p, x, frozen.astype(x.dtype))
    return of_x(closed_over, (t, d), rules, a=(d, r), b=(r, d))


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
    "weight normalisation": of_x(
        weight_norm, (3, 20), {"w": PLAIN, "scale": PLAIN}, w=(20, 20), scale=(20,)
    ),
    "reversed kernel": w_only(
        lambda w, x: score(x @ w[::-1]), (20, 20), (3, 20), PLAIN
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
        lambda w, x: score(x @ w) + 0.1 * jnp.sum(w**2), (20, 20), (3, 20), FALLBACK
    ),
    "raveled parameters": w_only(lambda w, x: 0.0, (), (), PLAIN)._replace(
        loss_fn=raveled,
        params=weights(flat=(420,)),
        batch=(normal(3, 20),),
        rules={"flat": FALLBACK},
    ),
    "kernel chosen by the example": Model(
        chosen_expert,
        weights(w=(4, 20, 20)),
        (normal(3, 20), ids(0, 4)),
        {"w": PLAIN},
    ),
    "inverse of a kernel": w_only(
        lambda w, x: score(x @ jnp.linalg.inv(w)), (20, 20), (3, 20), PLAIN
    ),
}


@dataclasses.dataclass(frozen=True)
class Conv:
    """A convolution of NHWC arrays with HWIO kernels, or as said."""

    strides: tuple[int, ...] = (1, 1)
    padding: Any = "SAME"
    lhs_dilation: tuple[int, ...] | None = None
    rhs_dilation: tuple[int, ...] | None = None
    groups: int = 1
    layout: tuple[str, str, str] = ("NHWC", "HWIO", "NHWC")

    def __call__(self, w, x):
        return lax.conv_general_dilated(
            x[None],
            w,
            self.strides,
            self.padding,
            self.lhs_dilation,
            self.rhs_dilation,
            self.layout,
            self.groups,
        )

    def model(self, w, x, rule):
        return w_only(lambda w, x: score(self(w, x)), w, x, rule)


def shared_conv(w, x):
    conv = Conv()
    return score(conv(w, jnp.tanh(conv(w, x)[0])))


def conv_in_a_scan(w, x):
    step = lambda x, _: (jnp.tanh(Conv()(w, x)[0]), None)
    return score(lax.scan(step, x, None, length=2)[0])


def conv_layers_by_scan(w, x):
    return score(lax.scan(lambda x, w: (jnp.tanh(Conv()(w, x)[0]), None), x, w)[0])


def cnn(p, x):
    x = jax.nn.relu(Conv((2, 2))(p["one"], x)[0] + p["bias"][None, None])
    x = jnp.tanh(Conv()(p["two"], x)[0])
    return score(x.mean((0, 1)) @ p["head"])


LINE, VOLUME = ("NHC", "HIO", "NHC"), ("NDHWC", "DHWIO", "NDHWC")
GRAM, TAPS = "convolution: gram", "convolution: taps"

CONVOLUTIONS = {
    "conv": Conv().model((3, 3, 8, 12), (5, 4, 8), TAPS),
    "conv of few positions": Conv().model((3, 3, 8, 12), (2, 2, 8), GRAM),
    "conv of many positions": Conv().model((3, 2, 2, 3), (7, 6, 2), "direct"),
    "valid conv": Conv(padding="VALID").model((3, 2, 8, 12), (6, 5, 8), TAPS),
    "explicit padding": Conv(padding=((2, 0), (1, 3))).model(
        (3, 3, 8, 12), (4, 3, 8), TAPS
    ),
    "negative padding": Conv(padding=((-1, 1), (0, -1))).model(
        (3, 2, 8, 12), (6, 5, 8), TAPS
    ),
    "strides": Conv((2, 3)).model((3, 4, 8, 12), (7, 8, 8), TAPS),
    "strides that skip the end": Conv((3, 2), "VALID").model(
        (2, 3, 8, 12), (7, 6, 8), GRAM
    ),
    "dilated kernel": Conv(rhs_dilation=(2, 3)).model((3, 2, 8, 12), (5, 4, 8), TAPS),
    "dilated kernel and strides": Conv((2, 2), rhs_dilation=(2, 1)).model(
        (3, 3, 8, 12), (6, 5, 8), GRAM
    ),
    "dilated input": Conv(padding=((1, 2), (2, 1)), lhs_dilation=(2, 2)).model(
        (3, 3, 8, 12), (3, 2, 8), TAPS
    ),
    "dilated input and kernel": Conv(
        padding=((2, 2), (1, 1)), lhs_dilation=(2, 1), rhs_dilation=(1, 2)
    ).model((3, 3, 8, 12), (3, 4, 8), TAPS),
    "transposed conv": w_only(
        lambda w, x: score(lax.conv_transpose(x[None], w, (2, 2), "SAME")),
        (3, 3, 8, 12),
        (2, 3, 8),
        TAPS,
    ),
    "groups": Conv(groups=2).model((3, 3, 8, 24), (3, 3, 16), GRAM),
    "groups of few positions": Conv(groups=2).model((3, 3, 8, 24), (2, 1, 16), GRAM),
    "groups of many positions": Conv(groups=2).model((2, 2, 2, 4), (5, 4, 4), "direct"),
    "groups, strides and dilation": Conv((2, 1), groups=3, rhs_dilation=(1, 2)).model(
        (3, 2, 8, 24), (5, 3, 24), TAPS
    ),
    "depthwise": Conv(groups=6).model((3, 3, 1, 6), (1, 1, 6), TAPS),
    "depthwise of many positions": Conv(groups=6).model(
        (3, 3, 1, 6), (4, 4, 6), "direct"
    ),
    "channels first": Conv(layout=("NCHW", "OIHW", "NCHW")).model(
        (12, 8, 3, 3), (8, 5, 4), TAPS
    ),
    "channels first, groups": Conv(groups=2, layout=("NCHW", "OIHW", "NCHW")).model(
        (24, 8, 3, 3), (16, 3, 3), GRAM
    ),
    "mixed layouts": Conv(layout=("NHWC", "OIHW", "NCHW")).model(
        (12, 8, 3, 3), (5, 4, 8), TAPS
    ),
    "one tap": Conv().model((1, 1, 20, 24), (2, 2, 20), "gram"),
    "one tap, many positions": Conv().model((1, 1, 3, 4), (4, 4, 3), "direct"),
    "one tap, strides": Conv((2, 2)).model((1, 1, 20, 24), (3, 4, 20), "gram"),
    "one tap, groups": Conv(groups=2).model((1, 1, 20, 40), (2, 1, 40), GRAM),
    "patches": Conv((2, 3), "VALID").model((2, 3, 8, 24), (4, 6, 8), "gram"),
    "patches, with gaps": Conv((3, 3), "VALID").model((2, 2, 8, 24), (6, 5, 8), "gram"),
    "patches, channels first": Conv(
        (2, 2), "VALID", layout=("NCHW", "OIHW", "NCHW")
    ).model((24, 8, 2, 2), (8, 4, 4), "gram"),
    "conv of a line": Conv((1,), layout=LINE).model((5, 12, 16), (6, 12), GRAM),
    "causal conv": Conv((1,), ((4, 0),), rhs_dilation=(2,), layout=LINE).model(
        (3, 12, 16), (6, 12), GRAM
    ),
    "conv of a volume": Conv((1, 1, 2), layout=VOLUME).model(
        (2, 3, 2, 8, 12), (3, 2, 3, 8), TAPS
    ),
    "conv of many taps": Conv((1,), ((70, 70),), layout=LINE).model(
        (130, 2, 3), (4, 2), FALLBACK
    ),
    "conv used twice": w_only(shared_conv, (3, 3, 16, 16), (3, 2, 16), GRAM),
    "conv in a scan": w_only(conv_in_a_scan, (3, 3, 16, 16), (3, 2, 16), GRAM),
    "conv layers by scan": w_only(
        conv_layers_by_scan, (2, 3, 3, 12, 12), (3, 2, 12), GRAM
    ),
    "conv under vmap over views": w_only(
        lambda w, x: jax.vmap(lambda x: score(Conv()(w, x)))(x).sum(),
        (3, 3, 8, 12),
        (2, 3, 2, 8),
        TAPS,
    ),
    "cnn": of_x(
        cnn,
        (6, 6, 3),
        {"one": GRAM, "bias": PLAIN, "two": GRAM, "head": "outer product"},
        one=(3, 3, 3, 16),
        bias=(16,),
        two=(3, 3, 16, 16),
        head=(16, 10),
    ),
}


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
    "pairs of ids": rows(
        lambda t, i: t[i[:, 0], i[:, 1]], (6, 6, 8), (4, 2), rule=FALLBACK
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
    # An index that is one number is a dynamic slice, which has no rule.
    "embedding in a scan by one index": token_model(
        functools.partial(tokens_in_a_scan, lambda table, i: table[i]), PLAIN
    ),
    "embedding of one index": rows(lambda t, i: t[i], (40, 6), (), rule=PLAIN),
    "embedding under vmap": rows(
        lambda t, i: jax.vmap(lambda i: t[i])(i), (40, 6), (4,), high=3, rule=FALLBACK
    ),
}

MODELS = {
    **PRODUCTS,
    **SHARED,
    **CONTROL_FLOW,
    **FALLBACKS,
    **CONVOLUTIONS,
    **EMBEDDINGS,
}

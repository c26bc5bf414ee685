"""Factored gradients of random programs are those of `method="vmap"`."""

import functools
from collections.abc import Callable

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree

import dpadambc
from dpadambc.engine import forms, product
from dpadambc.engine.interface import Norm
from dpadambc.engine.rounding import FULL
from tests.engine import factored_test
from tests.engine.factored_models.common import score, weights

BATCH_SIZE, LENGTH, WIDTH = 3, 2, 8
SQUARE = (WIDTH, WIDTH)

PARAMS = weights(
    w=SQUARE,
    v=SQUARE,
    heads=(WIDTH, 2, WIDTH // 2),
    half=(WIDTH, WIDTH // 2),
    stack=(2, *SQUARE),
    flat=(WIDTH + WIDTH * WIDTH,),
    a=(WIDTH, 2),
    b=(2, WIDTH),
    taps=(3, *SQUARE),
    table=(20, WIDTH),
    scale=(WIDTH,),
)


def unraveled(p):
    like = {"scale": jnp.zeros(WIDTH), "w": jnp.zeros(SQUARE)}
    return ravel_pytree(like)[1](p["flat"])


# What a kernel is made of.
KERNELS = {
    "w": lambda p: p["w"],
    "v": lambda p: p["v"],
    "transposed": lambda p: p["w"].T,
    "reversed": lambda p: p["w"][::-1],
    "reshaped": lambda p: p["w"].T.reshape(4, 16).T.reshape(SQUARE),
    "of heads": lambda p: p["heads"].reshape(SQUARE),
    "repeated": lambda p: jnp.repeat(p["half"], 2, axis=1),
    "joined": lambda p: jnp.concatenate([p["half"], p["w"][:, 2:6]], axis=1),
    "of a stack": lambda p: p["stack"][1],
    "raveled": lambda p: unraveled(p)["w"],
    "merged": lambda p: p["v"] + p["a"] @ p["b"],
    "masked": lambda p: jnp.triu(p["v"]),
}


def dense(kernel, p, x, ids):
    return jnp.tanh(x @ kernel)


def bias(kernel, p, x, ids):
    return x @ kernel + unraveled(p)["scale"][None]


def conv(kernel, p, x, ids):
    taps = p["taps"] + kernel[None]
    layout = ("NHC", "HIO", "NHC")
    y = lax.conv_general_dilated(x[None], taps, (1,), "SAME", dimension_numbers=layout)
    return jnp.tanh(y[0])


def embedding(kernel, p, x, ids):
    return x + p["table"][ids] @ kernel


def tied_head(kernel, p, x, ids):
    return jax.nn.softmax(x @ kernel @ p["table"].T) @ p["table"]


def norm(kernel, p, x, ids):
    size = lax.rsqrt(jnp.mean(x**2, 1, keepdims=True) + 1)
    return x * size * p["scale"][None] @ kernel


def attention(kernel, p, x, ids):
    q, k = jnp.einsum("td,dhk->htk", x, p["heads"]), jnp.einsum("td,de->te", x, kernel)
    k = k.reshape(LENGTH, 2, WIDTH // 2)
    mixed = jax.nn.softmax(jnp.einsum("htk,shk->hts", q, k))
    return jnp.einsum("hts,sd->td", mixed, x)


BLOCKS = {f.__name__: f for f in (dense, bias, conv, embedding, tied_head, norm)}
BLOCKS["attention"] = attention


def scan(f, p, x, ids):
    return lax.scan(lambda x, _: (f(p, x, ids), None), x, None, length=2)[0]


def scan_over_layers(f, p, x, ids):
    layer = lambda x, w: (f({**p, "w": w}, x, ids), None)
    return lax.scan(layer, x, p["stack"])[0]


def scan_over_ids(f, p, x, ids):
    step = lambda x, i: (f(p, x + p["table"][i][None], ids), None)
    return lax.scan(step, x, ids)[0]


def twice(f, p, x, ids):
    return f(p, f(p, x, ids), ids)


def views(f, p, x, ids):
    return jax.vmap(f, (None, 0, None))(p, jnp.stack([x, x[::-1]]), ids).sum(0)


def chain(f, g, p, x, ids):
    return g(p, f(p, x, ids), ids)


def cond(f, g, p, x, ids):
    return lax.cond(x[0, 0] > 0, f, g, p, x, ids)


def remat(f, p, x, ids):
    return jax.checkpoint(f)(p, x, ids)


def jit(f, p, x, ids):
    return jax.jit(f)(p, x, ids)


OF_ONE = {
    f.__name__: f
    for f in (scan, scan_over_layers, scan_over_ids, twice, views, remat, jit)
}
OF_TWO = {f.__name__: f for f in (chain, cond)}


def run(program, p, x, ids):
    """A program is (block, kernel), or a name of the above and its programs."""
    name, *parts = program
    if name in BLOCKS:
        return BLOCKS[name](KERNELS[parts[0]](p), p, x, ids)
    of: Callable[..., jax.Array] = (OF_ONE | OF_TWO)[name]
    return of(*(functools.partial(run, part) for part in parts), p, x, ids)


def combined(programs):
    one = st.tuples(st.sampled_from([*OF_ONE]), programs)
    two = st.tuples(st.sampled_from([*OF_TWO]), programs, programs)
    return one | two


blocks = st.tuples(st.sampled_from([*BLOCKS]), st.sampled_from([*KERNELS]))
programs = st.recursive(blocks, combined, max_leaves=4)


def check(program):
    """Raises unless norms and clipped sums are those of gradients that are formed."""
    rng = np.random.default_rng(0)
    params = PARAMS(rng)
    x = jnp.asarray(rng.normal(size=(BATCH_SIZE, LENGTH, WIDTH)))
    ids = jnp.asarray(rng.integers(0, 3, size=(BATCH_SIZE, LENGTH)))
    loss_fn = lambda p, x, ids: score(run(program, p, x, ids))

    def by(method):
        grads = dpadambc.per_example_grad(loss_fn, method=method)(params, x, ids)
        norms = dpadambc.per_example_norms(grads)
        return norms, factored_test.clip(grads, params, 0.1)

    factored, formed = jax.jit(lambda: (by("factored"), by("vmap")))()
    factored_test.assert_close(factored, formed, 1e-9)


def in_double_precision(program):
    with jax.enable_x64(True):
        check(program)


@pytest.mark.slow
@hypothesis.settings(max_examples=10)
@hypothesis.given(programs)
def test_random_programs(program):
    in_double_precision(program)


@pytest.mark.parametrize(
    "rule", ["products", pytest.param("sums", marks=pytest.mark.thorough)]
)
def test_random_programs_find_a_wrong_rule(rule, monkeypatch):
    """That adds the squared norms of parts, as if they were orthogonal."""
    if rule == "sums":
        wrong = lambda grad, *_: Norm.of_all([x.norm(FULL) for x in grad.parts])
        monkeypatch.setattr(forms.Sum, "norm", wrong)
    else:
        wrong = factored_test.norm_without_pairs
        monkeypatch.setattr(product.Product, "norm", wrong)
    first = hypothesis.settings(max_examples=50, phases=[hypothesis.Phase.generate])
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        first(hypothesis.given(programs)(in_double_precision))()


@pytest.mark.thorough
@hypothesis.settings(max_examples=40)
@hypothesis.given(programs)
def test_many_random_programs(program):
    in_double_precision(program)

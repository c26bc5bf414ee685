"""Layers of Flax Linen, Flax NNX and Equinox keep their gradients factored."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.engine import factored_test
from tests.engine.factored_models.common import (
    PLAIN,
    Model,
    ids,
    normal,
    score,
)
from tests.engine.factored_models.convolutions import GRAM

# The rules are those of plain functions, which are tested by default.
pytestmark = pytest.mark.slow


def drawn(rng, shapes):
    """Normal numbers in double precision: initial zeros would hide gradients."""
    return jax.tree.map(lambda x: jnp.asarray(0.5 * rng.normal(size=x.shape)), shapes)


def linen(module, x, rules, call=None):
    """A model of a module that is called with one array."""
    kwargs = {} if call is None else {"method": call}

    def init(rng):
        example = jnp.asarray(x(rng, 1))[0]
        init = lambda key: module.init(key, example, **kwargs)["params"]
        return drawn(rng, jax.eval_shape(init, jax.random.key(0)))

    loss_fn = lambda params, x: score(module.apply({"params": params}, x, **kwargs))
    return Model(loss_fn, init, (x,), rules)


def tied(module, i):
    return module.attend(jnp.tanh(module(i)))


class Block(nn.Module):
    """A layer of a transformer, as the body of a scan."""

    @nn.compact
    def __call__(self, x, _=None):
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
        return x + nn.Dense(20)(jax.nn.gelu(nn.Dense(24)(x))), None


class Layers(nn.Module):
    """Layers stacked by nn.scan, each of them rematerialized."""

    @nn.compact
    def __call__(self, x):
        axes = dict(variable_axes={"params": 0}, split_rngs={"params": True})
        layers = nn.scan(nn.remat(Block, prevent_cse=False), length=2, **axes)
        return layers(name="layers")(x)[0]


def attention_rules(prefix=""):
    kernels = {f"{prefix}{k}/kernel": "gram" for k in ("query", "key", "value", "out")}
    biases = {f"{prefix}{k}/bias": PLAIN for k in ("query", "key", "value", "out")}
    return {**kernels, **biases}


def dense_rules(*names, rule="gram"):
    return {
        **{f"{name}kernel": rule for name in names},
        **{f"{name}bias": PLAIN for name in names},
    }


LSTM_RULES = {
    **{f"cell/i{k}/kernel": "gram" for k in "ifgo"},
    **dense_rules(*(f"cell/h{k}/" for k in "ifgo")),
}
GRU_RULES = {
    **dense_rules("cell/ir/", "cell/iz/", "cell/in/", "cell/hn/"),
    "cell/hr/kernel": "gram",
    "cell/hz/kernel": "gram",
}

LINEN = {
    "Dense": linen(nn.Dense(16), normal(3, 20), dense_rules("")),
    "DenseGeneral": linen(nn.DenseGeneral((2, 8)), normal(3, 20), dense_rules("")),
    "DenseGeneral over two axes": linen(
        nn.DenseGeneral(20, axis=(-2, -1)), normal(3, 2, 10), dense_rules("")
    ),
    "MultiHeadDotProductAttention": linen(
        nn.MultiHeadDotProductAttention(num_heads=2), normal(3, 20), attention_rules()
    ),
    "Conv": linen(nn.Conv(48, (3, 3)), normal(5, 4, 32), dense_rules("", rule=GRAM)),
    "Conv, strides, groups, circular": linen(
        nn.Conv(48, (3, 3), (2, 2), "CIRCULAR", feature_group_count=2),
        normal(4, 4, 64),
        dense_rules("", rule=GRAM),
    ),
    "ConvTranspose": linen(
        nn.ConvTranspose(48, (3, 3), (2, 2)),
        normal(2, 3, 32),
        dense_rules("", rule=GRAM),
    ),
    "Embed": linen(nn.Embed(40, 6), ids(0, 3, 4), {"embedding": "lookup"}),
    "Embed.attend": linen(
        nn.Embed(40, 20), ids(0, 3, 4), {"embedding": "gram + lookup"}, tied
    ),
    "LayerNorm": linen(nn.LayerNorm(), normal(3, 6), {"scale": PLAIN, "bias": PLAIN}),
    "GroupNorm": linen(nn.GroupNorm(2), normal(3, 6), {"scale": PLAIN, "bias": PLAIN}),
    "OptimizedLSTMCell": linen(
        nn.RNN(nn.OptimizedLSTMCell(16, param_dtype=jnp.float64)),
        normal(3, 16),
        LSTM_RULES,
    ),
    "GRUCell": linen(
        nn.RNN(nn.GRUCell(16, param_dtype=jnp.float64)), normal(3, 16), GRU_RULES
    ),
    "scan of remat of a block": linen(
        Layers(),
        normal(3, 20),
        {
            **attention_rules("layers/MultiHeadDotProductAttention_0/"),
            **dense_rules("layers/Dense_0/", "layers/Dense_1/"),
            "layers/LayerNorm_0/scale": PLAIN,
            "layers/LayerNorm_0/bias": PLAIN,
        },
    ),
}


def called(module, x):
    return module(x)


def with_state(make, x, rules, call=called, wrt=nnx.Param):
    """A model of an NNX module that is called with one array, `wrt` alone trained."""
    module = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    graph, trained, frozen = nnx.split(module, wrt, ...)
    frozen = drawn(np.random.default_rng(1), frozen)
    loss_fn = lambda state, x: score(call(nnx.merge(graph, state, frozen), x))
    return Model(loss_fn, lambda rng: drawn(rng, trained), (x,), rules)


class NNXLayers(nnx.Module):
    """Layers made by nnx.vmap and called by nnx.scan."""

    def __init__(self, rngs):
        make = nnx.split_rngs(splits=2)(nnx.vmap(NNXBlock))
        self.layers = make(rngs)

    def __call__(self, x):
        carry = (0, nnx.Carry)
        call = nnx.scan(lambda layer, x: layer(x), in_axes=carry, out_axes=nnx.Carry)
        return call(self.layers, x)


class NNXBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(20, rngs=rngs)
        self.dense = nnx.Linear(20, 20, rngs=rngs)

    def __call__(self, x):
        return x + jax.nn.gelu(self.dense(self.norm(x)))


class WithLoRA(nnx.Module):
    def __init__(self, rngs):
        self.one = nnx.LoRALinear(40, 40, lora_rank=8, rngs=rngs)
        self.two = nnx.LoRALinear(40, 40, lora_rank=8, rngs=rngs)

    def __call__(self, x):
        return self.two(jnp.tanh(self.one(x)))


def over_time(cell, x):
    """A cell in jax.lax.scan, on the state of the module."""
    graph, state = nnx.split(cell)
    step = lambda h, x: nnx.merge(graph, state)(h, x)
    start = jnp.zeros(cell.hidden_features, x.dtype)
    return jax.lax.scan(step, start, x)[1]


def rnn(module, x):
    start = jnp.zeros(module.cell.hidden_features, x.dtype)
    return module(x, initial_carry=(start, start))


make = functools.partial
DOUBLE = dict(param_dtype=jnp.float64)
NORM = {"scale": PLAIN, "bias": PLAIN}

NNX = {
    "Linear": (make(nnx.Linear, 20, 16), normal(3, 20), dense_rules("")),
    "Conv": (
        make(nnx.Conv, 32, 48, (3, 3)),
        normal(5, 4, 32),
        dense_rules("", rule=GRAM),
    ),
    "Embed": (
        make(nnx.Embed, 40, 6, dtype=jnp.float64),
        ids(0, 3, 4),
        {"embedding": "lookup"},
    ),
    "Embed.attend": (
        make(nnx.Embed, 40, 20, dtype=jnp.float64),
        ids(0, 3, 4),
        {"embedding": "gram + lookup"},
        tied,
    ),
    "MultiHeadAttention": (
        make(nnx.MultiHeadAttention, 2, 20, decode=False),
        normal(3, 20),
        attention_rules(),
    ),
    "LayerNorm": (make(nnx.LayerNorm, 6), normal(3, 6), NORM),
    "GRUCell in lax.scan": (
        make(nnx.GRUCell, 16, 16, **DOUBLE),
        normal(3, 16),
        {**dense_rules("dense_i/"), "dense_h/kernel": "gram"},
        over_time,
    ),
    "RNN of OptimizedLSTMCell": (
        lambda rngs: nnx.RNN(nnx.OptimizedLSTMCell(16, 16, rngs=rngs, **DOUBLE)),
        normal(3, 16),
        {"cell/dense_i/kernel": "gram", **dense_rules("cell/dense_h/")},
        rnn,
    ),
    "scan over layers": (
        NNXLayers,
        normal(3, 20),
        {
            **dense_rules("layers/dense/"),
            "layers/norm/scale": PLAIN,
            "layers/norm/bias": PLAIN,
        },
    ),
    "LoRA": (
        WithLoRA,
        normal(3, 40),
        {
            f"{layer}/lora/lora_{part}": "gram"
            for layer in ("one", "two")
            for part in "ab"
        },
        called,
        nnx.LoRAParam,
    ),
}


def partitioned(make, x, rules, call):
    """A model of an Equinox module: its arrays are trained, the rest is closed over."""
    eqx = pytest.importorskip("equinox")
    module = eqx.filter_eval_shape(make, jax.random.key(0))
    is_array = lambda x: isinstance(x, jax.ShapeDtypeStruct)
    shapes, static = eqx.partition(module, is_array)
    loss_fn = lambda params, x: score(call(eqx.combine(params, static), x))
    return Model(loss_fn, lambda rng: drawn(rng, shapes), (x,), rules)


def mapped(module, x):
    return jax.vmap(module)(x)


def by_scan(cell, x):
    def step(h, x):
        h = cell(x, h)
        return h, h

    return jax.lax.scan(step, jnp.zeros(cell.hidden_size, x.dtype), x)[1]


def layer(name, *args, **kwargs):
    """A function of a key that makes a layer of Equinox, which may be missing."""

    def make(key):
        import equinox as eqx

        return getattr(eqx.nn, name)(*args, key=key, **kwargs)

    return make


def mlp_rules(rule):
    return {
        f"layers/{i}/{part}": rule if part == "weight" else PLAIN
        for i in range(3)
        for part in ("weight", "bias")
    }


WEIGHTS = {"weight": GRAM, "bias": PLAIN}
EQUINOX = {
    "MLP": (
        layer("MLP", 20, 20, 24, 2),
        normal(20),
        mlp_rules("outer product"),
        called,
    ),
    "MLP over time": (
        layer("MLP", 20, 20, 24, 2),
        normal(3, 20),
        mlp_rules("gram"),
        mapped,
    ),
    "Conv2d": (
        layer("Conv2d", 32, 48, 3, padding=1),
        normal(32, 5, 4),
        WEIGHTS,
        called,
    ),
    "Conv1d, strides and groups": (
        layer("Conv1d", 96, 96, 4, stride=2, groups=2),
        normal(96, 25),
        WEIGHTS,
        called,
    ),
    "ConvTranspose2d": (
        layer("ConvTranspose2d", 32, 48, 3, stride=2),
        normal(32, 2, 3),
        WEIGHTS,
        called,
    ),
    "MultiheadAttention": (
        layer("MultiheadAttention", 2, 20),
        normal(3, 20),
        {f"{name}_proj/weight": "gram" for name in ("query", "key", "value", "output")},
        lambda module, x: module(x, x, x),
    ),
    "GRUCell in lax.scan": (
        layer("GRUCell", 16, 16),
        normal(3, 16),
        {"weight_ih": "gram", "weight_hh": "gram", "bias": PLAIN, "bias_n": PLAIN},
        by_scan,
    ),
    "Embedding": (
        layer("Embedding", 40, 6),
        ids(0, 3, 4),
        {"weight": "lookup"},
        mapped,
    ),
}


@pytest.mark.parametrize("name", LINEN)
def test_linen(name, x64):
    factored_test.check(LINEN[name])
    factored_test.check_forms(LINEN[name])


@pytest.mark.parametrize("name", NNX)
def test_nnx(name, x64):
    model = with_state(*NNX[name])
    factored_test.check(model)
    factored_test.check_forms(model)


@pytest.mark.parametrize("name", EQUINOX)
def test_equinox(name, x64):
    model = partitioned(*EQUINOX[name])
    factored_test.check(model)
    factored_test.check_forms(model)

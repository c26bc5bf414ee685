"""Transformers: a causal language model, a decoder with one loop, an encoder."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.speed.models.layers import (
    attention,
    causal,
    cross_entropy,
    dense,
    init_attention,
    init_dense,
    init_layer_norm,
    integers,
    layer_norm,
    normal,
)
from benchmarks.speed.models.problem import Problem


def _init_block(rng: np.random.Generator, width: int, bias: bool = True) -> Any:
    return {
        "norm_1": init_layer_norm(width),
        **init_attention(rng, width, bias),
        "norm_2": init_layer_norm(width),
        "up": init_dense(rng, width, 4 * width, bias),
        "down": init_dense(rng, 4 * width, width, bias),
    }


def _block(block: Any, x: jax.Array, heads: int) -> jax.Array:
    """Causal attention and a dense part, each normalized before."""
    is_seen = causal(x.shape[-2])
    x = x + attention(block, layer_norm(block["norm_1"], x), heads, is_seen)
    hidden = jax.nn.gelu(dense(block["up"], layer_norm(block["norm_2"], x)))
    return x + dense(block["down"], hidden)


def transformer(
    batch_size: int,
    width: int = 512,
    layers: int = 4,
    heads: int = 8,
    length: int = 64,
    vocabulary: int = 5000,
) -> Problem:
    """A causal language model, normalized before each part of a block."""
    rng = np.random.default_rng(0)
    params = {
        "tokens": normal(rng, vocabulary, width, scale=0.02),
        "positions": normal(rng, length, width, scale=0.02),
        "blocks": [_init_block(rng, width) for _ in range(layers)],
        "norm": init_layer_norm(width),
        "head": init_dense(rng, width, vocabulary),
    }

    def loss_fn(params, tokens):
        inputs, targets = tokens[..., :-1], tokens[..., 1:]
        x = params["tokens"][inputs] + params["positions"]
        for block in params["blocks"]:
            x = _block(block, x, heads)
        logits = dense(params["head"], layer_norm(params["norm"], x))
        return cross_entropy(logits, targets)

    name = f"transformer, width {width}, {layers} layers, length {length}"
    batch = (integers(rng, vocabulary, batch_size, length + 1),)
    return Problem(name, loss_fn, loss_fn, params, batch)


def decoder(
    batch_size: int,
    width: int = 384,
    layers: int = 6,
    heads: int = 6,
    length: int = 128,
    vocabulary: int = 8_000,
    scanned: bool = True,
    rematerialized: bool = True,
) -> Problem:
    """A language model without biases, whose head is tied to its tokens.

    With `scanned` the parameters of the layers are stacked and one block is scanned
    over them; with `rematerialized` the block is computed again in the backward pass.
    """
    rng = np.random.default_rng(0)
    blocks = [_init_block(rng, width, bias=False) for _ in range(layers)]
    params = {
        "tokens": normal(rng, vocabulary, width, scale=0.02),
        "positions": normal(rng, length, width, scale=0.02),
        "blocks": jax.tree.map(lambda *x: jnp.stack(x), *blocks) if scanned else blocks,
        "norm": init_layer_norm(width),
    }

    def step(x, block):
        return _block(block, x, heads), None

    def loss_fn(params, tokens):
        inputs, targets = tokens[..., :-1], tokens[..., 1:]
        x = params["tokens"][inputs] + params["positions"]
        body = jax.checkpoint(step) if rematerialized else step
        if scanned:
            x, _ = jax.lax.scan(body, x, params["blocks"])
        else:
            for block in params["blocks"]:
                x, _ = body(x, block)
        logits = layer_norm(params["norm"], x) @ params["tokens"].T
        return cross_entropy(logits, targets)

    name = f"decoder, width {width}, {layers} layers, length {length}"
    name += "" if scanned else ", unrolled"
    name += "" if rematerialized else ", no remat"
    batch = (integers(rng, vocabulary, batch_size, length + 1),)
    return Problem(name, loss_fn, loss_fn, params, batch, microbatched=True)


def _init_encoder_block(rng: np.random.Generator, width: int, intermediate: int) -> Any:
    return {
        **init_attention(rng, width),
        "norm_1": init_layer_norm(width),
        "up": init_dense(rng, width, intermediate),
        "down": init_dense(rng, intermediate, width),
        "norm_2": init_layer_norm(width),
    }


def encoder(
    batch_size: int,
    length: int,
    width: int = 384,
    layers: int = 6,
    heads: int = 12,
    intermediate: int = 1536,
    vocabulary: int = 30_522,
    positions: int = 512,
    classes: int = 2,
) -> Problem:
    """A classifier of the size of MiniLM, normalized after each part of a block."""
    rng = np.random.default_rng(0)
    params = {
        "tokens": normal(rng, vocabulary, width, scale=0.02),
        "positions": normal(rng, positions, width, scale=0.02),
        "types": normal(rng, 2, width, scale=0.02),
        "norm": init_layer_norm(width),
        "blocks": [
            _init_encoder_block(rng, width, intermediate) for _ in range(layers)
        ],
        "pooler": init_dense(rng, width, width),
        "head": init_dense(rng, width, classes),
    }

    def loss_fn(params, tokens, types, is_valid, label):
        x = params["tokens"][tokens] + params["positions"][:length]
        x = layer_norm(params["norm"], x + params["types"][types])
        is_seen = is_valid[..., None, None, :]
        for block in params["blocks"]:
            mixed = attention(block, x, heads, is_seen)
            x = layer_norm(block["norm_1"], x + mixed)
            hidden = jax.nn.gelu(dense(block["up"], x), approximate=False)
            x = layer_norm(block["norm_2"], x + dense(block["down"], hidden))
        mean = x.mean(axis=-2, where=is_valid[..., None])
        pooled = jnp.tanh(dense(params["pooler"], mean))
        return cross_entropy(dense(params["head"], pooled), label)

    num_valid = rng.integers(1, length + 1, size=(batch_size, 1))
    batch = (
        integers(rng, vocabulary, batch_size, length),
        integers(rng, 2, batch_size, length),
        jnp.arange(length) < num_valid,
        integers(rng, classes, batch_size),
    )
    name = f"encoder, width {width}, {layers} layers, length {length}"
    return Problem(name, loss_fn, loss_fn, params, batch)

